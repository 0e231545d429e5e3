"""Where each token of a packed batch belongs, as tensor arithmetic that a compiler can follow."""

import torch
from torch import Tensor


def packed_beside(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The offsets [N + 1] on the device of x [1, T, ...], wherever they were, and the number of the sequence that each
    of its tokens belongs to, int64 [T]."""
    cu_seqlens = cu_seqlens.to(x.device)
    steps = torch.arange(x.shape[1], device=x.device, dtype=cu_seqlens.dtype)
    # computed, because of a slice Inductor searches the memory from its start: off by one (torch 2.11, pytorch#182343)
    last = cu_seqlens[1:] - 1
    # offsets that end before T are refused by the op, which reads their values
    return cu_seqlens, torch.searchsorted(last, steps).clamp_max(cu_seqlens.shape[0] - 2)
