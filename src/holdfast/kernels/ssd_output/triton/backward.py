"""Gradients of the end of Mamba-2's layer: what the forward pass computed is computed again."""

import triton
import triton.language as tl

from .tile import load_rows, load_skip, row_offsets


@triton.jit
def ssd_output_bwd(
    o, x, D, z, weight, dy, do, dz, parts, count, length, channels, eps,
    x_batch, x_step, z_batch, z_step, dy_batch, dy_step, dz_batch, dz_step,
    P: tl.constexpr, PER_CHANNEL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (p * blocks of channels,). Programs of a block take its tiles of rows in turn: sums in the same order in
    every run.

    o [B, T, channels], contiguous; x, z, dy [B, T, channels], strides in units of UNIT; D [H] or [channels]; weight
        [channels]; x, D, z and weight may be None
    do [B, T, channels], contiguous, dz [B, T, channels], by strides, or None, written
    parts [p, 1 or 2, channels] float32 or None, written: what each program adds up for D and then for weight, as far as
        they are given, for `ssd_output_sums`
    """
    SUMS: tl.constexpr = (D is not None) + (weight is not None)
    blocks = tl.cdiv(channels, WIDTH)
    part, programs = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    column = tl.arange(0, BLOCK)
    d = tl.program_id(0) % blocks * WIDTH + column
    here = (column < WIDTH) & (d < channels)
    if D is not None:
        skip_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    if weight is not None:
        scale_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(part, tl.cdiv(count, ROWS), programs):
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = (rows < count)[:, None] & here[None, :]
        to = rows.to(tl.int64)[:, None] * channels
        gradient = load_rows(dy, row_offsets(rows, length, dy_batch, dy_step, UNIT), d, inside)
        value = load_rows(o, to, d, inside)
        # weights come from a cache each time: registers are needed for what waits for sums over rows
        if D is not None:
            entry = load_rows(x, row_offsets(rows, length, x_batch, x_step, UNIT), d, inside)
            value += load_skip(D, d, here, P, PER_CHANNEL) * entry
        if z is not None:
            gate = load_rows(z, row_offsets(rows, length, z_batch, z_step, UNIT), d, inside)
            share = 1.0 / (1.0 + tl.exp(-gate))
        if weight is not None:
            normal = value * (gate * share) if z is not None else value
            # eps may be 0, and rows beyond the last are: they count in the sums
            least = tl.where(rows < count, eps, 1.0)
            inverse = tl.rsqrt(tl.sum(normal * normal, 1) / WIDTH + least)[:, None]
            normal *= inverse
            scale_sums += gradient * normal
            gradient *= tl.load(weight + d, mask=here, other=0.0).to(tl.float32)[None, :]
            gradient = inverse * (gradient - normal * (tl.sum(gradient * normal, 1) / WIDTH)[:, None])
        if z is not None:
            derivative = share * (1.0 + gate * (1.0 - share))
            at = row_offsets(rows, length, dz_batch, dz_step, UNIT) + d[None, :]
            tl.store(dz + at, (gradient * value * derivative).to(dz.dtype.element_ty), mask=inside)
            gradient *= gate * share
        if D is not None:
            skip_sums += gradient * entry
        tl.store(do + to + d[None, :], gradient.to(do.dtype.element_ty), mask=inside)
    to = part.to(tl.int64) * SUMS * channels + d
    if D is not None:
        tl.store(parts + to, tl.sum(skip_sums, 0), mask=here)
    if weight is not None:
        tl.store(parts + to + (SUMS - 1) * channels, tl.sum(scale_sums, 0), mask=here)


@triton.jit
def ssd_output_sums(
    parts, dD, dweight, count, channels, P: tl.constexpr, PER_CHANNEL: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (H, 1 or 2).

    parts [count, 1 or 2, channels] float32
    dD [H] or [H, P], dweight [channels], written; either may be None
    """
    SUMS: tl.constexpr = (dD is not None) + (dweight is not None)
    head, which = tl.program_id(0), tl.program_id(1)
    p = tl.arange(0, BLOCK)
    d = head * P + p
    here = p < P
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, count, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        at = (row.to(tl.int64) * SUMS + which) * channels + d[None, :]
        total += tl.load(parts + at, mask=(row < count) & here[None, :], other=0.0)
    found = tl.sum(total, 0)
    if dweight is not None:  # noqa: SIM102
        if which == SUMS - 1:
            tl.store(dweight + d, found.to(dweight.dtype.element_ty), mask=here)
    if dD is not None:  # noqa: SIM102
        if which == 0:
            if PER_CHANNEL:
                tl.store(dD + d, found.to(dD.dtype.element_ty), mask=here)
            else:
                tl.store(dD + head, tl.sum(found, 0).to(dD.dtype.element_ty))


@triton.jit
def ssd_output_add_skip(
    dx, do, D, into, count, length, channels, into_batch, into_step,
    P: tl.constexpr, PER_CHANNEL: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows * blocks of channels,). into = dx + D do.

    dx, do [B, T, channels], contiguous; D [H] or [channels]
    into [B, T, channels], strides in units of UNIT, written
    """
    blocks = tl.cdiv(channels, WIDTH)
    column = tl.arange(0, BLOCK)
    d = tl.program_id(0) % blocks * WIDTH + column
    here = (column < WIDTH) & (d < channels)
    rows = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    inside = (rows < count)[:, None] & here[None, :]
    at = rows.to(tl.int64)[:, None] * channels
    value = load_rows(dx, at, d, inside) + load_skip(D, d, here, P, PER_CHANNEL) * load_rows(do, at, d, inside)
    to = row_offsets(rows, length, into_batch, into_step, UNIT) + d[None, :]
    tl.store(into + to, value.to(into.dtype.element_ty), mask=inside)
