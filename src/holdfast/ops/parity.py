"""Compares an op with the oracle, outputs and gradients: what doctor and the tests both do."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from holdfast.recurrences.torch_private import tree_leaves, tree_map


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def leaves(tree: Any) -> list[Tensor]:
    """The floating-point tensors of a nested structure, in order."""
    return [x for x in tree_leaves(tree) if _is_float(x)]


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """A copy with every floating-point tensor in dtype, detached."""
    return tree_map(lambda x: x.detach().to(dtype) if _is_float(x) else x, tree)


def with_grad(tree: Any) -> Any:
    """A copy whose floating-point tensors are leaves that require gradients."""
    return tree_map(lambda x: x.detach().clone().requires_grad_() if _is_float(x) else x, tree)


def values_and_grads(run: Callable[[Any], Any], arguments: Any, seed: int = 1) -> list[Tensor]:
    """Outputs of run, then the gradient of every argument for random cotangents, all in float64 on the CPU."""
    arguments = with_grad(arguments)
    outputs = leaves(run(arguments))
    draw = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.device, x.dtype) for x in outputs]
    grads = torch.autograd.grad(outputs, leaves(arguments), cotangents, allow_unused=True, materialize_grads=True)
    return [x.detach().double().cpu() for x in [*outputs, *grads]]


def relative_error(got: Tensor, exact: Tensor) -> float:
    """|got - exact| / |exact|, NaN if anything is not finite; absolute where exact is 0."""
    norm = exact.norm().item()
    return ((got - exact).norm() / (norm if norm > 0 else 1.0)).item()


def largest_error(got: Tensor, exact: Tensor) -> float:
    """The largest |got - exact| of an element, over |exact| of it and the root mean square of all; 0 for none.

    NaN if anything is not finite; absolute where exact is 0.
    """
    if not exact.numel():
        return 0.0
    typical = exact.square().mean().sqrt()
    return ((got - exact).abs() / (exact.abs() + (typical if typical > 0 else 1.0))).max().item()
