"""Retention with what stands around it in a layer, from the layer's projection to the input of its last one.

One custom op a pass: kernels read the projection where it lies, and each writes its part of the projection's gradient
into one tensor, which autograd would otherwise gather by copies.
"""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.matrix.variants import GradRoom
from holdfast.kernels.norm.call import GatedNormCall
from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.kernels.varlen import sequence_count
from holdfast.recurrences.oracle_matrix import compute_dtype
from holdfast.recurrences.retnet import log_decay
from holdfast.recurrences.simple_gla import map_call

from . import matrix
from .autocast import without_autocast
from .check import name_of, needs_grad
from .gated_rms_norm import select as select_norm
from .registration import define, differentiable
from .rotary import turn_back, turned


def retention_layer(
    packed: Tensor,
    norm_weight: Tensor,
    initial_state: Tensor | None,
    position: Tensor | None,
    heads: int,
    base: float,
    eps: float,
    cu_seqlens: Tensor | None,
    backend: str | None,
    first_head: int,
) -> tuple[Tensor, Tensor]:
    """What `nn.RetNet` is between its projections:

        o = retnet(rotate(q), rotate(k), v);  y = rmsnorm(o) silu(gate)

    The same as `rotary`, `retnet` and `gated_rms_norm`. Arguments are not checked.

    Args:
        packed: the projection [B, T, P], channels side by side: q, k [H * K each], v, gate [H * V each].
        norm_weight: [V]. initial_state: [N, H, K, V] in float32 or wider, None for 0.
        position: as in `rotary`. heads: H. base: of the rotation. eps: of the norm.
        cu_seqlens: int32 or int64 [N + 1], or None. backend: of `retnet`.
        first_head: the number of the first of these heads, by which they decay.

    Returns:
        y [B, T, H * V] in packed's dtype, and the state to continue from.
    """
    tensors = (packed, norm_weight, initial_state)
    rest = (position, heads, float(base), eps, cu_seqlens, needs_grad(*tensors), name_of(backend), first_head)
    return _differentiable(*tensors, *rest)[:2]


def _parts(packed: Tensor, norm_weight: Tensor, heads: int) -> tuple[Tensor, ...]:
    """q, k [B, T, H, K], v, gate [B, T, H, V]."""
    values = heads * norm_weight.shape[0]
    keys = packed.shape[2] // 2 - values
    return tuple(x.unflatten(-1, (heads, -1)) for x in packed.split([keys, keys, values, values], -1))


def _forward(
    packed: Tensor,
    norm_weight: Tensor,
    initial_state: Tensor | None,
    position: Tensor | None,
    heads: int,
    base: float,
    eps: float,
    cu_seqlens: Tensor | None,
    grad: bool,
    backend: str,
    first_head: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y and the state; and for the backward pass q and k, turned, the heads' log decay [H], and o."""
    q, k, v, gate = _parts(packed, norm_weight, heads)
    with without_autocast(packed):
        q, k = turned(q, k, position, base)
        g = log_decay(v, first_head)
        call, _ = map_call(q, k, v, g, initial_state)
        o, final, _ = matrix.matrix_forward(*call, cu_seqlens, "retnet", grad, backend)
        norm = GatedNormCall(o, gate, norm_weight, eps)
        chosen, plan = select_norm(norm, grad, "forward", "")
        y = chosen.forward(plan, norm)
    return y.flatten(2), final, q, k, g, o


def _forward_fake(
    packed, norm_weight, initial_state, position, heads, base, eps, cu_seqlens, grad, backend, first_head
):
    batch, length, width = packed.shape
    values = norm_weight.shape[0]
    keys = width // 2 // heads - values
    sequences = sequence_count(packed, cu_seqlens)
    return (
        packed.new_empty(batch, length, heads * values),
        packed.new_empty(sequences, heads, keys, values, dtype=compute_dtype(packed.dtype)),
        *(packed.new_empty(batch, length, heads, keys) for _ in range(2)),
        packed.new_empty(heads, dtype=compute_dtype(packed.dtype)),
        packed.new_empty(batch, length, heads, values),
    )


def _gradients(
    grad_y: Tensor | None,
    grad_final: Tensor | None,
    packed: Tensor,
    norm_weight: Tensor,
    initial_state: Tensor | None,
    position: Tensor | None,
    q: Tensor,
    k: Tensor,
    g: Tensor,
    o: Tensor,
    base: float,
    eps: float,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of packed, norm_weight and initial_state, empty for one that was not given. q, k, g, o: of `_forward`."""
    dpacked = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    heads = o.shape[2]
    (_, _, v, gate), (dq, dk, dv, dgate) = (_parts(x, norm_weight, heads) for x in (packed, dpacked))
    with without_autocast(packed):
        norm = GatedNormCall(o, gate, norm_weight, eps)
        chosen, plan = select_norm(norm, True, "backward", "")
        dy = torch.zeros_like(o) if grad_y is None else grad_y.unflatten(-1, o.shape[2:])
        do, _, dnorm = chosen.backward(plan, norm, dy, dgate)
        call, _ = map_call(q, k, v, g, initial_state)
        room, grads = GradRoom(v=dv), (do, grad_final)
        dy, dz, *_, dstate = matrix.write_gradients(room, call, cu_seqlens, "retnet", backend, grads)
        turn_back(dy, dz, position, base, (dq, dk))
    return dpacked, dnorm.contiguous(), packed.new_empty(0) if initial_state is None else dstate


def _gradients_fake(
    grad_y, grad_final, packed, norm_weight, initial_state, position, q, k, g, o, base, eps, cu_seqlens, backend
):
    return tuple(
        packed.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (packed, norm_weight, initial_state)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*outputs[2:])
    ctx.save_for_backward(*inputs[:4], inputs[7], *outputs[2:])
    ctx.rest = *inputs[5:7], inputs[9]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    *tensors, cu_seqlens, q, k, g, o = ctx.saved_tensors
    base, eps, backend = ctx.rest
    found = retention_layer_backward(*grads[:2], *tensors, q, k, g, o, base, eps, cu_seqlens, backend)
    return tuple(None if x is None else grad for x, grad in zip(tensors[:3], found, strict=True))


# replayed where they are called, which spares the dispatcher too, and beneath it, where compiled graphs call them
retention_layer_backward = replayed_below(
    define("retention_layer_backward", replayed_below(_gradients), _gradients_fake)
)
_op = define("retention_layer_forward", replayed_below(_forward), _forward_fake)
_differentiable = differentiable(_op, lambda *_: None, _backward, 3, _save, replayed_below(_op))
