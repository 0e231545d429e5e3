"""What the short convolution's kernels share: a program's tokens, the taps, the window of inputs.

A program takes SEGMENTS x LENGTH tokens of one sequence and BLOCK channels. Each thread goes over the LENGTH tokens of
one segment with some channels, the last W - 1 inputs in registers, so that a token is read once but for those before a
segment. Offsets count from the program's first token.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

from holdfast.recurrences.delta_rule import L2_EPS

EPS = tl.constexpr(L2_EPS)

# the interpreter has no libdevice
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


class Inputs(NamedTuple):
    """Addresses [1, BLOCK] at offset 0, and those of the inputs before the sequence, None where these are 0."""

    x: tl.tensor
    initial: tl.tensor


@triton.jit
def times_sigmoid(x, z):
    """Return x / (1 + e^-z) to a few units in the last place, by the GPU's own exponential and reciprocal.

    What makes either right for the smallest numbers costs as many instructions as a convolution.
    """
    if INTERPRETED:
        return x / (1.0 + tl.exp(-z))
    else:
        return libdevice.fast_dividef(x, 1.0 + libdevice.fast_expf(-z))


@triton.jit
def tokens_of(place, bounds, length, sequences, search, ROWS: tl.constexpr):
    """Return the batch row, sequence, the sequence's start and end, and the tile's number in it, maybe beyond the end.

    place: of the program among the tiles of all sequences. bounds: the offsets of packed sequences, or None. search:
    the bits of their number. Sequence n has the tiles from bounds[n] // ROWS + n on, which are never too few;
    length // ROWS + sequences are enough for all.
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
    """Return the number of blocks of channels: one for each of the first heads, of K channels, then one for BLOCK."""
    return heads + tl.cdiv(channels - heads * K, BLOCK)


@triton.jit
def channels_of(block, channels, heads, K: tl.constexpr, BLOCK: tl.constexpr):
    """Return the channels [BLOCK] of a block, and which of them are its own."""
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
    """Return y's factor [S, 1]: 1 unless the block is a head, whose channels beyond K are 0."""
    return tl.where(is_head, tl.rsqrt(tl.sum(y * y, 1) + EPS), 1.0)[:, None]


@triton.jit
def taps_of(weight, bias, d, here, W: tl.constexpr):
    """Load the columns of weight [D, W], each [1, BLOCK] in float32, and then the bias."""
    taps = ()
    for j in tl.static_range(W):
        taps += (tl.load(weight + d * W + j, mask=here, other=0.0).to(tl.float32)[None, :],)
    if bias is not None:
        taps += (tl.load(bias + d, mask=here, other=0.0).to(tl.float32)[None, :],)
    else:
        taps += (tl.zeros_like(taps[0]),)
    return taps


@triton.jit
def window_of(source, offset, begin, left, here, x_step, channels, W: tl.constexpr):
    """Load the W - 1 inputs before the tokens at offset [S, 1], oldest first, in float32.

    begin, left: offsets of the sequence's first token and of its end.
    """
    window = ()
    for j in tl.static_range(W - 1):
        at = offset - (W - 1) + j
        row = tl.load(source.x + at * x_step, mask=(at >= begin) & (at < left) & here, other=0.0).to(tl.float32)
        if source.initial is not None:
            held = at - begin + (W - 1)
            is_before = at < begin
            before = tl.load(source.initial + held * channels, mask=(at < begin) & here, other=0.0)
            row = tl.where(is_before, before, row)
        window += (row,)
    return window


@triton.jit
def shifted(window, now, W: tl.constexpr):
    """Return the window of the next token."""
    after = ()
    for j in tl.static_range(1, W - 1):
        after += (window[j],)
    if W > 1:
        after += (now,)
    return after


@triton.jit
def convolved(taps, window, now, W: tl.constexpr):
    """Return the sum over taps at a token, before its activation."""
    z = taps[W] + taps[W - 1] * now
    for j in tl.static_range(W - 1):
        z += taps[j] * window[j]
    return z
