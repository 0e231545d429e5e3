"""The short convolution's forward pass."""

import triton
import triton.language as tl

from .tile import (
    Inputs,
    blocks_of,
    channels_of,
    convolved,
    inverse_length,
    shifted,
    taps_of,
    times_sigmoid,
    tokens_of,
    window_of,
)


@triton.jit
def last_inputs(x, initial, final, count, here, x_step, channels, W: tl.constexpr):
    """Store the last W - 1 inputs of a sequence of count tokens in final. x, initial, final [1, BLOCK]: addresses."""
    for j in tl.static_range(W - 1):
        at = count - (W - 1) + j
        row = tl.load(x + at * x_step, mask=(at >= 0) & here, other=0.0).to(tl.float32)
        if initial is not None:
            before = tl.load(initial + (at + W - 1) * channels, mask=(at < 0) & here, other=0.0)
            row = tl.where(at < 0, before, row)
        tl.store(final + j * channels, row, mask=here)


@triton.jit
def conv_fwd(
    x, weight, bias, initial, y, final, bounds, length, sequences, search, channels, heads, x_row, x_step,
    SILU: tl.constexpr, W: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr,
    STEPS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of all sequences * blocks of channels,). The first `heads` heads of K channels are normalised.

    K is 0 where none is. CHUNKS times, a thread reads STEPS tokens ahead of its arithmetic.

    x [B, T, D], strides of rows and steps; weight [D, W]; bias [D] or None
    initial [N, W - 1, D] float32 or None: inputs before each sequence
    y [B, T, D], written
    final [N, W - 1, D] float32 or None, written: the last inputs of each sequence
    bounds [N + 1] or None: offsets of packed sequences
    """
    LENGTH: tl.constexpr = STEPS * CHUNKS
    across = blocks_of(channels, heads, K, BLOCK)
    row, sequence, start, stop, tile = tokens_of(
        tl.program_id(0) // across, bounds, length, sequences, search, SEGMENTS * LENGTH
    )
    block = tl.program_id(0) % across
    d, own = channels_of(block, channels, heads, K, BLOCK)
    here = own[None, :]
    first = start + tile * (SEGMENTS * LENGTH)
    begin, left = (start - first).to(tl.int32), (stop - first).to(tl.int32)
    x += row * x_row + first * x_step + d[None, :]
    y += (row * length + first) * channels + d[None, :]
    if initial is not None:
        initial += sequence * (W - 1) * channels + d[None, :]
    if final is not None:  # noqa: SIM102
        if tile == 0:
            to = final + sequence * (W - 1) * channels + d[None, :]
            last_inputs(x, initial, to, stop - start, here, x_step, channels, W)
    taps = taps_of(weight, bias, d, own, W)
    offset = tl.arange(0, SEGMENTS)[:, None] * LENGTH
    window = window_of(Inputs(x=x, initial=initial), offset, begin, left, here, x_step, channels, W)
    for chunk in tl.range(0, tl.minimum(tl.cdiv(left, STEPS), CHUNKS)):
        at = offset + chunk * STEPS
        inputs = ()
        for j in tl.static_range(STEPS):
            inputs += (tl.load(x + (at + j) * x_step, mask=(at + j < left) & here, other=0.0),)
        for j in tl.static_range(STEPS):
            now = inputs[j].to(tl.float32)
            z = convolved(taps, window, now, W)
            if SILU:
                z = times_sigmoid(z, z)
            if K > 0:
                z *= inverse_length(z, block < heads)
            tl.store(y + (at + j) * channels, z.to(y.dtype.element_ty), mask=(at + j < left) & here)
            window = shifted(window, now, W)
