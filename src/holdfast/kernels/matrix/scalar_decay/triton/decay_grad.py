"""The log decay's gradient from what the sweeps leave of it: sums inside a chunk, and what passes the whole of it.

For a chunk, <decay S, dS>, with S the state that enters it and dS the gradient of the one that leaves it, counts for
every token. It is exact of the last chunk, before which the state is saved, and where one was saved: in float32 as it
is; else as <S, dS> at the chunk's start less what the chunk reads, which are of numbers rounded alike. In float32 that
difference had ten times the rounding that the product has, and a sum of dg over tokens showed it. Between saved states
it is carried on, less what one chunk writes for later and plus what the next reads, and collects rounding that a sum
over tokens shows. Its size is about the decay's share of <S, dS>, what carries it on errs by the operands' rounding of
that, and the next saved state shows how far it has strayed: the estimate of least mean square from both sides, by a
filter and a smoother of one number (Rauch, Tung, Striebel 1965), whose weights depend on the decays alone.
"""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.decay import LOG2E, LOG_DECAY_FLOOR
from holdfast.kernels.lib.triton.sequence import sequence_bounds

# of sums in float32, relative to what they add; above FAINT a decay leaves more than that
ROUNDING = tl.constexpr(2.0**-21)
FAINT = tl.constexpr(-12.0)


@triton.jit
def _at(x, index, slots):
    """Return x[index] of a vector over slots."""
    return tl.sum(tl.where(slots == index, x, 0.0), 0)


@triton.jit
def _rows(ptr, at, live, stride, SPLITS: tl.constexpr):
    """Return the sum of all splits' rows."""
    x = tl.load(ptr + at, mask=live, other=0.0)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(ptr + split * stride + at, mask=live, other=0.0)
    return x


