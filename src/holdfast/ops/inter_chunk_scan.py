"""inter_chunk_scan: the recurrence of states between the chunks of a chunkwise kernel."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.chunk.inter.call import InterChunkCall
from holdfast.kernels.chunk.inter.hopper.backend import HopperInterChunkScan
from holdfast.kernels.chunk.inter.torch.backend import ChunkedInterChunkScan
from holdfast.kernels.chunk.inter.triton.backend import TritonInterChunkScan
from holdfast.kernels.select import resolve
from holdfast.kernels.varlen import sequence_count
from holdfast.planner import Direction, Plan, Problem
from holdfast.recurrences.definition import Argument
from holdfast.recurrences.scalars import flag

from .autocast import without_autocast
from .check import check_arguments, name_of, needs_grad
from .registration import define, differentiable

BACKENDS = (HopperInterChunkScan(), TritonInterChunkScan(), ChunkedInterChunkScan())

ARGUMENTS = {
    "states": Argument("what each chunk adds to the state", "B chunks H K V"),
    "decay": Argument("natural-log decay over each chunk, at most 0", ("B chunks H", "B chunks H K"), "float"),
    "W": Argument("left factor of what each chunk erases", "B chunks H K r", required=False),
    "Y": Argument("right factor of what each chunk erases", "B chunks H K r", required=False),
    "initial_state": Argument("state before the first chunk", "sequences H K V", "state", required=False),
}


def inter_chunk_scan(
    states: Tensor,
    decay: Tensor,
    W: Tensor | None = None,
    Y: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The state after each chunk: h_g = exp(decay_g) (h_{g-1} - W_g Y_g^T h_{g-1}) + states_g.

    Without W and Y, h_g = exp(decay_g) h_{g-1} + states_g. It is the half of a chunkwise kernel that runs along time;
    `intra_chunk` is the other. The low rank serves delta rules, whose chunks erase r = chunk size directions.

    Source: Dao, Gu 2024, Transformers are SSMs (arXiv:2405.21060), section 6; the low-rank transition: Yang et al.
    2024, Parallelizing Linear Transformers with the Delta Rule (arXiv:2406.06484).

    Args:
        states: what each of G chunks adds, [B, G, H, K, V].
        decay: natural-log decay over each chunk, at most 0, [B, G, H] or a row of the state [B, G, H, K], any floating
            dtype.
        W, Y: [B, G, H, K, r] of states' dtype, both or neither.
        initial_state: float32 [N, H, K, V] (float64 for float64 states); zeros by default. N is B, or the number of
            sequences with cu_seqlens.
        output_final_state: whether to return the state after the last chunk in float32.
        cu_seqlens: int32 or int64 [N + 1], offsets, counted in chunks, of sequences packed along G, with B = 1.
        backend: forces a backend by name; by default the first that can serve the call.

    Returns:
        h_1 .. h_G [B, G, H, K, V] in states' dtype, and the final state [N, H, K, V] or None.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message; for W without
            Y; for a backend that is unknown or cannot serve the call.
    """
    flag("output_final_state", output_final_state)
    given = {"states": states, "decay": decay, "W": W, "Y": Y, "initial_state": initial_state}
    call = InterChunkCall(**check_arguments(ARGUMENTS, cu_seqlens, given))
    if (W is None) != (Y is None):
        missing, other = ("W", "Y") if W is None else ("Y", "W")
        raise ValueError(f"{missing}: expected a tensor [B, G, H, K, r] beside {other}; got None")
    h, final_state = inter_chunk_forward(*call, cu_seqlens, needs_grad(*call), name_of(backend), output_final_state)
    return h, final_state if output_final_state else None


