"""How the loop lays out the gates of a token: those that only x feeds first, those that only R feeds last.

So the gates that take x, and those that take R h, are each one contiguous range.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.recurrences.cell import Cell


@dataclass(frozen=True)
class Gates:
    """column: the place of each gate, in the cell's order. recurrent: the range that R feeds."""

    cell: Cell
    column: dict[str, int]
    recurrent: slice

    def weights(self, R: Tensor, dtype: torch.dtype) -> Tensor:
        """[Gr, H, D, D] -> [H, columns * D, D]."""
        rows = [R[self.cell.recurrent.index(gate)] for gate in list(self.column)[self.recurrent]]
        return torch.stack(rows, 1).flatten(1, 2).to(dtype)

    def weight_grad(self, grad: Tensor) -> Tensor:
        """[H, columns * D, D] -> [Gr, H, D, D]."""
        width = grad.shape[2]
        columns = [self.column[gate] - self.recurrent.start for gate in self.cell.recurrent]
        return torch.stack([grad[:, k * width : (k + 1) * width] for k in columns])


def arrange(cell: Cell) -> Gates:
    """Return the layout for a cell."""
    first = [gate for gate in cell.gates if gate not in cell.recurrent]
    last = [gate for gate in cell.gates if gate not in cell.input]
    shared = [gate for gate in cell.gates if gate not in first + last]
    column = {gate: place for place, gate in enumerate(first + shared + last)}
    return Gates(cell, column, slice(len(first), len(column)))
