"""The matrix family's custom ops: plan, kernel, autograd and fake tensors, once for all of its recurrences."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.matrix.decode.triton.backend import TritonDecode
from holdfast.kernels.matrix.delta_rule.hopper.backend import HopperDelta
from holdfast.kernels.matrix.delta_rule.triton.backend import TritonDelta
from holdfast.kernels.matrix.mlstm.hopper.backend import HopperMLSTM
from holdfast.kernels.matrix.problem import problem
from holdfast.kernels.matrix.scalar_decay.hopper.backend import Hopper
from holdfast.kernels.matrix.scalar_decay.triton.backend import TritonSinglePass
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.kernels.matrix.torch.reference import Reference
from holdfast.kernels.matrix.variants import BackendVariants, GradRoom, SavedShape, takes_room, uses_forward_output
from holdfast.kernels.matrix.vector_decay.hopper.backend import HopperGLA
from holdfast.kernels.matrix.vector_decay.triton.backend import TritonGLA
from holdfast.kernels.matrix.vector_decay.triton.delta.backend import TritonKDA
from holdfast.kernels.matrix.wide import Wide
from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.kernels.select import clearable_cache, resolve
from holdfast.kernels.varlen import sequence_count
from holdfast.planner import Direction, Plan, Problem
from holdfast.recurrences.definition import MatrixCall, Recurrence
from holdfast.recurrences.oracle_matrix import compute_dtype
from holdfast.recurrences.scalars import flag

from .autocast import without_autocast
from .check import name_of, needs_grad
from .registration import define, differentiable
from .unserved import warn_of_unserved

_KERNELS = (
    BackendVariants(*map(Wide, (Hopper(), HopperGLA(), HopperDelta(), HopperMLSTM()))),
    TritonDecode(),
    BackendVariants(*map(Wide, (TritonSinglePass(), TritonDelta(), TritonGLA(), TritonKDA()))),
)
BACKENDS = (*_KERNELS, Chunked(), Reference())


def run(
    recurrence: Recurrence,
    mapped: tuple[MatrixCall, Any],
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Any]:
    """Runs a mapped call through the custom op and finishes it into the recurrence's output and final state.

    mapped: what the recurrence's `map` returned for checked arguments. cu_seqlens: int32 or int64 [N + 1], or None.
    backend: a name forces that backend. Returns o [B, T, H, V] in v's dtype and the recurrence's state, for the matrix
    family's own [N, H, K, V] in float32 or wider; None where it is not asked for. Raises ValueError for a backend that
    is unknown or cannot serve the call.
    """
    flag("output_final_state", output_final_state)
    call, finish = mapped
    grad = needs_grad(*call[:8])
    o, final_state, _ = matrix_forward(*call, cu_seqlens, recurrence.name, grad, name_of(backend))
    final_state = final_state if output_final_state else None
    return (o, final_state) if finish is None else finish(o, final_state)


class Selected(NamedTuple):
    """What runs a pass of a call, its plan, and what a graph of the call is told that the forward pass saves."""

    backend: Any
    plan: Plan
    saved: SavedShape | None


_SELECTED: dict[tuple[Any, ...], Selected] = clearable_cache()


def _select(
    call: MatrixCall, cu_seqlens: Tensor | None, op: str, grad: bool, direction: Direction, backend: str
) -> Selected:
    q, k, v, g, beta, m = call[:6]
    # what `problem` reads, in less time than it takes to make and hash a Problem
    offsets = None if cu_seqlens is None else cu_seqlens.numel()
    erase = 0 if call.e is None else call.e.shape[2], call.erase_before_decay
    axes = (q.shape[2], k.shape[3], erase, 0 if g is None else g.dim(), beta is None, m is None, offsets)
    key = (BACKENDS, op, v.shape, v.dtype, v.device, axes, call.delta, grad, direction, backend)
    found = _SELECTED.get(key)
    if found is None:
        what, device = problem(op, call, cu_seqlens, grad), describe(v.device)
        chosen, plan = resolve(BACKENDS, what, device, backend, direction)
        if isinstance(chosen, BackendVariants):
            chosen = chosen.variant(what, device)
        found = _SELECTED[key] = Selected(chosen, plan, _saved_shape(what, v.device, backend))
        if not backend:
            warn_of_unserved(_KERNELS, what, device)
    return found


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    stabilizer: Tensor | None,
    initial_state: Tensor | None,
    e: Tensor | None,
    scale: float,
    eps: float,
    delta: bool,
    erase_before_decay: bool,
    cu_seqlens: Tensor | None,
    op: str,
    grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """MatrixCall -> (o [B, T, H, V] in v's dtype, final state [N, H, K, V (+ 1)] in float32 or wider, saved).

    saved: what the backend's backward pass reads of this one, as `_saved_shape` says; 0 where another backend runs.
    """
    call = MatrixCall(q, k, v, g, beta, stabilizer, initial_state, e, scale, eps, delta, erase_before_decay)
    chosen, plan, shape = _select(call, cu_seqlens, op, grad, "forward", backend)
    with without_autocast(v):
        o, final, *saved = chosen.forward(plan, call, cu_seqlens)
    if not saved:
        saved = [_room(shape, v)]
        if shape is not None:
            # where a graph was told of another backend's
            saved[0].zero_()
    return o.contiguous(), final.contiguous(), *saved


def _saved_shape(what: Problem, device: torch.device, backend: str) -> SavedShape | None:
    """What a call's forward pass saves for the backward pass, if anything.

    A graph knows it before a backend is chosen: it is what the one backend says that saves something, if that one may
    serve such a call, whatever B and T, which may be symbols.
    """
    what = replace(what, sizes=tuple((name, int(size) if name in "KV" else size) for name, size in what.sizes))
    alone = replace(what, sizes=tuple((name, size if name in "KV" else 1) for name, size in what.sizes))
    for each in BACKENDS:
        if isinstance(each, BackendVariants) and backend in ("", each.name):
            for variant, shape in each.saving(what):
                if variant.reject(alone, describe(device)) is None:
                    return shape
    return None


def _room(shape: SavedShape | None, v: Tensor) -> Tensor:
    """An empty tensor for what is saved; [0] for nothing."""
    return v.new_empty(0) if shape is None else v.new_empty(shape.sizes, dtype=shape.dtype)


def _forward_fake(
    q, k, v, g, beta, stabilizer, initial_state, e, scale, eps, delta, erase_before_decay, cu_seqlens, op, grad,
    backend,
):  # fmt: skip
    sequences = sequence_count(v, cu_seqlens)
    columns = v.shape[3] + int(stabilizer is not None)
    state = v.new_empty(sequences, v.shape[2], k.shape[3], columns, dtype=compute_dtype(v.dtype))
    call = MatrixCall(q, k, v, g, beta, stabilizer, initial_state, e, scale, eps, delta, erase_before_decay)
    saved = _room(_saved_shape(problem(op, call, cu_seqlens, grad), v.device, backend), v)
    return torch.empty_like(v, memory_format=torch.contiguous_format), state, saved


def fake_of(
    call: MatrixCall, cu_seqlens: Tensor | None, op: str, grad: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """What `matrix_forward` returns of a call, without data: for the fakes of ops around it."""
    return _forward_fake(*call, cu_seqlens, op, grad, backend)


def _gradients(
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    stabilizer: Tensor | None,
    initial_state: Tensor | None,
    e: Tensor | None,
    scale: float,
    eps: float,
    delta: bool,
    erase_before_decay: bool,
    cu_seqlens: Tensor | None,
    op: str,
    backend: str,
    o: Tensor | None = None,
    saved: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta, stabilizer, initial_state and e; an empty tensor for one that was not given.

    o, saved: what the forward pass returned; where they are needed and not given, it runs again.
    """
    call = MatrixCall(q, k, v, g, beta, stabilizer, initial_state, e, scale, eps, delta, erase_before_decay)
    grads = _backward_of(call, cu_seqlens, op, backend, (grad_o, grad_final), (o, saved))
    return tuple(v.new_empty(0) if x is None else _laid_out(x, of) for x, of in zip(grads, call[:8], strict=True))


def _backward_of(
    call: MatrixCall,
    cu_seqlens: Tensor | None,
    op: str,
    backend: str,
    grads: tuple[Tensor | None, Tensor | None],
    made: tuple[Tensor | None, Tensor | None],
    room: GradRoom = GradRoom(),  # noqa: B008
) -> list[Tensor | None]:
    """Gradients of the call's eight tensors, None for one that was not given. grads: of the output and the final state.

    made: the output and what the forward pass saved, or None.
    """
    chosen, plan, _ = _select(call, cu_seqlens, op, True, "backward", backend)
    o, saved = made
    given = o is not None and saved is not None and saved.dim() > 1
    known = made if given and uses_forward_output(chosen) else ()
    named = {"room": room} if takes_room(chosen) else {}
    with without_autocast(call.v):
        found, grad_state = chosen.backward(plan, call, cu_seqlens, *grads, *known, **named)
    return [*found[:6], None if call.initial_state is None else grad_state, None if call.e is None else found[6]]


def write_gradients(
    room: GradRoom,
    call: MatrixCall,
    cu_seqlens: Tensor | None,
    op: str,
    backend: str,
    grads: tuple[Tensor | None, Tensor | None],
    made: tuple[Tensor | None, Tensor | None] = (None, None),
) -> list[Tensor | None]:
    """`matrix_backward` within another op's backward pass: gradients that have room are there, and are that tensor.

    Returned are those of the call's seven tensors other than e, None for one that was not given. grads: of the output
    [B, T, H, V] and the final state [N, H, K, V (+ 1)], or None for 0. made: what `matrix_forward` returned first and
    last.
    """
    found = _backward_of(call, cu_seqlens, op, backend, grads, made, room)
    for n, place in enumerate(room):
        if place is not None and found[n] is not place:
            found[n] = place.copy_(found[n])
    return [*found[:3], *(None if x is None else _laid_out(x, of) for x, of in zip(found[3:7], call[3:7], strict=True))]


def _laid_out(grad: Tensor, of: Tensor) -> Tensor:
    """grad, contiguous; or like `of`, where a head's tokens are side by side."""
    if _is_by_head(of):
        return grad if _is_by_head(grad) else grad.transpose(1, 2).contiguous().transpose(1, 2)
    return grad.contiguous()


def _is_by_head(x: Tensor) -> bool:
    return x.dim() == 3 and x.transpose(1, 2).is_contiguous() and not x.is_contiguous()


def _gradients_fake(
    grad_o, grad_final, q, k, v, g, beta, stabilizer, initial_state, e, scale, eps, delta, erase_before_decay,
    cu_seqlens, op, backend, o=None, saved=None,
):  # fmt: skip
    inputs = (q, k, v, g, beta, stabilizer, initial_state, e)
    empty = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    return tuple(v.new_empty(0) if x is None else _laid_out(x, of) for x, of in zip(empty, inputs, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    o, _, saved = outputs
    ctx.mark_non_differentiable(saved)
    ctx.save_for_backward(*inputs[:8], inputs[12], *((o, saved) if saved.dim() > 1 else (None, None)))
    ctx.rest = inputs[8:12], inputs[13], inputs[15]


def _backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None, _: None) -> tuple[Any, ...]:
    *tensors, cu_seqlens, o, saved = ctx.saved_tensors
    scalars, op, backend = ctx.rest
    grads = matrix_backward(grad_o, grad_final, *tensors, *scalars, cu_seqlens, op, backend, o, saved)
    return tuple(None if x is None else grad for x, grad in zip(tensors, grads, strict=True))


# replayed where they are called, which spares the dispatcher too, and beneath it, where compiled graphs call them
matrix_backward = replayed_below(define("matrix_backward", replayed_below(_gradients), _gradients_fake))
_matrix = define("matrix_forward", replayed_below(_forward), _forward_fake)
matrix_forward = differentiable(_matrix, lambda *_: None, _backward, 8, _save, replayed_below(_matrix))


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    stabilizer: Tensor | None,
    state: Tensor,
    e: Tensor | None,
    scale: float,
    eps: float,
    delta: bool,
    erase_before_decay: bool,
    op: str,
    backend: str,
) -> Tensor:
    """One token of a MatrixCall without a normaliser: o [B, 1, H, V] in v's dtype; state [B, H, K, V] is updated."""
    call = MatrixCall(q, k, v, g, beta, stabilizer, state, e, scale, eps, delta, erase_before_decay)
    chosen, plan, _ = _select(call, None, op, False, "forward", backend)
    with without_autocast(v):
        if isinstance(chosen, TritonDecode):
            return chosen.step(plan, call, state)
        o, after, *_ = chosen.forward(plan, call, None)
    state.copy_(after)
    return o


def _step_fake(q, k, v, g, beta, stabilizer, state, e, scale, eps, delta, erase_before_decay, op, backend):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


matrix_step = define("matrix_step", _step, _step_fake, mutates=["state"])
