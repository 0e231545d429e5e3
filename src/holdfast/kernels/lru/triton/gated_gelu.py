"""h * gelu(z) as one launch a pass, the exact GeLU in float32; the backward pass forms it again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.runtime.launch import launch

# elements of a tile, 8 a thread: 16 bytes in half precision; channels of a row of it
TILE, WARPS, WIDEST = 1024, 4, 256


@triton.jit
def rows_of(count, T, width, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """A program's rows of batch and step, the place of each among all tokens, its columns, and which are there."""
    across = tl.cdiv(width, BLOCK)
    token = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    inside = (token < count)[:, None] & (d < width)[None, :]
    return (token // T).to(tl.int64), (token % T).to(tl.int64), token.to(tl.int64), d, inside


@triton.jit
def tile(ptr, batch, step, d, inside, x_batch, x_step):
    at = (batch * x_batch + step * x_step)[:, None] + d[None, :]
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def below(z):
    """The share of a normal distribution below z."""
    return 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)


@triton.jit
def gated_gelu(
    h_ptr, z_ptr, y_ptr, count, T, width, h_b, h_t, z_b, z_t, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """y [B, T, D], contiguous. count: tokens of all sequences; width: D."""
    batch, step, row, d, inside = rows_of(count, T, width, BLOCK, ROWS)
    h, z = tile(h_ptr, batch, step, d, inside, h_b, h_t), tile(z_ptr, batch, step, d, inside, z_b, z_t)
    to = row[:, None] * width + d[None, :]
    tl.store(y_ptr + to, (h * z * below(z)).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gated_gelu_gradient(
    h_ptr, z_ptr, dy_ptr, dh_ptr, dz_ptr, count, T, width, h_b, h_t, z_b, z_t, dy_b, dy_t, dz_b, dz_t,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dh and dz [B, T, D], dh contiguous."""
    batch, step, row, d, inside = rows_of(count, T, width, BLOCK, ROWS)
    h, z = tile(h_ptr, batch, step, d, inside, h_b, h_t), tile(z_ptr, batch, step, d, inside, z_b, z_t)
    dy = tile(dy_ptr, batch, step, d, inside, dy_b, dy_t)
    to, share = row[:, None] * width + d[None, :], below(z)
    density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
    tl.store(dh_ptr + to, (dy * z * share).to(dh_ptr.dtype.element_ty), mask=inside)
    to = (batch * dz_b + step * dz_t)[:, None] + d[None, :]
    tl.store(dz_ptr + to, (dy * h * (share + z * density)).to(dz_ptr.dtype.element_ty), mask=inside)


def _launch(kernel: object, read: tuple[Tensor, ...], made: tuple[Tensor, ...], strides: tuple[int, ...] = ()) -> None:
    """made: [B, T, D], from tensors of that shape; strides: of those that are not contiguous."""
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
    """h * gelu(z) [B, T, D], contiguous, in their dtype."""
    y = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    _launch(gated_gelu, (h, z), (y,))
    return y


def run_backward(h: Tensor, z: Tensor, dy: Tensor, into: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of h and z, contiguous. into: where that of z will be, part of a wider tensor."""
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    dz = torch.empty_like(dh) if into is None else into
    _launch(gated_gelu_gradient, (h, z, dy), (dh, dz), dz.stride()[:2])
    return dh, dz
