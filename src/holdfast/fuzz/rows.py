"""Sequences as rows: a batch as it is, packed sequences padded to the longest, one row each."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

State = tuple[Tensor, ...]


class Rows:
    """Of a batch of length T, or of the packed sequences between the offsets cu (empty for a batch)."""

    def __init__(self, cu: tuple[int, ...], batch: int, length: int, device: torch.device | str) -> None:
        self.cu = cu
        self.count, self.length = batch, length
        if cu:
            lengths = [end - start for start, end in pairwise(cu)]
            self.count, self.length = len(lengths), max(lengths)
            steps = torch.arange(self.length, device=device)
            self.alive = steps < torch.tensor(lengths, device=device)[:, None]
            self.index = (torch.tensor(cu[:-1], device=device)[:, None] + steps).clamp(0, max(length - 1, 0))

    def split(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [rows, length, ...]"""
        return x[0][self.index] if self.cu else x

    def join(self, x: Tensor) -> Tensor:
        """[rows, length, ...] -> [B, T, ...]"""
        return x[self.alive][None] if self.cu else x

    def walk(self, state: State, step: Callable[[int, State], tuple[State, Tensor]], like: Tensor) -> Any:
        """Runs step(t, state) -> (state, output) through time; rows that have ended keep their state.

        like: an empty output [rows, 0, ...], for no steps at all. Returns outputs [B, T, ...] and the last state.
        """
        outputs = []
        for t in range(self.length):
            after, output = step(t, state)
            if self.cu:
                alive = self.alive[:, t]
                after = tuple(
                    torch.where(alive.reshape(-1, *(1,) * (new.dim() - 1)), new, old)
                    for new, old in zip(after, state, strict=True)
                )
            state = after
            outputs.append(output)
        return self.join(torch.stack(outputs, 1) if outputs else like), state
