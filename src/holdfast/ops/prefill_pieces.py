"""Packed sequences cut into blocks: in which order they are taken, found on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pieces:
    """Complete blocks of `block` tokens, in rounds: the first of every sequence, then the second ones, and so on. What
    is left behind a sequence's blocks, its tail, comes after all rounds; it may be empty.

    order: the sequences, those of more blocks first: a round has those of the first ones in it. rounds: how many each
    has. numbers: of each block, round by round, its place among all that are counted sequence by sequence. starts: its
    first token. tails: start and end, in the order of the sequences.
    """

    block: int
    order: list[int]
    rounds: list[int]
    numbers: list[int]
    starts: list[int]
    tails: list[tuple[int, int]]

    def tail_offsets(self) -> Tensor:
        """Of the tails behind one another, int64 [N + 1]."""
        return torch.tensor([0, *accumulate(end - start for start, end in self.tails)], dtype=torch.int64)

    def tokens(self) -> Tensor | None:
        """Where each token lies, in the order in which they are taken, int64 [T]; None where that is their own."""
        parts = [(start, start + self.block) for start in self.starts]
        parts += [(start, end) for start, end in self.tails if start < end]
        if all(before[1] == after[0] for before, after in pairwise(parts)):
            return None
        return torch.cat([torch.arange(start, end, dtype=torch.int64) for start, end in parts])


def pieces_of(bounds: Sequence[int], block: int) -> Pieces:
    """bounds: offsets of the sequences, which rise from 0. block: 1 or more tokens."""
    counts = [(end - start) // block for start, end in pairwise(bounds)]
    order = sorted(range(len(counts)), key=lambda n: -counts[n])
    before = [0, *accumulate(counts)]
    rounds, numbers, starts = [], [], []
    for place in range(max(counts)):
        members = [n for n in order if counts[n] > place]
        rounds.append(len(members))
        numbers += [before[n] + place for n in members]
        starts += [bounds[n] + place * block for n in members]
    tails = [(bounds[n] + counts[n] * block, bounds[n + 1]) for n in order]
    return Pieces(block, order, rounds, numbers, starts, tails)
