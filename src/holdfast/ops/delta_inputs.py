"""The delta rules' inputs on a GPU: one launch in place of a dozen element-wise ones, as a custom op with autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.autograd.vjp import vjp
from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.recurrences.delta_rule import Inputs, check_options, prepared

from .mlstm_gates import can_fuse
from .registration import define, differentiable


def fastest_inputs(q: Tensor) -> Callable[..., Inputs]:
    """What prepares a delta rule's inputs for q [B, T, Hq, K], of any floating dtype, on any device.

    `fused_inputs`, one launch, on an NVIDIA GPU of compute capability 8.0 with Triton and q of at most 32 bits; else
    `recurrences.delta_rule.prepared`, PyTorch's operations. Both take and return the same.
    """
    return fused_inputs if can_fuse(q, q, torch.promote_types(q.dtype, torch.float32)) else prepared


def fused_inputs(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    qk_l2norm: bool,
    beta_sigmoid: bool,
    allow_neg_eigval: bool,
) -> Inputs:
    """`recurrences.delta_rule.prepared` by `holdfast::delta_inputs`, a custom op with a gradient: one launch a pass.

    Args:
        q, k: [B, T, Hq, K], of one dtype: bfloat16, float16 or float32.
        g: [B, T, H] or [H], any floating dtype; None for no decay. beta: [B, T, H], any floating dtype.
        A_log, dt_bias: [H], any floating dtype, or None.
        qk_l2norm, beta_sigmoid, allow_neg_eigval: as in `prepared`.

    Returns:
        q, k as they came, or normalised, in their dtype; g and beta [B, T, H] as they came (g None for None), or where
        A_log or beta_sigmoid asks for them, the log decay and the write strength in float32.

    With a gate or strength in float64, which the kernel does not compute in, `prepared` itself runs.

    Raises:
        TypeError, ValueError: for options that are no bools or do not go together, as
            `recurrences.delta_rule.check_options` does.
    """
    check_options(A_log, dt_bias, qk_l2norm, beta_sigmoid, allow_neg_eigval)
    if g is not None and g.dim() == 1:
        g = g.expand(beta.shape)
    gate, strength = (None if A_log is None else g), (beta if beta_sigmoid else None)
    if any(x is not None and x.dtype == torch.float64 for x in (gate, strength, A_log, dt_bias)):
        return prepared(q, k, g, beta, A_log, dt_bias, qk_l2norm, beta_sigmoid, allow_neg_eigval)
    if not qk_l2norm and gate is None and strength is None:
        return q, k, g, beta
    y, z, decay, opened = _inputs(q, k, gate, strength, A_log, dt_bias, qk_l2norm, 1.0 + allow_neg_eigval)
    q, k = (y, z) if qk_l2norm else (q, k)
    return q, k, g if gate is None else decay, beta if strength is None else opened


def gates(
    a: Tensor | None, b: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, allow_neg_eigval: bool
) -> tuple[Tensor | None, Tensor]:
    """The log decay that `fused_inputs` makes of g = a, None without A_log, and the write strength of beta = b.

    For an op's inside, on any device. a, b: [B, T, H]. A_log, dt_bias: [H], or None. Returns float32 (float64 beside
    float64 b), contiguous.
    """
    if not _can_fuse_gates(b, A_log, dt_bias):
        return _prepared_gates(a, b, A_log, dt_bias, allow_neg_eigval)
    no_rows = b[..., None]
    _, _, decay, strength = _forward(no_rows, no_rows, a, b, A_log, dt_bias, False, 1.0 + allow_neg_eigval)
    return None if a is None else decay, strength


def gate_gradients(
    a: Tensor | None,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    allow_neg_eigval: bool,
    grads: tuple[Tensor | None, Tensor],
    into: tuple[Tensor | None, Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of A_log and dt_bias, None where they are, from those of what `gates` returned.

    into: where those of a and b will be, [B, T, H] and [B, T, H or more], parts of a wider tensor; 0 beyond H.
    """
    grads = (None if a is None else grads[0], grads[1])
    if _can_fuse_gates(b, A_log, dt_bias):
        from holdfast.kernels.matrix.delta_rule.inputs import triton as triton_delta_inputs
        from holdfast.kernels.runtime.launch import on_device_of

        rate, bias = (None if x is None else x.contiguous() for x in (A_log, dt_bias))
        given = (b[..., None], b[..., None], a, b, rate, bias)
        with on_device_of(b):
            found = triton_delta_inputs.run_backward(given, False, 1.0 + allow_neg_eigval, (None, None, *grads), into)
        return found[4:]
    given = {n: x for n, x in enumerate((a, b, A_log, dt_bias)) if x is not None}

    def run(*leaves: Tensor) -> list[Tensor]:
        at = dict(zip(given, leaves, strict=True))
        made = _prepared_gates(*(at.get(n) for n in range(4)), allow_neg_eigval)
        return [x for x in made if x is not None]

    asked = [x for x in grads if x is not None]
    found = dict(zip(given, vjp(run, [*given.values()], asked), strict=True))
    if a is not None:
        into[0].copy_(found[0])
    into[1].zero_()
    into[1][..., : b.shape[2]].copy_(found[1])
    return found.get(2), found.get(3)


