"""Skip, gate and norm in PyTorch, in float32 (float64 for float64 inputs), on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.autograd.vjp import vjp

from ..call import OutputCall

# what has a gradient here; that of x is D times that of o
_LEAVES = ("o", "D", "z", "weight")
Gradients = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


class PyTorchOutput:
    """Every call."""

    def forward(self, call: OutputCall) -> Tensor:
        """Return y [B, T, H, P], contiguous, in o's dtype."""
        return _run(call).contiguous()

    def backward(self, call: OutputCall, dy: Tensor, dz: Tensor | None = None) -> Gradients:
        """Return the gradients of o, D, z and weight, None where the input is. dz: where that of z is written."""
        given = {name: getattr(call, name) for name in _LEAVES if getattr(call, name) is not None}

        def run(*leaves: Tensor) -> tuple[Tensor]:
            return (_run(call._replace(**dict(zip(given, leaves, strict=True)))),)

        grads = dict(zip(given, vjp(run, list(given.values()), [dy]), strict=True))
        if dz is not None:
            grads["z"] = dz.copy_(grads["z"])
        return tuple(grads.get(name) for name in _LEAVES)

    def add_skip(self, dx: Tensor, do: Tensor, D: Tensor, into: Tensor) -> None:
        """Write into = dx + D do, which is x's whole gradient; all but D [B, T, H, P]. into may be dx."""
        dtype = torch.promote_types(dx.dtype, torch.float32)
        into.copy_(dx.to(dtype) + _beside(D, dtype) * do)


def _beside(D: Tensor, dtype: torch.dtype) -> Tensor:
    return (D if D.dim() == 2 else D[:, None]).to(dtype)


def _run(call: OutputCall) -> Tensor:
    dtype = torch.promote_types(call.o.dtype, torch.float32)
    y = call.o.to(dtype)
    if call.D is not None:
        y = y + _beside(call.D, dtype) * call.x
    if call.z is not None:
        y = y * F.silu(call.z.to(dtype))
    if call.weight is not None:
        grouped = y.flatten(-2).unflatten(-1, call.weight.shape)
        grouped = F.rms_norm(grouped, call.weight.shape[1:], eps=call.eps) * call.weight.to(dtype)
        y = grouped.flatten(-2).view(y.shape)
    return y.to(call.o.dtype)
