"""What a run of several suites leaves on disk until its end, so that another process can go on with it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.planner.whole_file import write_text

from .child import case_of
from .cold import First, Firsts
from .record import Record


@dataclass(frozen=True)
class Begun:
    """A run that was begun. date: when; a suite's record is this run's if it is not older. firsts: its first calls."""

    date: str
    firsts: Firsts


def _what(records: Sequence[Record]) -> list[list[object]]:
    """What tells this run from others."""
    return [[record.command, record.commit, record.device, record.versions] for record in records]


def keep(begun: Begun, records: Sequence[Record], path: Path) -> None:
    """Writes what a process that goes on needs beside the records."""
    firsts = [[asdict(case), name, asdict(first)] for (case, name), first in begun.firsts.items()]
    write_text(path, json.dumps({"of": _what(records), "date": begun.date, "firsts": firsts}))


def kept(records: Sequence[Record], path: Path) -> Begun | None:
    """What keep wrote for the same run, if it did."""
    if not path.exists():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    if data["of"] != json.loads(json.dumps(_what(records))):
        return None
    return Begun(data["date"], {(case_of(case), name): First(**first) for case, name, first in data["firsts"]})
