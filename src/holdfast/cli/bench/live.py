"""Measures in front of a person: progress, a table for each case, where the results went."""

import gc
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..errors import UserError
from ..report import plain
from . import clock
from .begun import Begun, keep, kept
from .case import Case
from .cold import Firsts, first_calls
from .record import Record, commit, device_facts, device_folder, now, read, versions
from .result import Result
from .roofs import Roofs, roofs
from .selection import Selection, runners_of
from .session import DeviceLost, Each, Job, count, new_process, run, unfinished
from .subject import Runner
from .table import COLUMNS, cells

_STYLES = {"ok": "dim", "wrong": "red", "failed": "red", "rejected": "dim", "missing": "dim"}


@dataclass(frozen=True)
class Named:
    """Cases under the name that their file and their command line go by."""

    name: str
    title: str
    command: str
    cases: list[Case]


@dataclass(frozen=True)
class Choices:
    """What the command line says beside the cases. cold: how many first calls are measured side by side, 0 for none.
    seconds: for the runs of a row. out: a file, or None for one below results. fresh: whether rows of an unfinished run
    are dropped."""

    wanted: Selection
    counters: Selection | None = None
    graph: bool = False
    cold: int = 0
    seconds: float = clock.SECONDS
    commit: str = ""
    out: Path | None = None
    fresh: bool = False


def _table(case: Case, rows: list[Result]) -> Group:
    """The timed rows as a table; what is to be said of rows below it, so that a narrow terminal shows all of it."""
    floor = next((row.floor_ms for row in rows if row.floor_ms), None)
    method = next((row.method for row in rows if row.method), None)
    said = [f"floor {floor:.3g} ms"] if floor is not None else []
    title = Text.assemble((str(case), "bold"), "   ", (", ".join([*said, *([method] if method else [])]), "dim"))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    shown = [n for n, column in enumerate(COLUMNS[:-1]) if any(cells(row)[n] for row in rows)]
    for n in shown:
        table.add_column(COLUMNS[n], justify="right" if n else "left", overflow="fold")
    lines = []
    for row in rows:
        written = cells(row)
        if row.status == "ok":
            table.add_row(*(escape(written[n]) for n in shown))
        if written[-1]:
            lines.append(Text(f"  {row.runner}: {written[-1]}", style=_STYLES[row.status]))
    return Group(title, *([table] if table.row_count else []), *lines, "")


def _started(record: Record, out: Path, since: str, fresh: bool, console: Console) -> Record:
    """The record with the rows and roofs of an unfinished run of the same command, or of this run, which began at
    since, if another process has finished the suite in it; UserError if the unfinished run is of another."""
    draft = unfinished(out)
    if fresh:
        return record
    if draft.exists():
        found = read(draft)
        if not record.continues(found):
            raise UserError(
                f"{draft} is an unfinished run of another command, commit or device: keep it under another name "
                "(bench report takes any), or add --fresh to drop it"
            )
    elif since and out.exists() and record.continues(found := read(out)) and found.date >= since:
        pass
    else:
        return record
    rows = "1 row is" if len(found.rows) == 1 else f"{len(found.rows)} rows are"
    plain(console, f"{rows} there from a run that was cut short; --fresh drops them")
    return replace(record, rows=found.rows, roofs=found.roofs, first_calls=record.first_calls or found.first_calls)


def _cold(
    cases: list[Case], done: set[tuple[Case, str]], device: torch.device, choices: Choices, console: Console
) -> Firsts:
    if not choices.cold:
        return {}
    with console.status(f"first calls, {choices.cold} side by side, each in a process of its own"):
        return first_calls(
            cases,
            device,
            choices.wanted,
            choices.cold,
            done,
            each=lambda line: plain(console, f"first call: {line}"),
        )


