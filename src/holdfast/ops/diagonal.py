"""The diagonal family's custom ops: plan, kernel, autograd and fake tensors, once for all of its recurrences."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.common.backend import describe
from holdfast.kernels.common.planning import resolve
from holdfast.kernels.diagonal.chunked import Chunked
from holdfast.kernels.diagonal.reference import Reference
from holdfast.planner import Direction, Plan, Problem
from holdfast.recurrences.definition import DiagonalCall, Recurrence

from .check import needs_grad

BACKENDS = (Chunked(), Reference())


def problem(op: str, call: DiagonalCall, cu_seqlens: Tensor | None, grad: bool) -> Problem:
    """What planning needs to know of a call."""
    sizes = dict(zip("BTD", call.x.shape, strict=True))
    traits = {"complex": call.theta is not None, "varlen": cu_seqlens is not None, "needs_grad": grad}
    return Problem.of(op, "diagonal", call.x.dtype, sizes, traits)


def run(
    recurrence: Recurrence,
    mapped: tuple[DiagonalCall, Any],
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Any]:
    """Runs a mapped call through the custom op and finishes it into the recurrence's output and final state."""
    call, finish = mapped
    o, final_state = diagonal_forward(*call, cu_seqlens, recurrence.name, needs_grad(*call), backend or "")
    if finish is not None:
        o, final_state = finish(o, final_state)
    return o, final_state if output_final_state else None


def _select(
    call: DiagonalCall, cu_seqlens: Tensor | None, op: str, grad: bool, direction: Direction, backend: str
) -> tuple[Any, Plan]:
    what, device = problem(op, call, cu_seqlens, grad), describe(call.x.device)
    return resolve(BACKENDS, what, device, backend, direction)


@torch.library.custom_op("holdfast::diagonal_forward", mutates_args=())
def diagonal_forward(
    a: Tensor,
    x: Tensor,
    theta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    op: str,
    grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """DiagonalCall -> (h [B, T, D] in x's dtype, final state [N, D] in float32 or wider)."""
    call = DiagonalCall(a, x, theta, initial_state)
    chosen, plan = _select(call, cu_seqlens, op, grad, "forward", backend)
    with torch.autocast(x.device.type, enabled=False):
        return chosen.forward(plan, call, cu_seqlens)


@diagonal_forward.register_fake
def _(a, x, theta, initial_state, cu_seqlens, op, grad, backend):
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = x.new_empty(sequences, x.shape[2], dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.empty_like(x, memory_format=torch.contiguous_format), state


@torch.library.custom_op("holdfast::diagonal_backward", mutates_args=())
def diagonal_backward(
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    states: Tensor | None,
    a: Tensor,
    x: Tensor,
    theta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    op: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a, x, theta and initial_state; an empty tensor for one that was not given.

    states: the forward's output where rounding has lost nothing of it, otherwise None.
    """
    call = DiagonalCall(a, x, theta, initial_state)
    chosen, plan = _select(call, cu_seqlens, op, True, "backward", backend)
    with torch.autocast(x.device.type, enabled=False):
        *grads, grad_state = chosen.backward(plan, call, cu_seqlens, states, grad_o, grad_final)
    grads = [*grads, None if initial_state is None else grad_state]
    return tuple(x.new_empty(0) if grad is None else grad.contiguous() for grad in grads)


@diagonal_backward.register_fake
def _(grad_o, grad_final, states, a, x, theta, initial_state, cu_seqlens, op, backend):
    empty = [
        x.new_empty(0) if given is None else torch.empty_like(given, memory_format=torch.contiguous_format)
        for given in (a, x, theta, initial_state)
    ]
    return tuple(empty)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, x, theta, initial_state, cu_seqlens, op, _, backend = inputs
    ctx.set_materialize_grads(False)
    states = output[0] if torch.finfo(x.dtype).bits >= 32 else None
    ctx.save_for_backward(states, a, x, theta, initial_state, cu_seqlens)
    ctx.rest = op, backend


def _backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None) -> tuple[Any, ...]:
    states, *tensors, cu_seqlens = ctx.saved_tensors
    grads = diagonal_backward(grad_o, grad_final, states, *tensors, cu_seqlens, *ctx.rest)
    return *(None if x is None else grad for x, grad in zip(tensors, grads, strict=True)), *(None,) * 4


diagonal_forward.register_autograd(_backward, setup_context=_setup)
