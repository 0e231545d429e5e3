"""The dense family's custom ops: plan, kernel, autograd and fake tensors, once for all of its cells."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.common.backend import describe
from holdfast.kernels.common.planning import resolve
from holdfast.kernels.dense import kept
from holdfast.kernels.dense.fused import Fused
from holdfast.kernels.dense.loop import Loop
from holdfast.kernels.dense.reference import Reference
from holdfast.planner import Direction, Plan, Problem
from holdfast.recurrences import dense as shapes
from holdfast.recurrences.cell import Cell, lookup
from holdfast.recurrences.definition import DenseCall, Recurrence
from holdfast.recurrences.oracle_matrix import compute_dtype

from .check import needs_grad, prepare

BACKENDS = (Fused(), Loop(), Reference())


def problem(op: str, call: DenseCall, cu_seqlens: Tensor | None, grad: bool) -> Problem:
    """What planning needs to know of a call."""
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
    """Checks a call of one of the family's public ops and runs it through the custom op."""
    arguments = {"x": x, "R": R, "b": b, "initial_state": initial_state, "reset": reset}
    given = prepare(recurrence, cu_seqlens, arguments, shapes.sizes(cell))
    if recurrent_grad_clip is not None:
        if not isinstance(recurrent_grad_clip, int | float) or isinstance(recurrent_grad_clip, bool):
            found = type(recurrent_grad_clip).__name__
            raise TypeError(f"recurrent_grad_clip: expected a number or None; got {found}")
        if not recurrent_grad_clip > 0:
            raise ValueError(f"recurrent_grad_clip: expected a number > 0 or None; got {recurrent_grad_clip}")
        recurrent_grad_clip = float(recurrent_grad_clip)
    if not isinstance(cut_recurrent_grad, bool):
        raise TypeError(f"cut_recurrent_grad: expected a bool; got {type(cut_recurrent_grad).__name__}")
    grad = needs_grad(*(given[name] for name in ("x", "R", "b", "initial_state")))
    h, final_state, _, _ = dense_forward(
        *given.values(), cu_seqlens, recurrent_grad_clip, cut_recurrent_grad, cell.key, grad, backend or ""
    )
    return h, final_state if output_final_state else None


def _select(
    call: DenseCall, cu_seqlens: Tensor | None, grad: bool, direction: Direction, backend: str
) -> tuple[Any, Plan]:
    what, device = problem(call.cell.name, call, cu_seqlens, grad), describe(call.x.device)
    return resolve(BACKENDS, what, device, backend, direction)


@torch.library.custom_op("holdfast::dense_forward", mutates_args=())
def dense_forward(
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
    backend alone knows; for 16-bit inputs on a GPU the form in kernels/dense/kept.py; and empty without grad.
    """
    call = DenseCall(lookup(cell), x, R, b, initial_state, reset, recurrent_grad_clip, cut_recurrent_grad)
    chosen, plan = _select(call, cu_seqlens, grad, "forward", backend)
    with torch.autocast(x.device.type, enabled=False):
        h, final_state, states, gates = chosen.forward(plan, call, cu_seqlens, grad)
        if grad and kept.compact(x) and not chosen.compact:
            states, gates = kept.pack(call, cu_seqlens, states, gates)
        return h, final_state, states, gates


@dense_forward.register_fake
def _(x, R, b, initial_state, reset, cu_seqlens, recurrent_grad_clip, cut_recurrent_grad, cell, grad, backend):
    which, dtype = lookup(cell), compute_dtype(x.dtype)
    batch, length, _, heads, width = x.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
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


@torch.library.custom_op("holdfast::dense_backward", mutates_args=())
def dense_backward(
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

    h: the output of the forward pass where what it kept has the form of kernels/dense/kept.py, else None.
    """
    which = lookup(cell)
    # x's shape without its memory: what is saved stands for its values
    x = R.new_zeros(()).expand(batch, length, len(which.input), *R.shape[1:3])
    if gates.numel() == 0 and x.numel() > 0:
        raise RuntimeError("dense_backward: expected what dense_forward saves with grad=True; it ran with grad=False")
    call = DenseCall(which, x, R, b, initial_state, reset, recurrent_grad_clip, cut_recurrent_grad)
    chosen, plan = _select(call, cu_seqlens, True, "backward", backend)
    with torch.autocast(R.device.type, enabled=False):
        saved = (states, gates) if h is None else (h, states, gates)
        if h is not None and not chosen.compact:
            saved = kept.unpack(call, cu_seqlens, *saved)
        dx, dR, db, grad_initial = chosen.backward(plan, call, cu_seqlens, *saved, grad_h, grad_final)
    grads = (dx, dR, db, None if initial_state is None else grad_initial)
    return tuple(R.new_empty(0) if x is None else x.contiguous() for x in grads)


@dense_backward.register_fake
def _(
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


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    x, *tensors = inputs[:6]
    h, _, states, gates = output
    ctx.save_for_backward(*tensors, h if kept.compact(x) else None, states, gates)
    ctx.rest = x.shape[0], x.shape[1], *inputs[6:9], inputs[10]


def _backward(ctx: Any, grad_h: Tensor | None, grad_final: Tensor | None, *_: Any) -> tuple[Any, ...]:
    R, b, initial_state, *others = ctx.saved_tensors
    dx, dR, db, grad_initial = dense_backward(grad_h, grad_final, R, b, initial_state, *others, *ctx.rest)
    db, grad_initial = (None if x is None else grad for x, grad in ((b, db), (initial_state, grad_initial)))
    return dx, dR, db, grad_initial, *(None,) * 7


dense_forward.register_autograd(_backward, setup_context=_setup)