def _can_fuse_gates(b: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> bool:
    wide = any(x is not None and x.dtype == torch.float64 for x in (A_log, dt_bias))
    return not wide and can_fuse(b, b, torch.promote_types(b.dtype, torch.float32))


def _prepared_gates(
    a: Tensor | None, b: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, allow_neg_eigval: bool
) -> tuple[Tensor | None, Tensor]:
    _, _, decay, strength = prepared(b, b, a, b, A_log, dt_bias, False, True, allow_neg_eigval)
    wide = strength.dtype
    return None if decay is None else decay.to(wide).contiguous(), strength.contiguous()


def _forward(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    norm: bool,
    largest: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised q and k, log decay and write strength; an empty tensor for what is not asked for."""
    from holdfast.kernels.matrix.delta_rule.inputs import triton as triton_delta_inputs
    from holdfast.kernels.runtime.launch import on_device_of

    rate, bias = (None if x is None else x.contiguous() for x in (A_log, dt_bias))
    with on_device_of(q):
        found = triton_delta_inputs.run_forward((q, k, g, beta, rate, bias), norm, largest)
    return tuple(q.new_empty(0) if x is None else x for x in found)


def _forward_fake(q, k, g, beta, A_log, dt_bias, norm, largest):
    y, z = (q.new_empty(q.shape if norm else 0) for _ in range(2))
    gates = (q.new_empty(0) if x is None else x.new_empty(x.shape, dtype=torch.float32) for x in (g, beta))
    return y, z, *gates


def _gradients(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    norm: bool,
    largest: float,
    dy: Tensor | None,
    dz: Tensor | None,
    ddecay: Tensor | None,
    dstrength: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first six, empty for what was not given or, of q and k, not normalised. A None among those of
    the results is 0."""
    from holdfast.kernels.matrix.delta_rule.inputs import triton as triton_delta_inputs
    from holdfast.kernels.runtime.launch import on_device_of

    rate, bias = (None if x is None else x.contiguous() for x in (A_log, dt_bias))
    of = (q if norm else None, k if norm else None, g, beta)
    grads = [
        torch.zeros_like(x, memory_format=torch.contiguous_format) if grad is None and x is not None else grad
        for x, grad in zip(of, (dy, dz, ddecay, dstrength), strict=True)
    ]
    with on_device_of(q):
        found = triton_delta_inputs.run_backward((q, k, g, beta, rate, bias), norm, largest, grads)
    return tuple(q.new_empty(0) if x is None else x for x in found)


def _gradients_fake(q, k, g, beta, A_log, dt_bias, norm, largest, dy, dz, ddecay, dstrength):
    given = (q if norm else None, k if norm else None, g, beta, A_log, dt_bias)
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in given)


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.rest = inputs[6:]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    # once: activation checkpointing refuses to unpack them again
    tensors = ctx.saved_tensors
    norm, _ = ctx.rest
    found = _inputs_backward(*tensors, *ctx.rest, *grads)
    given = (norm, norm, *(x is not None for x in tensors[2:]))
    return tuple(grad if was else None for grad, was in zip(found, given, strict=True))


_inputs_backward = replayed_below(define("delta_inputs_backward", replayed_below(_gradients), _gradients_fake))
_op = define("delta_inputs", replayed_below(_forward), _forward_fake)
_inputs = differentiable(_op, _save, _backward, 6, run=replayed_below(_op), used=4)
