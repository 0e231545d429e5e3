"""The delta rule's gradients of q, k, v, g and beta, chunk by chunk, in a launch that runs all chunks at once.

Given S that enters a chunk and dS' of the state that leaves it, all else is inside the chunk. With the names of
states.py, R = V - exp(G) (K S), e = exp(G_C - G), D the decay between two tokens and * elementwise,

    dV = beta Y       dP = dO U^T      Z = Y U^T      F = scale causal(D * dP)      E = -beta strictly lower(D * Z)
    dQ = scale exp(G) (dO S^T) + F K
    dK = (e U) dS'^T - (exp(G) beta Y) S^T + F^T Q + (E + E^T) K
    dbeta_t = Y_t . U_t / beta_t = Y_t . R_t - sum_s (D * Z * K K^T)(t, s), s < t

A log decay scales every pair on both sides of it, every read of S and write to S' across it, and S on its way to S'.
See docs/delta-rule.md#gradient.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.compat import aggregate
from holdfast.kernels.lib.triton.decay import LOG_DECAY_FLOOR, log_decay_cumsum_or_zero
from holdfast.kernels.lib.triton.sequence import chunk_coords
from holdfast.kernels.lib.triton.tiles import load_tile

from .states import PRECISION, state_rows

# betas up to it say little or nothing of what they scale
_BETA_EPS = tl.constexpr(0.01)


@aggregate
class Sizes:
    """Constants of a launch, by the names that its kernel has them under."""

    WIDTH: tl.constexpr
    COLUMNS: tl.constexpr
    BLOCK_V: tl.constexpr
    CHUNK: tl.constexpr
    PARTS: tl.constexpr

    @triton.constexpr_function
    def __init__(self, WIDTH, COLUMNS, BLOCK_V, CHUNK, PARTS):
        self.WIDTH = tl.constexpr(WIDTH)
        self.COLUMNS = tl.constexpr(COLUMNS)
        self.BLOCK_V = tl.constexpr(BLOCK_V)
        self.CHUNK = tl.constexpr(CHUNK)
        self.PARTS = tl.constexpr(PARTS)


class Tokens(NamedTuple):
    """A chunk's tokens: their rows, which of them there are, the first one's row of [B, T, H], and theirs from it."""

    steps: Any
    live: Any
    first: Any
    rows: Any


class Chunk(NamedTuple):
    """What every block of V's columns takes of a chunk.

    k: [C, K]. a: [C, C], the inverse. scores: P, [C, C]. from_start, to_end: decays of the tokens. beta, and 1 / beta
    where it is large, that is over _BETA_EPS.
    """

    k: Any
    a: Any
    scores: Any
    from_start: Any
    to_end: Any
    beta: Any
    is_large: Any
    inverse_beta: Any


class Values(NamedTuple):
    """Pointers to a chunk's rows of v and dO with their strides, and to all of dv, contiguous."""

    v: Any
    v_step: Any
    do: Any
    do_step: Any
    dv: Any


class States(NamedTuple):
    """A chunk's saved states, transposed: pointers to S, whose rows from CHUNK on are at s_high, and to dS'.

    s_row: from one row of S to the next; a row of dS' has WIDTH numbers. columns: K's columns, and own_columns those of
    this program's part of dq and dk. there: whether there is a chunk.
    """

    s: Any
    s_high: Any
    s_row: Any
    ds: Any
    columns: Any
    own_columns: Any
    there: Any


class Block(NamedTuple):
    """Tiles of a block of V's columns: S and dS' [V, K], dO [C, V], U [V, C] and Y [V, C], rounded."""

    s: Any
    ds: Any
    do: Any
    u: Any
    y: Any


class Sums(NamedTuple):
    """Sums over blocks of V's columns: dP and Z [C, C], dbeta [C], <S, dS'> by column [V]."""

    dp: Any
    z: Any
    dbeta: Any
    state_grad_dot: Any


class KeyGrads(NamedTuple):
    """Sums over blocks of V's columns: dq through S, dk through S and through dS', [K, C]."""

    dq: Any
    dk_read: Any
    dk_write: Any


