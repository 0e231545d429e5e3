"""Rotation of queries and keys by their position in PyTorch, on any device."""

import torch
from torch import Tensor


def rotate(x: Tensor, position: Tensor, base: float = 10000.0) -> Tensor:
    """Turns channel pair (j, j + D/2) of x [B, T, H, D], D even, by position * base^(-2 j / D) radians.

    position: integers [B, T] or [1, T]. Returns x's dtype. Source: Su et al. 2021, RoFormer (arXiv:2104.09864).
    """
    half = x.shape[-1] // 2
    # float64: a float32 angle of 1e5 radians is off by 0.004
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = (position[..., None] * frequency)[:, :, None]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    a, b = x.to(dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)
