"""Measures in front of a person: progress, a table for each case, where the results went."""

from collections.abc import Collection
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .case import Case
from .record import device_facts, device_folder
from .result import Result
from .roofs import roofs
from .session import check_runners, run, runners_of
from .subject import Runner
from .table import COLUMNS, cells

_STYLES = {"ok": "dim", "wrong": "red", "failed": "red", "rejected": "dim", "missing": "dim"}


def _table(case: Case, rows: list[Result]) -> Group:
    """The timed rows as a table; what is to be said of rows below it, so that a narrow terminal shows all of it."""
    floor = next((row.floor_ms for row in rows if row.floor_ms), None)
    title = Text(f"{case}" + ("" if floor is None else f"   floor {floor:.3g} ms"), style="bold")
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


def measure_live(
    name: str,
    title: str,
    command: str,
    cases: list[Case],
    device: torch.device,
    wanted: Collection[str] | None,
    graph: bool,
    out: Path | None,
    results: Path,
) -> None:
    """Measures, prints and writes to out, or else to results/<device>/<name>.json."""
    if wanted is not None:
        check_runners(wanted, cases)
    console = Console()
    facts = device_facts(device)
    path = out or results / device_folder(facts) / f"{name}.json"
    with console.status("measuring copy bandwidth and matrix rates"):
        roof = roofs(device)
    rates = ", ".join(f"{dtype} {rate / 1e12:.3g} Top/s" for dtype, rate in roof.rates.items())
    console.print(f"{title}\n{facts['name']}: copy {roof.copy_bandwidth / 1e9:.4g} GB/s, matrix product {rates}\n")
    total = sum(len(runners_of(case, wanted)) for case in cases)
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bars, console=console, transient=True) as progress:
        task, rows = progress.add_task("", total=total), []

        def each(case: Case, runner: Runner, result: Result | None) -> None:
            if result is None:
                progress.update(task, description=escape(f"{case.op} {case.shape} {case.passes}: {runner.name}"))
                return
            progress.advance(task)
            rows.append(result)
            if len(rows) == len(runners_of(case, wanted)):
                console.print(_table(case, rows))
                rows.clear()

        run(name, title, command, cases, device, roof, path, wanted, "graph" if graph else "events", each)
    console.print(f"written to {path}", highlight=False, soft_wrap=True)
