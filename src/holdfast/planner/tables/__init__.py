"""Measured plans, one JSON file a GPU beside this one; where a call was measured, its times win over the model's.

`holdfast bench --tune` writes them. A file is read when the first call on its device is planned.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args

from ..device import Device
from ..plan import Direction, Plan
from ..problem import Problem
from ..whole_file import write_text

FORMAT = 1
FOLDER = Path(__file__).parent
REMEDY = "delete the file, and measure again with holdfast bench --tune"


class TableError(ValueError):
    """A table that cannot be read; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What a plan took, in seconds: a median."""

    plan: Plan
    seconds: float


@dataclass(frozen=True, slots=True)
class Table:
    """Times on one device.

    device: the driver's name. sms: how many it had, None off CUDA. versions: of what ran, such as "triton".
    timings: of each pass of each call, the fastest plan first.
    """

    device: str
    sms: int | None
    versions: Mapping[str, str]
    timings: Mapping[tuple[Problem, Direction], tuple[Timing, ...]] = field(default_factory=dict)

    def of(self, problem: Problem, direction: Direction) -> tuple[Timing, ...]:
        """What was measured of a pass; empty if nothing was."""
        return self.timings.get((problem, direction), ())

    def mismatch(self, device: Device) -> str | None:
        """Why the times do not hold on a device, or None if they do."""
        if self.sms is not None and device.sms is not None and self.sms != device.sms:
            return f"was measured with {self.sms} SMs, this device has {device.sms}"
        return None


def path_of(device: Device) -> Path:
    """Where the device's table lies: h200.json for every name of an H200."""
    known = Device.recognised(device.name) if device.kind == "cuda" else None
    name = known.name if known else re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    return FOLDER / f"{name}.json"


def table_of(device: Device) -> Table | None:
    """The device's table, or None where there is none. Raises TableError for a file that cannot be understood."""
    if _in_use:
        return _in_use[-1]
    path = path_of(device)
    return _read_once(path)


@cache
def _read_once(path: Path) -> Table | None:
    return read(path) if path.exists() else None


_in_use: list[Table | None] = []


@contextmanager
def instead(table: Table | None) -> Iterator[None]:
    """Plans by this table, or by none, instead of the file; whoever keeps plans has to forget them before and after."""
    _in_use.append(table)
    try:
        yield
    finally:
        _in_use.pop()


def read(path: Path) -> Table:
    """Raises TableError, which says what to do, for a file that is not a table of this format."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise TableError(f"{path}: not readable as JSON ({error}); {REMEDY}") from None
    if isinstance(found, dict) and "format" in found and found["format"] != FORMAT:
        raise TableError(f"{path}: has format {found['format']!r}, this Holdfast reads {FORMAT}; {REMEDY}")
    try:
        return _table(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise TableError(f"{path}: not a table of measured plans ({what}); {REMEDY}") from None


def write(path: Path, table: Table) -> None:
    """Replaces the file whole. Raises OSError that names it."""
    write_text(path, _text(table))
    _read_once.cache_clear()


def merged(old: Table | None, new: Table) -> Table:
    """The old table with what the new one has measured put in its place. A table of other SMs is dropped."""
    if old is None or old.sms != new.sms:
        return new
    return Table(new.device, new.sms, new.versions, {**old.timings, **new.timings})


def _text(table: Table) -> str:
    """One line an entry, sorted, so that differences of two tables can be read."""
    head = {"format": FORMAT, "device": table.device, "sms": table.sms, "versions": dict(table.versions)}
    lines = sorted(json.dumps(_entry(*key, timings)) for key, timings in table.timings.items())
    body = ",\n  ".join(lines)
    opening = json.dumps(head)[:-1]
    return f'{opening}, "entries": [\n  {body}\n]}}\n' if lines else f'{opening}, "entries": []}}\n'


def _entry(problem: Problem, direction: Direction, timings: tuple[Timing, ...]) -> dict[str, Any]:
    return {
        "op": problem.op,
        "family": problem.family,
        "dtype": problem.dtype,
        "sizes": dict(problem.sizes),
        "traits": sorted(problem.traits),
        "direction": direction,
        "plans": [
            {"backend": timing.plan.backend, "values": dict(timing.plan.values), "seconds": timing.seconds}
            for timing in timings
        ],
    }


def _table(found: dict[str, Any]) -> Table:
    if not isinstance(found, dict):
        raise TypeError(f"expected an object; got {type(found).__name__}")
    sms = found["sms"]
    if sms is not None:
        _integer("sms", sms)
    versions = {_text_of("version", name): _text_of(name, version) for name, version in found["versions"].items()}
    entries = dict(map(_timings, found["entries"]))
    return Table(_text_of("device", found["device"]), sms, versions, entries)


def _timings(entry: dict[str, Any]) -> tuple[tuple[Problem, Direction], tuple[Timing, ...]]:
    if entry["direction"] not in get_args(Direction):
        raise ValueError(f"direction {entry['direction']!r}")
    problem = Problem(
        _text_of("op", entry["op"]),
        _text_of("family", entry["family"]),
        _text_of("dtype", entry["dtype"]),
        tuple((name, _integer(name, size)) for name, size in entry["sizes"].items()),
        frozenset(_text_of("trait", trait) for trait in entry["traits"]),
    )
    timings = []
    for plan in entry["plans"]:
        seconds = plan["seconds"]
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
            raise ValueError(f"seconds: expected a positive number; got {seconds!r}")
        values = tuple((name, _integer(name, value)) for name, value in plan["values"].items())
        timings.append(Timing(Plan(_text_of("backend", plan["backend"]), values), float(seconds)))
    return (problem, entry["direction"]), tuple(sorted(timings, key=lambda timing: timing.seconds))


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer; got {value!r}")
    return value


def _text_of(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected text; got {value!r}")
    return value
