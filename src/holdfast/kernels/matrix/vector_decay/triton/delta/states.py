"""The passes from chunk to chunk, with the state or its gradient in registers.

In a chunk with the state S that enters it, k_in and q_in decayed from its start, k_out to its end, P the causal scores,
L = strictly lower(k k^T * decay) and N = (I + L diag(beta))^-1:

    x = N (v - k_in S);  u = beta x;  o = q_in S + P u;  S' = decay S + k_out^T u

x is what a token's value is not yet of the state, v - S^T k. Backwards, with D the gradient of S':

    y = P^T do + k_out D;  dv = N^T (beta y);  du = y - L^T dv;  dbeta = du . x;  dS = decay D + q_in^T do - k_in^T dv
"""

import triton
import triton.language as tl

from holdfast.kernels.matrix.vector_decay.triton.decay import CHUNK
from holdfast.kernels.matrix.vector_decay.triton.slots import sequence_bounds, tile_offsets


@triton.jit
def load_rows(base, token, steps, columns, live, inside, H: tl.constexpr, SIZE: tl.constexpr):
    """Load [CHUNK, columns] of [B, T, H, SIZE], zero past the sequence and past SIZE."""
    at = token * SIZE + (steps * H * SIZE)[:, None] + columns[None, :]
    return tl.load(base + at, mask=live[:, None] & inside[None, :], other=0.0)


