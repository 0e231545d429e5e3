"""intra_chunk: the outputs of a chunkwise kernel, given the state that enters each chunk."""

from typing import Any, get_args

import torch
from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.chunk.intra.call import Activation, IntraChunkCall
from holdfast.kernels.chunk.intra.hopper.backend import HopperIntraChunk
from holdfast.kernels.chunk.intra.torch.backend import ChunkedIntraChunk
from holdfast.kernels.chunk.intra.triton.backend import TritonIntraChunk
from holdfast.kernels.select import resolve
from holdfast.planner import Direction, Plan, Problem
from holdfast.recurrences.definition import Argument
from holdfast.recurrences.scalars import number

from .autocast import without_autocast
from .check import check_arguments, is_dense, name_of, needs_grad
from .registration import define, differentiable

BACKENDS = (HopperIntraChunk(), TritonIntraChunk(), ChunkedIntraChunk())

ARGUMENTS = {
    "q": Argument("queries", "B T Hq K"),
    "k": Argument("keys", "B T Hq K"),
    "v": Argument("values", "B T H V"),
    "g": Argument("natural-log decay, at most 0", "B T H", "float", required=False),
    "states": Argument("state that enters each chunk", "B chunks H K V", "float", required=False),
    "gate": Argument("output gate before its activation", "B T H V", required=False),
}


def intra_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    states: Tensor | None = None,
    gate: Tensor | None = None,
    chunk_size: int = 64,
    scale: float | None = None,
    gate_activation: Activation = "silu",
    backend: str | None = None,
) -> Tensor:
    """The outputs of all steps, given the state S that enters each chunk. For step t of a chunk that begins at c:

        o_t = scale (sum over s = c .. t of exp(g_{s+1} + .. + g_t) (q_t . k_s) v_s + exp(g_c + .. + g_t) S^T q_t)

    times activation(gate_t) where there is a gate. It is the half of a chunkwise kernel that runs in parallel over
    time; `inter_chunk_scan` is the other.

    Source: Yang et al. 2024, Gated Linear Attention Transformers (arXiv:2312.06635), section 4, with one decay a head.

    Args:
        q, k: queries and keys [B, T, Hq, K]; query head j serves value heads j H / Hq to (j + 1) H / Hq - 1.
        v: values [B, T, H, V], of q's dtype.
        g: natural-log decay, at most 0, [B, T, H], any floating dtype; None for no decay.
        states: [B, G, H, K, V] with G = T / chunk_size rounded up, any floating dtype; None where all are zero.
        gate: output gate before its activation, [B, T, H, V], of q's dtype.
        chunk_size: steps a chunk; the last chunk may be shorter.
        scale: factor on the output; K ** -0.5 by default.
        gate_activation: "silu" or "sigmoid".
        backend: forces a backend by name; by default the first that can serve the call.

    Returns:
        o [B, T, H, V] in v's dtype.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message; for a
            chunk_size below 1 or an unknown gate_activation; for a backend that is unknown or cannot serve the call.
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size: expected an integer; got {type(chunk_size).__name__}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1; got {chunk_size}")
    if gate_activation not in get_args(Activation):
        raise ValueError(f"gate_activation: expected 'silu' or 'sigmoid'; got {gate_activation!r}")
    has_length = is_dense(q) and q.dim() == 4
    sizes = {"chunks": -(-q.shape[1] // chunk_size)} if has_length else {}
    given = {"q": q, "k": k, "v": v, "g": g, "states": states, "gate": gate}
    tensors = check_arguments(ARGUMENTS, None, given, sizes)
    scale = tensors["k"].shape[3] ** -0.5 if scale is None else number("scale", scale)
    call = IntraChunkCall(**tensors, scale=scale, chunk_size=chunk_size, gate_activation=gate_activation)
    return intra_chunk_forward(*call, needs_grad(*tensors.values()), name_of(backend))


def problem(call: IntraChunkCall, grad: bool) -> Problem:
    """What planning needs to know of a call: sizes B, T, H, Hq, K, V of q, k [B, T, Hq, K] and v [B, T, H, V].

    And the chunk's, C, v's dtype and traits. grad: whether a backward pass may follow. Reads no values and raises
    nothing for a call that was checked.
    """
    batch, length, heads, width = call.v.shape
    sizes = {"B": batch, "T": length, "H": heads, "Hq": call.q.shape[2], "K": call.k.shape[3], "V": width}
    sizes["C"] = call.chunk_size
    traits = {
        "decay=scalar": call.g is not None,
        "states": call.states is not None,
        "mixed_states": call.states is not None and call.states.dtype != call.v.dtype,
        f"gate={call.gate_activation}": call.gate is not None,
        "needs_grad": grad,
    }
    return Problem.of("intra_chunk", "matrix", call.v.dtype, sizes, traits)


def _select(call: IntraChunkCall, grad: bool, direction: Direction, backend: str) -> tuple[Any, Plan]:
    what, device = problem(call, grad), describe(call.v.device)
    return resolve(BACKENDS, what, device, backend, direction)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    states: Tensor | None,
    gate: Tensor | None,
    scale: float,
    chunk_size: int,
    gate_activation: str,
    grad: bool,
    backend: str,
) -> Tensor:
    """IntraChunkCall -> o [B, T, H, V] in v's dtype."""
    call = IntraChunkCall(q, k, v, g, states, gate, scale, chunk_size, gate_activation)
    chosen, plan = _select(call, grad, "forward", backend)
    with without_autocast(v):
        return chosen.forward(plan, call).contiguous()


def _forward_fake(q, k, v, g, states, gate, scale, chunk_size, gate_activation, grad, backend):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def _gradients(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    states: Tensor | None,
    gate: Tensor | None,
    scale: float,
    chunk_size: int,
    gate_activation: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, states and gate; an empty tensor for one that was not given."""
    call = IntraChunkCall(q, k, v, g, states, gate, scale, chunk_size, gate_activation)
    chosen, plan = _select(call, True, "backward", backend)
    with without_autocast(v):
        grads = chosen.backward(plan, call, grad_o)
    return tuple(v.new_empty(0) if grad is None else grad.contiguous() for grad in grads)


def _gradients_fake(grad_o, q, k, v, g, states, gate, scale, chunk_size, gate_activation, backend):
    empty = [
        v.new_empty(0) if given is None else torch.empty_like(given, memory_format=torch.contiguous_format)
        for given in (q, k, v, g, states, gate)
    ]
    return tuple(empty)


intra_chunk_backward = define("intra_chunk_backward", _gradients, _gradients_fake)


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.rest = *inputs[6:9], inputs[10]


def _backward(ctx: Any, grad_o: Tensor | None) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    # None is 0
    grad_o = torch.zeros_like(tensors[2]) if grad_o is None else grad_o
    grads = intra_chunk_backward(grad_o, *tensors, *ctx.rest)
    return tuple(None if x is None else grad for x, grad in zip(tensors, grads, strict=True))


_op = define("intra_chunk_forward", _forward, _forward_fake)
intra_chunk_forward = differentiable(_op, _save, _backward, 6)
