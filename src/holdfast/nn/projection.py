"""A mixer's projections, whose gradients under autocast leave their products in the dtype that they are kept in."""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.kernels.runtime.replay.guard import autocast_dtype
from holdfast.kernels.runtime.torch_private import is_transformed
from holdfast.ops.derivatives import gradients_once


class Projection(nn.Linear):
    """nn.Linear without a bias.

    Under autocast PyTorch rounds the gradient of a float32 input or weight to autocast's dtype and copies it to float32
    afterwards. On an NVIDIA GPU the product writes float32 here: no rounding, no copy. It has no second derivatives.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # a compiler fuses the copies with what is next to them
        dtype = None if torch.compiler.is_compiling() else autocast_dtype("cuda")
        if dtype is None or not _serves(x, self.weight, dtype):
            return super().forward(x)
        return _Product.apply(x, self.weight, dtype)


def _serves(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether there is a gradient to be kept in float32, of plain tensors on a GPU and outside of torch.func."""
    is_plain = type(x) is Tensor and type(weight) is nn.Parameter and x.is_cuda and weight.is_cuda
    is_kept = weight.requires_grad and weight.dtype == torch.float32 and x.dtype in (torch.float32, dtype)
    return is_plain and is_kept and torch.is_grad_enabled() and not is_transformed()


class _Product(torch.autograd.Function):
    """x W^T in a half precision; gradients of x and W in their own dtypes, unrounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        narrow, narrow_weight = x.to(dtype), weight.to(dtype)
        # the weight itself too: by it a second differentiation is noticed
        ctx.save_for_backward(narrow, narrow_weight, weight)
        ctx.dtypes = x.dtype, weight.dtype
        return nn.functional.linear(narrow, narrow_weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return gradients_once("a mixer's projection", _gradients, ctx, (dy,))


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, _ = ctx.saved_tensors
    of_x, of_weight = ctx.dtypes
    needs_x, needs_weight, _ = ctx.needs_input_grad
    dy, rows = dy.flatten(0, -2), x.flatten(0, -2)
    dx = _product(dy, weight, of_x).unflatten(0, x.shape[:-1]) if needs_x else None
    return dx, _product(dy.t(), rows, of_weight) if needs_weight else None, None


def _product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mm(x, y) if dtype == x.dtype else torch.mm(x, y, out_dtype=dtype)
