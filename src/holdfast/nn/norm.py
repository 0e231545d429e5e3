"""Normalisation of heads: in float32 (float64 for float64), handed back in the input's dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .check import wide


class GatedRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, times silu(gate) where a gate is given.

    weight: of the given shape, which is that of x's last axes: [D] is shared between heads, [H, D] is each head's own.
    """

    def __init__(self, *shape: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x, gate and the result: [..., D] or [..., H, D]."""
        dtype = wide(x.dtype)
        y = F.rms_norm(x.to(dtype), x.shape[-1:], eps=self.eps) * self.weight
        if gate is not None:
            y = y * F.silu(gate.to(dtype))
        return y.to(x.dtype)


class HeadLayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight over the last axis of x [..., H, D], weight [H, D]."""

    def __init__(self, num_heads: int, head_dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: [..., H, D]."""
        y = F.layer_norm(x.to(wide(x.dtype)), x.shape[-1:], eps=self.eps) * self.weight
        return y.to(x.dtype)


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis."""
    y = x.to(wide(x.dtype))
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
