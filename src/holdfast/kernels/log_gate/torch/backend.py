"""The log decay of a gate in PyTorch, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.autograd.vjp import vjp


class PyTorchLogGate:
    """Every call."""

    def forward(self, x: Tensor, bias: Tensor, normalizer: float) -> Tensor:
        """Return logsigmoid(x + bias) / normalizer of x [B, T, D] and bias [D], in float32 (float64 for float64)."""
        return _run(x, bias, normalizer)

    def backward(self, x: Tensor, bias: Tensor, normalizer: float, dg: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and bias, contiguous, in their dtypes."""
        dx, dbias = vjp(lambda *leaves: (_run(*leaves, normalizer),), (x, bias), (dg,))
        return dx.contiguous(), dbias


def _run(x: Tensor, bias: Tensor, normalizer: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.logsigmoid(x.to(wide) + bias.to(wide)) / normalizer
