"""Kimi Delta Attention with what stands around it in a layer, as `delta_layer.py` has Gated DeltaNet: one op a pass."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.norm.call import GatedNormCall
from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.kernels.varlen import sequence_count
from holdfast.recurrences.oracle_matrix import compute_dtype

from . import matrix
from .autocast import without_autocast
from .causal_conv1d import select as select_conv
from .check import name_of, needs_grad
from .delta_inputs import gate_gradients, gates
from .delta_layer import conv_call, rule_call
from .gated_rms_norm import select as select_norm
from .kda_gate import decay_gate, decay_gate_gradients
from .registration import define, differentiable

# tensors that have a gradient: packed to tail
_TENSORS = 10


def kda_layer(
    packed: Tensor,
    conv_weight: Tensor,
    norm_weight: Tensor,
    decay_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    tail: Tensor | None,
    query_heads: int,
    key_dim: int,
    lower_bound: float | None,
    allow_neg_eigval: bool,
    eps: float,
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `nn.KDA` is between its projections:

        q, k, v = silu(conv(qkv));  o = kda(q / |q|, k / |k|, v, F f, sigmoid(b), A_log, dt_bias, lower_bound)
        y = rmsnorm(o) sigmoid(G z + c)

    The same as `causal_conv1d`, `kda` with its options and `gated_rms_norm`, but for a rounding: q and k are normalised
    before they are rounded. Arguments are not checked.

    Args:
        packed: the projection [B, T, P], channels side by side: q, k [Hq * K each], v [H * V], f and z [V each], b [H],
            and any number that nothing reads.
        conv_weight: [D, W], D = 2 Hq K + H V. norm_weight: [V]. decay_weight, F: [H * K, V]. gate_weight, gate_bias, G
            and c: [H * V, V] and [H * V]. A_log: [H]. dt_bias: [H, K].
        initial_state: [N, H, K, V]; tail: the convolution's last inputs [N, W - 1, D]; float32 or wider, None for 0.
        query_heads, key_dim: Hq and K. lower_bound: below 0, or None. allow_neg_eigval: doubles sigmoid(b). eps: of the
            norm. cu_seqlens: int32 or int64 [N + 1], or None. backend: of kda.

    Returns:
        y [B, T, H * V] in packed's dtype, the state and the tail to continue from.
    """
    tensors = (
        packed, conv_weight, norm_weight, decay_weight, gate_weight, gate_bias, A_log, dt_bias, initial_state, tail
    )  # fmt: skip
    rest = (query_heads, key_dim, lower_bound, allow_neg_eigval, eps, cu_seqlens)
    return _differentiable(*tensors, *rest, needs_grad(*tensors), name_of(backend))[:3]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of a layer: Hq, H, K and V."""

    query_heads: int
    heads: int
    key_dim: int
    value_dim: int

    def parts(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The convolution's inputs [B, T, D], f and z [B, T, V], and b with all behind it."""
        taken = 2 * self.query_heads * self.key_dim + self.heads * self.value_dim
        unused = packed.shape[2] - taken - 2 * self.value_dim
        return packed.split((taken, self.value_dim, self.value_dim, unused), -1)

    def by_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))


