"""The diagonal family's custom ops: plan, kernel, autograd and fake tensors, once for all of its recurrences."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.diagonal.hopper.backend import HopperScan
from holdfast.kernels.diagonal.torch.chunked import Chunked
from holdfast.kernels.diagonal.torch.reference import Reference
from holdfast.kernels.diagonal.triton.backend import TritonScan
from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.kernels.select import resolve
from holdfast.kernels.varlen import sequence_count
from holdfast.planner import Direction, Plan, Problem
from holdfast.recurrences.definition import DiagonalCall, Recurrence
from holdfast.recurrences.scalars import flag

from .autocast import without_autocast
from .check import name_of, needs_grad
from .registration import define, differentiable

BACKENDS = (
    HopperScan(),
    TritonScan(),
    Chunked(),
    Reference(),
)

# Steps between two states that a backend may keep for its backward pass; plans may keep fewer.
ENTRY_STEPS = 32


def problem(op: str, call: DiagonalCall, cu_seqlens: Tensor | None, grad: bool) -> Problem:
    """What planning needs to know of a call: sizes B, T, D, x's dtype and traits.

    op: the recurrence's name. call: x [B, T, D] and the rest of a DiagonalCall, checked. cu_seqlens: int32 or int64
    [N + 1], or None. grad: whether a backward pass may follow. Reads no values.
    """
    sizes = dict(zip("BTD", call.x.shape, strict=True))
    traits = {
        "complex": call.theta is not None,
        "wide_gate": any(x.element_size() > call.x.element_size() for x in (call.a, call.theta) if x is not None),
        "varlen": cu_seqlens is not None,
        "needs_grad": grad,
    }
    return Problem.of(op, "diagonal", call.x.dtype, sizes, traits)


def run(
    recurrence: Recurrence,
    mapped: tuple[DiagonalCall, Any],
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Any]:
    """Runs a mapped call through the custom op and finishes it into the recurrence's output and final state.

    mapped: what the recurrence's `map` returned for checked arguments. cu_seqlens: int32 or int64 [N + 1], or None.
    backend: a name forces that backend. Returns h [B, T, D] in x's dtype and the state [N, D] in float32 or wider, None
    where it is not asked for. Raises ValueError for a backend that is unknown or cannot serve the call.
    """
    flag("output_final_state", output_final_state)
    call, finish = mapped
    grad = needs_grad(*call[:4])
    o, final_state, _ = diagonal_forward(*call, cu_seqlens, recurrence.name, grad, name_of(backend))
    if finish is not None:
        o, final_state = finish(o, final_state)
    return o, final_state if output_final_state else None


def _select(
    call: DiagonalCall, cu_seqlens: Tensor | None, op: str, grad: bool, direction: Direction, backend: str
) -> tuple[Any, Plan]:
    what, device = problem(op, call, cu_seqlens, grad), describe(call.x.device)
    return resolve(BACKENDS, what, device, backend, direction)


def _forward(
    a: Tensor,
    x: Tensor,
    theta: Tensor | None,
    initial_state: Tensor | None,
    log: bool,
    cu_seqlens: Tensor | None,
    op: str,
    grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """DiagonalCall -> (h [B, T, D] in x's dtype, final state [N, D] in float32 or wider, entries).

    entries: float32 states that enter stretches of time, for the backward pass of the backend that left them; empty
    where the output itself serves, where no gradient follows and off CUDA.
    """
    call = DiagonalCall(a, x, theta, initial_state, log)
    chosen, plan = _select(call, cu_seqlens, op, grad, "forward", backend)
    entries = entries_of(x, cu_seqlens, grad)
    with without_autocast(x):
        o, final = chosen.forward(plan, call, cu_seqlens, entries if entries.numel() else None)
    return o.contiguous(), final.contiguous(), entries


def entries_of(x: Tensor, cu_seqlens: Tensor | None, grad: bool) -> Tensor:
    """Room for the states that a forward pass of x [B, T, D] may leave for its backward pass; [0, D] for none."""
    kept = grad and x.is_cuda and torch.finfo(x.dtype).bits < 32
    sequences = sequence_count(x, cu_seqlens)
    rows = x.shape[0] * x.shape[1] // ENTRY_STEPS + sequences if kept else 0
    return x.new_empty(rows, x.shape[2], dtype=torch.float32)


def _forward_fake(a, x, theta, initial_state, log, cu_seqlens, op, grad, backend):
    sequences = sequence_count(x, cu_seqlens)
    state = x.new_empty(sequences, x.shape[2], dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.empty_like(x, memory_format=torch.contiguous_format), state, entries_of(x, cu_seqlens, grad)


def _gradients(
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    states: Tensor | None,
    entries: Tensor | None,
    a: Tensor,
    x: Tensor,
    theta: Tensor | None,
    initial_state: Tensor | None,
    log: bool,
    cu_seqlens: Tensor | None,
    op: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a, x, theta and initial_state; an empty tensor for one that was not given.

    states: the forward's output where rounding has lost nothing of it, otherwise None. entries: the forward's, or None
    where it left none.
    """
    call = DiagonalCall(a, x, theta, initial_state, log)
    entries = None if entries is None or not entries.numel() else entries
    chosen, plan = _select(call, cu_seqlens, op, True, "backward", backend)
    with without_autocast(x):
        *grads, grad_state = chosen.backward(plan, call, cu_seqlens, states, grad_o, grad_final, entries)
    grads = [*grads, None if initial_state is None else grad_state]
    return tuple(x.new_empty(0) if grad is None else grad.contiguous() for grad in grads)


def _gradients_fake(grad_o, grad_final, states, entries, a, x, theta, initial_state, log, cu_seqlens, op, backend):
    empty = [
        x.new_empty(0) if given is None else torch.empty_like(given, memory_format=torch.contiguous_format)
        for given in (a, x, theta, initial_state)
    ]
    return tuple(empty)


# replayed where they are called, which spares the dispatcher too, and beneath it, where compiled graphs call them
diagonal_backward = replayed_below(define("diagonal_backward", replayed_below(_gradients), _gradients_fake))


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    a, x, theta, initial_state, log, cu_seqlens, op, _, backend = inputs
    o, _, entries = outputs
    ctx.mark_non_differentiable(entries)
    exact = torch.finfo(x.dtype).bits >= 32
    states, entries = (o, None) if exact else (None, entries if x.is_cuda else None)
    ctx.save_for_backward(states, entries, a, x, theta, initial_state, cu_seqlens)
    ctx.rest = log, op, backend


def _backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None, _: None) -> tuple[Any, ...]:
    states, entries, *tensors, cu_seqlens = ctx.saved_tensors
    log, *rest = ctx.rest
    grads = diagonal_backward(grad_o, grad_final, states, entries, *tensors, log, cu_seqlens, *rest)
    return tuple(None if x is None else grad for x, grad in zip(tensors, grads, strict=True))


_op = define("diagonal_forward", replayed_below(_forward), _forward_fake)
diagonal_forward = differentiable(_op, lambda *_: None, _backward, 4, _save, replayed_below(_op))
