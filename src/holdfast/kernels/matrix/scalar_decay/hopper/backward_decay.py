"""Two warps of the adjoint sweep: one weighs chunks, one turns the row sums that come back into dg and dbeta.

Together in one they took as long as a chunk of the warps that multiply.

The log decay's gradient is dg_t = <exp(g_t) S_{t-1}, dS_t>: all pairs of a token written before t and one that reads it
from t on. Summed apart, each from the side where it is small, so that an error stays with few tokens:
    pairs of one chunk, from the products of scores in float32, without a token's pair with itself;
    q . dq of what entered the chunk, from its end to t;  k . dk of what leaves it, from its start to t;
    what passes the whole chunk, <decay S, dS>, one number a chunk.
The last is known as it is of the last chunk, of which a final state's gradient may make all of dg, and as <S, dS> at a
chunk's start less the sum of q . dq, where the sweep for dq saved a state. Between two of those it is carried on, a
sum's end less the chunk's k . dk and then plus its q . dq, whose rounding adds up and is the same for all tokens of a
chunk. So it is smoothed (Rauch, Tung, Striebel 1965): what carries it on errs by ROUNDING of <S, dS>, its size is about
the decay's share of that, and a saved state shows by how much it has strayed.
"""

from holdfast.kernels.lib.gluon.compat import gl, gluon, mbarrier
from holdfast.kernels.lib.gluon.decay import CHUNK, load_decay_beta, prefetch_decay_beta, publish_decays
from holdfast.kernels.lib.gluon.pdl import grid_dependency_wait
from holdfast.kernels.lib.gluon.reduce import add, reduce_warp_partials
from holdfast.kernels.lib.gluon.sequence import segment_index

# below this log decay, to base 2, the decay is 0 in float32, and so is its gradient
_LOG_ZERO = gl.constexpr(-149.9)


@gluon.jit
def _load(g_ptr, beta_ptr, beta_t, chunk, is_inside, T):
    """Log decay to base 2, as the sweep for dq left it, and strength of a chunk; nothing where is_inside is false."""
    g, beta = prefetch_decay_beta(g_ptr, beta_ptr, 1, beta_t, chunk, is_inside, T)
    return g, beta.to(gl.float32)


