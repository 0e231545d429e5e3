"""Checks of the integer tensors that other libraries take: numbers of sequences, lengths, rows of a pool."""

import torch
from torch import Tensor


def check_integers(name: str, x: Tensor, beside: Tensor, **sizes: int) -> None:
    """Raises TypeError or ValueError, with the name, unless x is int32 or int64, of these sizes and on beside's device.

    sizes: axis -> size, in order, as they are shown.
    """
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: expected a tensor of torch.int32 or torch.int64; got {found}")
    if x.shape != tuple(sizes.values()):
        shape = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(f"{name}: expected shape [{shape}]; got {list(x.shape)}")
    if x.device != beside.device:
        raise ValueError(f"{name}: expected device {beside.device}, as the first argument has; got {x.device}")
