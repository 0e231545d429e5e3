"""Where each token of a packed batch belongs, as tensor arithmetic that a compiler can follow."""

import torch
from torch import Tensor


def sequence_of(cu_seqlens: Tensor, length: int) -> Tensor:
    """The number of the sequence that each of the T = length packed tokens belongs to, int64 [T]."""
    steps = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    # offsets that end before T are refused by the op, which reads their values
    return torch.searchsorted(cu_seqlens[1:].contiguous(), steps, right=True).clamp_max(cu_seqlens.shape[0] - 2)
