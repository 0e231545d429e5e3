"""Which rows belong in one table and one plot, and what the plot's horizontal axis is."""

from collections.abc import Iterable
from dataclasses import dataclass

from .result import Result

# which axis a reader looks for first
_AXES = ("T", "G", "B", "D", "C", "K", "V", "H", "Kg", "r")
_NAMES = {
    "T": "steps T",
    "G": "chunks G",
    "B": "batch B",
    "D": "width D",
    "C": "chunk C",
    "K": "K",
    "V": "V",
    "H": "heads H",
    "Kg": "decays a head",
    "r": "rank r",
}


@dataclass(frozen=True)
class Group:
    """Rows of one op, label, dtype and pass: one series a runner."""

    title: str
    rows: tuple[Result, ...]

    def cases(self) -> list[tuple[Result, ...]]:
        """The rows of each case, timed ones first and fastest first."""
        found: dict[str, list[Result]] = {}
        for row in self.rows:
            found.setdefault(row.case, []).append(row)
        order = ("ok", "wrong", "failed", "rejected", "missing")
        return [tuple(sorted(rows, key=lambda r: (order.index(r.status), r.median_ms or 0))) for rows in found.values()]

    def axis(self) -> str | None:
        """The size that tells the cases apart, "bytes" where no single one does, None with nothing to plot."""
        sizes = [rows[0].sizes for rows in self.cases()]
        if len(sizes) < 2 or not any(row.median_ms for row in self.rows):
            return None
        for axis in _AXES:
            if len({s.get(axis) for s in sizes}) == len(sizes):
                return axis
        return "bytes"


def axis_name(axis: str) -> str:
    """In words."""
    return "MiB that must move" if axis == "bytes" else _NAMES[axis]


def position(row: Result, axis: str) -> float:
    """Where a row stands on the axis."""
    return (row.floor_bytes or 0) / 2**20 if axis == "bytes" else row.sizes[axis]


def groups(rows: Iterable[Result]) -> list[Group]:
    """In the order in which they were measured."""
    found: dict[tuple[str, str], list[Result]] = {}
    for row in rows:
        options = "".join(f" {name}={value}" for name, value in row.options.items())
        name = row.label or f"{row.op}{options}"
        title = f"{name}, {row.dtype}, {'forward' if row.passes == 'fwd' else 'forward + backward'}"
        title += " with state" if row.state and not row.label else ""
        found.setdefault((f"{row.op}{options}", title), []).append(row)
    return [Group(title, tuple(members)) for (_, title), members in found.items()]
