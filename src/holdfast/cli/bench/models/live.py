"""Runs the suite in front of a person: a line for each row as it is measured, and the record on disk."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from ...errors import UserError
from ...report import plain
from .. import clock
from ..record import commit, device_facts, device_folder, now, versions
from ..session import unfinished
from .mixers import Mixer
from .row import ModelsRecord, Row, read, write
from .scale import Scale
from .suite import PARTS, Suite, lost_after, rows_of
from .warm import warm
from .words import line_of

# For the runs of a row, where the command line says nothing.
SECONDS = 0.2


@dataclass(frozen=True)
class Choices:
    """What the command line says. name: of the file. seconds: for the runs of a row. out: a file, or None for one below
    results. fresh: whether rows of an unfinished run are dropped."""

    mixers: list[Mixer]
    scale: Scale
    command: str
    name: str = "models"
    parts: tuple[str, ...] = PARTS
    seconds: float = SECONDS
    commit: str = ""
    out: Path | None = None
    fresh: bool = False


def _begun(record: ModelsRecord, out: Path, fresh: bool, console: Console) -> ModelsRecord:
    """The record with the rows of an unfinished run of the same command; UserError if that is of another."""
    draft = unfinished(out)
    if fresh or not draft.exists():
        return record
    found = read(draft)
    if not record.continues(found):
        raise UserError(
            f"{draft} is an unfinished run of another command, commit or device: keep it under another name, or add "
            "--fresh to drop it"
        )
    plain(console, f"{len(found.rows)} rows are there from a run that was cut short; --fresh drops them")
    return replace(record, rows=found.rows)


def measure_models(choices: Choices, device: torch.device, results: Path) -> str:
    """Measures, prints, and writes to results/<device>/<name>.json, or to choices.out.

    Returns why the device can run nothing more in this process, or "" at the end: a new process may then go on.
    """
    console = Console()
    clock.SECONDS = choices.seconds
    facts = device_facts(device)
    out = choices.out or results / device_folder(facts) / f"{choices.name}.json"
    record = ModelsRecord(choices.command, now(), choices.commit or commit(), facts, versions(), _plain(choices.scale))
    record = _begun(record, out, choices.fresh, console)
    jobs = [
        (part, mixer, rows_of(part, mixer, choices.scale, device)) for part in choices.parts for mixer in choices.mixers
    ]
    done = {row.key for row in record.rows}
    jobs = [(part, mixer, rows) for part, mixer, rows in jobs if any(row.key not in done for row in rows)]
    plain(console, f"{facts['name']}: {sum(len(rows) for _, _, rows in jobs)} rows to measure")
    if device.type == "cuda" and jobs:
        waiting = [mixer for mixer in choices.mixers if any(other is mixer for _, other, _ in jobs)]
        with console.status("compiling, mixers side by side"):
            warm(waiting, choices.parts, choices.scale, device, lambda line: plain(console, line))
    write(record, unfinished(out))
    suite, shown = Suite(choices.scale, device), ""
    for part, mixer, rows in jobs:
        if part != shown:
            console.print(f"\n{part}", style="bold")
            shown = part
        for row in suite.measure(mixer, [row for row in rows if row.key not in done]):
            broken = lost_after(row, device)
            if broken:
                row = replace(row, status="failed", detail=broken, figures={}, kinds={}, kernels={})
            record = _with(record, row)
            write(record, unfinished(out))
            plain(console, line_of(row, record.rows))
            if broken:
                return broken
    write(replace(record, complete=True), out)
    unfinished(out).unlink()
    plain(console, f"\nwritten to {out}")
    return ""


def _plain(scale: Scale) -> dict[str, object]:
    """As JSON has it, so that what is read again compares."""
    return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(scale).items()}


def _with(record: ModelsRecord, row: Row) -> ModelsRecord:
    return replace(record, rows=(*record.rows, row))
