"""Packed sequences as other libraries number them, seq_idx [B, T], into offsets as Holdfast's ops take them."""

import torch
from torch import Tensor


def offsets_of(seq_idx: Tensor) -> Tensor:
    """Offsets, int64 [sequences + 1], of the runs of equal numbers in the rows of seq_idx, one row behind the other.

    No run goes from a row into the next. Reads numbers on the host.

    Args:
        seq_idx: int32 or int64 [B, T], B and T at least 1; negative for padding, whose runs count too.

    Raises:
        ValueError: where a number comes again after another one, since its parts would be two sequences here and one in
            the library that takes it.
    """
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    now, before = seq_idx[:, 1:], seq_idx[:, :-1]
    starts[:, 1:] = now != before
    highest = seq_idx.cummax(1).values[:, :-1]
    if (starts[:, 1:] & (now >= 0) & (now <= highest)).any():
        raise ValueError("seq_idx: expected numbers that rise from one sequence to the next in each row; got one again")
    first = starts.flatten().nonzero().flatten()
    return torch.cat([first, first.new_full((1,), seq_idx.numel())])
