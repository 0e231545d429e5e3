"""Runs cases one after the other and keeps the record on disk up to date."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch

from ..errors import UserError
from .case import Case
from .clock import Method
from .cold import Firsts, died
from .counters import counted
from .measure import lost, measure
from .record import Record, write
from .result import Result, of_case
from .selection import EVERYTHING, Selection, runners_of
from .subject import Runner

Each = Callable[[Case, Runner, Result | None], None]


class DeviceLost(UserError):
    """A kernel broke the device's context: this process can measure nothing more."""


@dataclass(frozen=True)
class Job:
    """What a run measures. wanted: which runners. firsts: first calls that were measured before."""

    cases: tuple[Case, ...]
    device: torch.device
    wanted: Selection = EVERYTHING
    method: Method = "events"
    firsts: Firsts | None = None


def unfinished(out: Path) -> Path:
    """Where a run keeps its rows until it has all of them, so that it takes nothing away from an earlier one."""
    return out.with_name(f"{out.stem}.unfinished{out.suffix}")


def new_process() -> NoReturn:
    """Puts a new process of the same command in the place of this one, to go on where it stopped."""
    again = [argument for argument in sys.argv[1:] if argument != "--fresh"]
    os.execv(sys.executable, [sys.executable, "-m", "holdfast", *again])


def run(job: Job, record: Record, out: Path, each: Each = lambda case, runner, result: None) -> Record:
    """Measures every runner in every case that record has no row of, and adds the rows to it.

    The file `unfinished(out)` is rewritten after each row; at the end it takes out's place. each: called with None
    before a runner is measured, and with its row after.

    Raises DeviceLost after the row of what broke the device's context.
    """
    draft = unfinished(out)
    record, firsts = replace(record, complete=False), job.firsts or {}
    done = {(row.to_case(), row.runner) for row in record.rows}
    write(record, draft)
    for case in job.cases:
        for runner in runners_of(case, job.wanted):
            if (case, runner.name) in done:
                continue
            each(case, runner, None)
            broken = ""
            if how := died(firsts, case, runner):
                result = of_case(case, runner.name, "failed", how)
            else:
                result = measure(case, runner, job.device, record.roofs, job.method)
                if broken := lost(job.device):
                    result = of_case(case, runner.name, "failed", broken)
            if (first := firsts.get((case, runner.name))) is not None:
                result = replace(result, first_call_s=first.seconds)
            record = replace(record, rows=(*record.rows, result))
            write(record, draft)
            each(case, runner, result)
            if broken:
                raise DeviceLost(f"{runner.name} in {case}: {broken}; the same command goes on after it")
    record = replace(record, complete=True)
    write(record, out)
    draft.unlink()
    return record


def count(records: Sequence[tuple[Record, Path]], wanted: Selection, device: torch.device) -> None:
    """Adds hardware counters to rows of finished records and writes these again. One process counts for all of them,
    after all times are taken: a profiler must not be near what is timed."""
    places = [
        (r, n) for r, (record, _) in enumerate(records) for n, row in enumerate(record.rows) if _to_count(wanted, row)
    ]
    if not places:
        return
    found = counted([records[r][0].rows[n] for r, n in places], device)
    for r, (record, out) in enumerate(records):
        rows = list(record.rows)
        for (other, n), row in zip(places, found, strict=True):
            if other == r:
                rows[n] = row
        write(replace(record, rows=tuple(rows)), out)


def _to_count(wanted: Selection, row: Result) -> bool:
    return row.kind == "time" and bool(row.median_ms) and wanted.takes(row.runner, row.to_case())