@triton.jit
def _add_block(block, chunk, tokens, values, states, sums, sizes):
    """Store a block's dV; return its tiles and the sums with its part."""
    EVEN_V: tl.constexpr = sizes.COLUMNS % sizes.BLOCK_V == 0
    k, dp, z = chunk.k, sums.dp, sums.z
    state_grad_dot = sums.state_grad_dot
    columns = block + tl.arange(0, sizes.BLOCK_V)
    mask = states.there & (columns < sizes.COLUMNS)[:, None] & (states.columns < sizes.WIDTH)[None, :]
    at_s = states.s + state_rows(states.s, states.s_high, columns, states.s_row, sizes.CHUNK)[:, None]
    at_ds = states.ds + (columns * sizes.WIDTH)[:, None]
    s = tl.load(at_s + states.columns[None, :], mask=mask, other=0.0)
    ds = tl.load(at_ds + states.columns[None, :], mask=mask, other=0.0)
    if sizes.PARTS == 1:
        state_grad_dot += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
    v = load_tile(values.v, tokens.steps, columns, values.v_step, tokens.live, sizes.COLUMNS, EVEN_V)
    do = load_tile(values.do, tokens.steps, columns, values.do_step, tokens.live, sizes.COLUMNS, EVEN_V)
    # [V, C] from here on
    error = tl.trans(v).to(tl.float32) - tl.dot(s, tl.trans(k), input_precision=PRECISION) * chunk.from_start[None, :]
    u = error * chunk.beta[None, :]
    u = tl.dot(u.to(k.dtype), tl.trans(chunk.a), u, input_precision=PRECISION)
    error = tl.where(chunk.is_large[None, :], u * chunk.inverse_beta[None, :], error)
    u = u.to(k.dtype)
    du = tl.dot(ds, tl.trans(k), input_precision=PRECISION) * chunk.to_end[None, :]
    du = tl.dot(tl.trans(do), chunk.scores, du, input_precision=PRECISION)
    y = tl.dot(du.to(k.dtype), chunk.a, du, input_precision=PRECISION)
    dbeta = sums.dbeta + tl.sum(y * error, 0)
    dv_at = values.dv + tokens.first * sizes.COLUMNS + (tokens.rows * sizes.COLUMNS)[:, None] + columns[None, :]
    dv = tl.trans((y * chunk.beta[None, :]).to(values.dv.dtype.element_ty))
    mask = tokens.live[:, None] & (columns < sizes.COLUMNS)[None, :]
    tl.store(dv_at, dv, mask=mask if sizes.PARTS == 1 else mask & (tl.program_id(0) % sizes.PARTS == 0))
    y = y.to(k.dtype)
    dp = tl.dot(do, u, dp, input_precision=PRECISION)
    z = tl.dot(tl.trans(y), u, z, input_precision=PRECISION)
    if sizes.PARTS > 1:
        # loaded again: rows of an operand in shared memory are not to be had alone
        mask = states.there & (columns < sizes.COLUMNS)[:, None] & (states.own_columns < sizes.WIDTH)[None, :]
        s = tl.load(at_s + states.own_columns[None, :], mask=mask, other=0.0)
        ds = tl.load(at_ds + states.own_columns[None, :], mask=mask, other=0.0)
        state_grad_dot += tl.sum(s.to(tl.float32) * ds.to(tl.float32), 1)
    sums = Sums(dp=dp, z=z, dbeta=dbeta, state_grad_dot=state_grad_dot)
    return Block(s=s, ds=ds, do=do, u=u, y=y), sums


@triton.jit
def _add_key_grads(tiles, grads):
    """Return dq and dk through the states, [K, C], with a block's part."""
    dq = tl.dot(tl.trans(tiles.s), tl.trans(tiles.do), grads.dq, input_precision=PRECISION)
    dk_read = tl.dot(tl.trans(tiles.s), tiles.y, grads.dk_read, input_precision=PRECISION)
    dk_write = tl.dot(tl.trans(tiles.ds), tiles.u, grads.dk_write, input_precision=PRECISION)
    return KeyGrads(dq=dq, dk_read=dk_read, dk_write=dk_write)


