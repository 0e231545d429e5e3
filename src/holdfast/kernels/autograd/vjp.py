"""Differentiates a function inside a custom op."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from holdfast.recurrences.torch_private import own_graph


def vjp(run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients of the inputs, given those of run's outputs; None for an output stands for zeros."""
    # inside a custom op autograd is switched off below the dispatcher; leaving inference mode switches it on again
    with torch.inference_mode(False), torch.enable_grad(), own_graph():
        leaves = [x.detach().requires_grad_() for x in inputs]
        outputs = run(*leaves)
        # copies, because a gradient that passes through unchanged is the very tensor, which an op must not return
        copies = [None if g is None else g.to(o.dtype, copy=True) for o, g in zip(outputs, grads, strict=True)]
        pairs = [(o, g) for o, g in zip(outputs, copies, strict=True) if g is not None and o.requires_grad]
        if not pairs:
            return [torch.zeros_like(x) for x in inputs]
        roots, cotangents = zip(*pairs, strict=True)
        return list(torch.autograd.grad(roots, leaves, cotangents, materialize_grads=True))
