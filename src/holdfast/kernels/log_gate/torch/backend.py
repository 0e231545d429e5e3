"""The log decay of a gate in PyTorch, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor


class PyTorchLogGate:
    """Every call."""

    def forward(self, x: Tensor, normalizer: float) -> Tensor:
        """logsigmoid(x) / normalizer in float32 (float64 for float64), contiguous."""
        return (F.logsigmoid(_wide(x)) / normalizer).contiguous()

    def backward(self, x: Tensor, normalizer: float, dg: Tensor) -> Tensor:
        """The gradient of x, contiguous, in its dtype."""
        return (dg * torch.sigmoid(-_wide(x)) / normalizer).to(x.dtype).contiguous()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