def measure_live(named: list[Named], device: torch.device, choices: Choices, results: Path) -> None:
    """Measures, prints, and writes each to results/<device>/<name>.json, or to choices.out.

    Where a kernel breaks the device for this process, a new one takes its place and goes on after that row.
    """
    every = [case for each in named for case in each.cases]
    choices.wanted.check(every, "--runners")
    if choices.counters is not None:
        choices.counters.check(every, "--counters")
    if not any(runners_of(case, choices.wanted) for case in every):
        raise UserError(f"--runners: none of these runs in any of the {len(every)} cases")
    # garbage is collected for every row, which need not go through what the imports left each time
    gc.freeze()
    console = Console()
    clock.SECONDS = choices.seconds
    facts = device_facts(device)
    with console.status("measuring copy bandwidth and matrix rates"):
        roof = roofs(device)
    rates = ", ".join(f"{dtype} {rate / 1e12:.3g} Top/s" for dtype, rate in roof.rates.items())
    console.print(f"{facts['name']}: copy {roof.copy_bandwidth / 1e9:.4g} GB/s, matrix product {rates}\n")
    folder = results / device_folder(facts)
    outs = [choices.out or folder / f"{each.name}.json" for each in named]
    records = [_empty(each, facts, roof, choices) for each in named]
    place = outs[0].with_name(f"{'+'.join(out.stem for out in outs)}.begun.json")
    before = None if choices.fresh else kept(records, place)
    since = before.date if before else ""
    records = [_started(record, out, since, choices.fresh, console) for record, out in zip(records, outs, strict=True)]
    if before is None:
        done = {(row.to_case(), row.runner) for record in records for row in record.rows}
        before = Begun(min(record.date for record in records), _cold(every, done, device, choices, console))
        keep(before, records, place)
    finished = []
    for each, out, record in zip(named, outs, records, strict=True):
        console.print(f"\n{each.title}", style="bold")
        method: clock.Method = "graph" if choices.graph else "events"
        job = Job(tuple(each.cases), device, choices.wanted, method, before.firsts)
        try:
            finished.append((_shown(job, record, out, console), out))
        except KeyboardInterrupt:
            said = f"interrupted: what was measured is in {unfinished(out)}, and the same command goes on from there"
            plain(console, said)
            raise
        except DeviceLost as said:
            plain(console, f"{said}, as this one does now in a new process")
            new_process()
        plain(console, f"written to {out}")
    if choices.counters is not None:
        with console.status("hardware counters"):
            count(finished, choices.counters, device)
        console.print("hardware counters written beside their rows")
    place.unlink()


def _empty(named: Named, facts: dict[str, object], roof: Roofs, choices: Choices) -> Record:
    said = (
        f"each in a process of its own with empty compile caches, {choices.cold} side by side" if choices.cold else ""
    )
    return Record(
        suite=named.name,
        title=named.title,
        command=named.command,
        date=now(),
        commit=choices.commit or commit(),
        device=facts,
        versions=versions(),
        roofs=roof,
        rows=(),
        complete=False,
        first_calls=said if choices.cold else "",
    )


def _shown(job: Job, record: Record, out: Path, console: Console) -> Record:
    total = sum(len(runners_of(case, job.wanted)) for case in job.cases)
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bars, console=console, transient=True) as progress:
        task = progress.add_task("", total=total, completed=len(record.rows))
        return run(job, record, out, _printer(job, record, progress, task, console))


def _printer(job: Job, record: Record, progress: Progress, task: TaskID, console: Console) -> Each:
    rows: list[Result] = []

    def all_of(case: Case) -> bool:
        before = sum(row.to_case() == case for row in record.rows)
        return before + len(rows) == len(runners_of(case, job.wanted))

    def each(case: Case, runner: Runner, result: Result | None) -> None:
        if result is None:
            progress.update(task, description=escape(f"{case.op} {case.shape} {case.passes}: {runner.name}"))
            return
        progress.advance(task)
        rows.append(result)
        if all_of(case):
            console.print(_table(case, rows))
            rows.clear()

    return each
