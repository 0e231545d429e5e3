"""A delta rule with what stands around it in a layer, from the layer's projection to the input of its last one.

One custom op a pass: kernels read the projection where it lies, and each writes its part of the projection's gradient
into one tensor, which autograd would otherwise gather by copies and sums.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.conv.call import ConvCall
from holdfast.kernels.norm.call import GatedNormCall
from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.kernels.varlen import sequence_count
from holdfast.recurrences.definition import MatrixCall
from holdfast.recurrences.oracle_matrix import compute_dtype

from . import matrix
from .autocast import without_autocast
from .causal_conv1d import select as select_conv
from .check import name_of, needs_grad
from .delta_inputs import gate_gradients, gates
from .gated_rms_norm import select as select_norm
from .registration import define, differentiable


def delta_layer(
    packed: Tensor,
    conv_weight: Tensor,
    norm_weight: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    tail: Tensor | None,
    query_heads: int,
    key_dim: int,
    allow_neg_eigval: bool,
    eps: float,
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `nn.GatedDeltaNet` and, without A_log, `nn.DeltaNet` are between their projections:

        q, k, v = silu(conv(qkv));  o = gated_delta_rule(q / |q|, k / |k|, v, g, sigmoid(b));  y = rmsnorm(o) silu(gate)

    with g = -exp(A_log) softplus(a + dt_bias). The same as `causal_conv1d`, `gated_delta_rule` with its options and
    `gated_rms_norm`, but for a rounding: q and k are normalised before they are rounded. Arguments are not checked.

    Args:
        packed: the projection [B, T, P], channels side by side: q, k [Hq * K each], v [H * V], with A_log gate [H * V]
            and a [H], b [H], and any number that nothing reads.
        conv_weight: [D, W], D = 2 Hq K + H V. norm_weight: [V]. A_log, dt_bias: [H], or None.
        initial_state: [N, H, K, V]; tail: the convolution's last inputs [N, W - 1, D]; float32 or wider, None for 0.
        query_heads, key_dim: Hq and K. allow_neg_eigval: doubles sigmoid(b). eps: of the norm.
        cu_seqlens: int32 or int64 [N + 1], or None. backend: of the delta rule.

    Returns:
        y [B, T, H * V] in packed's dtype, the state and the tail to continue from.
    """
    tensors = (packed, conv_weight, norm_weight, A_log, dt_bias, initial_state, tail)
    rest = (query_heads, key_dim, allow_neg_eigval, eps, cu_seqlens, needs_grad(*tensors), name_of(backend))
    return _differentiable(*tensors, *rest)[:3]


def conv_call(x: Tensor, weight: Tensor, tail: Tensor | None, query_heads: int, key_dim: int) -> ConvCall:
    """The short convolution of q, k and v [B, T, D], after which q and k have length 1."""
    return ConvCall(x, weight, None, tail, "silu", 2 * query_heads, key_dim)


def rule_call(
    qkv: Tensor,
    g: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    query_heads: int,
    key_dim: int,
    value_dim: int,
) -> MatrixCall:
    """The delta rule of q, k and v side by side [B, T, D], with a scale of key_dim^-0.5."""
    keys = query_heads * key_dim
    q, k, v = qkv.split([keys, keys, qkv.shape[2] - 2 * keys], -1)
    q, k = (x.unflatten(-1, (query_heads, key_dim)) for x in (q, k))
    v = v.unflatten(-1, (-1, value_dim))
    return MatrixCall(q, k, v, g, beta, initial_state=initial_state, scale=key_dim**-0.5, delta=True)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Sizes of a layer, and the views and calls that follow from them."""

    query_heads: int
    heads: int
    key_dim: int
    value_dim: int
    is_gated: bool

    @staticmethod
    def of(conv_weight: Tensor, norm_weight: Tensor, A_log: Tensor | None, query_heads: int, key_dim: int) -> "_Layer":
        value_dim = norm_weight.shape[0]
        heads = (conv_weight.shape[0] - 2 * query_heads * key_dim) // value_dim
        return _Layer(query_heads, heads, key_dim, value_dim, A_log is not None)

    @property
    def op(self) -> str:
        return "gated_delta_rule" if self.is_gated else "delta_rule"

    def parts(self, packed: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """The convolution's inputs [B, T, D], output gate [B, T, H, V], a [B, T, H], and b with all behind it."""
        values = self.heads * self.value_dim
        taken = 2 * self.query_heads * self.key_dim + values
        qkv, rest = packed[..., :taken], packed[..., taken:]
        if not self.is_gated:
            return qkv, None, None, rest
        gate = rest[..., :values].unflatten(-1, (self.heads, self.value_dim))
        return qkv, gate, rest[..., values : values + self.heads], rest[..., values + self.heads :]

    def conv(self, x: Tensor, weight: Tensor, tail: Tensor | None) -> ConvCall:
        return conv_call(x, weight, tail, self.query_heads, self.key_dim)

    def rule(self, qkv: Tensor, g: Tensor | None, beta: Tensor, initial_state: Tensor | None) -> MatrixCall:
        return rule_call(qkv, g, beta, initial_state, self.query_heads, self.key_dim, self.value_dim)


