"""The delta rule's states chunk by chunk: S in registers forward in time, its gradient dS in registers backward.

With S the state that enters a chunk, G the log decays' cumulative sum in it, A = M^-1 of chunk_inverse.py (given as
A - I) and P = q k^T times scale and causal decay:

    U = A diag(beta) (V - exp(G) (K S))     O = scale exp(G) (Q S) + P U     S' = exp(G_C) S + K^T (exp(G_C - G) U)

and from the last chunk to the first, with dS' the gradient of the state that leaves:

    dU = P^T dO + exp(G_C - G) (K dS')      Y = A^T dU
    dS = exp(G_C) dS' + Q^T (scale exp(G) dO) - K^T (exp(G) beta Y)

Both are held transposed, [V, K], so that every product of the chain has its left operand in registers. See
docs/delta-rule.md#in-portable-triton.
"""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.decay import log_decay_cumsum_or_zero
from holdfast.kernels.lib.triton.sequence import sequence_bounds
from holdfast.kernels.lib.triton.tiles import load_tile

# products of float32 are three of TF32
PRECISION = tl.constexpr("tf32x3")


@triton.jit
def state_rows(low, high, columns, stride, CHUNK: tl.constexpr):
    """Return where a saved state's rows start, in elements from low: the first CHUNK there, the others from high on."""
    apart = (high.to(tl.int64) - low.to(tl.int64)) // (low.dtype.element_ty.primitive_bitwidth // 8)
    return columns * stride + tl.where(columns < CHUNK, 0, tl.multiple_of(apart, 8) - CHUNK * stride)


