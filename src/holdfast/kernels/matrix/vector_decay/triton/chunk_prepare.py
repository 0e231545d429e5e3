"""What a sweep takes of a chunk, found for all chunks at once: decayed queries and keys, and the scores inside it."""

import triton
import triton.language as tl

from .decay import CHUNK, LEVELS, NEAR, blocks, decay_of, inside, is_later, load, meet, places, store, widened
from .slots import chunk_of


@triton.jit
def prepare(
    q_ptr, k_ptr, g_ptr, beta_ptr, read_ptr, write_ptr, total_ptr, scores_ptr, cu_seqlens,
    T, sequences, pieces, scale, q_batch, q_head, k_batch, k_head,
    H: tl.constexpr, Q_STEP: tl.constexpr, K_STEP: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head, in pieces of BLOCK columns.

    read [B, T, H, K]: scale * q, decayed from the chunk's start. write: beta * k, decayed to its end. total [slots, H,
    K]: the decay of the chunk. scores [B, T, H, CHUNK]: of each token the weights of the chunk's values, causal.
    """
    head = (tl.program_id(0) % H).to(tl.int64)
    slot = tl.program_id(0) // H
    batch, start, count = chunk_of(slot, cu_seqlens, sequences, T)
    q_ptr += batch * q_batch + start * Q_STEP + (head // GROUP) * q_head
    k_ptr += batch * k_batch + start * K_STEP + (head // GROUP) * k_head
    token = (batch * T + start) * H + head
    steps = tl.arange(0, CHUNK)
    live = steps < count
    inner = tl.arange(0, NEAR)
    near = tl.zeros([CHUNK // NEAR, NEAR, NEAR], tl.float32)
    far = tl.zeros([CHUNK, CHUNK], tl.float32)
    # strides of tokens are compiled in: a thread's rows are then at fixed offsets from one address
    for piece in tl.range(0, pieces, num_stages=1):
        columns = piece * BLOCK + tl.arange(0, BLOCK)
        mask = inside(columns, count, WIDTH, PARTS)
        at = places(columns, H * WIDTH, PARTS)
        q = load(q_ptr, places(columns, Q_STEP, PARTS), mask)
        k = load(k_ptr, places(columns, K_STEP, PARTS), mask)
        strong = k.to(tl.float32)
        if beta_ptr is not None:
            strong *= tl.load(beta_ptr + token + steps * H, mask=live, other=0.0)[:, None]
        to_here = decay_of(load(g_ptr + token * WIDTH, at, mask), WIDE)
        to_end = tl.full([CHUNK, BLOCK], 1.0, tl.float32)
        total = to_here
        product = tl.dot(blocks(q), tl.trans(blocks(strong.to(q.dtype)), (0, 2, 1)), input_precision=PRECISION)
        near = tl.where((inner[:, None] == inner[None, :])[None], near + product, near)
        for level in tl.static_range(LEVELS):
            met = tl.where(is_later(steps, level), q.to(tl.float32) * to_here, strong * to_end).to(q.dtype)
            if (1 << level) < NEAR:
                product = tl.dot(blocks(met), tl.trans(blocks(met), (0, 2, 1)), input_precision=PRECISION)
                near = tl.where(meet(inner, level)[None], near + product, near)
            else:
                product = tl.dot(met, tl.trans(met), input_precision=PRECISION)
                far = tl.where(meet(steps, level), far + product, far)
            to_here, to_end, total = widened(to_here, to_end, total, level)
        store(read_ptr + token * WIDTH, at, q.to(tl.float32) * to_here * scale, mask)
        store(write_ptr + token * WIDTH, at, strong * to_end, mask)
        whole = tl.reshape(total, [BLOCK])
        tl.store(total_ptr + (slot.to(tl.int64) * H + head) * WIDTH + columns, whole, mask=columns < WIDTH)
    spread = tl.broadcast_to(near[:, :, None, :], [CHUNK // NEAR, NEAR, CHUNK // NEAR, NEAR])
    is_near = steps[:, None] // NEAR == steps[None, :] // NEAR
    scores = tl.where(is_near, tl.reshape(spread, [CHUNK, CHUNK]), far)
    # a level's pairs are in both orders
    scores = scale * tl.where(steps[:, None] >= steps[None, :], scores, 0.0)
    place = scores_ptr + token * CHUNK + (steps * H * CHUNK)[:, None] + steps[None, :]
    tl.store(place, scores.to(scores_ptr.dtype.element_ty), mask=live[:, None])
