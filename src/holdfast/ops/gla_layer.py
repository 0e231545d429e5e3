"""GLA's layer between its first and its last projection as one custom op: gate, recurrence and gated norm.

It reads the parts of the first projection where they lie, and their gradients are written into one tensor like it.
"""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.log_gate.torch.backend import PyTorchLogGate
from holdfast.kernels.log_gate.triton.backend import WIDEST, TritonLogGate
from holdfast.kernels.matrix.variants import GradRoom
from holdfast.kernels.norm.call import GatedNormCall
from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.recurrences.definition import MatrixCall

from .autocast import without_autocast
from .check import name_of, needs_grad
from .gated_rms_norm import gated_norm_forward, select
from .matrix import matrix_forward, write_gradients
from .mlstm_gates import can_fuse
from .registration import define, differentiable

_TENSORS = 5


def gla_layer(
    packed: Tensor,
    decay_weight: Tensor,
    decay_bias: Tensor,
    norm_weight: Tensor,
    initial_state: Tensor | None,
    heads: int,
    normalizer: float,
    eps: float,
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """What `nn.GLA` is between its projections:

        g = logsigmoid(W down + b) / normalizer;  y = rmsnorm(gla(q, k, v, g)) silu(gate)

    The same as `gla` and `gated_rms_norm` around PyTorch's operations, but that the bias is added in float32. Arguments
    are not checked.

    Args:
        packed: the projection [B, T, P], channels side by side: q, k [H K each], v, gate [H V each], down [R], and any
            number that nothing reads.
        decay_weight, decay_bias: W [H K, R] and b [H K]. norm_weight: [V].
        initial_state: [N, H, K, V] in float32 or wider, or None for 0.
        heads: H. normalizer: positive. eps: of the norm.
        cu_seqlens: int32 or int64 [N + 1], or None. backend: of `gla`.

    Returns:
        y [B, T, H V] in packed's dtype, and the state to continue from.
    """
    tensors = (packed, decay_weight, decay_bias, norm_weight, initial_state)
    rest = (heads, normalizer, eps, cu_seqlens, needs_grad(*tensors), name_of(backend))
    return _layer(*tensors, *rest)[:2]


def _parts(packed: Tensor, decay_weight: Tensor, norm_weight: Tensor, heads: int) -> list[Tensor]:
    """q, k [B, T, H, K], v, gate [B, T, H, V], down [B, T, R], and what nothing reads."""
    keys, rank = decay_weight.shape
    values = heads * norm_weight.shape[0]
    unused = packed.shape[2] - 2 * (keys + values) - rank
    *parts, down, rest = packed.split((keys, keys, values, values, rank, unused), -1)
    return [*(part.unflatten(-1, (heads, -1)) for part in parts), down, rest]


def _call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor | None) -> MatrixCall:
    return MatrixCall(q, k, v, g, initial_state=initial_state, scale=k.shape[3] ** -0.5)


def _gate_of(x: Tensor) -> TritonLogGate | PyTorchLogGate:
    return TritonLogGate() if can_fuse(x, x, torch.float32) and x.shape[2] <= WIDEST else PyTorchLogGate()


