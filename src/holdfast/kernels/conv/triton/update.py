"""One or a few tokens of decoding: the last inputs are read once and written in place."""

import triton
import triton.language as tl

from .tile import convolved, shifted, taps_of, times_sigmoid


@triton.jit
def conv_update(
    x, weight, bias, state, y, length, channels, x_row, x_step, state_row, state_step,
    SILU: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B * blocks of channels,): no program writes what another reads.

    x [B, T, D], strides of rows and steps; weight [D, W]; bias [D] or None
    y [B, T, D], written
    state [B, W - 1, D], updated: the last W - 1 inputs
    """
    across = tl.cdiv(channels, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64)
    d = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    here = d < channels
    x += row * x_row + d[None, :]
    y += row * length * channels + d[None, :]
    state += row * state_row + d[None, :]
    taps = taps_of(weight, bias, d, here, W)
    window = ()
    for j in tl.static_range(W - 1):
        window += (tl.load(state + j * state_step, mask=here[None, :], other=0.0).to(tl.float32),)
    for _ in tl.range(0, length):
        now = tl.load(x, mask=here[None, :], other=0.0).to(tl.float32)
        z = convolved(taps, window, now, W)
        if SILU:
            z = times_sigmoid(z, z)
        tl.store(y, z.to(y.dtype.element_ty), mask=here[None, :])
        window = shifted(window, now, W)
        x += x_step
        y += channels
    for j in tl.static_range(W - 1):
        tl.store(state + j * state_step, window[j].to(state.dtype.element_ty), mask=here[None, :])
