"""gated_gelu: the GeLU branch beside a recurrence, one launch a pass on a GPU, as a custom op with autograd."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.autograd.vjp import vjp
from holdfast.kernels.runtime.replay.replay import replayed_below

from .mlstm_gates import can_fuse
from .registration import define, differentiable


def gated_gelu(h: Tensor, z: Tensor) -> Tensor:
    """h * gelu(z) [B, T, D] in h's dtype. z may be part of a wider projection.

    On an NVIDIA GPU of compute capability 8.0 with Triton, tensors of one dtype of at most 32 bits go through one
    launch a pass, in float32 inside; else PyTorch's operations run. Source: Hendrycks and Gimpel 2016, Gaussian Error
    Linear Units (arXiv:1606.08415), without the approximation by tanh.
    """
    return fused_gated_gelu(h, z) if _fuses(h, z) else h * F.gelu(z)


def _fuses(h: Tensor, z: Tensor) -> bool:
    return h.dtype == z.dtype and can_fuse(h, z, torch.promote_types(h.dtype, torch.float32))


def branch(h: Tensor, z: Tensor) -> Tensor:
    """`gated_gelu` for an op's inside: without autograd, contiguous."""
    return _forward(h, z) if _fuses(h, z) else (h * F.gelu(z)).contiguous()


def branch_gradient(h: Tensor, z: Tensor, dy: Tensor, into: Tensor) -> Tensor:
    """The gradient of h, for an op's inside. into: where that of z will be, part of a wider tensor."""
    if not _fuses(h, z):
        dh, dz = vjp(lambda h, z: [h * F.gelu(z)], [h, z], [dy])
        into.copy_(dz)
        return dh
    from holdfast.kernels.lru.triton import gated_gelu as triton_gated_gelu
    from holdfast.kernels.runtime.launch import on_device_of

    with on_device_of(h):
        return triton_gated_gelu.run_backward(h, z, dy, into)[0]


def _forward(h: Tensor, z: Tensor) -> Tensor:
    from holdfast.kernels.lru.triton import gated_gelu as triton_gated_gelu
    from holdfast.kernels.runtime.launch import on_device_of

    with on_device_of(h):
        return triton_gated_gelu.run_forward(h, z)


def _forward_fake(h, z):
    return h.new_empty(h.shape)


def _gradients(h: Tensor, z: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    from holdfast.kernels.lru.triton import gated_gelu as triton_gated_gelu
    from holdfast.kernels.runtime.launch import on_device_of

    with on_device_of(h):
        return triton_gated_gelu.run_backward(h, z, dy)


def _gradients_fake(h, z, dy):
    return h.new_empty(h.shape), z.new_empty(z.shape)


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return _gated_gelu_backward(*ctx.saved_tensors, dy)


_gated_gelu_backward = replayed_below(define("gated_gelu_backward", replayed_below(_gradients), _gradients_fake))
_op = define("gated_gelu", replayed_below(_forward), _forward_fake)
fused_gated_gelu = differentiable(_op, _save, _backward, 2, run=replayed_below(_op))
