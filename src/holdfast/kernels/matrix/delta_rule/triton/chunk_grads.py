"""The delta rule's gradients of q, k, v, g and beta, chunk by chunk, as a launch that runs all chunks at once.

Given S that enters a chunk and dS' of the state that leaves it, all else is inside the chunk. With the names of
states.py, R = V - exp(G) (K S), e = exp(G_C - G), D the decay between two tokens and * elementwise,

    dV = beta Y       dP = dO U^T      Z = Y U^T      F = scale causal(D * dP)      E = -beta strictly lower(D * Z)
    dQ = scale exp(G) (dO S^T) + F K
    dK = (e U) dS'^T - (exp(G) beta Y) S^T + F^T Q + (E + E^T) K
    dbeta_t = Y_t . U_t / beta_t = Y_t . R_t - sum_s (D * Z * K K^T)(t, s), s < t

A log decay scales every pair on both sides of it, every read of S and write to S' across it, and S on its way to S'.
See docs/delta-rule.md.
"""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.decay import LOG_DECAY_FLOOR, log_decay_cumsum_or_zero
from holdfast.kernels.lib.triton.sequence import chunk_coords
from holdfast.kernels.lib.triton.tiles import load_tile

from .states import state_rows


@triton.jit
def _block(
    k, a, p, dp, z, strength, through, to_here, to_end, beta, is_strong, share,
    v_ptr, do_ptr, dv_ptr, low_ptr, high_ptr, after_low_ptr, after_high_ptr,
    block, steps, rows, own_rows, live, there, token, at, slot, slot_row, after_slot, after_row, v_step, do_step,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of V's columns: own rows of S and dS', dO, U and Y, sums with its part, and dV, which is stored."""
    EVEN_V: tl.constexpr = COLUMNS % BLOCK_V == 0
    columns = block + tl.arange(0, BLOCK_V)
    mask = there & (columns < COLUMNS)[:, None] & (rows < WIDTH)[None, :]
    at_s = low_ptr + slot + state_rows(low_ptr, high_ptr, columns, slot_row, CHUNK)[:, None]
    at_ds = after_low_ptr + after_slot + state_rows(after_low_ptr, after_high_ptr, columns, after_row, CHUNK)[:, None]
    s = tl.load(at_s + rows[None, :], mask=mask, other=0.0)
    ds = tl.load(at_ds + rows[None, :], mask=mask, other=0.0)
    if PARTS == 1:
        through += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
    v = load_tile(v_ptr, steps, columns, v_step, live, COLUMNS, EVEN_V)
    do = load_tile(do_ptr, steps, columns, do_step, live, COLUMNS, EVEN_V)
    # [V, C] from here on
    error = tl.trans(v).to(tl.float32) - tl.dot(s, tl.trans(k), input_precision=PRECISION) * to_here[None, :]
    u = error * beta[None, :]
    u = tl.dot(u.to(k.dtype), tl.trans(a), u, input_precision=PRECISION)
    error = tl.where(is_strong[None, :], u * share[None, :], error)
    u = u.to(k.dtype)
    du = tl.dot(ds, tl.trans(k), input_precision=PRECISION) * to_end[None, :]
    du = tl.dot(tl.trans(do), p, du, input_precision=PRECISION)
    y = tl.dot(du.to(k.dtype), a, du, input_precision=PRECISION)
    strength += tl.sum(y * error, 0)
    dv_at = dv_ptr + token * COLUMNS + (at * COLUMNS)[:, None] + columns[None, :]
    dv = tl.trans((y * beta[None, :]).to(dv_ptr.dtype.element_ty))
    mask = live[:, None] & (columns < COLUMNS)[None, :]
    tl.store(dv_at, dv, mask=mask if PARTS == 1 else mask & (tl.program_id(0) % PARTS == 0))
    y = y.to(k.dtype)
    dp = tl.dot(do, u, dp, input_precision=PRECISION)
    z = tl.dot(tl.trans(y), u, z, input_precision=PRECISION)
    if PARTS > 1:
        # in shared memory again: rows of a product's operand are not to be had alone
        mask = there & (columns < COLUMNS)[:, None] & (own_rows < WIDTH)[None, :]
        s = tl.load(at_s + own_rows[None, :], mask=mask, other=0.0)
        ds = tl.load(at_ds + own_rows[None, :], mask=mask, other=0.0)
        through += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
    return s, ds, do, u, y, dp, z, strength, through


@triton.jit
def _products(s, ds, do, u, y, dq, dk_read, dk_write, PRECISION: tl.constexpr):
    """A block's part of dQ and dK, [K, C]."""
    dq = tl.dot(tl.trans(s), tl.trans(do), dq, input_precision=PRECISION)
    dk_read = tl.dot(tl.trans(s), y, dk_read, input_precision=PRECISION)
    dk_write = tl.dot(tl.trans(ds), u, dk_write, input_precision=PRECISION)
    return dq, dk_read, dk_write


@triton.jit
def _pairs(q, k, dp, z, strength, between, beta, is_strong, itself, scale, PRECISION: tl.constexpr):
    """E and F, [C, C], what the pairs' decays have of dg, and dbeta, when all blocks are in dp and z."""
    z = tl.where(itself, 0.0, z * between)
    pairs = z * tl.dot(k, tl.trans(k), input_precision=PRECISION)
    strength -= tl.where(is_strong, 0.0, tl.sum(pairs, 1))
    dp *= between * scale
    e = z * -beta[:, None]
    pairs *= -beta[:, None]
    pairs += tl.where(itself, 0.0, dp * tl.dot(q, tl.trans(k), input_precision=PRECISION))
    across = tl.sum(pairs, 1) - tl.sum(pairs, 0)
    f = dp.to(k.dtype)
    return e.to(k.dtype), f, across, strength


# windows differ in length and place: one compilation for all
@triton.jit(do_not_specialize=["lowest", "window", "sequences"])
def delta_gradients(
    q_ptr, k_ptr, v_ptr, do_ptr, a_ptr, g_ptr, beta_ptr, low_ptr, high_ptr, after_low_ptr, after_high_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, cu_seqlens,
    T, H, sequences, scale, lowest, window, q_batch, q_step, q_head, k_batch, k_step, k_head,
    v_batch, v_step, v_head, do_batch, do_step, do_head, slot_chunk, slot_head, slot_row,
    after_chunk, after_head, after_row, part_size,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head, and one of PARTS of K's columns in dq and dk.

    low, high: S; after_low, after_high: dS'; both as delta_forward keeps them. dq, dk [B, T, H, WIDTH], whose memory
    may hold S, dv [B, T, H, COLUMNS]; dbeta [B, T, H], float32 or None; dg likewise, [PARTS, B, T, H], what each part
    has of it, part_size numbers apart.
    """
    EVEN_K: tl.constexpr = WIDTH == BLOCK_K
    OWN: tl.constexpr = BLOCK_K // PARTS
    part = tl.program_id(0) % PARTS
    head = (tl.program_id(0) // PARTS % H).to(tl.int64)
    program = tl.program_id(0) // (PARTS * H)
    n, batch, first, end, chunk = chunk_coords(program, cu_seqlens, T, sequences, lowest, window, CHUNK)
    steps, rows = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    start = first + chunk * CHUNK
    live = steps < (end - start).to(tl.int32)
    token, at = (batch * T + start) * H + head, steps * H
    after_slot = program.to(tl.int64)
    slot = after_slot
    if cu_seqlens is None:
        slot = n * tl.cdiv(T, CHUNK) + chunk
    slot = slot * slot_chunk + head * slot_head
    after_slot = after_slot * after_chunk + head * after_head
    # a place past its sequence's end has no state
    there = start < end

    q_ptr += batch * q_batch + (head // GROUP) * q_head + start * q_step
    k_ptr += batch * k_batch + (head // GROUP) * k_head + start * k_step
    v_ptr += batch * v_batch + head * v_head + start * v_step
    do_ptr += batch * do_batch + head * do_head + start * do_step
    k = load_tile(k_ptr, steps, rows, k_step, live, WIDTH, EVEN_K)
    a = load_tile(a_ptr + token * CHUNK, steps, steps, H * CHUNK, live, CHUNK, True)
    here, total, own = log_decay_cumsum_or_zero(g_ptr + token if g_ptr is not None else None, at, live, CHUNK, WIDE)
    to_here, to_end = tl.exp2(here.to(tl.float32)), tl.exp2((total - here).to(tl.float32))
    beta = live.to(tl.float32)
    if beta_ptr is not None:
        beta = tl.load(beta_ptr + token + at, mask=live, other=0.0)
    # what beta scales: U / beta, or where that says nothing, R less what the chunk's earlier writes predict
    is_strong = tl.abs(beta) > 0.01
    share = 1.0 / tl.where(is_strong, beta, 1.0)
    # [t, s]
    itself = steps[:, None] == steps[None, :]
    reads = steps[:, None] >= steps[None, :]
    between = tl.exp2(tl.where(reads, (here[:, None] - here[None, :]).to(tl.float32), float("-inf")))
    q = load_tile(q_ptr, steps, rows, q_step, live, WIDTH, EVEN_K)
    p = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * between * scale).to(k.dtype)

    dp = tl.zeros([CHUNK, CHUNK], tl.float32)
    z = tl.zeros([CHUNK, CHUNK], tl.float32)
    own_rows = rows
    if PARTS > 1:
        own_rows = part * OWN + tl.arange(0, OWN)
    dq = tl.zeros([OWN, CHUNK], tl.float32)
    dk_read = tl.zeros([OWN, CHUNK], tl.float32)
    dk_write = tl.zeros([OWN, CHUNK], tl.float32)
    strength = tl.zeros([CHUNK], tl.float32)
    through = tl.zeros([BLOCK_V], tl.float32)
    # code for each block takes longer to compile than many are worth: 79 s of one core for eight of float32
    FEW: tl.constexpr = COLUMNS <= 2 * BLOCK_V
    UNROLLED: tl.constexpr = COLUMNS if FEW else 0
    LOOPED: tl.constexpr = 0 if FEW else COLUMNS
    for block in tl.static_range(0, UNROLLED, BLOCK_V):
        s, ds, do, u, y, dp, z, strength, through = _block(
            k, a, p, dp, z, strength, through, to_here, to_end, beta, is_strong, share,
            v_ptr, do_ptr, dv_ptr, low_ptr, high_ptr, after_low_ptr, after_high_ptr,
            block, steps, rows, own_rows, live, there, token, at, slot, slot_row, after_slot, after_row,
            v_step, do_step, WIDTH, COLUMNS, BLOCK_V, CHUNK, PARTS, PRECISION,
        )  # fmt: skip
        # before the last block's products, so that fewer tiles are in registers at a time
        if block + BLOCK_V >= COLUMNS:
            e, f, across, strength = _pairs(q, k, dp, z, strength, between, beta, is_strong, itself, scale, PRECISION)
        dq, dk_read, dk_write = _products(s, ds, do, u, y, dq, dk_read, dk_write, PRECISION)
    # loads ahead would take shared memory that the plan does not count
    for block in tl.range(0, LOOPED, BLOCK_V, num_stages=1):
        s, ds, do, u, y, dp, z, strength, through = _block(
            k, a, p, dp, z, strength, through, to_here, to_end, beta, is_strong, share,
            v_ptr, do_ptr, dv_ptr, low_ptr, high_ptr, after_low_ptr, after_high_ptr,
            block, steps, rows, own_rows, live, there, token, at, slot, slot_row, after_slot, after_row,
            v_step, do_step, WIDTH, COLUMNS, BLOCK_V, CHUNK, PARTS, PRECISION,
        )  # fmt: skip
        dq, dk_read, dk_write = _products(s, ds, do, u, y, dq, dk_read, dk_write, PRECISION)
    if not FEW:
        e, f, across, strength = _pairs(q, k, dp, z, strength, between, beta, is_strong, itself, scale, PRECISION)

    out = token * WIDTH + (at * WIDTH)[:, None] + own_rows[None, :]
    out_mask = live[:, None] & (own_rows < WIDTH)[None, :]
    if PARTS > 1:
        across *= (part == 0).to(tl.float32)
    dq *= (scale * to_here)[None, :]
    dk_read *= (-to_here * beta)[None, :]
    dk_write *= to_end[None, :]
    if dg_ptr is not None:
        # read again: kept from above, they would take registers all the way
        query = tl.trans(load_tile(q_ptr, steps, own_rows, q_step, live, WIDTH, EVEN_K)).to(tl.float32)
        reading = query * dq
        key = tl.trans(load_tile(k_ptr, steps, own_rows, k_step, live, WIDTH, EVEN_K)).to(tl.float32)
        written = tl.sum(key * dk_write, 0)
        # of each token's decay: what reads past it, and what is written before it and reaches the end
        dg = tl.cumsum(across + tl.sum(reading + key * dk_read, 0), 0, reverse=True)
        dg += tl.cumsum(written, 0) - written
        dg += tl.sum(through, 0) * tl.exp2(total.to(tl.float32))
        tl.store(
            dg_ptr + part.to(tl.int64) * part_size + token + at, tl.where(own <= LOG_DECAY_FLOOR, 0.0, dg), mask=live
        )
    if dbeta_ptr is not None:
        tl.store(dbeta_ptr + token + at, strength, mask=live & (part == 0))
    if PARTS > 1:
        k = load_tile(k_ptr, steps, own_rows, k_step, live, WIDTH, EVEN_K)
        q = load_tile(q_ptr, steps, own_rows, q_step, live, WIDTH, EVEN_K)
    dq = tl.dot(tl.trans(k), tl.trans(f), dq, input_precision=PRECISION)
    tl.store(dq_ptr + out, tl.trans(dq.to(dq_ptr.dtype.element_ty)), mask=out_mask)
    dk = tl.dot(tl.trans(q), f, dk_read + dk_write, input_precision=PRECISION)
    dk = tl.dot(tl.trans(k), e, dk, input_precision=PRECISION)
    dk = tl.dot(tl.trans(k), tl.trans(e), dk, input_precision=PRECISION)
    tl.store(dk_ptr + out, tl.trans(dk.to(dk_ptr.dtype.element_ty)), mask=out_mask)
