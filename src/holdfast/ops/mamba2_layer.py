"""Mamba-2's layer between its two projections as one custom op: convolution, scan, skip, gate and norm.

It reads the parts of the first projection where they lie, and their gradients are written into one tensor like it.
"""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.conv.call import ConvCall
from holdfast.kernels.runtime.replay.replay import replayed_below
from holdfast.kernels.ssd_steps.call import StepsCall
from holdfast.kernels.varlen import sequence_count

from .autocast import without_autocast
from .causal_conv1d import conv_forward, select
from .check import needs_grad
from .registration import define, differentiable
from .ssd_passes import Kept, Room, SSDCall, run_backward, run_forward

_TENSORS = 9


def mamba2_layer(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    initial_state: Tensor | None,
    tail: Tensor | None,
    eps: float,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    backend: str,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """rmsnorm(ssd(x, softplus(dt + dt_bias), -exp(A_log), B, C, D) silu(z)) of z, conv(x, B, C) and dt in one tensor.

    Args:
        projected: [B, T, *], channels side by side: z [I], the convolution's x [I], B and C [G N each], dt [H], and any
            number that nothing reads; I = H P.
        conv_weight, conv_bias: [I + 2 G N, W] and [I + 2 G N].
        A_log, D, dt_bias: [H].
        norm_weight: [G, I / G]; its rows are the groups of B, of C and of the norm.
        initial_state: [sequences, H, N, P], tail: [sequences, W - 1, I + 2 G N]; float32 (float64 for float64).
        eps: of the norm.
        cu_seqlens: int32 or int64 [sequences + 1], of packed sequences, or None.
        backend: of the scan, by name, or "".

    Returns:
        y [B, T, I] in projected's dtype, and the state and tail to continue from, None unless they are asked for.
        Shapes and dtypes are not checked: nn.Mamba2 has done so.
    """
    tensors = (projected, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, initial_state, tail)
    y, state, last, *_ = _layer(*tensors, eps, cu_seqlens, output_final_state, needs_grad(*tensors), backend)
    return (y, state, last) if output_final_state else (y, None, None)


class _Layout:
    """The parts of a projection. inner: I; channels: of the convolution; written: G N."""

    def __init__(self, conv_weight: Tensor, norm_weight: Tensor, A_log: Tensor) -> None:
        self.groups, self.heads, self.channels = norm_weight.shape[0], A_log.shape[0], conv_weight.shape[0]
        self.inner = norm_weight.shape[0] * norm_weight.shape[1]
        self.written = (self.channels - self.inner) // 2

    def of_projection(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """z [B, T, H, P], the convolution's input [B, T, channels], dt [B, T, H], and what nothing reads."""
        widths = (self.inner, self.channels, self.heads)
        z, mixed, dt, rest = x.split((*widths, x.shape[2] - sum(widths)), -1)
        return self.by_head(z), mixed, dt, rest

    def of_convolution(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, H, P], B and C [B, T, G, N]."""
        x, B, C = x.split((self.inner, self.written, self.written), -1)
        return self.by_head(x), *(part.unflatten(-1, (self.groups, -1)) for part in (B, C))

    def by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))


def _forward(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    initial_state: Tensor | None,
    tail: Tensor | None,
    eps: float,
    cu_seqlens: Tensor | None,
    final: bool,
    grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, state and tail; and for the backward pass the convolution's output and `Kept`."""
    layout = _Layout(conv_weight, norm_weight, A_log)
    mixed = layout.of_projection(projected)[1]
    mixed, last = conv_forward(mixed, conv_weight, conv_bias, tail, "silu", cu_seqlens, final, grad, "")
    call = _call(layout, projected, mixed, A_log, D, dt_bias, norm_weight, initial_state, eps)
    y, state, kept = run_forward(call, cu_seqlens, grad, backend)
    return y.flatten(-2), state, last, mixed if grad else mixed.new_empty(0), *kept


def _call(
    layout: _Layout,
    projected: Tensor,
    mixed: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    initial_state: Tensor | None,
    eps: float,
) -> SSDCall:
    z, _, dt, _ = layout.of_projection(projected)
    x, B, C = layout.of_convolution(mixed)
    steps = StepsCall.beside(x, dt, A_log, dt_bias, True, True)
    return SSDCall(x, B, C, steps, D, z, norm_weight, eps, initial_state)


def _forward_fake(
    projected, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, initial_state, tail, eps, cu_seqlens, final,
    grad, backend,
):  # fmt: skip
    layout = _Layout(conv_weight, norm_weight, A_log)
    batch, length, _ = projected.shape
    sequences = sequence_count(projected, cu_seqlens)
    wide = torch.promote_types(projected.dtype, torch.float32)
    y = projected.new_empty(batch, length, layout.inner)
    sizes = (layout.heads, layout.written // layout.groups, layout.inner // layout.heads)
    state = y.new_empty(sequences, *sizes, dtype=wide)
    last = (sequences, conv_weight.shape[1] - 1, layout.channels) if final else (0,)
    mixed = y.new_empty((batch, length, layout.channels) if grad else (0,))
    call = _call(layout, projected, mixed if grad else layout.of_projection(projected)[1], A_log, D, dt_bias,
                 norm_weight, initial_state, eps)  # fmt: skip
    gates = [y.new_empty((batch, length, layout.heads) if grad else (0,), dtype=call.steps.dtype) for _ in range(2)]
    o = y.new_empty((batch, length, layout.heads, sizes[2]) if grad else (0,))
    return y, state, y.new_empty(last, dtype=wide if final else y.dtype), mixed, o, *gates


def _gradients(
    dy: Tensor | None,
    dstate: Tensor | None,
    dlast: Tensor | None,
    mixed: Tensor,
    o: Tensor,
    step: Tensor,
    g: Tensor,
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    initial_state: Tensor | None,
    tail: Tensor | None,
    eps: float,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of the nine tensors from projected on; an empty tensor for one that was not given."""
    layout = _Layout(conv_weight, norm_weight, A_log)
    call = _call(layout, projected, mixed, A_log, D, dt_bias, norm_weight, initial_state, eps)
    dprojected = torch.empty(projected.shape, dtype=projected.dtype, device=projected.device)
    dz, dentering, ddt, unused = layout.of_projection(dprojected)
    dmixed = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)
    dx, dB, dC = layout.of_convolution(dmixed)
    dy = None if dy is None else layout.by_head(dy)
    found = run_backward(call, Kept(o, step, g), dy, dstate, cu_seqlens, backend, Room(dx, dz, ddt))
    dB.copy_(found.B)
    dC.copy_(found.C)
    conv = ConvCall(layout.of_projection(projected)[1], conv_weight, conv_bias, tail, "silu")
    chosen, plan = select(conv, cu_seqlens, True, "backward", "")
    with without_autocast(projected):
        _, dweight, dbias, dtail = chosen.backward(plan, conv, cu_seqlens, dmixed, dlast, dentering)
    unused.zero_()
    state = None if initial_state is None else found.initial_state
    grads = dprojected, dweight, dbias, found.A, found.D, found.dt_bias, found.weight, state, dtail
    return tuple(projected.new_empty(0) if grad is None else grad.contiguous() for grad in grads)


def _gradients_fake(
    dy, dstate, dlast, mixed, o, step, g, projected, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight,
    initial_state, tail, eps, cu_seqlens, backend,
):  # fmt: skip
    given = (projected, conv_weight, conv_bias, A_log, D, dt_bias, norm_weight, initial_state, tail)
    return tuple(projected.new_empty(0) if x is None else x.new_empty(x.shape) for x in given)


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    kept = outputs[3:]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*inputs[:_TENSORS], inputs[10], *kept)
    ctx.rest = inputs[9], inputs[13]


def _backward(ctx: Any, dy: Tensor | None, dstate: Tensor | None, dlast: Tensor | None, *_: None) -> tuple[Any, ...]:
    # once: activation checkpointing refuses to unpack them again
    saved = ctx.saved_tensors
    tensors, cu_seqlens, kept = saved[:_TENSORS], saved[_TENSORS], saved[_TENSORS + 1 :]
    eps, backend = ctx.rest
    # what was not asked for is no state, and has no gradient but zeros
    dlast = None if dlast is None or dlast.dim() == 1 else dlast
    grads = _layer_backward(dy, dstate, dlast, *kept, *tensors, eps, cu_seqlens, backend)
    return tuple(None if x is None else grad for x, grad in zip(tensors, grads, strict=True))


# replayed where they are called, which spares the dispatcher too, and beneath it, where compiled graphs call them
_layer_backward = replayed_below(define("mamba2_layer_backward", replayed_below(_gradients), _gradients_fake))
_op = define("mamba2_layer_forward", replayed_below(_forward), _forward_fake)
_layer = differentiable(_op, lambda *_: None, _backward, _TENSORS, _save, replayed_below(_op))
