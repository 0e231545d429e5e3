"""`holdfast::ssd_forward` and its gradient: a scan and what stands around it as one custom op."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.kernels.ssd_steps.call import StepsCall
from holdfast.kernels.varlen import sequence_count

from .registration import define, differentiable
from .ssd_passes import Kept, SSDCall, run_backward, run_forward


def _call(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    softplus: bool,
) -> SSDCall:
    steps = StepsCall.beside(x, dt, A, dt_bias, softplus, False)
    return SSDCall(x, B, C, steps, D, z, initial_state=initial_state)


def _forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    softplus: bool,
    cu_seqlens: Tensor | None,
    grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments of `ssd`, A [H] -> (y [B, T, H, P] in x's dtype, the final state in float32 or wider, what is kept)."""
    call = _call(x, dt, A, B, C, D, z, dt_bias, initial_state, softplus)
    y, final, kept = run_forward(call, cu_seqlens, grad, backend)
    return y, final, *kept


def _forward_fake(x, dt, A, B, C, D, z, dt_bias, initial_state, softplus, cu_seqlens, grad, backend):
    call = _call(x, dt, A, B, C, D, z, dt_bias, initial_state, softplus)
    sequences = sequence_count(x, cu_seqlens)
    state = (sequences, x.shape[2], B.shape[3], x.shape[3])
    o, gates = x.shape if grad and not call.output(x).is_o else (0,), dt.shape if grad else (0,)
    final = x.new_empty(state, dtype=torch.promote_types(x.dtype, torch.float32))
    kept = x.new_empty(o), *(x.new_empty(gates, dtype=call.steps.dtype) for _ in range(2))
    return x.new_empty(x.shape), final, *kept


def _gradients(
    dy: Tensor | None,
    dfinal: Tensor | None,
    o: Tensor,
    step: Tensor,
    g: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    softplus: bool,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of the nine tensors from x on; an empty tensor for one that was not given."""
    call = _call(x, dt, A, B, C, D, z, dt_bias, initial_state, softplus)
    found = run_backward(call, Kept(o, step, g), dy, dfinal, cu_seqlens, backend)
    grads = found.x, found.dt, found.A, found.B, found.C, found.D, found.z, found.dt_bias, found.initial_state
    return tuple(x.new_empty(0) if grad is None else grad.contiguous() for grad in grads)


def _gradients_fake(
    dy, dfinal, o, step, g, x, dt, A, B, C, D, z, dt_bias, initial_state, softplus, cu_seqlens, backend
):  # fmt: skip
    given = (x, dt, A, B, C, D, z, dt_bias, initial_state)
    return tuple(x.new_empty(0) if of is None else of.new_empty(of.shape) for of in given)


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    kept = outputs[2:]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*inputs[:9], inputs[10], *kept)
    ctx.rest = inputs[9], inputs[12]


def _backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None, *_: None) -> tuple[Any, ...]:
    # once: activation checkpointing refuses to unpack them again
    saved = ctx.saved_tensors
    tensors, cu_seqlens, kept = saved[:9], saved[9], saved[10:]
    softplus, backend = ctx.rest
    grads = _ssd_backward(dy, dfinal, *kept, *tensors, softplus, cu_seqlens, backend)
    return tuple(None if x is None else grad for x, grad in zip(tensors, grads, strict=True))


# replayed where they are called, which spares the dispatcher too, and beneath it, where compiled graphs call them
_ssd_backward = replayed_below(define("ssd_backward", replayed_below(_gradients), _gradients_fake))
_ssd = define("ssd_forward", replayed_below(_forward), _forward_fake)
ssd_forward = differentiable(_ssd, lambda *_: None, _backward, 9, _save, replayed_below(_ssd))
