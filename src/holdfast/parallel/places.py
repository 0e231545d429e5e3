"""Where the spans of a packed axis begin and end, and which pieces of sequences lie in them: arithmetic on the host."""

from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Piece:
    """A span's share of one sequence. begins, ends: whether the sequence's first token, or its last, is in it."""

    sequence: int
    length: int
    begins: bool
    ends: bool


@dataclass(frozen=True, slots=True)
class Places:
    """Spans end to end along a packed axis, and the sequences along the same axis.

    starts: the position of each span's first token, and the end of the last. bounds: of each sequence, likewise.
    """

    starts: tuple[int, ...]
    bounds: tuple[int, ...]

    def crossing(self, span: int) -> int | None:
        """The sequence that goes on from before this span into it, or past it; None where one ends and one begins."""
        position = self.starts[span]
        for n, (start, end) in enumerate(pairwise(self.bounds)):
            if start < position < end:
                return n
        return None

    def begun_in(self, sequence: int) -> int:
        """The span that holds a sequence's first token."""
        position = self.bounds[sequence]
        return next(n for n, (start, end) in enumerate(pairwise(self.starts)) if start <= position < end)

    def outgoing(self, span: int) -> tuple[int, int, int | None]:
        """From where to where in the span the sequence runs that goes on behind it, and its number; an empty stretch at
        the span's end, and None, if there is none."""
        start, end = self.starts[span], self.starts[span + 1]
        sequence = self.crossing(span + 1)
        first = end if sequence is None else max(self.bounds[sequence], start)
        return first - start, end - start, sequence

    def pieces(self, span: int) -> list[Piece]:
        """Of the sequences with a token in the span, in order; an empty one is where its place is."""
        start, end = self.starts[span], self.starts[span + 1]
        is_last = span == len(self.starts) - 2
        found = []
        for n, (first, last) in enumerate(pairwise(self.bounds)):
            length = min(last, end) - max(first, start)
            is_here = length > 0 if last > first else start <= first < end or (is_last and first == end)
            if is_here:
                found.append(Piece(n, length, first >= start, last <= end))
        return found


def places_of(lengths: list[int], bounds: list[int]) -> Places:
    """The places of spans of these lengths, in the order of the tokens.

    bounds: the global offsets of the packed sequences. Raises ValueError unless they rise from 0 to the lengths' sum.
    """
    total = sum(lengths)
    if bounds[0] != 0 or bounds[-1] != total:
        raise ValueError(
            f"cu_seqlens: expected offsets from 0 to the tokens of all ranks together, T = {total}; got {bounds[0]} to "
            f"{bounds[-1]}"
        )
    for n, (start, end) in enumerate(pairwise(bounds)):
        if end < start:
            raise ValueError(f"cu_seqlens: expected offsets that do not decrease; got {start} then {end} at {n + 1}")
    return Places((0, *accumulate(lengths)), tuple(bounds))