@triton.jit
def _pair_grads(q, chunk, sums, causal_decay, is_self, scale):
    """Return E and F, [C, C], the pairs' part of dg, and dbeta, when all blocks are in the sums.

    The pairs' part of a token is of those with one before it and one that is not. Float32's is the sum of these; of
    others it is what this token reads less what it writes, to be summed from the chunk's end.
    """
    k = chunk.k
    z = tl.where(is_self, 0.0, sums.z * causal_decay)
    pairs = z * tl.dot(k, tl.trans(k), input_precision=PRECISION)
    dbeta = sums.dbeta - tl.where(chunk.is_large, 0.0, tl.sum(pairs, 1))
    dp = sums.dp * (causal_decay * scale)
    e = z * -chunk.beta[:, None]
    pairs *= -chunk.beta[:, None]
    pairs += tl.where(is_self, 0.0, dp * tl.dot(q, tl.trans(k), input_precision=PRECISION))
    if k.dtype == tl.float32:
        # the rounding of such a sum would be the same for all earlier tokens, which a rate's gradient shows
        steps = tl.arange(0, pairs.shape[0])
        before = (steps[:, None] < steps[None, :]).to(tl.float32)
        across = tl.dot(pairs, before, input_precision=PRECISION)
        dg = tl.sum(tl.where(steps[:, None] >= steps[None, :], across, 0.0), 0)
    else:
        dg = tl.sum(pairs, 1) - tl.sum(pairs, 0)
    f = dp.to(k.dtype)
    return e.to(k.dtype), f, dg, dbeta


@triton.jit
def _unrounded_dot(initial_ptr, dfinal_ptr, begin, end):
    """Return <S, dS'> of numbers begin to end of two float32 states in memory."""
    BLOCK: tl.constexpr = 1024
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=1):
        at = start + tl.arange(0, BLOCK)
        initial = tl.load(initial_ptr + at, mask=at < end, other=0.0)
        total += initial * tl.load(dfinal_ptr + at, mask=at < end, other=0.0)
    return tl.sum(total, 0)