def _forward(
    packed: Tensor,
    conv_weight: Tensor,
    norm_weight: Tensor,
    decay_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    tail: Tensor | None,
    query_heads: int,
    key_dim: int,
    lower_bound: float | None,
    allow_neg_eigval: bool,
    eps: float,
    cu_seqlens: Tensor | None,
    grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, state and tail; and for the backward pass q, k, v side by side, what the decay's and the output's gate take,
    log decay, strength, o, and what the recurrence keeps."""
    sizes = _Sizes(query_heads, A_log.shape[0], key_dim, norm_weight.shape[0])
    x, f, z, b = sizes.parts(packed)
    with without_autocast(packed):
        conv = conv_call(x, conv_weight, tail, query_heads, key_dim)
        chosen, plan = select_conv(conv, cu_seqlens, grad, "forward", "")
        qkv, last = chosen.forward(plan, conv, cu_seqlens, True)
        decay = sizes.by_heads(torch.matmul(f, decay_weight.to(packed.dtype).mT))
        gate = torch.nn.functional.linear(z, gate_weight.to(packed.dtype), gate_bias.to(packed.dtype))
        g = decay_gate(decay, A_log, dt_bias, lower_bound)
        _, beta = gates(None, b[..., : sizes.heads], None, None, allow_neg_eigval)
        rule = rule_call(qkv, g, beta, initial_state, query_heads, key_dim, sizes.value_dim)
        o, final, kept = matrix.matrix_forward(*rule, cu_seqlens, "kda", grad, backend)
        norm = GatedNormCall(o, sizes.by_heads(gate), norm_weight, eps, "sigmoid")
        chosen, plan = select_norm(norm, grad, "forward", "")
        y = chosen.forward(plan, norm)
    return y.flatten(2), final, last.contiguous(), qkv, decay, gate, g, beta, o, kept


def _forward_fake(
    packed, conv_weight, norm_weight, decay_weight, gate_weight, gate_bias, A_log, dt_bias, initial_state, tail,
    query_heads, key_dim, lower_bound, allow_neg_eigval, eps, cu_seqlens, grad, backend,
):  # fmt: skip
    (batch, length, _), (channels, width) = packed.shape, conv_weight.shape
    heads, values, wide = A_log.shape[0], norm_weight.shape[0], compute_dtype(packed.dtype)
    qkv, gate = (packed.new_empty(batch, length, n) for n in (channels, heads * values))
    decay, beta = packed.new_empty(batch, length, heads, key_dim), packed.new_empty(batch, length, heads, dtype=wide)
    g = torch.empty_like(decay, dtype=wide)
    rule = rule_call(qkv, g, beta, initial_state, query_heads, key_dim, values)
    o, final, kept = matrix.fake_of(rule, cu_seqlens, "kda", grad, backend)
    last = packed.new_empty(sequence_count(packed, cu_seqlens), width - 1, channels, dtype=wide)
    return packed.new_empty(batch, length, heads * values), final, last, qkv, decay, gate, g, beta, o, kept


def _gradients(
    grad_y: Tensor | None,
    grad_final: Tensor | None,
    grad_last: Tensor | None,
    packed: Tensor,
    conv_weight: Tensor,
    norm_weight: Tensor,
    decay_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    tail: Tensor | None,
    qkv: Tensor,
    decay: Tensor,
    gate: Tensor,
    g: Tensor,
    beta: Tensor,
    o: Tensor,
    kept: Tensor,
    query_heads: int,
    key_dim: int,
    lower_bound: float | None,
    allow_neg_eigval: bool,
    eps: float,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of the first ten of `_forward`'s arguments; an empty tensor for one that was not given."""
    sizes = _Sizes(query_heads, A_log.shape[0], key_dim, norm_weight.shape[0])
    dpacked = torch.empty_like(packed, memory_format=torch.contiguous_format)
    (x, f, z, b), (dx, df, dz, db) = sizes.parts(packed), sizes.parts(dpacked)
    with without_autocast(packed):
        norm = GatedNormCall(o, sizes.by_heads(gate), norm_weight, eps, "sigmoid")
        chosen, plan = select_norm(norm, True, "backward", "")
        dy = torch.zeros_like(o) if grad_y is None else grad_y.unflatten(-1, o.shape[2:])
        dgate = torch.empty_like(gate)
        do, _, dnorm = chosen.backward(plan, norm, dy, sizes.by_heads(dgate))
        dgate_weight = _through(dgate, gate_weight, z, dz)
        rule = rule_call(qkv, g, beta, initial_state, query_heads, key_dim, sizes.value_dim)
        *dqkv, dg, dbeta, _, dstate, _ = matrix.matrix_backward(
            do, grad_final, *rule, cu_seqlens, "kda", backend, o, kept
        )
        ddecay, drate, dbias = decay_gate_gradients(decay, A_log, dt_bias, lower_bound, dg)
        ddecay_weight = _through(ddecay.flatten(2), decay_weight, f, df)
        gate_gradients(None, b[..., : sizes.heads], None, None, allow_neg_eigval, (None, dbeta), (None, db))
        conv = conv_call(x, conv_weight, tail, query_heads, key_dim)
        chosen, plan = select_conv(conv, cu_seqlens, True, "backward", "")
        _, dweight, _, dtail = chosen.backward(plan, conv, cu_seqlens, tuple(dqkv), grad_last, dx)
        dgate_bias = dgate.sum((0, 1), dtype=compute_dtype(packed.dtype)).to(gate_bias.dtype)
    of_states = None if initial_state is None else dstate, dtail
    found = (dpacked, dweight, dnorm, ddecay_weight, dgate_weight, dgate_bias, drate, dbias, *of_states)
    return tuple(packed.new_empty(0) if x is None else x.contiguous() for x in found)


def _through(dy: Tensor, weight: Tensor, x: Tensor, dx: Tensor) -> Tensor:
    """The gradient of weight [M, R] in y = x weight^T, x [B, T, R]; x's is written to dx, part of a wider tensor."""
    dy = dy.flatten(0, 1)
    torch.mm(dy, weight.to(dy.dtype), out=dx.flatten(0, 1))
    return torch.matmul(dy.mT, x.flatten(0, 1)).to(weight.dtype)


def _gradients_fake(
    grad_y, grad_final, grad_last, packed, conv_weight, norm_weight, decay_weight, gate_weight, gate_bias, A_log,
    dt_bias, initial_state, tail, qkv, decay, gate, g, beta, o, kept, query_heads, key_dim, lower_bound,
    allow_neg_eigval, eps, cu_seqlens, backend,
):  # fmt: skip
    given = (
        packed, conv_weight, norm_weight, decay_weight, gate_weight, gate_bias, A_log, dt_bias, initial_state, tail
    )  # fmt: skip
    return tuple(
        packed.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in given
    )


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    kept = outputs[3:]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*inputs[:_TENSORS], inputs[_TENSORS + 5], *kept)
    ctx.rest = inputs[_TENSORS : _TENSORS + 5], inputs[-1]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    # once: activation checkpointing refuses to unpack them again
    saved = ctx.saved_tensors
    tensors, cu_seqlens, kept = saved[:_TENSORS], saved[_TENSORS], saved[_TENSORS + 1 :]
    numbers, backend = ctx.rest
    found = _layer_backward(*grads[:3], *tensors, *kept, *numbers, cu_seqlens, backend)
    return tuple(None if x is None else grad for x, grad in zip(tensors, found, strict=True))


# replayed where they are called, which spares the dispatcher too, and beneath it, where compiled graphs call them
_layer_backward = replayed_below(define("kda_layer_backward", replayed_below(_gradients), _gradients_fake))
_op = define("kda_layer_forward", replayed_below(_forward), _forward_fake)
_differentiable = differentiable(_op, lambda *_: None, _backward, _TENSORS, _save, replayed_below(_op))
