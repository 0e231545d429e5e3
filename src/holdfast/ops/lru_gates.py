"""The gates of the linear recurrent units: one launch a pass on a GPU, as a custom op with autograd."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.autograd.vjp import vjp
from holdfast.kernels.lru.call import Gates
from holdfast.kernels.lru.torch import backend as pytorch
from holdfast.kernels.runtime.replay.replay import replayed_below

from .mlstm_gates import can_fuse
from .registration import define, differentiable


def lru_gates(
    u: Tensor, gates: Tensor, bias: Tensor, rate: Tensor, strength: float, phase: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What RG-LRU and, with a phase, the rotational LRU feed to their scan:

        log a = -strength softplus(rate) sigmoid(r);  write = sqrt(1 - a^2) sigmoid(i) u;  theta = phase + angle

    u: [B, T, H * C]. gates [B, T, H, S] and bias [H, S], which is added to them: r, P columns, then i, C columns, and
    with a phase the angle, P columns. C is P, or with a phase 2 P, two channels a pair. rate, phase: [H * P], any
    floating dtype. Returns a [B, T, H * P] in float32 (float64 for float64 u), write in u's shape and dtype, and theta,
    as a, or None.

    On an NVIDIA GPU of compute capability 8.0 with Triton, inputs of at most 32 bits are read where they lie, in one
    launch forward and two backward; else PyTorch's operations run.

    Source: De et al. 2024, Griffin (arXiv:2402.19427), eq. 1 to 4 and appendix A.
    """
    given = Gates(u, gates, bias, rate, phase, strength)
    return fused_lru_gates(u, gates, bias, rate, strength, phase) if _fuses(given) else pytorch.lru_gates(given)


def _fuses(given: Gates) -> bool:
    others = (given.bias, given.rate) if given.phase is None else (given.bias, given.rate, given.phase)
    wide = torch.promote_types(given.u.dtype, torch.float32)
    return can_fuse(given.u, given.gates, wide) and all(x.dtype != torch.float64 for x in others)


def opened(given: Gates) -> tuple[Tensor, Tensor, Tensor | None]:
    """`lru_gates` for an op's inside: without autograd, contiguous."""
    if _fuses(given):
        a, write, theta = _forward(*given)
        return a, write, None if given.phase is None else theta
    return tuple(None if x is None else x.contiguous() for x in pytorch.lru_gates(given))


def gate_gradients(
    given: Gates, da: Tensor, dwrite: Tensor, dtheta: Tensor | None, into: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of gates, bias, rate and phase, for an op's inside. into: where that of u will be, part of a wider
    tensor."""
    if not _fuses(given):
        leaves = [x for x in given[:5] if x is not None]

        def run(*tensors: Tensor) -> list[Tensor]:
            made = pytorch.lru_gates(Gates(*tensors, *(None,) * (5 - len(tensors)), given.decay_scale))
            return [x for x in made if x is not None]

        asked = [da, dwrite] if dtheta is None else [da, dwrite, dtheta]
        du, *found = vjp(run, leaves, asked)
        into.copy_(du)
        return *found, *(None,) * (4 - len(found))
    from holdfast.kernels.lru.triton import gates as triton_gates
    from holdfast.kernels.runtime.launch import on_device_of

    with on_device_of(da):
        return triton_gates.run_backward(given, da, dwrite, dtheta, into)[1:]


def fused_lru_gates(
    u: Tensor, gates: Tensor, bias: Tensor, rate: Tensor, strength: float, phase: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`lru_gates` by `holdfast::lru_gates`."""
    a, write, theta = _gates(u, gates, bias, rate, phase, float(strength))
    return a, write, None if phase is None else theta


def _forward(
    u: Tensor, gates: Tensor, bias: Tensor, rate: Tensor, phase: Tensor | None, strength: float
) -> tuple[Tensor, Tensor, Tensor]:
    """a, write, and theta, empty without a phase."""
    from holdfast.kernels.lru.triton import gates as triton_gates
    from holdfast.kernels.runtime.launch import on_device_of

    with on_device_of(u):
        a, write, theta = triton_gates.run_forward(Gates(u, gates, bias, rate, phase, strength))
    return a, write, a.new_empty(0) if theta is None else theta


def _forward_fake(u, gates, bias, rate, phase, strength):
    a = u.new_empty(*u.shape[:2], rate.shape[0], dtype=torch.float32)
    return a, u.new_empty(u.shape), a.new_empty(a.shape if phase is not None else 0)


def _gradients(
    u: Tensor,
    gates: Tensor,
    bias: Tensor,
    rate: Tensor,
    phase: Tensor | None,
    strength: float,
    da: Tensor | None,
    dwrite: Tensor | None,
    dtheta: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of the first five, empty for a phase that was not given. A None among those of the results is 0."""
    from holdfast.kernels.lru.triton import gates as triton_gates
    from holdfast.kernels.runtime.launch import on_device_of

    shape = (*u.shape[:2], rate.shape[0])
    da = u.new_zeros(shape, dtype=torch.float32) if da is None else da
    dwrite = u.new_zeros(u.shape) if dwrite is None else dwrite
    if phase is None:
        dtheta = None
    elif dtheta is None:
        dtheta = u.new_zeros(shape, dtype=torch.float32)
    given = Gates(u, gates, bias, rate, phase, strength)
    with on_device_of(u):
        *grads, dphase = triton_gates.run_backward(given, da, dwrite, dtheta)
    return *grads, u.new_empty(0) if dphase is None else dphase


def _gradients_fake(u, gates, bias, rate, phase, strength, da, dwrite, dtheta):
    dphase = u.new_empty(0) if phase is None else phase.new_empty(phase.shape)
    return *(x.new_empty(x.shape) for x in (u, gates, bias, rate)), dphase


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.strength = inputs[5]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    # once: activation checkpointing refuses to unpack them again
    tensors = ctx.saved_tensors
    *found, dphase = _gates_backward(*tensors, ctx.strength, *grads)
    return *found, None if tensors[4] is None else dphase


_gates_backward = replayed_below(define("lru_gates_backward", replayed_below(_gradients), _gradients_fake))
_op = define("lru_gates", replayed_below(_forward), _forward_fake)
_gates = differentiable(_op, _save, _backward, 5, run=replayed_below(_op), used=2)
