"""soft_cap: gates kept within bounds, one launch a pass on a GPU, as a custom op with autograd."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.autograd.vjp import vjp
from holdfast.kernels.runtime.replay.replay import replayed_below

from .mlstm_gates import can_fuse
from .registration import define, differentiable


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) in float32 (float64 for float64 x), of x of any shape. cap: positive.

    On an NVIDIA GPU of compute capability 8.0 with Triton one launch a pass; else PyTorch's operations run.
    """
    return fused_soft_cap(x, float(cap)) if _fuses(x) else _capped(x, cap)


def _fuses(x: Tensor) -> bool:
    return x.dim() > 0 and can_fuse(x, x, torch.promote_types(x.dtype, torch.float32))


def _capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x.to(torch.promote_types(x.dtype, torch.float32)) / cap)


def capped(x: Tensor, cap: float) -> Tensor:
    """`soft_cap` for an op's inside: without autograd."""
    return _forward(x, cap) if _fuses(x) else _capped(x, cap)


def cap_gradient(x: Tensor, dy: Tensor, cap: float) -> Tensor:
    """The gradient of x, contiguous, for an op's inside."""
    return _gradient(x, dy, cap) if _fuses(x) else vjp(lambda x: [_capped(x, cap)], [x], [dy])[0].contiguous()


def _forward(x: Tensor, cap: float) -> Tensor:
    from holdfast.kernels.runtime.launch import on_device_of
    from holdfast.kernels.soft_cap.triton import backend as triton_soft_cap

    with on_device_of(x):
        return triton_soft_cap.run_forward(x, cap)


def _forward_fake(x, cap):
    return x.new_empty(x.shape, dtype=torch.float32)


def _gradient(x: Tensor, dy: Tensor, cap: float) -> Tensor:
    from holdfast.kernels.runtime.launch import on_device_of
    from holdfast.kernels.soft_cap.triton import backend as triton_soft_cap

    with on_device_of(x):
        return triton_soft_cap.run_backward(x, dy, cap)


def _gradient_fake(x, dy, cap):
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.cap = inputs[1]


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return (_soft_cap_backward(*ctx.saved_tensors, dy, ctx.cap),)


_soft_cap_backward = replayed_below(define("soft_cap_backward", replayed_below(_gradient), _gradient_fake))
_op = define("soft_cap", replayed_below(_forward), _forward_fake)
fused_soft_cap = differentiable(_op, _save, _backward, 1, run=replayed_below(_op))
