"""Cuts a sequence into chunks, and puts it together again."""

import torch.nn.functional as F
from torch import Tensor


def cut(x: Tensor, chunk: int) -> Tensor:
    """[B, T, H, ...] -> [B, H, n, C, ...], the tail filled with zeros, which leave the state as it is."""
    pad = -x.shape[1] % chunk
    if pad:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, pad))
    # contiguous, because every product of chunks would otherwise copy it again
    return x.unflatten(1, (-1, chunk)).movedim(3, 1).contiguous()


def cut_heads(x: Tensor, heads: int, chunk: int) -> Tensor:
    """cut, with each head repeated for its group."""
    return cut(x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2), chunk)


def join(x: Tensor, length: int) -> Tensor:
    """[B, H, n, C, ...] -> [B, T, H, ...], without the tail."""
    return x.movedim(1, 3).flatten(1, 2)[:, :length]
