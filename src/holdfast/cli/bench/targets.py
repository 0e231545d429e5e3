"""What the documents behind the suites aim at, and whether it was reached; the aims are data, targets/<suite>.toml."""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from .result import Result

FOLDER = Path(__file__).parent / "targets"


@dataclass(frozen=True)
class Target:
    """One line of a document's table of metrics.

    metric, target: what the document says, in short. value: which figure of VALUES is held against the limit; "" for
    an aim that is not measured here, and why says why not. cases: texts, one of which a case has to say. passes: the
    pass of those cases, "" for any. runners: whose best row counts, by name or first word. against: the best of these
    is what ratios are taken to. at_most, at_least: the limit. note: what differs from the document's measurement.
    """

    metric: str
    target: str
    value: str = ""
    cases: tuple[str, ...] = ("",)
    passes: str = ""
    runners: tuple[str, ...] = ("holdfast",)
    against: tuple[str, ...] = ()
    at_most: float | None = None
    at_least: float | None = None
    why: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if bool(self.value) == bool(self.why):
            raise ValueError(f"target {self.metric!r}: expected either a value or why there is none")
        if self.value and self.value not in VALUES:
            raise ValueError(f"target {self.metric!r}: expected a value of {', '.join(VALUES)}; got {self.value!r}")
        if self.value and (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"target {self.metric!r}: expected one of at_most and at_least")

    def holds(self, value: float) -> bool:
        """Whether a value is within the limit."""
        return value <= self.at_most if self.at_most is not None else value >= (self.at_least or 0.0)


@dataclass(frozen=True)
class Table:
    """A table that a suite's report carries along. rows: of strings, one for each column."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Verdict = Literal["met", "missed", "not measured"]


@dataclass(frozen=True)
class Judged:
    """A target beside what was measured. by_case: case -> value."""

    target: Target
    verdict: Verdict
    measured: str
    by_case: dict[str, float]


def _ratio(name: str) -> Callable[[Result, Result | None], float | None]:
    def value(ours: Result, theirs: Result | None) -> float | None:
        mine, other = getattr(ours, name), getattr(theirs, name) if theirs else None
        return mine / other if mine is not None and other else None

    return value


def _step_error(ours: Result, theirs: Result | None) -> float | None:
    return max(ours.step_errors["100"]) if ours.step_errors else None


def _history(ours: Result, theirs: Result | None) -> float | None:
    return ours.history_bytes / ours.memory_bytes if ours.history_bytes and ours.memory_bytes else None


def _rate(ours: Result, theirs: Result | None) -> float | None:
    return ours.operations / ours.median_ms / 1e9 if ours.operations and ours.median_ms else None


def _prediction(ours: Result, theirs: Result | None) -> float | None:
    if ours.dram_bytes is None or not ours.predicted_bytes:
        return None
    return 100 * abs(ours.dram_bytes / ours.predicted_bytes - 1)


# name -> (unit in words, the figure of a row, and of the row that it is held against)
VALUES: dict[str, tuple[str, Callable[[Result, Result | None], float | None]]] = {
    "speed": ("x as fast", lambda ours, theirs: (lambda r: 1 / r if r else None)(_ratio("median_ms")(ours, theirs))),
    "memory": ("x the memory", _ratio("memory_bytes")),
    "dram": ("x the DRAM bytes", _ratio("dram_bytes")),
    "history": ("x less than the full history", _history),
    "floor": ("x the floor", lambda ours, theirs: ours.floor_ratio),
    "rate": ("TFLOP/s", _rate),
    "tensor": ("% of cycles", lambda ours, theirs: ours.tensor_percent),
    "kernels": ("kernels", lambda ours, theirs: ours.kernels),
    "shared": ("KiB a block", lambda ours, theirs: ours.shared_bytes / 1024 if ours.shared_bytes else None),
    "error": ("relative error", lambda ours, theirs: ours.error),
    "step_error": ("absolute error", _step_error),
    "prediction": ("% off the prediction", _prediction),
    "host": ("us a call", lambda ours, theirs: ours.median_ms * 1e3 if ours.median_ms else None),
    "runs": ("right", lambda ours, theirs: float(ours.status == "ok")),
}


@cache
def _read(suite: str) -> dict[str, Any]:
    path = FOLDER / f"{suite}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _tuples(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


def targets_of(suite: str) -> list[Target]:
    """Of a suite's file; none without one. ValueError for a target that does not say what it holds against what."""
    return [Target(**_tuples(entry)) for entry in _read(suite).get("target", [])]


def tables_of(suite: str) -> list[Table]:
    """Tables that a suite's file holds beside its targets."""
    return [
        Table(entry["title"], entry["note"], tuple(entry["columns"]), tuple(map(tuple, entry["rows"])))
        for entry in _read(suite).get("table", [])
    ]


def _named(row: Result, names: Sequence[str]) -> bool:
    return row.runner in names or row.runner.split()[0] in names


def _best(rows: list[Result], names: Sequence[str]) -> Result | None:
    """The fastest right row of these runners; without times the first right one."""
    right = [row for row in rows if row.status == "ok" and _named(row, names)]
    return min(right, key=lambda row: row.median_ms or 0.0, default=None)


def judge(target: Target, rows: Sequence[Result]) -> Judged:
    """Holds a target against the rows of one record: met if every case that could be measured is within the limit."""
    if not target.value:
        return Judged(target, "not measured", target.why, {})
    by_case: dict[str, list[Result]] = {}
    for row in rows:
        if target.passes in ("", row.passes) and any(text in f"{row.label}: {row.case}" for text in target.cases):
            by_case.setdefault(row.case, []).append(row)
    value_of = VALUES[target.value][1]
    found: dict[str, float] = {}
    lacking = ""
    for case, members in by_case.items():
        ours, theirs = _best(members, target.runners), _best(members, target.against)
        if ours is None or (target.against and theirs is None):
            names = target.runners if ours is None else target.against
            whose = next((r for r in members if _named(r, names)), None)
            lacking = f"{whose.runner}: {whose.status}, {whose.detail}" if whose else f"no row of {', '.join(names)}"
            continue
        value = value_of(ours, theirs)
        if value is not None:
            found[case] = value
        elif ours.counters_note:
            lacking = ours.counters_note
    if not found:
        return Judged(target, "not measured", (lacking or "no case of this run measures it")[:200], {})
    held = sum(target.holds(value) for value in found.values())
    return Judged(target, "met" if held == len(found) else "missed", _said(target, found, held), found)


def _said(target: Target, found: dict[str, float], held: int) -> str:
    """The values in words, and in how many cases they are within the target."""
    if target.value == "runs":
        return f"{held} of {len(found)} cases run and are right"
    unit, least, most = VALUES[target.value][0], min(found.values()), max(found.values())
    said = f"{least:.3g} {unit}" if least == most else f"{least:.3g} to {most:.3g} {unit}"
    if len(found) == 1:
        return said
    return f"{said}, {held} of {len(found)} cases within the target" if held < len(found) else f"{said}, {held} cases"


def judged(suite: str, rows: Sequence[Result]) -> list[Judged]:
    """All targets of a suite against the rows of one record."""
    return [judge(target, rows) for target in targets_of(suite)]
