"""The log decay's gradient from what a reverse sweep leaves of it: what passes a whole chunk is smoothed and added.

For a chunk, <decay S, dS>, with S the state that enters it and dS the gradient of the one that leaves it, counts for
every token. It is exact where a state was kept: <S, dS> at the chunk's start less what the chunk reads. Between kept
states it is carried on, less what one chunk writes for later and plus what the next reads, and collects rounding that a
sum over tokens shows. Its size is about the decay's share of <S, dS>, what carries it on errs by the operands' rounding
of that, and the next kept state shows how far it has strayed: the estimate of least mean square from both sides, by a
filter and a smoother of one number (Rauch, Tung, Striebel 1965), whose weights depend on the decays alone.
"""

import triton
import triton.language as tl

from .triton_sweep import FLOOR, LOG2E, span


@triton.jit
def _at(x, index, slots):
    """x[index] of a vector over slots."""
    return tl.sum(tl.where(slots == index, x, 0.0), 0)


@triton.jit
def _sum(ptr, size, SPLITS: tl.constexpr):
    """The sum of all splits' number."""
    x = tl.load(ptr)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(ptr + split * size)
    return x


@triton.jit
def _product(ptr, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of all splits' and columns' numbers."""
    x = tl.load(ptr + tl.arange(0, BLOCK))
    for split in tl.static_range(1, SPLITS):
        x += tl.load(ptr + split * size + tl.arange(0, BLOCK))
    return tl.sum(x, 0)


@triton.jit
def smooth(
    g_ptr, rows_ptr, sums_ptr, products_ptr, out_ptr, cu_seqlens, T, H, segment, tokens, sums_size, products_size,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, SEGMENTS: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
    VARIANCE: tl.constexpr,
):  # fmt: skip
    """Grid (sequences or segments of them, of which there may be any number, H, programs that share the windows of KEEP
    chunks).

    g, out: [B, T, H]. rows [SPLITS, B, T, H], sums, products: see triton_sweep.sweep. VARIANCE: of a rounded
    operand, relative to its square.
    """
    head = tl.program_id(1)
    n = tl.program_id(0)
    batch, first, end = span(n, cu_seqlens, T, segment, SEGMENTS)
    base = (batch.to(tl.int64) * T + first) * H + head
    sums_ptr += (((batch.to(tl.int64) * T + first) // CHUNK + 2 * n) * H + head) * 2
    products_ptr += (((batch.to(tl.int64) * T + first) // (KEEP * CHUNK) + 2 * n) * H + head) * BLOCK
    count = tl.cdiv(end - first, CHUNK).to(tl.int32)
    steps = tl.arange(0, CHUNK)
    slots = tl.arange(0, KEEP)
    for window in range(tl.program_id(2), tl.cdiv(count, KEEP), tl.num_programs(2)):
        low = window * KEEP
        high = tl.minimum(low + KEEP, count)
        pasts = tl.zeros([KEEP], tl.float32)
        strays = tl.zeros([KEEP], tl.float32)
        shares = tl.zeros([KEEP], tl.float32)
        carry = _product(products_ptr + (window + 1) * H * BLOCK, products_size, SPLITS, BLOCK)
        doubt = tl.zeros([], tl.float32) + VARIANCE
        for i in range(high - low):
            chunk = high - 1 - i
            at = base + (chunk * CHUNK + steps).to(tl.int64) * H
            live = chunk * CHUNK + steps < end - first
            g = tl.load(g_ptr + at, mask=live, other=0.0)
            decay = tl.exp2(tl.sum(tl.maximum(g, FLOOR).to(tl.float32) * LOG2E, 0))
            place = sums_ptr + chunk * H * 2
            read = _sum(place, sums_size, SPLITS)
            expected = carry - _sum(place + 1, sums_size, SPLITS)
            doubted = doubt + VARIANCE
            known = decay * decay / (decay * decay + doubted)
            # of the next chunk's error, the share that is this one's too
            share = doubt / doubted
            doubt = doubted * known
            past = expected * known
            if chunk == low:
                exact = _product(products_ptr + window * H * BLOCK, products_size, SPLITS, BLOCK)
                past = tl.where(decay > 0.0, exact - read, 0.0)
            carry = past + read
            here = slots == chunk - low
            pasts = tl.where(here, past, pasts)
            strays = tl.where(here, past - expected, strays)
            shares = tl.where(here, share, shares)
        error = tl.zeros([], tl.float32)
        for chunk in range(low, high):
            at = base + (chunk * CHUNK + steps).to(tl.int64) * H
            live = chunk * CHUNK + steps < end - first
            # 0 in a chunk with a decay of zero, which lets nothing pass
            dg = tl.zeros([CHUNK], tl.float32) + (_at(pasts, chunk - low, slots) + error)
            for split in tl.static_range(SPLITS):
                dg += tl.load(rows_ptr + split * tokens * H + at, mask=live, other=0.0)
            tl.store(out_ptr + at, dg.to(out_ptr.dtype.element_ty), mask=live)
            error = _at(shares, chunk - low, slots) * (error + _at(strays, chunk - low, slots))