def problem(call: InterChunkCall, cu_seqlens: Tensor | None, grad: bool) -> Problem:
    """What planning needs to know of a call: sizes B, G, H, K, V of states [B, G, H, K, V], r of W and Y [.., K, r].

    And states' dtype and traits. cu_seqlens: int32 or int64 [N + 1] in chunks, or None. grad: whether a backward pass
    may follow. Reads no values and raises nothing for a call that was checked.
    """
    sizes = dict(zip("BGHKV", call.states.shape, strict=True))
    if call.W is not None:
        sizes["r"] = call.W.shape[4]
    traits = {
        "decay=scalar": call.decay.dim() == 3,
        "decay=vector": call.decay.dim() == 4,
        "low_rank": call.W is not None,
        "varlen": cu_seqlens is not None,
        "needs_grad": grad,
    }
    return Problem.of("inter_chunk_scan", "diagonal", call.states.dtype, sizes, traits)


def _select(
    call: InterChunkCall, cu_seqlens: Tensor | None, grad: bool, direction: Direction, backend: str
) -> tuple[Any, Plan]:
    what, device = problem(call, cu_seqlens, grad), describe(call.states.device)
    return resolve(BACKENDS, what, device, backend, direction)


def _forward(
    states: Tensor,
    decay: Tensor,
    W: Tensor | None,
    Y: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    grad: bool,
    backend: str,
    keep_final: bool,
) -> tuple[Tensor, Tensor]:
    """InterChunkCall -> (h [B, G, H, K, V] in states' dtype, final state [N, H, K, V] in float32 or wider).

    keep_final: whether the final state is written; it is an empty tensor otherwise.
    """
    call = InterChunkCall(states, decay, W, Y, initial_state)
    chosen, plan = _select(call, cu_seqlens, grad, "forward", backend)
    with without_autocast(states):
        h, final = chosen.forward(plan, call, cu_seqlens, keep_final)
    return h.contiguous(), h.new_empty(0) if final is None else final.contiguous()


def _forward_fake(states, decay, W, Y, initial_state, cu_seqlens, grad, backend, keep_final):
    if not keep_final:
        return torch.empty_like(states, memory_format=torch.contiguous_format), states.new_empty(0)
    sequences = sequence_count(states, cu_seqlens)
    final = states.new_empty(sequences, *states.shape[2:], dtype=torch.promote_types(states.dtype, torch.float32))
    return torch.empty_like(states, memory_format=torch.contiguous_format), final


def _gradients(
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    history: Tensor | None,
    states: Tensor,
    decay: Tensor,
    W: Tensor | None,
    Y: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of states, decay, W, Y and initial_state; an empty tensor for one that was not given.

    history: the forward's output where rounding has lost nothing of it, otherwise None.
    """
    call = InterChunkCall(states, decay, W, Y, initial_state)
    chosen, plan = _select(call, cu_seqlens, True, "backward", backend)
    with without_autocast(states):
        *grads, grad_state = chosen.backward(plan, call, cu_seqlens, history, grad_o, grad_final)
    grads = [*grads, None if initial_state is None else grad_state]
    return tuple(states.new_empty(0) if grad is None else grad.contiguous() for grad in grads)


def _gradients_fake(grad_o, grad_final, history, states, decay, W, Y, initial_state, cu_seqlens, backend):
    empty = [
        states.new_empty(0) if given is None else torch.empty_like(given, memory_format=torch.contiguous_format)
        for given in (states, decay, W, Y, initial_state)
    ]
    return tuple(empty)


inter_chunk_backward = define("inter_chunk_backward", _gradients, _gradients_fake)


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]) -> None:
    *tensors, cu_seqlens, _, backend, keep_final = inputs
    history = outputs[0] if torch.finfo(tensors[0].dtype).bits >= 32 else None
    ctx.save_for_backward(history, *tensors, cu_seqlens)
    ctx.backend, ctx.keep_final = backend, keep_final


def _backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None) -> tuple[Any, ...]:
    history, *tensors, cu_seqlens = ctx.saved_tensors
    grad_final = grad_final if ctx.keep_final else None
    grads = inter_chunk_backward(grad_o, grad_final, history, *tensors, cu_seqlens, ctx.backend)
    return tuple(None if x is None else grad for x, grad in zip(tensors, grads, strict=True))


_op = define("inter_chunk_forward", _forward, _forward_fake)
inter_chunk_forward = differentiable(_op, lambda *_: None, _backward, 5, _save)
