"""Packed sequences cut into pieces of a block's length: which follow which, found on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces in the order of the tokens, numbered through all sequences.

    A sequence has a piece for each of its complete blocks and one for what is left behind them; an empty sequence has
    an empty one. Those that another one follows are complete. They are taken in rounds: the first of every sequence,
    then the second ones, so that each round's states are made of the first ones of the round before.

    offsets: of all pieces. first, last: a sequence's. complete: those of `block` tokens. order: the sequences, those of
    more pieces first. rounds: how many pieces each round has, of the first sequences in order. starts: the first token
    of those pieces. after: the piece behind each.
    """

    offsets: list[int]
    first: list[int]
    last: list[int]
    complete: list[int]
    order: list[int]
    rounds: list[int]
    starts: list[int]
    after: list[int]


def pieces_of(bounds: Sequence[int], block: int) -> Pieces:
    """bounds: offsets of the sequences, which rise from 0. block: 1 or more tokens."""
    counts = [max(1, -(-(end - start) // block)) for start, end in pairwise(bounds)]
    first = [0, *accumulate(counts)]
    offsets = [
        min(start + n * block, end) for (start, end), c in zip(pairwise(bounds), counts, strict=True) for n in range(c)
    ]
    offsets.append(bounds[-1])
    order = sorted(range(len(counts)), key=lambda n: -counts[n])
    rounds, taken = [], []
    for place in range(max(counts) - 1):
        members = [first[n] + place for n in order if counts[n] > place + 1]
        rounds.append(len(members))
        taken += members
    return Pieces(
        offsets,
        first[:-1],
        [n - 1 for n in first[1:]],
        [n for n, (start, end) in enumerate(pairwise(offsets)) if end - start == block],
        order,
        rounds,
        [offsets[n] for n in taken],
        [n + 1 for n in taken],
    )
