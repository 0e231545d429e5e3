"""The end of Mamba-2's layer: o, x and z are read once and y is written once."""

import triton
import triton.language as tl

from .tile import load_rows, load_skip, row_offsets


@triton.jit
def ssd_output_fwd(
    o, x, D, z, weight, y, count, length, channels, eps, x_batch, x_step, z_batch, z_step,
    P: tl.constexpr, PER_CHANNEL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens * blocks of channels,): a program takes ROWS tokens and WIDTH channels.

    o [B, T, channels], contiguous; x, z [B, T, channels], strides in units of UNIT; D [H] or [channels]; x, D and z may
        be None
    weight [channels] or None: of a norm over WIDTH channels
    y [B, T, channels], contiguous, written
    count: tokens of all sequences
    """
    blocks = tl.cdiv(channels, WIDTH)
    column = tl.arange(0, BLOCK)
    d = tl.program_id(0) % blocks * WIDTH + column
    here = (column < WIDTH) & (d < channels)
    rows = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    inside = (rows < count)[:, None] & here[None, :]
    to = rows.to(tl.int64)[:, None] * channels
    value = load_rows(o, to, d, inside)
    if D is not None:
        value += load_skip(D, d, here, P, PER_CHANNEL) * load_rows(
            x, row_offsets(rows, length, x_batch, x_step, UNIT), d, inside
        )
    if z is not None:
        gate = load_rows(z, row_offsets(rows, length, z_batch, z_step, UNIT), d, inside)
        value *= gate / (1.0 + tl.exp(-gate))
    if weight is not None:
        value *= tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
        value *= tl.load(weight + d, mask=here, other=0.0).to(tl.float32)[None, :]
    tl.store(y + to + d[None, :], value.to(y.dtype.element_ty), mask=inside)
