"""Recurrences whose token is several steps of their family: tokens [B, T, ...] as steps [B, T * n, ...] in a row."""

import torch.nn.functional as F
from torch import Tensor


def at_first(x: Tensor, steps: int, rest: float = 0.0) -> Tensor:
    """x [B, T, H, ...] at the first of each token's steps, `rest` at the others: [B, T * steps, H, ...]."""
    return F.pad(x[:, :, None], (0, 0) * (x.dim() - 2) + (0, steps - 1), value=rest).flatten(1, 2)


def at_last(x: Tensor, steps: int) -> Tensor:
    """x [B, T, H, ...] at the last of each token's steps, 0 at the others: [B, T * steps, H, ...]."""
    return F.pad(x[:, :, None], (0, 0) * (x.dim() - 2) + (steps - 1, 0)).flatten(1, 2)


def last_of(o: Tensor, steps: int) -> Tensor:
    """What is read after a token's last step: o [B, T * steps, H, V] -> [B, T, H, V]."""
    return o.unflatten(1, (o.shape[1] // steps, steps))[:, :, -1]
