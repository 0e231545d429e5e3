"""The dense family's custom ops: plan, kernel, autograd and fake tensors, once for all of its cells."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.dense import saved as kept
from holdfast.kernels.dense.alternating.backend import Alternating
from holdfast.kernels.dense.cuda.backend import Fused
from holdfast.kernels.dense.torch.reference import Reference
from holdfast.kernels.dense.torch.time_loop import Loop
from holdfast.kernels.dense.triton.backend import TritonLoop
from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.kernels.select import clearable_cache, resolve
from holdfast.kernels.varlen import sequence_count
from holdfast.planner import Direction, Plan, Problem
from holdfast.recurrences import dense as shapes
from holdfast.recurrences.cell import Cell, lookup
from holdfast.recurrences.definition import DenseCall, Recurrence
from holdfast.recurrences.oracle_matrix import compute_dtype
from holdfast.recurrences.scalars import flag

from .autocast import without_autocast
from .check import name_of, needs_grad, prepare
from .registration import define, differentiable

BACKENDS = (Fused(), TritonLoop(), Alternating(), Loop(), Reference())


def problem(op: str, call: DenseCall, cu_seqlens: Tensor | None, grad: bool) -> Problem:
    """What planning needs to know of a call: sizes B, T, H, D and counts of states and gates, dtype and traits.

    op: the recurrence's name. call: x [B, T, Gi, H, D] and the rest of a DenseCall, checked. cu_seqlens: int32 or int64
    [N + 1], or None. grad: whether a backward pass may follow. Reads no values, so that fake tensors serve.
    """
    batch, length, inputs, heads, width = call.x.shape
    cell = call.cell
    sizes = {"B": batch, "T": length, "H": heads, "D": width, "S": len(cell.states), "G": len(cell.gates)}
    sizes |= {"Gi": inputs, "Gr": call.R.shape[0]}
    traits = {
        f"cell={cell.key}": True,
        "reset": call.reset is not None,
        "recurrent_grad_clip": call.recurrent_grad_clip is not None,
        "cut_recurrent_grad": call.cut_recurrent_grad,
        "varlen": cu_seqlens is not None,
        # some backends begin packed sequences from zeros alone; of a batch none cares
        "initial_state": cu_seqlens is not None and call.initial_state is not None,
        "needs_grad": grad,
    }
    return Problem.of(op, "dense", call.x.dtype, sizes, traits)


def run(
    recurrence: Recurrence,
    cell: Cell,
    x: Tensor,
    R: Tensor,
    b: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    reset: Tensor | None,
    recurrent_grad_clip: float | None,
    cut_recurrent_grad: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor | None]:
    """Checks a call of one of the family's public ops and runs it through the custom op.

    Args:
        x: input part of the gates [B, T, Gi, H, D], float64, float32, bfloat16 or float16.
        R: recurrent weights [Gr, H, D, D] (out, in), of x's dtype. b: bias [G, H, D], of x's dtype, or None.
        initial_state: [S, N, H, D] in float32 (float64 beside float64), N sequences; None for the cell's own.
        cu_seqlens: int32 or int64 [N + 1] for sequences packed along T, with B = 1.
        reset: bool [B, T]; the state is zeroed before that step.
        recurrent_grad_clip: bound on each element of the gradient through R, > 0. cut_recurrent_grad: drops it.
        backend: a name forces that backend.

    Returns:
        h [B, T, H, D] in x's dtype, and the state after the last step [S, N, H, D], or None where it is not asked for.

    Raises:
        TypeError, ValueError: as `check.prepare` does; for a clip that is no number > 0 or a cut that is no bool; for a
            backend that is unknown or cannot serve the call.
    """
    arguments = {"x": x, "R": R, "b": b, "initial_state": initial_state, "reset": reset}
    given = prepare(recurrence, cu_seqlens, arguments, shapes.sizes(cell))
    if recurrent_grad_clip is not None:
        if not isinstance(recurrent_grad_clip, int | float) or isinstance(recurrent_grad_clip, bool):
            found = type(recurrent_grad_clip).__name__
            raise TypeError(f"recurrent_grad_clip: expected a number or None; got {found}")
        if not recurrent_grad_clip > 0:
            raise ValueError(f"recurrent_grad_clip: expected a number > 0 or None; got {recurrent_grad_clip}")
        recurrent_grad_clip = float(recurrent_grad_clip)
    flag("cut_recurrent_grad", cut_recurrent_grad)
    flag("output_final_state", output_final_state)
    grad = needs_grad(*(given[name] for name in ("x", "R", "b", "initial_state")))
    h, final_state, _, _ = _dense(
        *given.values(), cu_seqlens, recurrent_grad_clip, cut_recurrent_grad, cell.key, grad, name_of(backend)
    )
    return h, final_state if output_final_state else None


_SELECTED: dict[tuple[Any, ...], tuple[Any, Plan]] = clearable_cache()


def _select(
    call: DenseCall, cu_seqlens: Tensor | None, grad: bool, direction: Direction, backend: str
) -> tuple[Any, Plan]:
    x = call.x
    # what `problem` reads, in less time than it takes to make and hash a Problem
    given = (call.reset is None, call.recurrent_grad_clip is None, call.cut_recurrent_grad, cu_seqlens is None)
    given += (call.initial_state is None,)
    key = (call.cell.key, x.shape, x.dtype, x.device, given, grad, direction, backend)
    found = _SELECTED.get(key)
    if found is None:
        what, device = problem(call.cell.name, call, cu_seqlens, grad), describe(x.device)
        found = _SELECTED[key] = resolve(BACKENDS, what, device, backend, direction)
    return found


def _forward(
    x: Tensor,
    R: Tensor,
    b: Tensor | None,
    initial_state: Tensor | None,
    reset: Tensor | None,
    cu_seqlens: Tensor | None,
    recurrent_grad_clip: float | None,
    cut_recurrent_grad: bool,
    cell: str,
    grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """DenseCall -> (h [B, T, H, D] in x's dtype, final state [S, N, H, D], what the backward pass needs).

    The latter are states [S, B * T, H, D] and gates [B * T, H, G, D] in the final state's dtype, in an order that the
    backend alone knows; for 16-bit inputs on a GPU the form in kernels/dense/saved.py; and empty without grad.
    """
    call = DenseCall(lookup(cell), x, R, b, initial_state, reset, recurrent_grad_clip, cut_recurrent_grad)
    chosen, plan = _select(call, cu_seqlens, grad, "forward", backend)
    with without_autocast(x):
        h, final_state, states, gates = chosen.forward(plan, call, cu_seqlens, grad)
        if grad and kept.compact(x) and not chosen.compact:
            states, gates = kept.pack(call, cu_seqlens, states, gates)
        return h.contiguous(), final_state.contiguous(), states, gates


def _forward_fake(
    x, R, b, initial_state, reset, cu_seqlens, recurrent_grad_clip, cut_recurrent_grad, cell, grad, backend
):
    which, dtype = lookup(cell), compute_dtype(x.dtype)
    batch, length, _, heads, width = x.shape
    sequences = sequence_count(x, cu_seqlens)
    final_state = x.new_empty(len(which.states), sequences, heads, width, dtype=dtype)
    states, gates = x.new_empty(0, dtype=dtype), x.new_empty(0, dtype=dtype)
    if grad and kept.compact(x):
        state_shape, gate_shape = kept.shapes(which, batch, length, heads, width)
        states = x.new_empty(state_shape, dtype=dtype)
        gates = x.new_empty(gate_shape, dtype=kept.gates_dtype(which, x.dtype))
    elif grad:
        states = x.new_empty(len(which.states), batch * length, heads, width, dtype=dtype)
        gates = x.new_empty(batch * length, heads, len(which.gates), width, dtype=dtype)
    return x.new_empty(batch, length, heads, width), final_state, states, gates


def _gradients(
    grad_h: Tensor | None,
    grad_final: Tensor | None,
    R: Tensor,
    b: Tensor | None,
    initial_state: Tensor | None,
    reset: Tensor | None,
    cu_seqlens: Tensor | None,
    h: Tensor | None,
    states: Tensor,
    gates: Tensor,
    batch: int,
    length: int,
    recurrent_grad_clip: float | None,
    cut_recurrent_grad: bool,
    cell: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, R, b and initial_state; an empty tensor for one that was not given.

    h: the output of the forward pass where what it kept has the form of kernels/dense/saved.py, else None.
    """
    which = lookup(cell)
    # x's shape without its memory: what is saved stands for its values
    x = R.new_empty(()).expand(batch, length, len(which.input), *R.shape[1:3])
    if gates.numel() == 0 and x.numel() > 0:
        raise RuntimeError("dense_backward: expected what dense_forward saves with grad=True; it ran with grad=False")
    call = DenseCall(which, x, R, b, initial_state, reset, recurrent_grad_clip, cut_recurrent_grad)
    chosen, plan = _select(call, cu_seqlens, True, "backward", backend)
    with without_autocast(R):
        saved = (states, gates) if h is None else (h, states, gates)
        if h is not None and not chosen.compact:
            saved = kept.unpack(call, cu_seqlens, *saved)
        dx, dR, db, grad_initial = chosen.backward(plan, call, cu_seqlens, *saved, grad_h, grad_final)
    grads = (dx, dR, db, None if initial_state is None else grad_initial)
    return tuple(R.new_empty(0) if x is None else x.contiguous() for x in grads)


def _gradients_fake(
    grad_h,
    grad_final,
    R,
    b,
    initial_state,
    reset,
    cu_seqlens,
    h,
    states,
    gates,
    batch,
    length,
    recurrent_grad_clip,
    cut_recurrent_grad,
    cell,
    backend,
):
    dx = R.new_empty(batch, length, len(lookup(cell).input), *R.shape[1:3])
    rest = [
        R.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (R, b, initial_state)
    ]
    return dx, *rest


# replayed where they are called, which spares the dispatcher too, and beneath it, where compiled graphs call them
dense_forward = define("dense_forward", replayed_below(_forward), _forward_fake)
dense_backward = define("dense_backward", replayed_below(_gradients), _gradients_fake)
_replayed_backward = replayed_below(dense_backward)


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.rest = inputs[0].shape[0], inputs[0].shape[1], *inputs[6:9], inputs[10]


def _save_outputs(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    h, _, states, gates = outputs
    # gates, saved, lead a second differentiation to x, which is not
    ctx.mark_non_differentiable(states)
    ctx.save_for_backward(*inputs[1:6], h if kept.compact(inputs[0]) else None, states, gates)


def _backward(ctx: Any, grad_h: Tensor | None, grad_final: Tensor | None, *_: Any) -> tuple[Any, ...]:
    R, b, initial_state, *others = ctx.saved_tensors
    dx, dR, db, grad_initial = _replayed_backward(grad_h, grad_final, R, b, initial_state, *others, *ctx.rest)
    db, grad_initial = (None if x is None else grad for x, grad in ((b, db), (initial_state, grad_initial)))
    return dx, dR, db, grad_initial


_dense = differentiable(dense_forward, _save, _backward, 4, _save_outputs, replayed_below(dense_forward))
