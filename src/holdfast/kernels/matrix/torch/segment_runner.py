"""What the PyTorch backends of the matrix family share: precision, packing and recomputation around one step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels import varlen
from holdfast.kernels.autograd import segmented as segments
from holdfast.recurrences.definition import MatrixCall
from holdfast.recurrences.oracle_matrix import compute_dtype


@dataclass(frozen=True, slots=True)
class Step:
    """What a backend does with a call of equal-length sequences, in the compute dtype.

    run: -> (o, final state), differentiable. run_state: -> the final state alone.
    """

    run: Callable[[MatrixCall], tuple[Tensor, Tensor]]
    run_state: Callable[[MatrixCall], Tensor]


_TOKENWISE = ("q", "k", "v", "g", "beta", "stabilizer", "e")


def _initial_state(call: MatrixCall, sequences: int) -> Tensor:
    if call.initial_state is not None:
        return call.initial_state
    heads, columns = call.v.shape[2], call.v.shape[3] + (call.stabilizer is not None)
    return call.v.new_zeros(sequences, heads, call.k.shape[3], columns, dtype=compute_dtype(call.v.dtype))


def _on_segments(function: Callable[[MatrixCall], Any], call: MatrixCall) -> Callable[[segments.Inputs, Tensor], Any]:
    return lambda inputs, state: function(
        call._replace(**dict(zip(_TOKENWISE, inputs, strict=False)), initial_state=state)
    )


def _inputs(call: MatrixCall) -> list[Tensor | None]:
    """The call's tensors that have an axis of tokens, the erase key where there is one."""
    return [getattr(call, name) for name in _TOKENWISE[: 6 + (call.e is not None)]]


def forward(step: Step, segment: int, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """o [B, T, H, V] in v's dtype and the final state [N, H, K, V (+ 1)]."""
    batch, length = call.v.shape[:2]
    run = _on_segments(step.run, call)
    out = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    inputs = _inputs(call)
    if cu_seqlens is None:
        state = _initial_state(call, batch)
        final = segments.forward(run, inputs, state, length, segment, out)
        # a copy, because the final state may be a view of the last segment's states, or of the argument
        return out, final.to(state.dtype, copy=True)
    bounds = varlen.sequence_bounds(cu_seqlens, length)
    final = _initial_state(call, len(bounds) - 1).clone()
    for bucket in varlen.buckets(bounds, out.device):
        padded = [None if x is None else bucket.pad(x) for x in inputs]
        o = call.v.new_empty(*bucket.index.shape, *out.shape[2:])
        last = segments.forward(run, padded, final[bucket.sequences], o.shape[1], segment, o)
        final[bucket.sequences] = last.to(final.dtype)
        bucket.unpad(o, out)
    return out, final


def backward(
    step: Step,
    segment: int,
    call: MatrixCall,
    cu_seqlens: Tensor | None,
    grad_o: Tensor | None,
    grad_final: Tensor | None,
) -> tuple[list[Tensor | None], Tensor]:
    """Gradients of forward: of (q, k, v, g, beta, stabilizer), None where the input is, of e where the call has an
    erase key, and of the initial state."""
    batch, length = call.v.shape[:2]
    run, run_state = _on_segments(step.run, call), _on_segments(step.run_state, call)
    inputs = _inputs(call)
    bounds = None if cu_seqlens is None else varlen.sequence_bounds(cu_seqlens, length)
    state = _initial_state(call, batch if bounds is None else len(bounds) - 1)
    grad_state = torch.zeros_like(state) if grad_final is None else grad_final.to(state.dtype)
    if length == 0:
        return [None if x is None else torch.zeros_like(x) for x in inputs], grad_state.clone()
    has_unit = call.stabilizer is not None and grad_final is not None
    if bounds is None:
        grads, grad_initial = segments.backward(run, run_state, inputs, state, length, segment, grad_o, grad_state)
        if has_unit:
            final = segments.final_state(run_state, inputs, state, length, segment)
            grads[5][:, -1] -= _of_unit(final, grad_state)
        return grads, grad_initial
    grads = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    grad_state = grad_state.clone()
    for bucket in varlen.buckets(bounds, state.device):
        padded = [None if x is None else bucket.pad(x) for x in inputs]
        entry, grad_last, longest = state[bucket.sequences], grad_state[bucket.sequences], bucket.index.shape[1]
        found, grad_state[bucket.sequences] = segments.backward(
            run, run_state, padded, entry, longest, segment, None if grad_o is None else bucket.pad(grad_o), grad_last
        )
        if has_unit:
            final = segments.final_state(run_state, padded, entry, longest, segment)
            last = bucket.valid.sum(1) - 1
            found[5][torch.arange(len(last), dtype=torch.int64, device=last.device), last] -= _of_unit(final, grad_last)
        for grad, piece in zip(grads, found, strict=True):
            if grad is not None:
                bucket.unpad(piece, grad)
    return grads, grad_state


def _of_unit(state: Tensor, grad: Tensor) -> Tensor:
    """<S, dS> by sequence and head, of what is in units of exp(m), less its gradient of m."""
    return (state * grad).sum((2, 3))