def _forward(
    packed: Tensor,
    conv_weight: Tensor,
    norm_weight: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    tail: Tensor | None,
    query_heads: int,
    key_dim: int,
    allow_neg_eigval: bool,
    eps: float,
    cu_seqlens: Tensor | None,
    grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, state and tail; and for the backward pass q, k, v side by side, log decay ([0] without), strength, o, and what
    the recurrence keeps."""
    layer = _Layer.of(conv_weight, norm_weight, A_log, query_heads, key_dim)
    x, gate, a, b = layer.parts(packed)
    with without_autocast(packed):
        conv = layer.conv(x, conv_weight, tail)
        chosen, plan = select_conv(conv, cu_seqlens, grad, "forward", "")
        qkv, last = chosen.forward(plan, conv, cu_seqlens, True)
        g, beta = gates(a, b[..., : layer.heads], A_log, dt_bias, allow_neg_eigval)
        rule = layer.rule(qkv, g, beta, initial_state)
        o, final, kept = matrix.matrix_forward(*rule, cu_seqlens, layer.op, grad, backend)
        norm = GatedNormCall(o, gate, norm_weight, eps)
        chosen, plan = select_norm(norm, grad, "forward", "")
        y = chosen.forward(plan, norm)
    return y.flatten(2), final, last.contiguous(), qkv, qkv.new_empty(0) if g is None else g, beta, o, kept


def _forward_fake(
    packed, conv_weight, norm_weight, A_log, dt_bias, initial_state, tail, query_heads, key_dim, allow_neg_eigval, eps,
    cu_seqlens, grad, backend,
):  # fmt: skip
    layer = _Layer.of(conv_weight, norm_weight, A_log, query_heads, key_dim)
    (batch, length, _), (channels, width) = packed.shape, conv_weight.shape
    sequences = sequence_count(packed, cu_seqlens)
    wide, heads, values = compute_dtype(packed.dtype), layer.heads, layer.value_dim
    beta = packed.new_empty(batch, length, heads, dtype=wide)
    qkv, g = packed.new_empty(batch, length, channels), None if A_log is None else torch.empty_like(beta)
    rule = layer.rule(qkv, g, beta, initial_state)
    o, _, kept = matrix.fake_of(rule, cu_seqlens, layer.op, grad, backend)
    return (
        packed.new_empty(batch, length, heads * values),
        packed.new_empty(sequences, heads, key_dim, values, dtype=wide),
        packed.new_empty(sequences, width - 1, channels, dtype=wide),
        qkv,
        packed.new_empty(0) if g is None else g,
        beta,
        o,
        kept,
    )


def _gradients(
    grad_y: Tensor | None,
    grad_final: Tensor | None,
    grad_last: Tensor | None,
    packed: Tensor,
    conv_weight: Tensor,
    norm_weight: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    tail: Tensor | None,
    qkv: Tensor,
    g: Tensor | None,
    beta: Tensor,
    o: Tensor,
    kept: Tensor,
    query_heads: int,
    key_dim: int,
    allow_neg_eigval: bool,
    eps: float,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of the first seven of `_forward`'s arguments; an empty tensor for one that was not given."""
    layer = _Layer.of(conv_weight, norm_weight, A_log, query_heads, key_dim)
    dpacked = torch.empty_like(packed, memory_format=torch.contiguous_format)
    (x, gate, a, b), (dx, dgate, da, db) = layer.parts(packed), layer.parts(dpacked)
    with without_autocast(packed):
        norm = GatedNormCall(o, gate, norm_weight, eps)
        chosen, plan = select_norm(norm, True, "backward", "")
        dy = torch.zeros_like(o) if grad_y is None else grad_y.unflatten(-1, o.shape[2:])
        do, _, dnorm = chosen.backward(plan, norm, dy, dgate)
        rule = layer.rule(qkv, g, beta, initial_state)
        *dqkv, dg, dbeta, _, dstate, _ = matrix.matrix_backward(
            do, grad_final, *rule, cu_seqlens, layer.op, backend, o, kept
        )
        drate, dbias = gate_gradients(a, b[..., : layer.heads], A_log, dt_bias, allow_neg_eigval, (dg, dbeta), (da, db))
        conv = layer.conv(x, conv_weight, tail)
        chosen, plan = select_conv(conv, cu_seqlens, True, "backward", "")
        _, dweight, _, dtail = chosen.backward(plan, conv, cu_seqlens, tuple(dqkv), grad_last, dx)
    found = (dpacked, dweight, dnorm, drate, dbias, None if initial_state is None else dstate, dtail)
    return tuple(packed.new_empty(0) if x is None else x.contiguous() for x in found)


def _gradients_fake(
    grad_y, grad_final, grad_last, packed, conv_weight, norm_weight, A_log, dt_bias, initial_state, tail, qkv, g, beta,
    o, kept, query_heads, key_dim, allow_neg_eigval, eps, cu_seqlens, backend,
):  # fmt: skip
    return tuple(
        packed.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (packed, conv_weight, norm_weight, A_log, dt_bias, initial_state, tail)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    *_, qkv, g, beta, o, kept = outputs
    ctx.mark_non_differentiable(qkv, g, beta, o, kept)
    ctx.save_for_backward(*inputs[:7], inputs[11], qkv, None if inputs[3] is None else g, beta, o, kept)
    ctx.rest = inputs[7:11], inputs[13]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    tensors, cu_seqlens, kept = saved[:7], saved[7], saved[8:]
    sizes, backend = ctx.rest
    found = delta_layer_backward(*grads[:3], *tensors, *kept, *sizes, cu_seqlens, backend)
    return tuple(None if x is None else grad for x, grad in zip(tensors, found, strict=True))


# replayed where they are called, which spares the dispatcher too, and beneath it, where compiled graphs call them
delta_layer_backward = replayed_below(define("delta_layer_backward", replayed_below(_gradients), _gradients_fake))
_op = define("delta_layer_forward", replayed_below(_forward), _forward_fake)
_differentiable = differentiable(_op, lambda *_: None, _backward, 7, _save, replayed_below(_op))