@triton.jit
def _product(ptr, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of all splits' and columns' numbers."""
    x = tl.load(ptr + tl.arange(0, BLOCK))
    for split in tl.static_range(1, SPLITS):
        x += tl.load(ptr + split * size + tl.arange(0, BLOCK))
    return tl.sum(x, 0)


@triton.jit
def _both(a, b, next_a, next_b):
    return a + next_a, b + next_b


@triton.jit
def _onward(sums, passed, next_sums, passes):
    """Sums that begin again where nothing passes."""
    return tl.where(passes != 0, sums, 0.0) + next_sums, passed & passes


@triton.jit
def pairs_across(later, earlier, g):
    """Return, for each token of a chunk, the sum over all pairs of a token before it and one that is not.

    later, earlier: the sums over each token's pairs with earlier and with later ones; g: log decays. From a token on
    the first less the second is that sum. Where a decay leaves little of it, it is their rounding, which may not go
    on to the tokens before: a step size that is long there would make it all of the gradient of a rate.
    """
    pairs = later - earlier
    whole, size = tl.associative_scan((pairs, tl.abs(later) + tl.abs(earlier)), 0, _both, reverse=True)
    passes = (g > LOG_DECAY_FLOOR) & ((g > FAINT) | (tl.abs(whole) > ROUNDING * size))
    sums, _ = tl.associative_scan((tl.where(passes, pairs, 0.0), passes.to(tl.int32)), 0, _onward, reverse=True)
    return sums


@triton.jit
def scalar_decay_dg(
    g_ptr, read_ptr, written_ptr, products_ptr, out_ptr, grad_m_ptr, cu_seqlens, T, H, segment, tokens, products_size,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, SEGMENTS: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
    VARIANCE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Turn the sums of the passes for dq and dk into dg.

    Grid (sequences, or segments of them, of which there may be any number; H; programs that share the windows of KEEP
    chunks).

    read:
        g        float32 [B, T, H]: log decays
        read, written, products
                 float32 [SPLITS, 3, B, T, H], [SPLITS, B, T, H] and [SPLITS, products_size]: rows of
                 scalar_decay_single_pass forward and in reverse, and its products
    written:
        out      [B, T, H]: dg
        grad_m   float32 [B, T, H], or None: of each sequence's last token less <S, dS> of the final state, as dg has it
    VARIANCE: of a rounded operand, relative to its square. EXACT: operands are float32; then the products are of saved
    states and the gradients behind their chunks, not before, and pairs come summed.
    """
    head = tl.program_id(1)
    n = tl.program_id(0)
    batch, first, end = sequence_bounds(n, cu_seqlens, T, segment, SEGMENTS)
    base = (batch.to(tl.int64) * T + first) * H + head
    plane = batch.to(tl.int64) * 0 + tokens * H
    products_ptr += (((batch.to(tl.int64) * T + first) // (KEEP * CHUNK) + 2 * n) * H + head) * BLOCK
    count = tl.cdiv(end - first, CHUNK).to(tl.int32)
    steps = tl.arange(0, CHUNK)
    slots = tl.arange(0, KEEP)
    for window in range(tl.program_id(2), tl.cdiv(count, KEEP), tl.num_programs(2)):
        low = window * KEEP
        high = tl.minimum(low + KEEP, count)
        pasts = tl.zeros([KEEP], tl.float32)
        innovations = tl.zeros([KEEP], tl.float32)
        rts_gains = tl.zeros([KEEP], tl.float32)
        carry = _product(products_ptr + (window + 1) * H * BLOCK, products_size, SPLITS, BLOCK)
        if EXACT and high < count:
            # <S, dS> where the next window starts
            at = base + (high * CHUNK + steps).to(tl.int64) * H
            live = high * CHUNK + steps < end - first
            g = tl.load(g_ptr + at, mask=live, other=0.0)
            carry *= tl.exp2(tl.sum(tl.maximum(g, LOG_DECAY_FLOOR).to(tl.float32) * LOG2E, 0))
            carry += tl.sum(_rows(read_ptr, at, live, 3 * plane, SPLITS), 0)
        variance = tl.zeros([], tl.float32) + VARIANCE
        for i in range(high - low):
            chunk = high - 1 - i
            at = base + (chunk * CHUNK + steps).to(tl.int64) * H
            live = chunk * CHUNK + steps < end - first
            g = tl.load(g_ptr + at, mask=live, other=0.0)
            decay = tl.exp2(tl.sum(tl.maximum(g, LOG_DECAY_FLOOR).to(tl.float32) * LOG2E, 0))
            read = tl.sum(_rows(read_ptr, at, live, 3 * plane, SPLITS), 0)
            written = tl.sum(_rows(written_ptr, at, live, plane, SPLITS), 0)
            expected = carry - written
            predicted = variance + VARIANCE
            gain = decay * decay / (decay * decay + predicted)
            # of the next chunk's error, the share that is this one's too
            rts_gain = variance / predicted
            # what passes the last chunk is known as it is
            is_last = chunk == count - 1
            variance = tl.where(is_last, 0.0, predicted * gain)
            past = tl.where(is_last, decay * carry, expected * gain)
            if grad_m_ptr is not None:
                # of a segment only where it ends the sequence
                is_final = is_last & ((end == T) | (cu_seqlens is not None))
                last = grad_m_ptr + base + (end - first - 1) * H
                tl.store(last, tl.load(last, mask=is_final, other=0.0) - (past + written), mask=is_final)
            if chunk == low:
                exact = _product(products_ptr + window * H * BLOCK, products_size, SPLITS, BLOCK)
                if EXACT:
                    past = decay * exact
                else:
                    past = tl.where(is_last, past, tl.where(decay > 0.0, exact - read, 0.0))
            carry = past + read
            here = slots == chunk - low
            pasts = tl.where(here, past, pasts)
            innovations = tl.where(here, past - expected, innovations)
            rts_gains = tl.where(here, rts_gain, rts_gains)
        error = tl.zeros([], tl.float32)
        for chunk in range(low, high):
            at = base + (chunk * CHUNK + steps).to(tl.int64) * H
            live = chunk * CHUNK + steps < end - first
            # The decay of token t takes part in whatever is written before it and read from it on: what enters the
            # chunk and is read, what is written and leaves, both, and pairs inside. Each is summed from the end where
            # it is small, so that rounding of large terms stays with tokens whose own is large.
            read = _rows(read_ptr, at, live, 3 * plane, SPLITS)
            # of the tokens before: a sum less its last term would leave that term's rounding
            written = _rows(written_ptr - H, at, live & (steps > 0), plane, SPLITS)
            g = tl.load(g_ptr + at, mask=live, other=0.0)
            # past is 0 in a chunk with a decay of zero, which lets nothing pass
            dg = tl.cumsum(read, 0, reverse=True) + tl.cumsum(written, 0)
            if EXACT:
                dg += _rows(read_ptr + plane - H, at, live & (steps > 0), 3 * plane, SPLITS)
            else:
                later = _rows(read_ptr + plane, at, live, 3 * plane, SPLITS)
                earlier = _rows(read_ptr + 2 * plane, at, live, 3 * plane, SPLITS)
                # no pair is of a token before the first and one from it on: their sum there is rounding
                dg += tl.where(steps > 0, pairs_across(later, earlier, g), 0.0)
            dg += _at(pasts, chunk - low, slots) + error
            dg = tl.where(g <= LOG_DECAY_FLOOR, 0.0, dg)
            tl.store(out_ptr + at, dg.to(out_ptr.dtype.element_ty), mask=live)
            error = _at(rts_gains, chunk - low, slots) * (error + _at(innovations, chunk - low, slots))
