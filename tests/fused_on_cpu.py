"""The ops that stand around recurrences on a GPU (`delta_inputs`, `rotary`) on a CPU: their kernels by PyTorch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.autograd.vjp import vjp
from holdfast.kernels.lru.call import Gates
from holdfast.kernels.lru.torch.backend import lru_gates
from holdfast.kernels.rotary.torch.backend import rotate
from holdfast.kernels.select import forget
from holdfast.recurrences.delta_rule import prepared
from holdfast.recurrences.kda import log_decay
from holdfast.recurrences.mlstm import gates

# ops whose modules ask whether a GPU's kernels serve
AROUND = ("delta_inputs", "gated_gelu", "kda_gate", "lru_gates", "mlstm", "mlstm_gates", "rotary", "soft_cap")


def _can_fuse(i: Tensor, f: Tensor, wide: torch.dtype) -> bool:
    return wide == torch.float32 and torch.float64 not in (i.dtype, f.dtype)


def _differentiate(run: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Sequence[Any]) -> list[Any]:
    """Gradients of run, None for an input that is."""
    given = [x for x in inputs if x is not None]

    def of_given(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        return run(*(None if x is None else next(rest) for x in inputs))

    found = iter(vjp(of_given, given, grads))
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
    given = rest[2]
    grads = [given.dg, given.dbeta, given.dm, given.dlast]
    return _differentiate(lambda *x: gates(*x, cu_seqlens, exponential, torch.float32), (i, f, m), grads)


def _rotated(q: Tensor, k: Tensor, position: Any, base: float, inverse: bool, into: Any = None) -> tuple[Tensor, ...]:
    position = torch.arange(q.shape[1])[None] if position is None else position
    made = tuple(rotate(x, -position if inverse else position, base).contiguous() for x in (q, k))
    return made if into is None else tuple(place.copy_(x) for place, x in zip(into, made, strict=True))


def _lru(given: Gates) -> tuple[Any, ...]:
    return tuple(None if x is None else x.contiguous() for x in lru_gates(given))


def _lru_gradients(given: Gates, *grads: Any) -> list[Any]:
    *grads, into = (*grads, None)[:4]

    def run(*leaves: Any) -> Any:
        return [x for x in lru_gates(Gates(*leaves, given.decay_scale)) if x is not None]

    du, *found = _differentiate(run, given[:5], [x for x in grads if x is not None])
    return [du if into is None else into.copy_(du), *found]


def _branch(h: Tensor, z: Tensor) -> Tensor:
    return (h * F.gelu(z)).contiguous()


def _branch_gradients(h: Tensor, z: Tensor, dy: Tensor, into: Tensor | None = None) -> list[Any]:
    dh, dz = _differentiate(lambda *x: [_branch(*x)], (h, z), [dy])
    return [dh, dz if into is None else into.copy_(dz)]


def _decay(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None) -> Tensor:
    return log_decay(x, A_log, dt_bias, bound).contiguous()


def _decay_gradients(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None, dg: Tensor
) -> tuple[Any, ...]:
    return tuple(_differentiate(lambda *given: [_decay(*given, bound)], (x, A_log, dt_bias), [dg]))


def _capped(x: Tensor, cap: float) -> Tensor:
    return (cap * torch.tanh(x.float() / cap)).contiguous()


def _capped_gradient(x: Tensor, dy: Tensor, cap: float) -> Tensor:
    (found,) = _differentiate(lambda x: [_capped(x, cap)], (x,), [dy])
    return found


@contextmanager
def fused_on_cpu() -> Iterator[None]:
    """What a GPU's calls go through, around kernels that are PyTorch's operations. Skips where Triton is not there."""
    pytest.importorskip("triton")
    from holdfast.kernels.lru.triton import gated_gelu as triton_gated_gelu
    from holdfast.kernels.lru.triton import gates as triton_gates
    from holdfast.kernels.matrix.delta_rule.inputs import triton as triton_delta_inputs
    from holdfast.kernels.matrix.mlstm.gates import launch as triton_mlstm_gates
    from holdfast.kernels.matrix.vector_decay.gates import launch as triton_gate
    from holdfast.kernels.rotary.triton import backend as triton_rotary
    from holdfast.kernels.soft_cap.triton import backend as triton_soft_cap

    with pytest.MonkeyPatch.context() as patch:
        for module in AROUND:
            patch.setattr(import_module(f"holdfast.ops.{module}"), "can_fuse", _can_fuse)
        patch.setattr(triton_rotary, "run", _rotated)
        patch.setattr(triton_gates, "run_forward", _lru)
        patch.setattr(triton_gates, "run_backward", _lru_gradients)
        patch.setattr(triton_gated_gelu, "run_forward", _branch)
        patch.setattr(triton_gated_gelu, "run_backward", _branch_gradients)
        patch.setattr(triton_soft_cap, "run_forward", _capped)
        patch.setattr(triton_soft_cap, "run_backward", _capped_gradient)
        patch.setattr(triton_delta_inputs, "run_forward", _delta)
        patch.setattr(triton_delta_inputs, "run_backward", _delta_gradients)
        patch.setattr(triton_gate, "run_forward", _decay)
        patch.setattr(triton_gate, "run_backward", _decay_gradients)
        patch.setattr(triton_mlstm_gates, "forward", _gates)
        patch.setattr(triton_mlstm_gates, "backward", _gates_gradients)
        # what calls before and within go through is remembered, and is another in each
        forget()
        try:
            yield
        finally:
            forget()
