"""Rotation of queries and keys by their position: one launch a pass on a GPU, a custom op with autograd."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.rotary.torch.backend import rotate
from holdfast.kernels.runtime.replay.replay import replayed_below

from .mlstm_gates import can_fuse
from .registration import define, differentiable


def rotary(q: Tensor, k: Tensor, position: Tensor | None = None, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Turns channel pair (j, j + D/2) of q [B, T, Hq, D] and k [B, T, H, D] by position * base^(-2 j / D) radians.

    D is even. position: int32 or int64 [B, T] or [1, T], or None for each token's place in T. base: positive. Returns
    both in their dtype. Cosines and sines are right to 1e-7 at positions below 2^28. A gradient is turned back;
    position has none.

    On an NVIDIA GPU of compute capability 8.0 with Triton, q and k of one dtype of at most 32 bits are read where they
    lie, parts of a wider projection say, in one launch a pass; else PyTorch's operations run.

    Source: Su et al. 2021, RoFormer (arXiv:2104.09864).
    """
    return fused_rotary(q, k, position, base) if _fuses(q, k) else _rotated(q, k, position, base)


def _fuses(q: Tensor, k: Tensor) -> bool:
    return q.dtype == k.dtype and can_fuse(q, k, torch.promote_types(q.dtype, torch.float32))


def _rotated(q: Tensor, k: Tensor, position: Tensor | None, base: float) -> tuple[Tensor, Tensor]:
    if position is None:
        position = torch.arange(q.shape[1], dtype=torch.int64, device=q.device)[None]
    return rotate(q, position, base), rotate(k, position, base)


def turned(q: Tensor, k: Tensor, position: Tensor | None, base: float) -> tuple[Tensor, Tensor]:
    """`rotary` for an op's inside: without autograd, contiguous."""
    return _forward(q, k, position, base) if _fuses(q, k) else _rotated(q, k, position, base)


def turn_back(dy: Tensor, dz: Tensor, position: Tensor | None, base: float, into: tuple[Tensor, Tensor]) -> None:
    """Gradients of q and k, for an op's inside. into: where they will be, parts of a wider tensor."""
    if _fuses(dy, dz):
        from holdfast.kernels.rotary.triton import backend as triton_rotary
        from holdfast.kernels.runtime.launch import on_device_of

        with on_device_of(dy):
            triton_rotary.run(dy, dz, position, base, True, into)
        return
    if position is None:
        position = torch.arange(dy.shape[1], dtype=torch.int64, device=dy.device)[None]
    for x, place in zip((dy, dz), into, strict=True):
        place.copy_(rotate(x, -position, base))


def fused_rotary(q: Tensor, k: Tensor, position: Tensor | None, base: float) -> tuple[Tensor, Tensor]:
    """`rotary` by `holdfast::rotary`."""
    return tuple(_rotary(q, k, position, float(base)))


def _forward(q: Tensor, k: Tensor, position: Tensor | None, base: float) -> tuple[Tensor, Tensor]:
    """q and k, turned; contiguous."""
    from holdfast.kernels.rotary.triton import backend as triton_rotary
    from holdfast.kernels.runtime.launch import on_device_of

    with on_device_of(q):
        return triton_rotary.run(q, k, position, base, False)


def _gradients(dy: Tensor, dz: Tensor, position: Tensor | None, base: float) -> tuple[Tensor, Tensor]:
    """Of q and k: the gradients of what they became, turned back."""
    from holdfast.kernels.rotary.triton import backend as triton_rotary
    from holdfast.kernels.runtime.launch import on_device_of

    with on_device_of(dy):
        return triton_rotary.run(dy, dz, position, base, True)


def _fake(q, k, position, base):
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    q, k, position, base = inputs
    ctx.save_for_backward(position)
    ctx.rest = q.shape, k.shape, base


def _backward(ctx: Any, dy: Tensor | None, dz: Tensor | None) -> tuple[Any, ...]:
    (position,) = ctx.saved_tensors
    *shapes, base = ctx.rest
    given = dz if dy is None else dy
    dy, dz = (given.new_zeros(shape) if x is None else x for x, shape in zip((dy, dz), shapes, strict=True))
    return _rotary_backward(dy, dz, position, base)


_rotary_backward = replayed_below(define("rotary_backward", replayed_below(_gradients), _fake))
_op = define("rotary", replayed_below(_forward), _fake)
_rotary = differentiable(_op, _save, _backward, 2, run=replayed_below(_op))
