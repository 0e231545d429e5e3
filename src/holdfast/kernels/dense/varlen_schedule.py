"""Rows of tokens in the order in which a time loop meets them: step by step, the longest sequence first.

A batch of equal lengths is the case where every step has as many rows. Packed sequences are sorted by length, so that
those still running are always the first rows of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from holdfast.kernels import varlen


@dataclass(frozen=True)
class VarlenSchedule:
    """sizes: rows of each step, never rising. offsets: the first row of each step, and the end.

    order: for each row its token in the packed axis; None for a batch. sequences: the sequence of each row of the
    first step, empty ones last; None for a batch.
    """

    sizes: list[int]
    offsets: list[int]
    order: Tensor | None = None
    sequences: Tensor | None = None

    def rows(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """[B, T, ...] -> [rows, 1, ...] packed or [T, B, ...] of the steps from start to stop; perhaps a view."""
        stop = len(self.sizes) if stop is None else stop
        if self.order is None:
            return x[:, start:stop].transpose(0, 1)
        return x[0, self.order[self.offsets[start] : self.offsets[stop]]][:, None]

    def steps(self, x: Tensor) -> Sequence[Tensor]:
        """[B, T, ...] -> the rows of each step; perhaps views."""
        return x.unbind(1) if self.order is None else x[0, self.order].split(self.sizes)

    def put(self, rows: Tensor, x: Tensor, start: int, stop: int) -> None:
        """Writes [rows of the steps from start to stop, ...] to their places of [B, T, ...]."""
        if self.order is None:
            place = x[:, start:stop].transpose(0, 1)
            place.copy_(rows.view(place.shape))
        else:
            x[0, self.order[self.offsets[start] : self.offsets[stop]]] = rows.to(x.dtype)

    def enter(self, state: Tensor) -> Tensor:
        """[S, N, ...] in the caller's order of sequences -> in the loop's."""
        return state if self.sequences is None else state[:, self.sequences]

    def leave(self, state: Tensor) -> Tensor:
        """[S, N, ...] in the loop's order of sequences -> in the caller's; always a new tensor."""
        if self.sequences is None:
            return state.clone()
        out = torch.empty_like(state)
        out[:, self.sequences] = state
        return out

    def blocks(self, rows: int) -> list[tuple[int, int]]:
        """Consecutive steps (start, stop) of about that many rows, at least one step each."""
        ranges, start = [], 0
        for step in range(1, len(self.sizes) + 1):
            if step == len(self.sizes) or self.offsets[step + 1] - self.offsets[start] > rows:
                ranges.append((start, step))
                start = step
        return ranges


def make_schedule(batch: int, length: int, cu_seqlens: Tensor | None, device: torch.device) -> VarlenSchedule:
    """Return the schedule of a [batch, length] call on device.

    Raises ValueError for offsets that do not rise from 0 to length, RuntimeError while a CUDA graph is captured there.
    """
    if cu_seqlens is None:
        offsets = list(range(0, batch * length + 1, batch)) if batch else [0] * (length + 1)
        return VarlenSchedule([batch] * length, offsets)
    bounds = torch.tensor(varlen.sequence_bounds(cu_seqlens, length), dtype=torch.int64)
    varlen.refuse_copy_in_capture(device, f"offsets on {cu_seqlens.device}")
    lengths = bounds.diff()
    sequences = lengths.argsort(descending=True, stable=True)
    steps = torch.arange(int(lengths.max()), dtype=torch.int64)
    running = steps[:, None] < lengths[sequences]
    sizes = running.sum(1).tolist()
    order = (bounds[sequences] + steps[:, None])[running]
    return VarlenSchedule(sizes, [0, *accumulate(sizes)], order.to(device), sequences.to(device))