@triton.jit
def delta_rule_triton_fwd(
    q_ptr, k_ptr, v_ptr, a_ptr, g_ptr, beta_ptr, o_ptr, first_ptr, last_ptr, low_ptr, high_ptr, cu_seqlens,
    T, H, scale, q_batch, q_step, q_head, k_batch, k_step, k_head, v_batch, v_step, v_head,
    slot_chunk, slot_head, slot_row,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program a sequence, head and block of v's columns, over all of the sequence's chunks.

    q, k: [B, T, H / GROUP, WIDTH], v: [B, T, H, COLUMNS], their last axes dense. a: [B, T, H, CHUNK], of
    chunk_inverse.py. g, beta: [B, T, H], float32, contiguous, or None for 0 and 1. o: [B, T, H, COLUMNS], contiguous,
    or None. first, last: [N, H, WIDTH, COLUMNS], float32, the states before and after, or None. low, high: None, or
    where the state that enters a chunk is saved, transposed, in slots of slot_chunk, slot_head and slot_row elements.
    cu_seqlens: [N + 1], where packed sequences begin and end, or None.
    """
    SPLITS: tl.constexpr = (COLUMNS + BLOCK_V - 1) // BLOCK_V
    EVEN_K: tl.constexpr = WIDTH == BLOCK_K
    EVEN_V: tl.constexpr = COLUMNS % BLOCK_V == 0
    program = tl.program_id(0)
    split, head, n = program % SPLITS, (program // SPLITS) % H, (program // SPLITS) // H
    batch, first, end = sequence_bounds(n, cu_seqlens, T, T, 1)
    n, batch, head = n.to(tl.int64), batch.to(tl.int64), head.to(tl.int64)
    steps, rows = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    columns = split * BLOCK_V + tl.arange(0, BLOCK_V)
    identity = steps[:, None] == steps[None, :]
    k_ptr += batch * k_batch + (head // GROUP) * k_head
    v_ptr += batch * v_batch + head * v_head
    if o_ptr is not None:
        q_ptr += batch * q_batch + (head // GROUP) * q_head

    state_at = (n * H + head) * WIDTH * COLUMNS + columns[:, None] + rows[None, :] * COLUMNS
    state_mask = (columns < COLUMNS)[:, None] & (rows < WIDTH)[None, :]
    if first_ptr is None:
        state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    else:
        state = tl.load(first_ptr + state_at, mask=state_mask, other=0.0)
    count = tl.cdiv(end - first, CHUNK).to(tl.int32)
    slot = n * tl.cdiv(T, CHUNK)
    if low_ptr is not None:
        saved_rows = state_rows(low_ptr, high_ptr, columns, slot_row, CHUNK)
    if cu_seqlens is not None:
        slot = first // CHUNK + n
    for chunk in tl.range(0, count, num_stages=STAGES):
        start = first + chunk * CHUNK
        live = steps < (end - start).to(tl.int32)
        token, at = (batch * T + start) * H + head, steps * H
        k = load_tile(k_ptr + start * k_step, steps, rows, k_step, live, WIDTH, EVEN_K)
        v = load_tile(v_ptr + start * v_step, steps, columns, v_step, live, COLUMNS, EVEN_V)
        a = load_tile(a_ptr + token * CHUNK, steps, steps, H * CHUNK, live, CHUNK, True)
        decays = log_decay_cumsum_or_zero(g_ptr + token if g_ptr is not None else None, at, live, CHUNK, WIDE)
        cumsum, total = decays[0], decays[1]
        from_start, to_end = tl.exp2(cumsum.to(tl.float32)), tl.exp2((total - cumsum).to(tl.float32))
        if low_ptr is not None:
            place = low_ptr + (slot + chunk) * slot_chunk + head * slot_head
            saved = state.to(low_ptr.dtype.element_ty)
            tl.store(place + saved_rows[:, None] + rows[None, :], saved, mask=state_mask)

        if o_ptr is not None:
            q = load_tile(q_ptr + start * q_step, steps, rows, q_step, live, WIDTH, EVEN_K)
            reads = steps[:, None] <= steps[None, :]
            p = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
            p *= tl.exp2(tl.where(reads, (cumsum[None, :] - cumsum[:, None]).to(tl.float32), float("-inf")))
            p = p.to(k.dtype)
        rounded = state.to(k.dtype)
        # the product with 1 puts v where the state's product is
        error = tl.dot(tl.trans(v), identity.to(v.dtype), input_precision=PRECISION)
        error -= tl.dot(rounded, tl.trans(k), input_precision=PRECISION) * from_start[None, :]
        if beta_ptr is not None:
            error *= tl.load(beta_ptr + token + at, mask=live, other=0.0)[None, :]
        if o_ptr is not None:
            o = tl.dot(rounded, tl.trans(q), input_precision=PRECISION) * (scale * from_start)[None, :]
        u = tl.dot(error.to(k.dtype), tl.trans(a), error, input_precision=PRECISION)
        if o_ptr is not None:
            o = tl.dot(u.to(k.dtype), p, o, input_precision=PRECISION)
            o_at = o_ptr + token * COLUMNS + (at * COLUMNS)[:, None] + columns[None, :]
            tl.store(o_at, tl.trans(o.to(o_ptr.dtype.element_ty)), mask=live[:, None] & (columns < COLUMNS)[None, :])
        state = tl.dot(
            (u * to_end[None, :]).to(k.dtype), k, state * tl.exp2(total.to(tl.float32)), input_precision=PRECISION
        )
    if last_ptr is not None:
        tl.store(last_ptr + state_at, state, mask=state_mask)


# windows differ in length and place: one compilation for all
@triton.jit(do_not_specialize=["first_chunk", "window"])
def delta_rule_triton_dstates(
    q_ptr, k_ptr, do_ptr, a_ptr, g_ptr, beta_ptr, first_ptr, last_ptr, low_ptr, high_ptr, cu_seqlens,
    T, H, scale, first_chunk, window, q_batch, q_step, q_head, k_batch, k_step, k_head, do_batch, do_step, do_head,
    slot_chunk, slot_head, slot_row,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program a sequence, head and block of v's columns, over `window` chunks from first_chunk on, the last first.

    Tensors are the forward kernel's; do: [B, T, H, COLUMNS], its last axis dense. low, high: where dS of the state that
    leaves each chunk is saved, as there. first, last: [N, H, WIDTH, COLUMNS], float32, dS after and before the window;
    they may be one tensor. Of packed sequences the window is all chunks.
    """
    SPLITS: tl.constexpr = (COLUMNS + BLOCK_V - 1) // BLOCK_V
    EVEN_K: tl.constexpr = WIDTH == BLOCK_K
    EVEN_V: tl.constexpr = COLUMNS % BLOCK_V == 0
    program = tl.program_id(0)
    split, head, n = program % SPLITS, (program // SPLITS) % H, (program // SPLITS) // H
    batch, first, end = sequence_bounds(n, cu_seqlens, T, T, 1)
    n, batch, head = n.to(tl.int64), batch.to(tl.int64), head.to(tl.int64)
    steps, rows = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    columns = split * BLOCK_V + tl.arange(0, BLOCK_V)
    identity = steps[:, None] == steps[None, :]
    reads = steps[:, None] >= steps[None, :]
    q_ptr += batch * q_batch + (head // GROUP) * q_head
    k_ptr += batch * k_batch + (head // GROUP) * k_head
    do_ptr += batch * do_batch + head * do_head

    state_at = (n * H + head) * WIDTH * COLUMNS + columns[:, None] + rows[None, :] * COLUMNS
    state_mask = (columns < COLUMNS)[:, None] & (rows < WIDTH)[None, :]
    if first_ptr is None:
        state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    else:
        state = tl.load(first_ptr + state_at, mask=state_mask, other=0.0)
    count = tl.minimum(tl.cdiv(end - first, CHUNK).to(tl.int32) - first_chunk, window)
    slot = n * window
    saved_rows = state_rows(low_ptr, high_ptr, columns, slot_row, CHUNK)
    if cu_seqlens is not None:
        slot = first // CHUNK + n
    for i in tl.range(0, count, num_stages=STAGES):
        chunk = count - 1 - i
        start = first + (first_chunk + chunk) * CHUNK
        live = steps < (end - start).to(tl.int32)
        token, at = (batch * T + start) * H + head, steps * H
        q = load_tile(q_ptr + start * q_step, steps, rows, q_step, live, WIDTH, EVEN_K)
        k = load_tile(k_ptr + start * k_step, steps, rows, k_step, live, WIDTH, EVEN_K)
        do = load_tile(do_ptr + start * do_step, steps, columns, do_step, live, COLUMNS, EVEN_V)
        a = load_tile(a_ptr + token * CHUNK, steps, steps, H * CHUNK, live, CHUNK, True)
        decays = log_decay_cumsum_or_zero(g_ptr + token if g_ptr is not None else None, at, live, CHUNK, WIDE)
        cumsum, total = decays[0], decays[1]
        from_start, to_end = tl.exp2(cumsum.to(tl.float32)), tl.exp2((total - cumsum).to(tl.float32))
        place = low_ptr + (slot + chunk) * slot_chunk + head * slot_head
        tl.store(place + saved_rows[:, None] + rows[None, :], state.to(low_ptr.dtype.element_ty), mask=state_mask)

        # [t, s]
        p = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        p *= tl.exp2(tl.where(reads, (cumsum[:, None] - cumsum[None, :]).to(tl.float32), float("-inf")))
        du = tl.dot(state.to(k.dtype), tl.trans(k), input_precision=PRECISION) * to_end[None, :]
        du = tl.dot(tl.trans(do), p.to(k.dtype), du, input_precision=PRECISION)
        y = tl.dot(du.to(k.dtype), a, du, input_precision=PRECISION) * -from_start[None, :]
        if beta_ptr is not None:
            y *= tl.load(beta_ptr + token + at, mask=live, other=0.0)[None, :]
        read = tl.dot(tl.trans(do), identity.to(do.dtype), input_precision=PRECISION) * (scale * from_start)[None, :]
        state = tl.dot(read.to(k.dtype), q, state * tl.exp2(total.to(tl.float32)), input_precision=PRECISION)
        state = tl.dot(y.to(k.dtype), k, state, input_precision=PRECISION)
    if last_ptr is not None:
        tl.store(last_ptr + state_at, state, mask=state_mask)
