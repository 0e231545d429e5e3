"""The selective family's custom ops: plan, kernel, autograd, fake tensors, and a step in place."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.kernels.select import resolve
from holdfast.kernels.selective.torch.chunked import Chunked
from holdfast.kernels.selective.torch.reference import Reference
from holdfast.kernels.selective.triton.backend import TritonSelective
from holdfast.kernels.varlen import sequence_count
from holdfast.planner import Direction, Plan, Problem
from holdfast.recurrences.definition import Recurrence, SelectiveCall
from holdfast.recurrences.scalars import flag

from .autocast import without_autocast
from .check import name_of, needs_grad
from .registration import define, differentiable

BACKENDS = (
    TritonSelective(),
    Chunked(),
    Reference(),
)

# Steps between two states that a backend keeps for its backward pass.
ENTRY_STEPS = 16
_TENSORS = 9


def problem(op: str, call: SelectiveCall, cu_seqlens: Tensor | None, grad: bool) -> Problem:
    """What planning needs to know of a call: sizes B, T, D, N, G, x's dtype and traits.

    op: the recurrence's name. call: x [B, T, D] and the rest of a SelectiveCall, checked. cu_seqlens: int32 or int64
    [N + 1], or None. grad: whether a backward pass may follow. Reads no values.
    """
    sizes = dict(zip("BTD", call.x.shape, strict=True)) | {"N": call.A.shape[1], "G": call.B.shape[2]}
    traits = {
        "skip": call.D is not None,
        "gate": call.z is not None,
        "softplus": call.softplus,
        "wide_dt": call.dt.element_size() > call.x.element_size(),
        "varlen": cu_seqlens is not None,
        "needs_grad": grad,
    }
    return Problem.of(op, "selective", call.x.dtype, sizes, traits)


def run(
    recurrence: Recurrence,
    mapped: tuple[SelectiveCall, Any],
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor | None]:
    """Runs a mapped call through the custom op.

    mapped: what the recurrence's `map` returned for checked arguments. cu_seqlens: int32 or int64 [N + 1], or None.
    backend: a name forces that backend. Returns y [B, T, D] in x's dtype and the state [sequences, D, N] in float32 or
    wider, None where it is not asked for. Raises ValueError for a backend that is unknown or cannot serve the call.
    """
    flag("output_final_state", output_final_state)
    call, _ = mapped
    grad = needs_grad(*call[:_TENSORS])
    y, final_state, _ = selective_forward(*call, cu_seqlens, recurrence.name, grad, name_of(backend))
    return y, final_state if output_final_state else None


def _select(
    call: SelectiveCall, cu_seqlens: Tensor | None, op: str, grad: bool, direction: Direction, backend: str
) -> tuple[Any, Plan]:
    what, device = problem(op, call, cu_seqlens, grad), describe(call.x.device)
    return resolve(BACKENDS, what, device, backend, direction)


def _forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    softplus: bool,
    cu_seqlens: Tensor | None,
    op: str,
    grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """SelectiveCall -> (y [B, T, D] in x's dtype, final state [sequences, D, N] in float32 or wider, entries).

    entries: float32 states before stretches of ENTRY_STEPS steps, for the backward pass of the backend that left them;
    empty where no gradient follows and off CUDA.
    """
    call = SelectiveCall(x, dt, A, B, C, D, z, dt_bias, initial_state, softplus)
    chosen, plan = _select(call, cu_seqlens, op, grad, "forward", backend)
    entries = entries_of(x, A, cu_seqlens, grad)
    with without_autocast(x):
        y, final = chosen.forward(plan, call, cu_seqlens, entries if entries.numel() else None)
    return y.contiguous(), final.contiguous(), entries


def entries_of(x: Tensor, A: Tensor, cu_seqlens: Tensor | None, grad: bool) -> Tensor:
    """Room for the states that a forward pass of x [B, T, D] leaves for its backward pass; [0, N, D] for none."""
    sequences = sequence_count(x, cu_seqlens)
    kept = grad and x.is_cuda and x.dtype != torch.float64
    rows = x.shape[0] * x.shape[1] // ENTRY_STEPS + 2 * sequences if kept else 0
    return x.new_empty(rows, A.shape[1], A.shape[0], dtype=torch.float32)


def _forward_fake(x, dt, A, B, C, D, z, dt_bias, initial_state, softplus, cu_seqlens, op, grad, backend):
    sequences = sequence_count(x, cu_seqlens)
    state = x.new_empty(sequences, *A.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.empty_like(x, memory_format=torch.contiguous_format), state, entries_of(x, A, cu_seqlens, grad)


def _gradients(
    grad_y: Tensor | None,
    grad_final: Tensor | None,
    entries: Tensor | None,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    softplus: bool,
    cu_seqlens: Tensor | None,
    op: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of the call's tensors, in its order; an empty tensor for one that was not given. entries: the forward's."""
    call = SelectiveCall(x, dt, A, B, C, D, z, dt_bias, initial_state, softplus)
    entries = None if entries is None or not entries.numel() else entries
    chosen, plan = _select(call, cu_seqlens, op, True, "backward", backend)
    with without_autocast(x):
        grads = chosen.backward(plan, call, cu_seqlens, entries, grad_y, grad_final)
    return tuple(
        x.new_empty(0) if given is None else grad.contiguous()
        for grad, given in zip(grads, call[:_TENSORS], strict=True)
    )


def _gradients_fake(
    grad_y, grad_final, entries, x, dt, A, B, C, D, z, dt_bias, initial_state, softplus, cu_seqlens, op, backend
):
    return tuple(
        x.new_empty(0) if given is None else torch.empty_like(given, memory_format=torch.contiguous_format)
        for given in (x, dt, A, B, C, D, z, dt_bias, initial_state)
    )


# replayed where they are called, which spares the dispatcher too, and beneath it, where compiled graphs call them
selective_backward = replayed_below(define("selective_backward", replayed_below(_gradients), _gradients_fake))


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, softplus, cu_seqlens, op, _, backend = inputs
    entries = outputs[2]
    ctx.mark_non_differentiable(entries)
    ctx.save_for_backward(entries if entries.numel() else None, *tensors, cu_seqlens)
    ctx.rest = softplus, op, backend


def _backward(ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None, _: None) -> tuple[Any, ...]:
    entries, *tensors, cu_seqlens = ctx.saved_tensors
    softplus, *rest = ctx.rest
    grads = selective_backward(grad_y, grad_final, entries, *tensors, softplus, cu_seqlens, *rest)
    return tuple(None if x is None else grad for x, grad in zip(tensors, grads, strict=True))


_op = define("selective_forward", replayed_below(_forward), _forward_fake)
selective_forward = differentiable(_op, lambda *_: None, _backward, _TENSORS, _save, replayed_below(_op))


def _step(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    softplus: bool,
    op: str,
    backend: str,
) -> Tensor:
    """y [B, T, D] in x's dtype; state [B, D, N] is updated."""
    call = SelectiveCall(x, dt, A, B, C, D, z, dt_bias, state, softplus)
    chosen, plan = _select(call, None, op, False, "forward", backend)
    with without_autocast(x):
        if isinstance(chosen, TritonSelective):
            return chosen.update(plan, call)
        y, after = chosen.forward(plan, call, None)
    state.copy_(after)
    return y.contiguous()


def _step_fake(x, dt, A, B, C, D, z, dt_bias, state, softplus, op, backend):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


selective_step = define("selective_step", _step, _step_fake, mutates=["state"])
