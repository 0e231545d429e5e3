"""Gradients of queries, keys, decays and strengths, of all chunks at once, from the states that enter each."""

import triton
import triton.language as tl

from .decay import CHUNK, LEVELS, NEAR, blocks, crossed, decay_of, inside, is_later, load, meet, places, store, widened
from .slots import chunk_of, state_places


@triton.jit
def gradients(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, do_ptr, states_ptr, ends_ptr,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, cu_seqlens,
    T, sequences, scale, tokens, q_batch, q_head, k_batch, k_head, v_batch, v_head, do_batch, do_head,
    H: tl.constexpr, Q_STEP: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr, DO_STEP: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr, FOLDED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk, head and block of k's columns.

    states, ends: the state before each chunk, and the gradient of the one after it, where state_places says; FOLDED:
    ends are in dg's memory. dq, dk, dg [B, T, H, K]. dbeta [blocks, B, T, H] or None.

    At each level of triton_gla_decay one product serves queries and keys: a token is either, and meets the others in
    the symmetric matrix of pairs do . v. A log decay's gradient sums what crosses its token: pairs inside the chunk,
    from before it, to after it, and from before to after. No sum takes away what another added, so that a strong
    decay's small gradient stands beside large ones.
    """
    PIECES: tl.constexpr = (COLUMNS + BLOCK_V - 1) // BLOCK_V
    BLOCKS: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    block = tl.program_id(0) % BLOCKS
    head = (tl.program_id(0) // BLOCKS % H).to(tl.int64)
    slot = (tl.program_id(0) // BLOCKS // H).to(tl.int64)
    batch, start, count = chunk_of(slot, cu_seqlens, sequences, T)
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

    near = tl.zeros([CHUNK // NEAR, NEAR, NEAR], tl.float32)
    far = tl.zeros([CHUNK, CHUNK], tl.float32)
    dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    across = tl.zeros([BLOCK_K], tl.float32)
    for piece in tl.range(0, PIECES, num_stages=1):
        values = piece * BLOCK_V + tl.arange(0, BLOCK_V)
        tall = values < COLUMNS
        mask = live[:, None] & tall[None, :]
        v = tl.load(v_ptr + (steps * V_STEP)[:, None] + values[None, :], mask=mask, other=0.0)
        do = tl.load(do_ptr + (steps * DO_STEP)[:, None] + values[None, :], mask=mask, other=0.0)
        mask = tall[:, None] & (columns < WIDTH)[None, :]
        place = state_places(values, columns, slot, token, head, H, WIDTH, COLUMNS, False)
        state = tl.load(states_ptr + place, mask=mask, other=0.0)
        place = state_places(values, columns, slot, token, head, H, WIDTH, COLUMNS, FOLDED)
        end = tl.load(ends_ptr + place, mask=mask, other=0.0)
        near = tl.dot(blocks(do), tl.trans(blocks(v), (0, 2, 1)), near, input_precision=PRECISION)
        far = tl.dot(do, tl.trans(v), far, input_precision=PRECISION)
        dq = tl.dot(do, state, dq, input_precision=PRECISION)
        dk = tl.dot(v, end, dk, input_precision=PRECISION)
        across += tl.sum(state.to(tl.float32) * end.to(tl.float32), 0)
    inner = tl.arange(0, NEAR)
    itself = tl.reshape(tl.sum(tl.where((inner[:, None] == inner[None, :])[None], near, 0.0), 2), [CHUNK]) * scale

    mask = inside(columns, count, WIDTH, PARTS)
    at = places(columns, H * WIDTH, PARTS)
    q = load(q_ptr, places(columns, Q_STEP, PARTS), mask)
    k = load(k_ptr, places(columns, K_STEP, PARTS), mask)
    beta = tl.full([CHUNK], 1.0, tl.float32)
    if beta_ptr is not None:
        beta = tl.load(beta_ptr + token + steps * H, mask=live, other=0.0)
    strong = (k.to(tl.float32) * beta[:, None]).to(k.dtype)

    # what crosses the chunk's edges
    to_here = decay_of(load(g_ptr + token * WIDTH, at, mask), WIDE)
    to_end = tl.full([CHUNK, BLOCK_K], 1.0, tl.float32)
    total = to_here
    for level in tl.static_range(LEVELS):
        to_here, to_end, total = widened(to_here, to_end, total, level)
    dq *= scale * to_here
    dk *= to_end
    ahead = (q.to(tl.float32) * dq).to(q.dtype)
    behind = (strong.to(tl.float32) * dk).to(q.dtype)
    dg = tl.dot((steps[:, None] <= steps[None, :]).to(q.dtype), ahead, input_precision=PRECISION)
    dg = tl.dot((steps[:, None] > steps[None, :]).to(q.dtype), behind, dg, input_precision=PRECISION)
    dg += (across * tl.reshape(total, [BLOCK_K]))[None, :]
    dq += (itself * beta)[:, None] * k.to(tl.float32)
    dk += itself[:, None] * q.to(tl.float32)

    # pairs inside it
    near = (tl.where((inner[:, None] > inner[None, :])[None], near, tl.trans(near, (0, 2, 1))) * scale).to(q.dtype)
    far = (tl.where(steps[:, None] > steps[None, :], far, tl.trans(far)) * scale).to(q.dtype)
    # volatile: else the compiler keeps the factors of all levels since the first time
    own = tl.load(g_ptr + token * WIDTH + at, mask=mask, other=0.0, volatile=True)
    to_here = decay_of(tl.reshape(own, [CHUNK, BLOCK_K]), WIDE)
    to_end = tl.full([CHUNK, BLOCK_K], 1.0, tl.float32)
    total = to_here
    for level in tl.static_range(LEVELS):
        later = is_later(steps, level)
        factor = tl.where(later, to_here, to_end)
        mine = tl.where(later, q, strong)
        met = (mine.to(tl.float32) * factor).to(q.dtype)
        if (1 << level) < NEAR:
            pairs = tl.where(meet(inner, level)[None], near, 0.0).to(q.dtype)
            found = tl.reshape(tl.dot(pairs, blocks(met), input_precision=PRECISION), [CHUNK, BLOCK_K]) * factor
            sums = tl.broadcast_to(crossed(inner, level)[None].to(q.dtype), [CHUNK // NEAR, NEAR, NEAR])
            crossing = tl.dot(sums, blocks((mine.to(tl.float32) * found).to(q.dtype)), input_precision=PRECISION)
            dg += tl.reshape(crossing, [CHUNK, BLOCK_K])
        else:
            pairs = tl.where(meet(steps, level), far, 0.0).to(q.dtype)
            found = tl.dot(pairs, met, input_precision=PRECISION) * factor
            crossing = (mine.to(tl.float32) * found).to(q.dtype)
            dg = tl.dot(crossed(steps, level).to(q.dtype), crossing, dg, input_precision=PRECISION)
        dq += tl.where(later, found, 0.0)
        dk += tl.where(later, 0.0, found)
        to_here, to_end, total = widened(to_here, to_end, total, level)
    store(dq_ptr + token * WIDTH, at, dq, mask)
    store(dk_ptr + token * WIDTH, at, dk * beta[:, None], mask)
    store(dg_ptr + token * WIDTH, at, dg, mask)
    if dbeta_ptr is not None:
        place = dbeta_ptr + block.to(tl.int64) * tokens * H + token + steps * H
        tl.store(place, tl.sum(k.to(tl.float32) * dk, 1), mask=live)
