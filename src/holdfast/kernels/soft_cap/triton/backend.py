"""cap * tanh(x / cap), in float32, one launch a pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.lib.triton.sigmoid import one_minus_exp
from holdfast.kernels.runtime.launch import launch

BLOCK, WARPS = 1024, 4


@triton.jit
def tanh_of(x):
    """Return tanh and its slope, to float32's precision also where they are small."""
    twice = -2.0 * tl.abs(x)
    small = tl.exp(twice)
    whole = 1.0 + small
    y = one_minus_exp(twice) / whole
    return tl.where(x < 0.0, -y, y), 4.0 * small / (whole * whole)


@triton.jit
def soft_cap_fwd(x_ptr, y_ptr, count, cap, BLOCK: tl.constexpr):
    """Grid (blocks,). x [count]; y [count] float32, written: cap tanh(x / cap)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, cap * tanh_of(x / cap)[0], mask=at < count)


@triton.jit
def soft_cap_bwd(x_ptr, dy_ptr, dx_ptr, count, cap, BLOCK: tl.constexpr):
    """Grid (blocks,). x [count], dy [count] float32; dx [count] in x's dtype, written."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=at < count, other=0.0)
    tl.store(dx_ptr + at, (dy * tanh_of(x / cap)[1]).to(dx_ptr.dtype.element_ty), mask=at < count)


def run_forward(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap) in float32, contiguous, for x of any shape."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel():
        launch(soft_cap_fwd, (-(-x.numel() // BLOCK),), (x.contiguous(), y), (x.numel(), cap), {"BLOCK": BLOCK}, WARPS)
    return y


def run_backward(x: Tensor, dy: Tensor, cap: float) -> Tensor:
    """Return the gradient of x, in its dtype, contiguous; dy float32."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        tensors = (x.contiguous(), dy.contiguous(), dx)
        launch(soft_cap_bwd, (-(-x.numel() // BLOCK),), tensors, (x.numel(), cap), {"BLOCK": BLOCK}, WARPS)
    return dx
