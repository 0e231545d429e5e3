"""A batch whose states are rows of a larger pool, some of it padding."""

import torch
from torch import Tensor


class PoolRows:
    """Which row of a pool each sequence of a batch has; a negative number is of padding, which has none.

    Nothing is read on the host, so that a captured graph serves any rows: padding repeats the sequence of the highest
    row, and so writes there what that one does.
    """

    def __init__(self, rows: Tensor) -> None:
        """rows: int32 or int64 [batch], no row twice."""
        self._is_sequence = rows >= 0
        numbers = torch.arange(len(rows), dtype=torch.int64, device=rows.device)
        self._repeated = torch.where(self._is_sequence, numbers, rows.argmax()) if len(rows) else numbers
        rows = rows.long()[self._repeated]
        # where all is padding, row 0 is written as it is
        self._is_written, self._rows = rows >= 0, rows.clamp(min=0)

    def inputs(self, x: Tensor) -> Tensor:
        """x [batch, ...] with another sequence's in place of padding."""
        return x[self._repeated]

    def read(self, pool: Tensor) -> Tensor:
        """The batch's rows of pool [rows, ...], copied: [batch, ...]."""
        return pool[self._rows]

    def write(self, pool: Tensor, new: Tensor) -> None:
        """Puts new [batch, ...] into its rows of the pool."""
        kept = _beside(self._is_written, new)
        pool.index_copy_(0, self._rows, torch.where(kept, new.to(pool.dtype), self.read(pool)))

    def outputs(self, y: Tensor) -> Tensor:
        """y [batch, ...] with zeros for padding."""
        return torch.where(_beside(self._is_sequence, y), y, 0)


def _beside(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(-1, *(1,) * (x.dim() - 1))
