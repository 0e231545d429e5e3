"""h * gelu(z), one launch a pass, the exact GeLU in float32; the backward pass computes it again."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.runtime.launch import launch

# elements of a tile, 8 a thread: 16 bytes in half precision; channels of a row of it
TILE, WARPS, WIDEST = 1024, 4, 256


class Rows(NamedTuple):
    """Batch and step of rows, their numbers among all tokens, columns, and which cells are there."""

    batch: tl.tensor
    step: tl.tensor
    token: tl.tensor
    columns: tl.tensor
    inside: tl.tensor


@triton.jit
def program_rows(count, T, width, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return this program's Rows."""
    across = tl.cdiv(width, BLOCK)
    token = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    inside = (token < count)[:, None] & (d < width)[None, :]
    batch, step = (token // T).to(tl.int64), (token % T).to(tl.int64)
    return Rows(batch=batch, step=step, token=token.to(tl.int64), columns=d, inside=inside)


@triton.jit
def load_tile(ptr, batch, step, d, inside, x_batch, x_step):
    at = (batch * x_batch + step * x_step)[:, None] + d[None, :]
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def normal_cdf(z):
    """Return the share of a normal distribution below z."""
    return 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)


@triton.jit
def gated_gelu_fwd(
    h_ptr, z_ptr, y_ptr, count, T, width, h_b, h_t, z_b, z_t, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Grid (tiles of tokens * blocks of channels,). y = h gelu(z).

    h, z [B, T, D], strides of rows and steps
    y [B, T, D], contiguous, written
    count: tokens of all sequences; width: D
    """
    batch, step, row, d, inside = program_rows(count, T, width, BLOCK, ROWS)
    h, z = load_tile(h_ptr, batch, step, d, inside, h_b, h_t), load_tile(z_ptr, batch, step, d, inside, z_b, z_t)
    to = row[:, None] * width + d[None, :]
    tl.store(y_ptr + to, (h * z * normal_cdf(z)).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_gelu_bwd(
    h_ptr, z_ptr, dy_ptr, dh_ptr, dz_ptr, count, T, width, h_b, h_t, z_b, z_t, dy_b, dy_t, dz_b, dz_t,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens * blocks of channels,). Gradients of h gelu(z).

    h, z, dy [B, T, D], strides of rows and steps
    dh [B, T, D], contiguous, dz [B, T, D], by strides, written
    """
    batch, step, row, d, inside = program_rows(count, T, width, BLOCK, ROWS)
    h, z = load_tile(h_ptr, batch, step, d, inside, h_b, h_t), load_tile(z_ptr, batch, step, d, inside, z_b, z_t)
    dy = load_tile(dy_ptr, batch, step, d, inside, dy_b, dy_t)
    to, cdf = row[:, None] * width + d[None, :], normal_cdf(z)
    density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
    tl.store(dh_ptr + to, (dy * z * cdf).to(dh_ptr.dtype.element_ty), mask=inside)
    to = (batch * dz_b + step * dz_t)[:, None] + d[None, :]
    tl.store(dz_ptr + to, (dy * h * (cdf + z * density)).to(dz_ptr.dtype.element_ty), mask=inside)


def _launch(kernel: object, read: tuple[Tensor, ...], made: tuple[Tensor, ...], strides: tuple[int, ...] = ()) -> None:
    """Launch kernel. made: [B, T, D], from tensors of that shape; strides: of those that are not contiguous."""
    batch, length, width = made[0].shape
    if not made[0].numel():
        return
    block = min(triton.next_power_of_2(width), WIDEST)
    rows = max(1, TILE // block)
    read = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in read)
    numbers = (batch * length, length, width, *(n for x in read for n in x.stride()[:2]), *strides)
    grid = (-(-batch * length // rows) * -(-width // block),)
    launch(kernel, grid, (*read, *made), numbers, {"BLOCK": block, "ROWS": rows}, WARPS)


def run_forward(h: Tensor, z: Tensor) -> Tensor:
    """Return h * gelu(z) [B, T, D], contiguous, in their dtype."""
    y = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    _launch(gated_gelu_fwd, (h, z), (y,))
    return y


def run_backward(h: Tensor, z: Tensor, dy: Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the gradients of h and z, contiguous. into: where that of z goes, part of a wider tensor."""
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    dz = torch.empty_like(dh) if into is None else into
    _launch(gated_gelu_bwd, (h, z, dy), (dh, dz), dz.stride()[:2])
    return dh, dz
