"""Each case in one line: the fastest backend, the fastest peer, the floor."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from .result import Result

# Attention is another function; it is there for scale.
NOT_A_PEER = ("torch SDPA",)


@dataclass(frozen=True)
class Line:
    """ours, peer: the fastest right rows, None where there is none."""

    case: str
    rows: tuple[Result, ...]
    ours: Result | None
    peer: Result | None

    @property
    def floor_ms(self) -> float | None:
        """The same for all rows that have one."""
        return next((row.floor_ms for row in self.rows if row.floor_ms), None)

    @property
    def speed(self) -> float | None:
        """The peer's time / ours."""
        if self.ours is None or self.peer is None or not self.ours.median_ms or not self.peer.median_ms:
            return None
        return self.peer.median_ms / self.ours.median_ms


def is_ours(row: Result) -> bool:
    """Whether the row is one of Holdfast's backends."""
    return row.runner.split()[0] == "holdfast"


def _fastest(rows: Sequence[Result]) -> Result | None:
    return min((row for row in rows if row.median_ms), key=attrgetter("median_ms"), default=None)


def lines(rows: Sequence[Result], kind: str = "time") -> list[Line]:
    """One for each case of a kind with a right and timed row, in order."""
    cases: dict[str, list[Result]] = {}
    for row in rows:
        if row.kind == kind:
            cases.setdefault(row.case, []).append(row)
    found = []
    for case, members in cases.items():
        ours = _fastest([row for row in members if is_ours(row)])
        peer = _fastest([row for row in members if not is_ours(row) and row.runner not in NOT_A_PEER])
        if ours or peer:
            found.append(Line(case, tuple(members), ours, peer))
    return found
