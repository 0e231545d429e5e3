"""The states of sequences that are packed into rows and numbered there, as mamba_ssm has them."""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.ops.check import check_cu_seqlens

from ..integers import check_integers
from ..sequence_numbers import offsets_of


class Sequences(NamedTuple):
    """Sequences of all rows, one behind the other."""

    offsets: Tensor  # int64 [sequences + 1]
    first: Tensor  # int64 [batch], the number of each row's first sequence
    last: Tensor  # int64 [batch], of its last
    continues: Tensor  # bool [batch], whether the first one is number 0, which initial states are of

    def spread(self, states: Tensor) -> Tensor:
        """States [batch, ...] of the rows' first sequences as states of all [sequences, ...], zeros for the others."""
        kept = self.continues.view(-1, *(1,) * (states.dim() - 1))
        all_states = states.new_zeros(len(self.offsets) - 1, *states.shape[1:])
        return all_states.index_put((self.first,), torch.where(kept, states, 0))

    def of_offsets(self, states: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Of states [sequences, ...] those of cu_seqlens's sequences, which has empty ones too."""
        cu_seqlens = cu_seqlens.to(self.offsets)
        at = torch.searchsorted(self.offsets, cu_seqlens[:-1]).clamp(max=len(states) - 1)
        has_tokens = cu_seqlens[1:] > cu_seqlens[:-1]
        return torch.where(has_tokens.view(-1, *(1,) * (states.dim() - 1)), states[at], 0)


def sequences_of(x: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> Sequences | None:
    """Those of the tokens x [batch, T, ...] by their numbers seq_idx, int32 or int64 [batch, T]; None without numbers.

    cu_seqlens: the same as offsets, empty sequences among them, or None. Raises ValueError or TypeError for another
    shape or dtype, for offsets without numbers or of other sequences.
    """
    if cu_seqlens is not None and seq_idx is None:
        raise ValueError("seq_idx: expected beside cu_seqlens, which alone says where states are read, not where they "
                         "begin anew; got None")  # fmt: skip
    if seq_idx is None:
        return None
    batch, length = x.shape[:2]
    check_integers("seq_idx", seq_idx, x, B=batch, T=length)
    if not seq_idx.numel():
        raise ValueError(f"seq_idx: expected tokens to number; got shape {list(seq_idx.shape)}")
    offsets = offsets_of(seq_idx)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch)
        if not torch.equal(cu_seqlens.to(offsets).unique_consecutive(), offsets):
            raise ValueError("cu_seqlens: expected the offsets of seq_idx's sequences; got others")
    ends = torch.arange(batch + 1, dtype=torch.int64, device=x.device) * length
    rows = torch.searchsorted(offsets, ends)
    return Sequences(offsets, rows[:-1], rows[1:] - 1, seq_idx[:, 0] == 0)