def _forward(
    packed: Tensor,
    decay_weight: Tensor,
    decay_bias: Tensor,
    norm_weight: Tensor,
    initial_state: Tensor | None,
    heads: int,
    normalizer: float,
    eps: float,
    cu_seqlens: Tensor | None,
    grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y and the state; and for the backward pass the decay before its bias, g, o and what the recurrence keeps."""
    q, k, v, gate, down, _ = _parts(packed, decay_weight, norm_weight, heads)
    with without_autocast(packed):
        decay = torch.matmul(down, decay_weight.to(packed.dtype).mT)
        g = _gate_of(decay).forward(decay, decay_bias, normalizer)
        call = _call(q, k, v, g.unflatten(-1, (heads, -1)), initial_state)
        o, final, kept = matrix_forward(*call, cu_seqlens, "gla", grad, backend)
        y = gated_norm_forward(o, gate, norm_weight, eps, "silu", False, grad, "")
    if not grad:
        decay, g, o = (x.new_empty(0) for x in (decay, g, o))
    return y.flatten(-2), final, decay, g, o, kept


def _forward_fake(
    packed, decay_weight, decay_bias, norm_weight, initial_state, heads, normalizer, eps, cu_seqlens, grad, backend
):  # fmt: skip
    q, k, v, *_ = _parts(packed, decay_weight, norm_weight, heads)
    batch, length, _ = packed.shape
    decay = packed.new_empty(batch, length, decay_weight.shape[0])
    g = torch.empty_like(decay, dtype=torch.promote_types(packed.dtype, torch.float32))
    call = _call(q, k, v, g.unflatten(-1, (heads, -1)), initial_state)
    o, final, kept = matrix_forward(*call, cu_seqlens, "gla", grad, backend)
    y = packed.new_empty(batch, length, v.shape[2] * v.shape[3])
    if not grad:
        decay, g, o = (x.new_empty(0) for x in (decay, g, o))
    return y, final, decay, g, o, kept


def _gradients(
    dy: Tensor | None,
    dfinal: Tensor | None,
    decay: Tensor,
    g: Tensor,
    o: Tensor,
    kept: Tensor,
    packed: Tensor,
    decay_weight: Tensor,
    decay_bias: Tensor,
    norm_weight: Tensor,
    initial_state: Tensor | None,
    heads: int,
    normalizer: float,
    eps: float,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of the five tensors from packed on; an empty tensor for one that was not given."""
    dpacked = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    q, k, v, gate, down, _ = _parts(packed, decay_weight, norm_weight, heads)
    *into, dgate, ddown, unused = _parts(dpacked, decay_weight, norm_weight, heads)
    with without_autocast(packed):
        dy = torch.zeros_like(o) if dy is None else dy.unflatten(-1, o.shape[2:])
        norm = GatedNormCall(o, gate, norm_weight, eps)
        chosen, plan = select(norm, True, "backward", "")
        do, _, dnorm = chosen.backward(plan, norm, dy, dgate)
        call = _call(q, k, v, g.unflatten(-1, (heads, -1)), initial_state)
        room, grads = GradRoom(*into), (do, dfinal)
        *_, dg, _, _, dstate = write_gradients(room, call, cu_seqlens, "gla", backend, grads, (o, kept))
        ddecay, dbias = _gate_of(decay).backward(decay, decay_bias, normalizer, dg.flatten(-2))
        torch.mm(ddecay.flatten(0, 1), decay_weight.to(packed.dtype), out=ddown.flatten(0, 1))
        if unused.shape[-1]:
            unused.zero_()
        dweight = torch.matmul(ddecay.flatten(0, 1).mT, down.flatten(0, 1)).to(decay_weight.dtype)
    return dpacked, dweight, dbias, dnorm, packed.new_empty(0) if initial_state is None else dstate


def _gradients_fake(
    dy, dfinal, decay, g, o, kept, packed, decay_weight, decay_bias, norm_weight, initial_state, heads, normalizer, eps,
    cu_seqlens, backend,
):  # fmt: skip
    given = (packed, decay_weight, decay_bias, norm_weight, initial_state)
    return tuple(packed.new_empty(0) if x is None else x.new_empty(x.shape) for x in given)


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    kept = outputs[2:]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*inputs[:_TENSORS], inputs[8], *kept)
    ctx.rest = inputs[5:8], inputs[10]


def _backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, *_: None) -> tuple[Any, ...]:
    # once: activation checkpointing refuses to unpack them again
    saved = ctx.saved_tensors
    tensors, cu_seqlens, kept = saved[:_TENSORS], saved[_TENSORS], saved[_TENSORS + 1 :]
    numbers, backend = ctx.rest
    grads = _layer_backward(dy, dfinal, *kept, *tensors, *numbers, cu_seqlens, backend)
    return tuple(None if x is None else grad for x, grad in zip(tensors, grads, strict=True))


# replayed where they are called, which spares the dispatcher too, and beneath it, where compiled graphs call them
_layer_backward = replayed_below(define("gla_layer_backward", replayed_below(_gradients), _gradients_fake))
_op = define("gla_layer_forward", replayed_below(_forward), _forward_fake)
_layer = differentiable(_op, lambda *_: None, _backward, _TENSORS, _save, replayed_below(_op))
