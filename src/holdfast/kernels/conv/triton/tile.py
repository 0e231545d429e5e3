"""Device code that the short convolution's kernels share: which tokens are a program's, the taps, the window of inputs.

A program takes SEGMENTS x LENGTH tokens of one sequence and BLOCK channels. Each thread walks the LENGTH tokens of one
segment with some channels, the last W - 1 inputs in registers, so that a token is read once but for those before a
segment. Offsets count from the program's first token.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

from holdfast.recurrences.delta_rule import L2_EPS

EPS = tl.constexpr(L2_EPS)

# the interpreter has no libdevice
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def times_sigmoid(x, z):
    """x / (1 + e^-z) to a few units in the last place, by the GPU's own exponential and reciprocal: what makes either
    right for the smallest numbers costs as many instructions as a convolution."""
    if INTERPRETED:
        return x / (1.0 + tl.exp(-z))
    else:
        return libdevice.fast_dividef(x, 1.0 + libdevice.fast_expf(-z))


@triton.jit
def tokens_of(place, bounds, length, sequences, search, ROWS: tl.constexpr):
    """Of a program's place among the tiles of all sequences: its row of the batch, sequence, where that starts and
    ends, and the number of its tile in it, which may lie beyond the end.

    bounds: the offsets of packed sequences, or None. search: the bits of their number. Sequence n has the tiles from
    bounds[n] // ROWS + n on, which are never too few; length // ROWS + sequences are enough for all.
    """
    place = place.to(tl.int64)
    if bounds is None:
        per_row = tl.cdiv(length, ROWS)
        row = place // per_row
        sequence, start, stop, tile = row, row * 0, row * 0 + length, place % per_row
    else:
        low, high = place * 0, place * 0 + sequences - 1
        for _ in range(search):
            middle = (low + high + 1) // 2
            begins = tl.load(bounds + middle).to(tl.int64) // ROWS + middle <= place
            low, high = tl.where(begins, middle, low), tl.where(begins, high, middle - 1)
        row, sequence = low * 0, low
        start = tl.load(bounds + low).to(tl.int64)
        stop = tl.load(bounds + low + 1).to(tl.int64)
        tile = place - start // ROWS - low
    return row, sequence, start, stop, tile


@triton.jit
def blocks_of(channels, heads, K: tl.constexpr, BLOCK: tl.constexpr):
    """How many blocks there are of channels: one for each of the first heads, of K channels, then one for BLOCK."""
    return heads + tl.cdiv(channels - heads * K, BLOCK)


@triton.jit
def channels_of(block, channels, heads, K: tl.constexpr, BLOCK: tl.constexpr):
    """The channels [BLOCK] of a block, and which of them are its own."""
    if K == 0:
        d = block * BLOCK + tl.arange(0, BLOCK)
        here = d < channels
    else:
        first = tl.where(block < heads, block * K, heads * K + (block - heads) * BLOCK)
        d = first + tl.arange(0, BLOCK)
        here = d < tl.where(block < heads, first + K, channels)
    return d, here


@triton.jit
def inverse_length(y, is_head):
    """What y [S, BLOCK] is multiplied by: 1 unless the block is a head, whose channels beyond K are 0."""
    return tl.where(is_head, tl.rsqrt(tl.sum(y * y, 1) + EPS), 1.0)[:, None]


@triton.jit
def taps_of(weight, bias, d, here, W: tl.constexpr):
    """The columns of weight [D, W], each [1, BLOCK] in float32, and then the bias."""
    taps = ()
    for j in tl.static_range(W):
        taps += (tl.load(weight + d * W + j, mask=here, other=0.0).to(tl.float32)[None, :],)
    if bias is not None:
        taps += (tl.load(bias + d, mask=here, other=0.0).to(tl.float32)[None, :],)
    else:
        taps += (tl.zeros_like(taps[0]),)
    return taps


@triton.jit
def window_of(x, initial, offset, begin, left, here, x_step, channels, W: tl.constexpr):
    """The W - 1 inputs before the tokens at offset [S, 1], oldest first, in float32.

    x [1, BLOCK]: the addresses at offset 0. begin, left: offsets of the sequence's first token and of its end. initial
    [1, BLOCK]: the addresses of the inputs before the sequence, or None where they are 0.
    """
    window = ()
    for j in tl.static_range(W - 1):
        at = offset - (W - 1) + j
        row = tl.load(x + at * x_step, mask=(at >= begin) & (at < left) & here, other=0.0).to(tl.float32)
        if initial is not None:
            held = at - begin + (W - 1)
            row = tl.where(at < begin, tl.load(initial + held * channels, mask=(at < begin) & here, other=0.0), row)
        window += (row,)
    return window


@triton.jit
def shifted(window, now, W: tl.constexpr):
    """The window of the next token."""
    after = ()
    for j in tl.static_range(1, W - 1):
        after += (window[j],)
    if W > 1:
        after += (now,)
    return after


@triton.jit
def convolved(taps, window, now, W: tl.constexpr):
    """The sum over taps at a token, before its activation."""
    z = taps[W] + taps[W - 1] * now
    for j in tl.static_range(W - 1):
        z += taps[j] * window[j]
    return z
