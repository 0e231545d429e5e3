"""Pairs of channels as complex numbers: the real and imaginary part are neighbours in memory, so x is only viewed."""

import torch
from torch import Tensor


def join(x: Tensor) -> Tensor:
    """View [..., D] as complex [..., D/2]; a copy where x is not contiguous or begins within a pair."""
    x = x.unflatten(-1, (-1, 2)).contiguous()
    # an axis of size 1 may have any stride and still be contiguous
    if any(place % 2 for place in (x.storage_offset(), *x.stride()[:-1])):
        x = x.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(x)


def split(z: Tensor) -> Tensor:
    """View complex [..., D/2] as [..., D]."""
    return torch.view_as_real(z).flatten(-2)


def unit(theta: Tensor) -> Tensor:
    """Return e^(i theta)."""
    return torch.complex(theta.cos(), theta.sin())


def gate_grads(grad: Tensor, a: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a and theta from that of the gate a e^(i theta)."""
    aligned = grad * unit(-theta)
    return aligned.real, a * aligned.imag