@gluon.jit
def gate(places, g_ptr, beta_ptr, beta_t, length, first, count, scale, STAGES: gl.constexpr):
    """Weighs each chunk when its stage is free."""
    gates, decays, _, gated, free = places
    # log decays are what the launch ahead leaves
    grid_dependency_wait()
    g, beta = _load(g_ptr, beta_ptr, beta_t, first + count - 1, count > 0, length)
    stage = 0
    phase = 1
    for i in range(count):
        g_next, beta_next = _load(g_ptr, beta_ptr, beta_t, first + count - 2 - i, i + 1 < count, length)
        mbarrier.wait(free.index(stage), phase)
        publish_decays(gates, decays, gated, stage, g, beta, scale, True)
        g = g_next
        beta = beta_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def sum_up(
    signals,
    parts,
    pending,
    g_ptr,
    beta_ptr,
    g_t,
    beta_t,
    row_ptr,
    passing_ptr,
    dg_ptr,
    dbeta_ptr,
    length,
    slice_rows,
    H,
    step,
    slices,
    first,
    count,
    TURNED: gl.constexpr,
    SAVE: gl.constexpr,
    FROM: gl.constexpr,
    ROUNDING: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Turns the row sums of each chunk into dg and dbeta when its stage comes back.

    g_t: from one token's natural-log decay to the next, or None for what `gate` reads. step: the same of dg and dbeta.
    passing [slices, B, segments, H]: parts of <S, dS>, S before and dS after the last chunk; None for 0.
    """
    gated, free = signals
    waiting, strays = pending
    later_parts, earlier_parts, own_parts, cross_parts, state_parts = parts
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    rows: gl.constexpr = gl.BlockedLayout([state_parts.shape[1] // 32], [32], [1], [0])
    # nothing has been left in a stage yet that would have to be read first
    for i in gl.static_range(STAGES):
        mbarrier.arrive(gated.index(i), count=1, pred=i < count)
    grid_dependency_wait()
    passing = 0.0
    if passing_ptr is not None:  # noqa: SIM102 - known while compiling
        if count > 0:
            for part in range(slices):
                passing += gl.load(passing_ptr + part * (gl.num_programs(0) * gl.num_programs(1)) + segment_index(H, 1))
    # <S, dS> at a chunk's end, and the variance of its error, relative to its square
    carry = 0.0
    doubt = 0.0
    stage = 0
    phase = 0
    for i in range(count):
        slot = count - 1 - i
        # loaded before the wait
        tokens = (first + slot) * CHUNK + gl.arange(0, CHUNK, layout)
        inside = tokens < length
        if dg_ptr is not None:
            gain = gl.load(row_ptr + tokens, mask=inside, other=0.0)
            for part in range(1, slices):
                gain += gl.load(row_ptr + part * slice_rows + tokens, mask=inside, other=0.0)
        if g_t is None:
            own_g, own_beta = _load(g_ptr, beta_ptr, beta_t, first + slot, True, length)
        else:
            own_g, own_beta = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, first + slot, True, length)
        mbarrier.wait(free.index(stage), phase)
        within_chunk, cross = reduce_warp_partials(earlier_parts, stage), reduce_warp_partials(cross_parts, stage)
        if dbeta_ptr is not None:
            own = reduce_warp_partials(own_parts, stage)
        if dg_ptr is not None:
            pairs = reduce_warp_partials(later_parts, stage)
            kept = 0.0
            kept_rounded = 0.0
            if SAVE > 0:  # noqa: SIM102 - known while compiling
                if slot % SAVE == 0:
                    kept = gl.sum(state_parts.index(stage * 2).load(rows), 0)
                    kept_rounded = gl.sum(state_parts.index(stage * 2 + 1).load(rows), 0)
        # they have been read, so that the chunk that takes the stage may leave its own
        mbarrier.arrive(gated.index(stage), count=1, pred=i + STAGES < count)
        if dbeta_ptr is not None:
            gl.store(dbeta_ptr + tokens.to(gl.int64) * step, within_chunk + cross + own, mask=inside)
        if dg_ptr is not None:
            pairs -= within_chunk * own_beta
            cross *= own_beta
            dg = gl.associative_scan(gain + pairs, 0, add, reverse=True)
            dg += gl.associative_scan(cross, 0, add) - cross
            # what passes the chunk: the sum that is carried on, and that it is about the decay of the whole
            decay = gl.exp2(gl.sum(own_g, 0))
            expected = carry - gl.sum(cross, 0)
            read = gl.sum(gain, 0)
            doubted = doubt + ROUNDING
            known = decay * decay / (decay * decay + doubted)
            # of the next chunk's error, the share that is this one's too
            share = doubt / doubted
            # what passes the last chunk is known as it is
            doubt = gl.where(i == 0, 0.0, doubted * known)
            past = gl.where(i == 0, decay * passing, expected * known)
            carry = read + past
            if slot % SAVE == 0:
                if TURNED:
                    # here the sweep's sums are not of numbers rounded as this kernel's are
                    past += doubt / (doubt + ROUNDING) * (kept - carry)
                else:
                    past = gl.where((i > 0) & (decay > 0.0), kept - read, past)
                # nothing passes from a first state of 0
                past = gl.where(slot >= FROM, past, 0.0)
                carry = kept_rounded
                doubt = ROUNDING * 1.0
            stray = past - expected
            dg = gl.where(own_g < _LOG_ZERO, 0.0, dg + past)
            if slot % SAVE == 0:
                gl.store(dg_ptr + tokens.to(gl.int64) * step, dg, mask=inside)
                _correct(pending, share, stray, dg_ptr, tokens, length, step, i, SAVE)
            else:
                one = gl.full([1], 1.0, gl.float32, layout)
                waiting.index(slot % SAVE - 1).store(dg)
                strays.index(slot % SAVE * 2 - 2).store(one * share)
                strays.index(slot % SAVE * 2 - 1).store(one * stray)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _correct(pending, share, stray, dg_ptr, tokens, length, step, entry, SAVE: gl.constexpr):
    """Writes dg of the chunks after one with a saved state, with their share of the error that it shows."""
    waiting, strays = pending
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    # the last window of a segment has fewer
    for slot in range(1, gl.minimum(SAVE, entry + 1)):
        error = share * stray
        later = tokens + slot * CHUNK
        gl.store(dg_ptr + later.to(gl.int64) * step, waiting.index(slot - 1).load(layout) + error, mask=later < length)
        share = gl.sum(strays.index(slot * 2 - 2).load(layout), 0)
        stray = error + gl.sum(strays.index(slot * 2 - 1).load(layout), 0)
