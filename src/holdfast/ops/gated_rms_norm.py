"""gated_rms_norm: what a mixer does with its heads' outputs before it projects them."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.norm.call import ACTIVATIONS, Activation, GatedNormCall
from holdfast.kernels.norm.torch.backend import PyTorchGatedNorm
from holdfast.kernels.norm.triton.backend import TritonGatedNorm
from holdfast.kernels.runtime.replay.replay import replayed, replayed_below
from holdfast.kernels.select import clearable_cache, resolve
from holdfast.planner import Direction, Plan, Problem
from holdfast.recurrences.definition import Argument
from holdfast.recurrences.scalars import flag, number

from .autocast import without_autocast
from .check import check_arguments, name_of, needs_grad
from .registration import define, differentiable

BACKENDS = (TritonGatedNorm(), PyTorchGatedNorm())

ARGUMENTS = {
    "o": Argument("outputs of the heads", "B T H D"),
    "gate": Argument("output gate before its activation", "B T H D", required=False),
    "weight": Argument("weight of each channel", ("D", "H D"), "float", required=False),
}


@replayed
def gated_rms_norm(
    o: Tensor,
    gate: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    activation: Activation = "silu",
    center: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Each head's output divided by its root mean square, times a weight and an activated gate:

        y = o / sqrt(mean(o^2) + eps) * weight * activation(gate)

    The mean is over D. With center, o less its mean takes o's place: layer normalisation, without a bias. In float32
    (float64 for float64 inputs); `triton` reads and writes each tensor once.

    Source: Zhang and Sennrich 2019, Root Mean Square Layer Normalization (arXiv:1910.07467), a head at a time and with
    the swish output gate of Sun et al. 2023, Retentive Network (arXiv:2307.08621), eq. 8; with center, Ba et al. 2016,
    Layer Normalization (arXiv:1607.06450).

    Args:
        o: [B, T, H, D].
        gate: before its activation, [B, T, H, D], of o's dtype; None for none.
        weight: [D], shared by the heads, or [H, D], any floating dtype; None for 1.
        eps: added to the mean square.
        activation: of the gate, "silu" or "sigmoid".
        center: whether to subtract the mean first.
        backend: forces a backend by name; by default the one with the least predicted time that can serve the call.

    Returns:
        y [B, T, H, D] in o's dtype.

    Raises:
        ValueError, TypeError: for an argument of the wrong shape, dtype or device, named in the message; for an unknown
            activation; for a backend that is unknown or cannot serve the call.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected 'silu' or 'sigmoid'; got {activation!r}")
    eps, center = number("eps", eps, 0), flag("center", center)
    given = check_arguments(ARGUMENTS, None, {"o": o, "gate": gate, "weight": weight})
    grad = needs_grad(o, gate, weight)
    return gated_norm_forward(*given.values(), eps, activation, center, grad, name_of(backend))


def problem(call: GatedNormCall, grad: bool) -> Problem:
    """What planning needs to know of a call: sizes B, T, H, D of o [B, T, H, D], G rows of weight [G, D], o's dtype.

    grad: whether a backward pass may follow. Reads no values and raises nothing for a call that was checked.
    """
    batch, length, heads, width = call.o.shape
    weights = 1 if call.weight is None or call.weight.dim() == 1 else call.weight.shape[0]
    sizes = {"B": batch, "T": length, "H": heads, "D": width, "G": weights}
    traits = {"gate": call.gate is not None, "weight": call.weight is not None, "needs_grad": grad}
    return Problem.of("gated_rms_norm", "matrix", call.o.dtype, sizes, traits)


_SELECTED: dict[tuple[Any, ...], tuple[Any, Plan]] = clearable_cache()


def select(call: GatedNormCall, grad: bool, direction: Direction, backend: str) -> tuple[Any, Plan]:
    """The backend that runs a pass of a call, and its plan: for a layer's own ops too.

    call: o [B, T, H, D] and the rest of a GatedNormCall, checked. grad: whether a backward pass may follow. backend: a
    name, or "" for the one with the least predicted time. Raises ValueError for one that is unknown or cannot serve the
    call.
    """
    o, weight = call.o, call.weight
    # what `problem` reads, in less time than it takes to make and hash a Problem
    key = (
        BACKENDS,
        o.shape,
        o.dtype,
        o.device,
        call.gate is None,
        None if weight is None else weight.shape,
        grad,
        direction,
        backend,
    )
    found = _SELECTED.get(key)
    if found is None:
        found = _SELECTED[key] = resolve(BACKENDS, problem(call, grad), describe(o.device), backend, direction)
    return found


def _forward(
    o: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    activation: str,
    center: bool,
    grad: bool,
    backend: str,
) -> Tensor:
    call = GatedNormCall(o, gate, weight, eps, activation, center)
    chosen, plan = select(call, grad, "forward", backend)
    with without_autocast(o):
        return chosen.forward(plan, call).contiguous()


def _forward_fake(o, gate, weight, eps, activation, center, grad, backend):
    return torch.empty_like(o, memory_format=torch.contiguous_format)


def _gradients(
    grad_y: Tensor,
    o: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    activation: str,
    center: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of o, gate and weight; an empty tensor for one that was not given."""
    call = GatedNormCall(o, gate, weight, eps, activation, center)
    chosen, plan = select(call, True, "backward", backend)
    with without_autocast(o):
        grads = chosen.backward(plan, call, grad_y)
    return tuple(o.new_empty(0) if grad is None else grad.contiguous() for grad in grads)


def _gradients_fake(grad_y, o, gate, weight, eps, activation, center, backend):
    return tuple(
        o.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (o, gate, weight)
    )


def _save(ctx: Any, inputs: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.rest = *inputs[3:6], inputs[7]


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    grads = gated_norm_backward(grad_y, *tensors, *ctx.rest)
    return tuple(None if x is None else grad for x, grad in zip(tensors, grads, strict=True))


# replayed where they are called, which spares the dispatcher too, and beneath it, where compiled graphs call them
gated_norm_backward = replayed_below(define("gated_norm_backward", replayed_below(_gradients), _gradients_fake))
_norm = define("gated_norm_forward", replayed_below(_forward), _forward_fake)
gated_norm_forward = differentiable(_norm, _save, _backward, inputs=3, run=replayed_below(_norm))
