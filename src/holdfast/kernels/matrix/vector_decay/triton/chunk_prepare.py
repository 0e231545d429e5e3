"""What states.py takes of each chunk, for all chunks at once: decayed q and k, and the scores inside the chunk."""

import triton
import triton.language as tl

from .decay import (
    BLOCK_TOKENS,
    CHUNK,
    LEVELS,
    chunk_mask,
    chunk_offsets,
    decay_of,
    double_blocks,
    is_later,
    load_chunk,
    meet,
    split_blocks,
    store_chunk,
)
from .slots import chunk_bounds


@triton.jit
def gla_chunk_prepare(
    q_ptr, k_ptr, g_ptr, beta_ptr, q_decayed_ptr, k_decayed_ptr, chunk_decay_ptr, scores_ptr, cu_seqlens,
    T, sequences, pieces, scale, q_batch, q_head, k_batch, k_head,
    H: tl.constexpr, Q_STEP: tl.constexpr, K_STEP: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, BEFORE_DECAY: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one chunk of one head, in pieces of BLOCK columns. Grid (slots * H,). Strides of tokens are compiled in.

    q, k         [B, T, H / GROUP, K]
    g            [B, T, H, K]
    beta         [B, T, H], or None for 1
    q_decayed    [B, T, H, K], written: scale * q, decayed from the chunk's start
    k_decayed    [B, T, H, K], written: beta * k, decayed to the chunk's end; or None
    chunk_decay  [slots, H, K], written: the decay of the chunk
    scores       [B, T, H, CHUNK], written: each token's weights of the chunk's values, causal
    cu_seqlens   [N + 1], or None

    With BEFORE_DECAY queries read before their own token's decay, and so before its write: of the scores only those of
    earlier keys are right, and q_decayed has one decay less.
    """
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = tl.program_id(0) // H
    batch, start, count = chunk_bounds(slot, cu_seqlens, sequences, T)
    q_ptr += batch * q_batch + start * Q_STEP + (head // GROUP) * q_head
    k_ptr += batch * k_batch + start * K_STEP + (head // GROUP) * k_head
    token = (batch * T + start) * H + head
    steps = tl.arange(0, CHUNK)
    live = steps < count
    inner = tl.arange(0, BLOCK_TOKENS)
    intra_block = tl.zeros([CHUNK // BLOCK_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS], tl.float32)
    inter_block = tl.zeros([CHUNK, CHUNK], tl.float32)
    # strides of tokens are compiled in: a thread's rows are then at fixed offsets from one address
    for piece in tl.range(0, pieces, num_stages=1):
        columns = piece * BLOCK + tl.arange(0, BLOCK)
        mask = chunk_mask(columns, count, WIDTH, PARTS)
        at = chunk_offsets(columns, H * WIDTH, PARTS)
        q = load_chunk(q_ptr, chunk_offsets(columns, Q_STEP, PARTS), mask)
        k = load_chunk(k_ptr, chunk_offsets(columns, K_STEP, PARTS), mask)
        beta_k = k.to(tl.float32)
        if beta_ptr is not None:
            beta_k *= tl.load(beta_ptr + token + steps * H, mask=live, other=0.0)[:, None]
        log_decay = load_chunk(g_ptr + token * WIDTH, at, mask)
        to_here = decay_of(log_decay, WIDE)
        to_end = tl.full([CHUNK, BLOCK], 1.0, tl.float32)
        total = to_here
        if BEFORE_DECAY:
            to_here = to_end
        product = tl.dot(
            split_blocks(q), tl.trans(split_blocks(beta_k.to(q.dtype)), (0, 2, 1)), input_precision=PRECISION
        )
        intra_block = tl.where((inner[:, None] == inner[None, :])[None], intra_block + product, intra_block)
        for level in tl.static_range(LEVELS):
            factored = tl.where(is_later(steps, level), q.to(tl.float32) * to_here, beta_k * to_end).to(q.dtype)
            if (1 << level) < BLOCK_TOKENS:
                product = tl.dot(
                    split_blocks(factored), tl.trans(split_blocks(factored), (0, 2, 1)), input_precision=PRECISION
                )
                intra_block = tl.where(meet(inner, level)[None], intra_block + product, intra_block)
            else:
                product = tl.dot(factored, tl.trans(factored), input_precision=PRECISION)
                inter_block = tl.where(meet(steps, level), inter_block + product, inter_block)
            to_here, to_end, total = double_blocks(to_here, to_end, total, level)
        store_chunk(q_decayed_ptr + token * WIDTH, at, q.to(tl.float32) * to_here * scale, mask)
        if k_decayed_ptr is not None:
            store_chunk(k_decayed_ptr + token * WIDTH, at, beta_k * to_end, mask)
        if WIDE:
            # a product of numbers next to 1 loses the products of what they lack, chunk after chunk
            chunk_decay = tl.exp(tl.sum(log_decay.to(tl.float64), 0)).to(tl.float32)
        else:
            chunk_decay = tl.reshape(total, [BLOCK])
        tl.store(chunk_decay_ptr + (slot.to(tl.int64) * H + head) * WIDTH + columns, chunk_decay, mask=columns < WIDTH)
    repeated = tl.broadcast_to(
        intra_block[:, :, None, :], [CHUNK // BLOCK_TOKENS, BLOCK_TOKENS, CHUNK // BLOCK_TOKENS, BLOCK_TOKENS]
    )
    in_one_block = steps[:, None] // BLOCK_TOKENS == steps[None, :] // BLOCK_TOKENS
    scores = tl.where(in_one_block, tl.reshape(repeated, [CHUNK, CHUNK]), inter_block)
    # a level's pairs are in both orders
    scores = scale * tl.where(steps[:, None] >= steps[None, :], scores, 0.0)
    place = scores_ptr + token * CHUNK + (steps * H * CHUNK)[:, None] + steps[None, :]
    tl.store(place, scores.to(scores_ptr.dtype.element_ty), mask=live[:, None])