# windows differ in length and place: one compilation for all
@triton.jit(do_not_specialize=["first_chunk", "sequences"])
def delta_rule_triton_chunk_grads(
    q_ptr, k_ptr, v_ptr, do_ptr, a_ptr, g_ptr, beta_ptr, states_ptr, dstates_ptr, initial_ptr, dfinal_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, cu_seqlens,
    T, H, sequences, scale, first_chunk, q_batch, q_step, q_head, k_batch, k_step, k_head,
    v_batch, v_step, v_head, do_batch, do_step, do_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    IN_GRADS: tl.constexpr,
):  # fmt: skip
    """One program a chunk from first_chunk on, head and part of K's columns in dq and dk, of 2 with more than 128.

    q, k: [B, T, H / GROUP, WIDTH], v, do: [B, T, H, COLUMNS], their last axes dense. a: [B, T, H, CHUNK], of
    chunk_inverse.py. g, beta: [B, T, H], float32, contiguous, or None for 0 and 1. states: S, and dstates: dS', as
    states.py saves them, both [chunks, H, COLUMNS, WIDTH]; with IN_GRADS S is in the memory of dq and dk. initial,
    dfinal: [N, H, WIDTH, COLUMNS], S before and dS' after a sequence, float32, contiguous, for <S, dS'> of sequences of
    one chunk: it may be all of their dg, and cancel. Or both None. dq, dk: [B, T, H, WIDTH], dv: [B, T, H, COLUMNS],
    contiguous. dg: [parts, B, T, H], each part's share, and dbeta: [B, T, H], float32, contiguous, or None. cu_seqlens:
    [N + 1], where packed sequences begin and end, or None.
    """
    BLOCK_K: tl.constexpr = triton.next_power_of_2(WIDTH) if WIDTH > 16 else 16
    EVEN_K: tl.constexpr = WIDTH == BLOCK_K
    # as the planner has it
    PARTS: tl.constexpr = 1 if WIDTH <= 128 else 2
    OWN: tl.constexpr = BLOCK_K // PARTS
    # float32 sums of log decays beside bfloat16 inputs, else float64
    WIDE: tl.constexpr = k_ptr.dtype.element_ty != tl.bfloat16
    sizes = Sizes(WIDTH, COLUMNS, BLOCK_V, CHUNK, PARTS)
    part = tl.program_id(0) % PARTS
    head = (tl.program_id(0) // PARTS % H).to(tl.int64)
    program = tl.program_id(0) // (PARTS * H)
    # chunks of each sequence, unless packed
    window = tl.num_programs(0) // (PARTS * H * sequences)
    n, batch, first, end, chunk = chunk_coords(program, cu_seqlens, T, sequences, first_chunk, window, CHUNK)
    steps, rows = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    start = first + chunk * CHUNK
    live = steps < (end - start).to(tl.int32)
    token, at = (batch * T + start) * H + head, steps * H
    dslot = program.to(tl.int64)
    slot = dslot
    if cu_seqlens is None:
        slot = n * tl.cdiv(T, CHUNK) + chunk
    if IN_GRADS:
        # where the chunk's rows of dq and dk will be; a float32 number has room for two of 16 bits
        BITS: tl.constexpr = states_ptr.dtype.element_ty.primitive_bitwidth
        STRIDE: tl.constexpr = WIDTH * (dq_ptr.dtype.element_ty.primitive_bitwidth // BITS)
        s_row = H * STRIDE
        at_slot = slot * CHUNK * s_row + head * STRIDE
        s_high = (dk_ptr if STRIDE == WIDTH else states_ptr + WIDTH) + at_slot
    else:
        s_row = WIDTH
        at_slot = (slot * H + head) * (COLUMNS * WIDTH)
        s_high = states_ptr + at_slot + CHUNK * WIDTH
    s_ptr = states_ptr + at_slot
    ds_ptr = dstates_ptr + (dslot * H + head) * (COLUMNS * WIDTH)

    q_ptr += batch * q_batch + (head // GROUP) * q_head + start * q_step
    k_ptr += batch * k_batch + (head // GROUP) * k_head + start * k_step
    v_ptr += batch * v_batch + head * v_head + start * v_step
    do_ptr += batch * do_batch + head * do_head + start * do_step
    k = load_tile(k_ptr, steps, rows, k_step, live, WIDTH, EVEN_K)
    a = load_tile(a_ptr + token * CHUNK, steps, steps, H * CHUNK, live, CHUNK, True)
    cumsum, total, log = log_decay_cumsum_or_zero(g_ptr + token if g_ptr is not None else None, at, live, CHUNK, WIDE)
    from_start, to_end = tl.exp2(cumsum.to(tl.float32)), tl.exp2((total - cumsum).to(tl.float32))
    beta = live.to(tl.float32)
    if beta_ptr is not None:
        beta = tl.load(beta_ptr + token + at, mask=live, other=0.0)
    # what beta scales: U / beta, or where that says nothing, R less what the chunk's earlier writes predict
    is_large = tl.abs(beta) > _BETA_EPS
    inverse_beta = 1.0 / tl.where(is_large, beta, 1.0)
    # [t, s]
    is_self = steps[:, None] == steps[None, :]
    reads = steps[:, None] >= steps[None, :]
    causal_decay = tl.exp2(tl.where(reads, (cumsum[:, None] - cumsum[None, :]).to(tl.float32), float("-inf")))
    q = load_tile(q_ptr, steps, rows, q_step, live, WIDTH, EVEN_K)
    scores = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * causal_decay * scale).to(k.dtype)

    own_rows = rows
    if PARTS > 1:
        own_rows = part * OWN + tl.arange(0, OWN)
    tokens = Tokens(steps=steps, live=live, first=token, rows=at)
    chunk_tiles = Chunk(
        k=k,
        a=a,
        scores=scores,
        from_start=from_start,
        to_end=to_end,
        beta=beta,
        is_large=is_large,
        inverse_beta=inverse_beta,
    )
    values = Values(v=v_ptr, v_step=v_step, do=do_ptr, do_step=do_step, dv=dv_ptr)
    # a place past its sequence's end has no state
    states = States(
        s=s_ptr, s_high=s_high, s_row=s_row, ds=ds_ptr, columns=rows, own_columns=own_rows, there=start < end
    )
    sums = Sums(
        dp=tl.zeros([CHUNK, CHUNK], tl.float32),
        z=tl.zeros([CHUNK, CHUNK], tl.float32),
        dbeta=tl.zeros([CHUNK], tl.float32),
        state_grad_dot=tl.zeros([BLOCK_V], tl.float32),
    )
    grads = KeyGrads(
        dq=tl.zeros([OWN, CHUNK], tl.float32),
        dk_read=tl.zeros([OWN, CHUNK], tl.float32),
        dk_write=tl.zeros([OWN, CHUNK], tl.float32),
    )
    # code for each block takes longer to compile than many are worth: 79 s of one core for eight of float32
    FEW: tl.constexpr = COLUMNS <= 2 * BLOCK_V
    UNROLLED: tl.constexpr = COLUMNS if FEW else 0
    LOOPED: tl.constexpr = 0 if FEW else COLUMNS
    for block in tl.static_range(0, UNROLLED, BLOCK_V):
        tiles, sums = _add_block(block, chunk_tiles, tokens, values, states, sums, sizes)
        # before the last block's products, so that fewer tiles are in registers at a time
        if block + BLOCK_V >= COLUMNS:
            e, f, dg, dbeta = _pair_grads(q, chunk_tiles, sums, causal_decay, is_self, scale)
        grads = _add_key_grads(tiles, grads)
    # loads ahead would take shared memory that the plan does not count
    for block in tl.range(0, LOOPED, BLOCK_V, num_stages=1):
        tiles, sums = _add_block(block, chunk_tiles, tokens, values, states, sums, sizes)
        grads = _add_key_grads(tiles, grads)
    if not FEW:
        e, f, dg, dbeta = _pair_grads(q, chunk_tiles, sums, causal_decay, is_self, scale)

    out = token * WIDTH + (at * WIDTH)[:, None] + own_rows[None, :]
    out_mask = live[:, None] & (own_rows < WIDTH)[None, :]
    if PARTS > 1:
        dg *= (part == 0).to(tl.float32)
    dq = grads.dq * (scale * from_start)[None, :]
    dk_read = grads.dk_read * (-from_start * beta)[None, :]
    dk_write = grads.dk_write * to_end[None, :]
    if dg_ptr is not None:
        # read again: kept from above, they would take registers all the way
        query = tl.trans(load_tile(q_ptr, steps, own_rows, q_step, live, WIDTH, EVEN_K)).to(tl.float32)
        reading = query * dq
        key = tl.trans(load_tile(k_ptr, steps, own_rows, k_step, live, WIDTH, EVEN_K)).to(tl.float32)
        written = tl.sum(key * dk_write, 0)
        # of each token's decay: what reads past it, and what is written before it and reaches the end
        reads = tl.sum(reading + key * dk_read, 0)
        if k.dtype == tl.float32:
            dg += tl.cumsum(reads, 0, reverse=True)
        else:
            dg = tl.cumsum(dg + reads, 0, reverse=True)
        dg += tl.cumsum(written, 0) - written
        state_grad_dot = tl.sum(sums.state_grad_dot, 0)
        if initial_ptr is not None:  # noqa: SIM102 - known while compiling
            if end - first <= CHUNK:
                own = (n * H + head) * (WIDTH * COLUMNS)
                begin, stop = part * (OWN * COLUMNS), tl.minimum((part + 1) * OWN, WIDTH) * COLUMNS
                state_grad_dot = _unrounded_dot(initial_ptr + own, dfinal_ptr + own, begin, stop)
        dg += state_grad_dot * tl.exp2(total.to(tl.float32))
        batches = sequences if cu_seqlens is None else 1
        dg_ptr += part.to(tl.int64) * batches * T * H
        tl.store(dg_ptr + token + at, tl.where(log <= LOG_DECAY_FLOOR, 0.0, dg), mask=live)
    if dbeta_ptr is not None:
        tl.store(dbeta_ptr + token + at, dbeta, mask=live & (part == 0))
    if PARTS > 1:
        k = load_tile(k_ptr, steps, own_rows, k_step, live, WIDTH, EVEN_K)
        q = load_tile(q_ptr, steps, own_rows, q_step, live, WIDTH, EVEN_K)
    dq = tl.dot(tl.trans(k), tl.trans(f), dq, input_precision=PRECISION)
    tl.store(dq_ptr + out, tl.trans(dq.to(dq_ptr.dtype.element_ty)), mask=out_mask)
    dk = tl.dot(tl.trans(q), f, dk_read + dk_write, input_precision=PRECISION)
    dk = tl.dot(tl.trans(k), e, dk, input_precision=PRECISION)
    dk = tl.dot(tl.trans(k), tl.trans(e), dk, input_precision=PRECISION)
    tl.store(dk_ptr + out, tl.trans(dk.to(dk_ptr.dtype.element_ty)), mask=out_mask)
