"""The ops of a recurrence's inputs (`delta_inputs`, `mlstm_gates`) on a CPU: their kernels' results by PyTorch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.kernels.common.pullback import pull_back
from holdfast.recurrences.delta_rule import prepared
from holdfast.recurrences.mlstm import gates


def _can_fuse(i: Tensor, f: Tensor, wide: torch.dtype) -> bool:
    return wide == torch.float32 and torch.float64 not in (i.dtype, f.dtype)


def _differentiate(run: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Sequence[Any]) -> list[Any]:
    """Gradients of run, None for an input that is."""
    given = [x for x in inputs if x is not None]

    def of_given(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        return run(*(None if x is None else next(rest) for x in inputs))

    found = iter(pull_back(of_given, given, grads))
    # as the kernels write them
    return [None if x is None else next(found).contiguous() for x in inputs]


def _delta(inputs: Sequence[Any], norm: bool, largest: float) -> tuple[Any, ...]:
    q, k, g, beta, rate, bias = inputs
    ones = torch.ones(1) if beta is None else beta
    y, z, decay, strength = prepared(q, k, g, ones, rate, bias, norm, beta is not None, largest == 2)
    made = (y if norm else None, z if norm else None, decay, None if beta is None else strength)
    # as the kernels write them
    return tuple(None if x is None else x.contiguous() for x in made)


def _delta_gradients(
    inputs: Sequence[Any], norm: bool, largest: float, grads: Sequence[Any], into: Any = None
) -> tuple[Any, ...]:
    made = _delta(inputs, norm, largest)
    asked = [grad for x, grad in zip(made, grads, strict=True) if x is not None]
    found = _differentiate(lambda *x: [y for y in _delta(x, norm, largest) if y is not None], inputs, asked)
    if into is not None:
        da, db = into
        db.zero_()[..., : found[3].shape[2]].copy_(found[3])
        found[2:4] = None if da is None else da.copy_(found[2]), db
    return tuple(x if n > 1 or norm else None for n, x in enumerate(found))


def _gates(i: Tensor, f: Tensor, m: Tensor | None, cu_seqlens: Any, exponential: bool) -> tuple[Tensor, ...]:
    *first, last = gates(i, f, m, cu_seqlens, exponential, torch.float32)
    by_head = [torch.empty(x.mT.shape, dtype=x.dtype).copy_(x.mT).mT for x in first]
    return (*by_head, last.clone())


def _gates_gradients(i: Tensor, f: Tensor, m: Any, cu_seqlens: Any, exponential: bool, *rest: Any) -> Any:
    _, _, *grads = rest
    return _differentiate(lambda *x: gates(*x, cu_seqlens, exponential, torch.float32), (i, f, m), grads)


@contextmanager
def fused_on_cpu() -> Iterator[None]:
    """What a GPU's calls go through, around kernels that are PyTorch's operations. Skips where Triton is not there."""
    pytest.importorskip("triton")
    from holdfast.kernels.matrix import triton_delta_inputs, triton_mlstm_gates

    with pytest.MonkeyPatch.context() as patch:
        for module in ("delta_inputs", "mlstm_gates", "mlstm"):
            patch.setattr(import_module(f"holdfast.ops.{module}"), "can_fuse", _can_fuse)
        patch.setattr(triton_delta_inputs, "run_forward", _delta)
        patch.setattr(triton_delta_inputs, "run_backward", _delta_gradients)
        patch.setattr(triton_mlstm_gates, "forward", _gates)
        patch.setattr(triton_mlstm_gates, "backward", _gates_gradients)
        yield
