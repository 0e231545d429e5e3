"""Derivatives that the ops do not have, refused: PyTorch would take some of them for zero without a word."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from holdfast.kernels.runtime.torch_private import is_batched, is_transformed, may_have_tangents, unwrapped


def refuse_forward_mode(op: str, tensors: Iterable[Any]) -> None:
    """Raises NotImplementedError where one of the tensors has a tangent, which op would drop."""
    if may_have_tangents() and any(isinstance(x, Tensor) and _has_tangent(x) for x in tensors):
        raise NotImplementedError(
            f"{op}: expected tensors without tangents, since Holdfast's ops have no forward-mode derivative; got one "
            "of torch.func.jvp, jacfwd, linearize or torch.autograd.forward_ad. Take derivatives by backward() or "
            "torch.autograd.grad, or detach what should count as constant"
        )


def _has_tangent(x: Tensor) -> bool:
    # of vmap's wrappers PyTorch does not tell
    while is_batched(x):
        x = unwrapped(x)
    return x.is_floating_point() and forward_ad.unpack_dual(x).tangent is not None


def refuse_transforms(op: str) -> None:
    """Raises NotImplementedError inside a transform of torch.func, for a call whose gradient it would have to take."""
    if is_transformed():
        raise NotImplementedError(
            f"{op}: expected a call outside of torch.func's transforms, which Holdfast's ops with gradients take no "
            "part in; got one inside grad, vjp, jacrev, vmap or another. Take gradients by backward() or "
            "torch.autograd.grad, and a batch as the ops' own first axis"
        )


class _Unpacked:
    """An autograd context whose saved tensors were handed out, which activation checkpointing does once."""

    def __init__(self, ctx: Any) -> None:
        self.ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


class _Once(torch.autograd.Function):
    """Gradients that depend on sources, and cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, op: str, gradients: tuple[Tensor, ...], *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.op}: expected one differentiation, since the gradients of Holdfast's ops have none themselves; got "
            "a second one, as of a gradient penalty, a Hessian or torch.autograd.functional.jvp"
        )


def gradients_once(
    op: str, backward: Callable[..., tuple[Any, ...]], ctx: Any, grads: tuple[Tensor | None, ...]
) -> tuple[Any, ...]:
    """backward(ctx, *grads); to differentiate what it returns again raises NotImplementedError, where PyTorch's
    once_differentiable lets what does not need grads pass for constant."""
    # without create_graph nothing is recorded
    if not torch.is_grad_enabled():
        return backward(ctx, *grads)
    unpacked = _Unpacked(ctx)
    with torch.no_grad():
        found = backward(unpacked, *grads)
    sources = [x for x in (*unpacked.saved_tensors, *grads) if x is not None and x.requires_grad]
    if not sources:
        return found
    kept = iter(_Once.apply(op, tuple(x for x in found if x is not None), *sources))
    return tuple(None if x is None else next(kept) for x in found)
