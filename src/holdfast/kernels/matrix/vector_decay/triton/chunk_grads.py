"""The gradients of q, k, g and beta, of all chunks at once, from the states that enter each chunk."""

import triton
import triton.language as tl

from .decay import (
    BLOCK_TOKENS,
    CHUNK,
    LEVELS,
    chunk_mask,
    chunk_offsets,
    crosses,
    decay_of,
    double_blocks,
    is_later,
    load_chunk,
    meet,
    split_blocks,
    store_chunk,
)
from .slots import chunk_bounds, folded_state_offsets, state_offsets


@triton.jit
def gla_chunk_grads(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, do_ptr, states_ptr, dstates_ptr,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, cu_seqlens,
    T, sequences, scale, tokens, q_batch, q_head, k_batch, k_head, v_batch, v_head, do_batch, do_head,
    H: tl.constexpr, Q_STEP: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr, DO_STEP: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr, FOLDED: tl.constexpr, BEFORE_DECAY: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one chunk, head and block of k's columns. Grid (slots * H * ceil(WIDTH / BLOCK_K),).

    q, k          [B, T, H / GROUP, WIDTH]
    v, do         [B, T, H, COLUMNS]
    g             [B, T, H, WIDTH]
    beta          [B, T, H], or None for 1
    states        the state before each chunk, at state_offsets
    dstates       the gradient of the state after each chunk, there too, or in dg's memory, at folded_state_offsets, if
                  FOLDED
    dq, dk, dg    [B, T, H, WIDTH], written
    dbeta         [ceil(WIDTH / BLOCK_K), B, T, H], written, or None; tokens is B T
    cu_seqlens    [N + 1], or None

    With dstates of None, and no beta, queries read just before the write of their own token, and what the keys and the
    decays get is added to dk and dg. With dq of None as well queries are keys, and what they get is added to dk. With
    BEFORE_DECAY, and dstates of None, queries read before the decay of their own token too.

    At each level of decay.py one product serves q and k: a token is either, and meets the others in the symmetric
    matrix of pairs do . v. A log decay's gradient sums what crosses its token: pairs inside the chunk, from before it,
    to after it, and from before to after. No sum takes away what another added, so that a strong decay's small gradient
    stands beside large ones.
    """
    PIECES: tl.constexpr = (COLUMNS + BLOCK_V - 1) // BLOCK_V
    BLOCKS: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    block = tl.program_id(0) % BLOCKS
    head = (tl.program_id(0) // BLOCKS % H).to(tl.int64)
    slot = (tl.program_id(0) // BLOCKS // H).to(tl.int64)
    batch, start, count = chunk_bounds(slot, cu_seqlens, sequences, T)
    if count == 0:
        return
    q_ptr += batch * q_batch + start * Q_STEP + (head // GROUP) * q_head
    k_ptr += batch * k_batch + start * K_STEP + (head // GROUP) * k_head
    v_ptr += batch * v_batch + start * V_STEP + head * v_head
    do_ptr += batch * do_batch + start * DO_STEP + head * do_head
    token = (batch * T + start) * H + head
    steps = tl.arange(0, CHUNK)
    live = steps < count
    columns = block * BLOCK_K + tl.arange(0, BLOCK_K)

    intra_block = tl.zeros([CHUNK // BLOCK_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS], tl.float32)
    inter_block = tl.zeros([CHUNK, CHUNK], tl.float32)
    dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    state_grad_dot = tl.zeros([BLOCK_K], tl.float32)
    for piece in tl.range(0, PIECES, num_stages=1):
        values = piece * BLOCK_V + tl.arange(0, BLOCK_V)
        in_values = values < COLUMNS
        mask = live[:, None] & in_values[None, :]
        v = tl.load(v_ptr + (steps * V_STEP)[:, None] + values[None, :], mask=mask, other=0.0)
        do = tl.load(do_ptr + (steps * DO_STEP)[:, None] + values[None, :], mask=mask, other=0.0)
        mask = in_values[:, None] & (columns < WIDTH)[None, :]
        place = state_offsets(values, columns, slot, head, H, WIDTH, COLUMNS)
        state = tl.load(states_ptr + place, mask=mask, other=0.0)
        if FOLDED:
            place = folded_state_offsets(values, columns, token, H, WIDTH)
        else:
            place = state_offsets(values, columns, slot, head, H, WIDTH, COLUMNS)
        if dstates_ptr is not None:
            dstate = tl.load(dstates_ptr + place, mask=mask, other=0.0)
            dk = tl.dot(v, dstate, dk, input_precision=PRECISION)
            state_grad_dot += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)
        intra_block = tl.dot(
            split_blocks(do), tl.trans(split_blocks(v), (0, 2, 1)), intra_block, input_precision=PRECISION
        )
        inter_block = tl.dot(do, tl.trans(v), inter_block, input_precision=PRECISION)
        dq = tl.dot(do, state, dq, input_precision=PRECISION)
    inner = tl.arange(0, BLOCK_TOKENS)
    diagonal = (
        tl.reshape(tl.sum(tl.where((inner[:, None] == inner[None, :])[None], intra_block, 0.0), 2), [CHUNK]) * scale
    )

    mask = chunk_mask(columns, count, WIDTH, PARTS)
    at = chunk_offsets(columns, H * WIDTH, PARTS)
    q = load_chunk(q_ptr, chunk_offsets(columns, Q_STEP, PARTS), mask)
    k = load_chunk(k_ptr, chunk_offsets(columns, K_STEP, PARTS), mask)
    beta = tl.full([CHUNK], 1.0, tl.float32)
    if beta_ptr is not None:
        beta = tl.load(beta_ptr + token + steps * H, mask=live, other=0.0)
    beta_k = (k.to(tl.float32) * beta[:, None]).to(k.dtype)

    # what crosses the chunk's edges
    to_here = decay_of(load_chunk(g_ptr + token * WIDTH, at, mask), WIDE)
    to_end = tl.full([CHUNK, BLOCK_K], 1.0, tl.float32)
    total = to_here
    if BEFORE_DECAY:
        to_here = to_end
    for level in tl.static_range(LEVELS):
        to_here, to_end, total = double_blocks(to_here, to_end, total, level)
    dq *= scale * to_here
    dk *= to_end
    q_dq = (q.to(tl.float32) * dq).to(q.dtype)
    k_dk = (beta_k.to(tl.float32) * dk).to(q.dtype)
    if BEFORE_DECAY:
        read = steps[:, None] < steps[None, :]
    else:
        read = steps[:, None] <= steps[None, :]
    dg = tl.dot(read.to(q.dtype), q_dq, input_precision=PRECISION)
    dg = tl.dot((steps[:, None] > steps[None, :]).to(q.dtype), k_dk, dg, input_precision=PRECISION)
    dg += (state_grad_dot * tl.reshape(total, [BLOCK_K]))[None, :]
    if dstates_ptr is not None:
        dq += (diagonal * beta)[:, None] * k.to(tl.float32)
        dk += diagonal[:, None] * q.to(tl.float32)

    # pairs inside the chunk
    intra_block = (
        tl.where((inner[:, None] > inner[None, :])[None], intra_block, tl.trans(intra_block, (0, 2, 1))) * scale
    ).to(q.dtype)
    inter_block = (tl.where(steps[:, None] > steps[None, :], inter_block, tl.trans(inter_block)) * scale).to(q.dtype)
    # volatile: else the compiler keeps the factors of all levels since the first time
    own = tl.load(g_ptr + token * WIDTH + at, mask=mask, other=0.0, volatile=True)
    to_here = decay_of(tl.reshape(own, [CHUNK, BLOCK_K]), WIDE)
    to_end = tl.full([CHUNK, BLOCK_K], 1.0, tl.float32)
    total = to_here
    if BEFORE_DECAY:
        to_here = to_end
    for level in tl.static_range(LEVELS):
        later = is_later(steps, level)
        factor = tl.where(later, to_here, to_end)
        mine = tl.where(later, q, beta_k)
        factored = (mine.to(tl.float32) * factor).to(q.dtype)
        if (1 << level) < BLOCK_TOKENS:
            pairs = tl.where(meet(inner, level)[None], intra_block, 0.0).to(q.dtype)
            found = (
                tl.reshape(tl.dot(pairs, split_blocks(factored), input_precision=PRECISION), [CHUNK, BLOCK_K]) * factor
            )
            sums = tl.broadcast_to(
                crosses(inner, level, BEFORE_DECAY)[None].to(q.dtype),
                [CHUNK // BLOCK_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS],
            )
            pairs_dg = tl.dot(sums, split_blocks((mine.to(tl.float32) * found).to(q.dtype)), input_precision=PRECISION)
            dg += tl.reshape(pairs_dg, [CHUNK, BLOCK_K])
        else:
            pairs = tl.where(meet(steps, level), inter_block, 0.0).to(q.dtype)
            found = tl.dot(pairs, factored, input_precision=PRECISION) * factor
            pairs_dg = (mine.to(tl.float32) * found).to(q.dtype)
            dg = tl.dot(crosses(steps, level, BEFORE_DECAY).to(q.dtype), pairs_dg, dg, input_precision=PRECISION)
        dq += tl.where(later, found, 0.0)
        dk += tl.where(later, 0.0, found)
        to_here, to_end, total = double_blocks(to_here, to_end, total, level)
    if dstates_ptr is None:
        dk += load_chunk(dk_ptr + token * WIDTH, at, mask).to(tl.float32)
        dg += load_chunk(dg_ptr + token * WIDTH, at, mask).to(tl.float32)
    if dq_ptr is None:
        dk += dq
    else:
        store_chunk(dq_ptr + token * WIDTH, at, dq, mask)
    store_chunk(dk_ptr + token * WIDTH, at, dk * beta[:, None], mask)
    store_chunk(dg_ptr + token * WIDTH, at, dg, mask)
    if dbeta_ptr is not None:
        place = dbeta_ptr + block.to(tl.int64) * tokens * H + token + steps * H
        tl.store(place, tl.sum(k.to(tl.float32) * dk, 1), mask=live)
