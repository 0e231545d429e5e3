"""KDA's gate on a GPU: one launch in place of half a dozen element-wise ones, as a custom op with autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.autograd.vjp import vjp
from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.recurrences.kda import check_gate, log_decay

from .mlstm_gates import can_fuse
from .registration import define, differentiable


def fastest_log_decay(g: Tensor) -> Callable[..., Tensor]:
    """What makes a log decay of a gate's input g [B, T, H, K], of any floating dtype, on any device.

    `fused_log_decay`, one launch, on an NVIDIA GPU of compute capability 8.0 with Triton and g of at most 32 bits; else
    `recurrences.kda.log_decay`, PyTorch's operations. Both take and return the same.
    """
    return fused_log_decay if can_fuse(g, g, torch.promote_types(g.dtype, torch.float32)) else log_decay


def fused_log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """`recurrences.kda.log_decay` by `holdfast::kda_gate`, a custom op with a gradient: one launch a pass.

    Args:
        g: [B, T, H, K], bfloat16, float16 or float32.
        A_log, dt_bias: [H] and [H, K], any floating dtype, or None. In float64, which the kernel does not compute in,
            `log_decay` itself runs.
        lower_bound: as in `log_decay`.

    Returns the log decay [B, T, H, K] in float32, or g as it came where neither A_log nor lower_bound makes it a gate.
    Raises as `log_decay` does.
    """
    bound = check_gate(A_log, dt_bias, lower_bound)
    if A_log is None and bound is None:
        return g
    if any(x is not None and x.dtype == torch.float64 for x in (A_log, dt_bias)):
        return log_decay(g, A_log, dt_bias, lower_bound)
    return _gate(g, A_log, dt_bias, bound)


def decay_gate(x: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float | None) -> Tensor:
    """The log decay that `fused_log_decay` makes of x [B, T, H, K], contiguous: for an op's inside, on any device.

    A_log: [H]. dt_bias: [H, K]. bound: as lower_bound of `log_decay`. Returns float32 (float64 beside float64).
    """
    if _can_fuse(x, A_log, dt_bias):
        return _forward(x, A_log, dt_bias, bound)
    return log_decay(x, A_log, dt_bias, bound).contiguous()


def decay_gate_gradients(
    x: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float | None, ddecay: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the first three from ddecay [B, T, H, K], that of what `decay_gate` returned, in their dtypes."""
    if _can_fuse(x, A_log, dt_bias):
        return _gradients(x, A_log, dt_bias, bound, ddecay)
    dx, drate, dbias = vjp(lambda *leaves: [log_decay(*leaves, bound)], (x, A_log, dt_bias), [ddecay])
    return dx, drate, dbias


def _can_fuse(x: Tensor, A_log: Tensor, dt_bias: Tensor) -> bool:
    is_wide = torch.float64 in (A_log.dtype, dt_bias.dtype)
    return not is_wide and can_fuse(x, x, torch.promote_types(x.dtype, torch.float32))


def _forward(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None) -> Tensor:
    from holdfast.kernels.matrix.vector_decay.gates import launch as triton_gate
    from holdfast.kernels.runtime.launch import on_device_of

    rate, bias = (None if x is None else x.contiguous() for x in (A_log, dt_bias))
    with on_device_of(g):
        return triton_gate.run_forward(g, rate, bias, bound)


def _forward_fake(g, A_log, dt_bias, bound):
    return g.new_empty(g.shape, dtype=torch.float32)


def _gradients(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None, ddecay: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the first three, empty for what was not given."""
    from holdfast.kernels.matrix.vector_decay.gates import launch as triton_gate
    from holdfast.kernels.runtime.launch import on_device_of

    rate, bias = (None if x is None else x.contiguous() for x in (A_log, dt_bias))
    with on_device_of(g):
        dg, *found = triton_gate.run_backward(g, rate, bias, bound, ddecay)
    return dg, *(g.new_empty(0) if x is None else x for x in found)


def _gradients_fake(g, A_log, dt_bias, bound, ddecay):
    dg = g.new_empty(g.shape)
    return dg, *(g.new_empty(0) if x is None else x.new_empty(x.shape) for x in (A_log, dt_bias))


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.bound = inputs[3]


def _backward(ctx: Any, ddecay: Tensor) -> tuple[Any, ...]:
    # once: activation checkpointing refuses to unpack them again
    tensors = ctx.saved_tensors
    found = _gate_backward(*tensors, ctx.bound, ddecay)
    return tuple(None if x is None else grad for x, grad in zip(tensors, found, strict=True))


_gate_backward = replayed_below(define("kda_gate_backward", replayed_below(_gradients), _gradients_fake))
_op = define("kda_gate", replayed_below(_forward), _forward_fake)
_gate = differentiable(_op, _save, _backward, 3, run=replayed_below(_op))
