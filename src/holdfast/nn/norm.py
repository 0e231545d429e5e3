"""Normalisation of heads: in float32 (float64 for float64), handed back in the input's dtype."""

import torch
from torch import Tensor, nn

from holdfast.kernels.norm.call import Activation
from holdfast.ops import gated_rms_norm


class GatedRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, times activation(gate) where a gate is given.

    weight: [D], shared between heads, or [H, D], each head's own. activation: "silu" or "sigmoid".
    """

    def __init__(self, *shape: int, eps: float = 1e-5, activation: Activation = "silu") -> None:
        super().__init__()
        self.eps, self.activation = eps, activation
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x, gate and the result: [B, T, H, D]."""
        return gated_rms_norm(x, gate, self.weight, self.eps, self.activation)


class HeadLayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight over the last axis, times sigmoid(gate) where a gate is given.

    weight: [H, D], each head's own.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_heads, head_dim))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x, gate and the result: [B, T, H, D]."""
        return gated_rms_norm(x, gate, self.weight, self.eps, "sigmoid", center=True)