@triton.jit
def kda_fwd(
    q_in_ptr, k_in_ptr, k_out_ptr, v_ptr, beta_ptr, scores_ptr, inverse_ptr, chunk_decay_ptr,
    initial_ptr, o_ptr, x_ptr, u_ptr, states_ptr, final_ptr, cu_seqlens,
    T, v_batch, v_head,
    H: tl.constexpr, V_STEP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr, TILED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one sequence, head and block of v's columns. Grid (ceil(COLUMNS / BLOCK_V) * H * N,).

    q_in, k_in, k_out  [B, T, H, WIDTH]
    v                  [B, T, H, COLUMNS], by strides, the last axis dense
    beta               float32 [B, T, H], or None for 1
    scores, inverse    [B, T, H, CHUNK]: P, and N - I
    chunk_decay        float32 [slots, H, WIDTH]
    initial, final     float32 [N, H, WIDTH, COLUMNS]; initial may be None for 0, final None
    o, x, u            [B, T, H, COLUMNS], written; each may be None
    states             at tile_offsets, written: the state before each chunk; or None
    cu_seqlens         [N + 1], or None
    """
    SPLITS: tl.constexpr = (COLUMNS + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    columns = program % SPLITS * BLOCK_V + tl.arange(0, BLOCK_V)
    head = (program // SPLITS % H).to(tl.int64)
    n = (program // SPLITS // H).to(tl.int64)
    batch, first, end, slot = sequence_bounds(n, cu_seqlens, T)
    rows, steps = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
    in_keys, in_values = rows < WIDTH, columns < COLUMNS
    v_ptr += batch * v_batch + head * v_head
    # transposed, as in vector_decay/triton/states.py
    state_at = (n * H + head) * WIDTH * COLUMNS + columns[:, None] + (rows * COLUMNS)[None, :]
    mask = in_values[:, None] & in_keys[None, :]
    state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if initial_ptr is not None:
        state = tl.load(initial_ptr + state_at, mask=mask, other=0.0)
    for chunk in tl.range(0, tl.cdiv(end - first, CHUNK).to(tl.int32), num_stages=STAGES):
        start = first + chunk * CHUNK
        live = steps < (end - start).to(tl.int32)
        token = (batch * T + start) * H + head
        every = steps < CHUNK
        v = tl.load(v_ptr + start * V_STEP + (steps * V_STEP)[:, None] + columns[None, :],
                    mask=live[:, None] & in_values[None, :], other=0.0)  # fmt: skip
        rounded = state.to(v.dtype)
        if states_ptr is not None:
            place = tile_offsets(columns, rows, slot + chunk, head, H, WIDTH, COLUMNS, TILED)
            tl.store(states_ptr + place, rounded, mask=mask)
        k_in = load_rows(k_in_ptr, token, steps, rows, live, in_keys, H, WIDTH)
        missing = tl.trans(v).to(tl.float32) - tl.dot(rounded, tl.trans(k_in), input_precision=PRECISION)
        inverse = load_rows(inverse_ptr, token, steps, steps, live, every, H, CHUNK)
        x = missing + tl.dot(missing.to(v.dtype), tl.trans(inverse), input_precision=PRECISION)
        at_out = token * COLUMNS + (steps * H * COLUMNS)[:, None] + columns[None, :]
        written = live[:, None] & in_values[None, :]
        if x_ptr is not None:
            tl.store(x_ptr + at_out, tl.trans(x.to(v.dtype)), mask=written)
        if beta_ptr is not None:
            x *= tl.load(beta_ptr + token + steps * H, mask=live, other=0.0)[None, :]
        u = x.to(v.dtype)
        if u_ptr is not None:
            tl.store(u_ptr + at_out, tl.trans(u), mask=written)
        if o_ptr is not None:
            q_in = load_rows(q_in_ptr, token, steps, rows, live, in_keys, H, WIDTH)
            scores = load_rows(scores_ptr, token, steps, steps, live, every, H, CHUNK)
            o = tl.dot(rounded, tl.trans(q_in), input_precision=PRECISION)
            o = tl.dot(u, tl.trans(scores), o, input_precision=PRECISION)
            tl.store(o_ptr + at_out, tl.trans(o.to(v.dtype)), mask=written)
        k_out = load_rows(k_out_ptr, token, steps, rows, live, in_keys, H, WIDTH)
        decay = tl.load(chunk_decay_ptr + ((slot + chunk) * H + head) * WIDTH + rows, mask=in_keys, other=0.0)
        state = tl.dot(u, k_out, state * decay[None, :], input_precision=PRECISION)
    if final_ptr is not None:
        tl.store(final_ptr + state_at, state, mask=mask)


@triton.jit
def kda_bwd(
    q_in_ptr, k_in_ptr, k_out_ptr, beta_ptr, scores_ptr, inverse_ptr, pairs_ptr, chunk_decay_ptr, x_ptr, do_ptr,
    dfinal_ptr, dv_ptr, dbeta_ptr, dstates_ptr, dinitial_ptr, cu_seqlens,
    T, tokens, do_batch, do_head,
    H: tl.constexpr, DO_STEP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr, TILED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `kda_fwd`, from the last chunk to the first.

    pairs              float32 [B, T, H, CHUNK]: k . k with the decay between
    x                  [B, T, H, COLUMNS], as the forward pass wrote it
    do                 [B, T, H, COLUMNS], by strides, the last axis dense
    dfinal, dinitial   float32 [N, H, WIDTH, COLUMNS]: the final state's gradient, or None for 0, and the first's,
                       written, or None
    dv                 [B, T, H, COLUMNS], written
    dbeta              float32 [splits, B, T, H], written: of each block of columns; tokens: B T
    dstates            at tile_offsets, written: the gradient of the state after each chunk
    """
    SPLITS: tl.constexpr = (COLUMNS + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    columns = program % SPLITS * BLOCK_V + tl.arange(0, BLOCK_V)
    head = (program // SPLITS % H).to(tl.int64)
    n = (program // SPLITS // H).to(tl.int64)
    dbeta_ptr += (program % SPLITS).to(tl.int64) * tokens * H
    batch, first, end, slot = sequence_bounds(n, cu_seqlens, T)
    rows, steps = tl.arange(0, BLOCK_K), tl.arange(0, CHUNK)
    in_keys, in_values = rows < WIDTH, columns < COLUMNS
    do_ptr += batch * do_batch + head * do_head
    state_at = (n * H + head) * WIDTH * COLUMNS + columns[:, None] + (rows * COLUMNS)[None, :]
    mask = in_values[:, None] & in_keys[None, :]
    dstate = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if dfinal_ptr is not None:
        dstate = tl.load(dfinal_ptr + state_at, mask=mask, other=0.0)
    count = tl.cdiv(end - first, CHUNK).to(tl.int32)
    for i in tl.range(0, count, num_stages=STAGES):
        chunk = count - 1 - i
        start = first + chunk * CHUNK
        live = steps < (end - start).to(tl.int32)
        token = (batch * T + start) * H + head
        every = steps < CHUNK
        do = tl.load(do_ptr + start * DO_STEP + (steps * DO_STEP)[:, None] + columns[None, :],
                     mask=live[:, None] & in_values[None, :], other=0.0)  # fmt: skip
        k_out = load_rows(k_out_ptr, token, steps, rows, live, in_keys, H, WIDTH)
        scores = load_rows(scores_ptr, token, steps, steps, live, every, H, CHUNK)
        incoming = dstate.to(do.dtype)
        place = tile_offsets(columns, rows, slot + chunk, head, H, WIDTH, COLUMNS, TILED)
        tl.store(dstates_ptr + place, incoming, mask=mask)
        y = tl.dot(incoming, tl.trans(k_out), input_precision=PRECISION)
        y = tl.dot(tl.trans(do), scores, y, input_precision=PRECISION)
        inverse = load_rows(inverse_ptr, token, steps, steps, live, every, H, CHUNK)
        beta = tl.full([CHUNK], 1.0, tl.float32)
        if beta_ptr is not None:
            beta = tl.load(beta_ptr + token + steps * H, mask=live, other=0.0)
        strong = y * beta[None, :]
        dv = strong + tl.dot(strong.to(do.dtype), inverse, input_precision=PRECISION)
        rounded = dv.to(do.dtype)
        pairs = load_rows(pairs_ptr, token, steps, steps, live, every, H, CHUNK)
        lower = tl.where(steps[:, None] > steps[None, :], pairs, 0.0).to(do.dtype)
        # dv is beta du: the rounding of what it is a difference of does not show in it
        is_large = beta[None, :] > 0.1
        du = y - tl.dot(rounded, lower, input_precision=PRECISION)
        du = tl.where(is_large, dv / tl.where(is_large, beta[None, :], 1.0), du)
        at = token * COLUMNS + (steps * H * COLUMNS)[:, None] + columns[None, :]
        written = live[:, None] & in_values[None, :]
        x = tl.load(x_ptr + at, mask=written, other=0.0)
        tl.store(dbeta_ptr + token + steps * H, tl.sum(du * tl.trans(x).to(tl.float32), 0), mask=live)
        tl.store(dv_ptr + at, tl.trans(rounded), mask=written)
        q_in = load_rows(q_in_ptr, token, steps, rows, live, in_keys, H, WIDTH)
        k_in = load_rows(k_in_ptr, token, steps, rows, live, in_keys, H, WIDTH)
        decay = tl.load(chunk_decay_ptr + ((slot + chunk) * H + head) * WIDTH + rows, mask=in_keys, other=0.0)
        dstate = tl.dot(tl.trans(do), q_in, dstate * decay[None, :], input_precision=PRECISION)
        dstate = tl.dot(-rounded, k_in, dstate, input_precision=PRECISION)
    if dinitial_ptr is not None:
        tl.store(dinitial_ptr + state_at, dstate, mask=mask)
