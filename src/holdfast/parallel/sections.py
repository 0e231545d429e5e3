"""Packed weights over ranks: sections of rows, of which every rank needs its heads' and holds a part of the whole."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Sections:
    """The rows of a packed weight, section by section.

    widths: rows of each section. heads: how many heads lie one behind another in each; a section of fewer heads than
    there are ranks is cut into as many parts as it has heads, which several ranks have alike. piece: local rows are
    filled up with zeros to a multiple of it. Rows beyond the sections are needed by no rank.
    """

    widths: tuple[int, ...]
    heads: tuple[int, ...]
    piece: int = 1

    def check(self, name: str, rows: int, ranks: int) -> None:
        """Raises ValueError unless ranks can share a weight of so many rows, of that name."""
        if len(self.widths) != len(self.heads) or sum(self.widths) > rows:
            raise ValueError(f"{name}: expected sections of {rows} rows at most, each with its heads; got {self}")
        for width, heads in zip(self.widths, self.heads, strict=True):
            if (heads % ranks and ranks % heads) or width % heads:
                raise ValueError(
                    f"{name}: expected sections of whole heads, a multiple or a divisor of {ranks}, the number of "
                    f"tensor-parallel ranks; got {width} rows of {heads} heads"
                )

    def local(self, ranks: int) -> list[int]:
        """The rows that a rank needs of each section."""
        return [width // min(heads, ranks) for width, heads in zip(self.widths, self.heads, strict=True)]

    def local_rows(self, ranks: int) -> int:
        """The rows of a rank's weight, with those that fill it up."""
        return -(-sum(self.local(ranks)) // self.piece) * self.piece

    def needed(self, rank: int, ranks: int) -> list[Interval]:
        """What a rank needs of all rows, in their order."""
        found = []
        for start, heads, width in zip(accumulate(self.widths, initial=0), self.heads, self.local(ranks), strict=False):
            first = start + rank * min(heads, ranks) // ranks * width
            found.append((first, first + width))
        return found


@dataclass(frozen=True, slots=True)
class Routes:
    """Who sends which rows of one packed weight to whom.

    pieces[holder][rank]: rows that the rank needs and the holder has, counted from the holder's first, in the order in
    which the rank needs them; a rank's rows are those of all holders in turn. held: rows that each holds, as Shard(0)
    has it. local: rows of a rank's weight.
    """

    pieces: tuple[tuple[tuple[Interval, ...], ...], ...]
    held: tuple[int, ...]
    local: int

    def rows(self, holder: int, rank: int) -> int:
        return sum(end - start for start, end in self.pieces[holder][rank])


def routes(sections: Sections, rows: int, ranks: int) -> Routes:
    """Those of a weight of so many rows."""
    share = -(-rows // ranks)
    bounds = [min(n * share, rows) for n in range(ranks + 1)]
    pieces = tuple(
        tuple(tuple(_within(sections.needed(rank, ranks), first, last)) for rank in range(ranks))
        for first, last in pairwise(bounds)
    )
    return Routes(pieces, tuple(last - first for first, last in pairwise(bounds)), sections.local_rows(ranks))


def _within(intervals: list[Interval], first: int, last: int) -> list[Interval]:
    clipped = ((max(start, first) - first, min(end, last) - first) for start, end in intervals)
    return [(start, end) for start, end in clipped if start < end]
