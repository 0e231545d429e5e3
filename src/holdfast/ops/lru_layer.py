"""A linear recurrent unit with what stands around it in a layer, from the layer's projection to the input of its last.

One custom op a pass: kernels read the projection where it lies, and each writes its part of the projection's gradient
into one tensor, which autograd would otherwise gather by copies and sums.
"""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.lru.call import Gates
from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.kernels.varlen import sequence_count

from . import diagonal
from .autocast import without_autocast
from .check import name_of, needs_grad
from .gated_gelu import branch, branch_gradient
from .lru_gates import gate_gradients, opened
from .registration import define, differentiable


def lru_layer(
    packed: Tensor,
    weight: Tensor,
    bias: Tensor,
    rate: Tensor,
    phase: Tensor | None,
    initial_state: Tensor | None,
    strength: float,
    cu_seqlens: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """What `nn.RGLRU` and, with a phase, `nn.RotLRU` are between their projections:

        gates = u W;  h = scan(lru_gates(u, gates, bias, rate, strength, phase));  y = h gelu(z)

    The same as `lru_gates`, `rglru` or `rotlru`, and `gated_gelu`. Arguments are not checked.

    Args:
        packed: the projection [B, T, 2 D], u and z side by side.
        weight: of the gates [H, D / H, S], in packed's dtype for the product. bias, rate, phase: as in `lru_gates`.
        initial_state: [N, D] in float32 or wider, None for 0.
        cu_seqlens: int32 or int64 [N + 1], or None. backend: of the scan.

    Returns:
        y [B, T, D] in packed's dtype, and the state to continue from.
    """
    tensors = (packed, weight, bias, rate, phase, initial_state)
    rest = (float(strength), cu_seqlens, needs_grad(*tensors), name_of(backend))
    return _differentiable(*tensors, *rest)[:2]


def _op_of(phase: Tensor | None) -> str:
    return "rglru" if phase is None else "rotlru"


def _by_head(x: Tensor, heads: int) -> Tensor:
    """[B, T, H * C] as [H, B * T, C], without a copy."""
    return x.flatten(0, 1).unflatten(1, (heads, -1)).transpose(0, 1)


def _gates(u: Tensor, product: Tensor, bias: Tensor, rate: Tensor, phase: Tensor | None, strength: float) -> Gates:
    """product: [H, B * T, S]."""
    return Gates(u, product.transpose(0, 1).unflatten(0, u.shape[:2]), bias, rate, phase, strength)


def _forward(
    packed: Tensor,
    weight: Tensor,
    bias: Tensor,
    rate: Tensor,
    phase: Tensor | None,
    initial_state: Tensor | None,
    strength: float,
    cu_seqlens: Tensor | None,
    grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y and the state; and for the backward pass the product, a, write, theta ([0] without), h and its entries."""
    u, z = packed.chunk(2, -1)
    with without_autocast(packed):
        product = torch.bmm(_by_head(u, weight.shape[0]), weight.to(packed.dtype))
        a, write, theta = opened(_gates(u, product, bias, rate, phase, strength))
        call = (a, write, theta, initial_state, False, cu_seqlens, _op_of(phase), grad, backend)
        h, final, entries = diagonal.diagonal_forward(*call)
        y = branch(h, z)
    return y, final, product, a, write, a.new_empty(0) if theta is None else theta, h, entries


def _forward_fake(packed, weight, bias, rate, phase, initial_state, strength, cu_seqlens, grad, backend):
    batch, length, width = packed.shape
    sequences = sequence_count(packed, cu_seqlens)
    wide = torch.promote_types(packed.dtype, torch.float32)
    h = packed.new_empty(batch, length, width // 2)
    a = packed.new_empty(batch, length, rate.shape[0], dtype=wide)
    return (
        torch.empty_like(h),
        packed.new_empty(sequences, width // 2, dtype=wide),
        packed.new_empty(weight.shape[0], batch * length, weight.shape[2]),
        a,
        torch.empty_like(h),
        a.new_empty(0) if phase is None else torch.empty_like(a),
        h,
        diagonal.entries_of(h, cu_seqlens, grad),
    )


def _gradients(
    grad_y: Tensor | None,
    grad_final: Tensor | None,
    packed: Tensor,
    weight: Tensor,
    bias: Tensor,
    rate: Tensor,
    phase: Tensor | None,
    initial_state: Tensor | None,
    product: Tensor,
    a: Tensor,
    write: Tensor,
    theta: Tensor | None,
    h: Tensor,
    entries: Tensor | None,
    strength: float,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of the first six of `_forward`'s arguments; an empty tensor for one that was not given."""
    dpacked = torch.empty(packed.shape, dtype=packed.dtype, device=packed.device)
    (u, z), (du, dz), heads = packed.chunk(2, -1), dpacked.chunk(2, -1), weight.shape[0]
    with without_autocast(packed):
        dh = branch_gradient(h, z, torch.zeros_like(h) if grad_y is None else grad_y, dz)
        states = h if torch.finfo(h.dtype).bits >= 32 else None
        call = (a, write, theta, initial_state, False, cu_seqlens, _op_of(phase), backend)
        da, dwrite, dtheta, dstate = diagonal.diagonal_backward(dh, grad_final, states, entries, *call)
        given = _gates(u, product, bias, rate, phase, strength)
        dgates, *others = gate_gradients(given, da, dwrite, None if phase is None else dtheta, du)
        dproduct = dgates.contiguous().flatten(0, 1).transpose(0, 1)
        dweight = torch.bmm(_by_head(u, heads).transpose(1, 2), dproduct).to(weight.dtype)
        _by_head(du, heads).baddbmm_(dproduct, weight.to(packed.dtype).transpose(1, 2))
    found = (dpacked, dweight, *others, None if initial_state is None else dstate)
    return tuple(packed.new_empty(0) if x is None else x.contiguous() for x in found)


def _gradients_fake(
    grad_y, grad_final, packed, weight, bias, rate, phase, initial_state, product, a, write, theta, h, entries,
    strength, cu_seqlens, backend,
):  # fmt: skip
    return tuple(
        packed.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (packed, weight, bias, rate, phase, initial_state)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    product, a, write, theta, h, entries = outputs[2:]
    ctx.mark_non_differentiable(product, a, write, theta, h, entries)
    kept = (product, a, write, None if inputs[4] is None else theta, h, entries if entries.numel() else None)
    ctx.save_for_backward(*inputs[:6], inputs[7], *kept)
    ctx.rest = inputs[6], inputs[9]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    tensors, cu_seqlens, kept = saved[:6], saved[6], saved[7:]
    strength, backend = ctx.rest
    found = lru_layer_backward(*grads[:2], *tensors, *kept, strength, cu_seqlens, backend)
    return tuple(None if x is None else grad for x, grad in zip(tensors, found, strict=True))


# replayed where they are called, which spares the dispatcher too, and beneath it, where compiled graphs call them
lru_layer_backward = replayed_below(define("lru_layer_backward", replayed_below(_gradients), _gradients_fake))
_op = define("lru_layer_forward", replayed_below(_forward), _forward_fake)
_differentiable = differentiable(_op, lambda *_: None, _backward, 6, _save, replayed_below(_op))
