"""Positions of a rank's tokens within their sequences, for rotations."""

import torch
from torch import Tensor

from .group import Ranks, gather_on_device


def positions(
    x: Tensor, sequences: int, seen: Tensor | None, cu_seqlens: Tensor | None, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """Positions of this rank's tokens x [B, T, ...], int64 [B, T] or [1, T], and the number seen after them, [N].

    seen: int64 [N], tokens before each sequence's first, read on the rank that holds it; zeros by default.
    cu_seqlens: of the sequences of all ranks' tokens. The numbers after them are, as final states are, on every rank
    without cu_seqlens, and with it of the sequences that end on this rank; zeros in the other rows.
    """
    device = x.device
    given = torch.zeros(sequences, dtype=torch.int64, device=device) if seen is None else seen
    own = torch.cat([given.new_full((1,), x.shape[1]), given])
    every = gather_on_device(own, ranks, "positions")
    lengths, given = every[:, 0] // ranks.spans, every[:, 1:]
    # of the spans in the order of the tokens: their ranks, and where they end
    of_rank = torch.tensor(ranks.in_order([[rank] * ranks.spans for rank in range(ranks.size)]), device=device)
    ends = lengths[of_rank].cumsum(0)
    starts = ends - lengths[of_rank]
    steps = torch.arange(x.shape[1] // ranks.spans, device=device)
    index = torch.cat([starts[place] + steps for place in ranks.places])[None]
    if cu_seqlens is None:
        return index + given[0][:, None], given[0] + ends[-1]

    def holder(token: Tensor) -> Tensor:
        # the end of all tokens, where empty sequences may lie, is the last span's
        return of_rank[torch.searchsorted(ends, token, right=True).clamp_max(ranks.count - 1)]

    bounds = cu_seqlens.long()
    begun = given[holder(bounds[:-1]), torch.arange(sequences, device=device)]
    sequence = torch.searchsorted(bounds[1:].contiguous(), index, right=True).clamp_max(sequences - 1)
    last = torch.maximum(bounds[1:] - 1, bounds[:-1])
    after = torch.where(holder(last) == ranks.rank, begun + bounds.diff(), 0)
    return index - bounds[sequence] + begun[sequence], after
