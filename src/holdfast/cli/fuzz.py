"""holdfast doctor --fuzz and --replay: random scenarios against float64, and one of them again."""

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count, islice
from pathlib import Path

import typer

from .errors import UserError


def fuzz(seconds: float | None, scenarios: int | None, seed: int, device: str, workers: int, out: Path | None) -> None:
    """Runs scenarios 0, 1, .. of a seed until the seconds or the scenarios are over; exits with 1 if any failed.

    out: takes the environment, every row and the totals as JSON lines.
    """
    from rich.console import Console

    from holdfast.fuzz.check import begin, check
    from holdfast.fuzz.draw import draw
    from holdfast.fuzz.row import FAILURES
    from holdfast.fuzz.workers import Pool

    from .bench.record import commit
    from .report import plain

    console = Console()
    lines: Iterator[str] = (draw(seed, index, device).line() for index in count())
    started = time.monotonic()
    pool = Pool(workers, begin, check)
    totals, reasons = Counter[str](), Counter[str]()
    with open(out, "w", encoding="utf-8") if out else nullcontext() as record:
        until = started + seconds if seconds is not None else float("inf")
        for row in pool.rows(islice(lines, scenarios), until):
            if record and not totals:
                asked = {"commit": commit(), "seed": seed, "device": device, "workers": workers, "limit_s": pool.limit}
                print(json.dumps({"environment": pool.environment} | asked), file=record)
            totals["scenarios"] += 1
            totals[row.status] += 1
            totals["calls"] += row.calls
            totals["tensors"] += row.tensors
            if row.status == "refused":
                # sizes aside
                reasons[re.sub(r"\d+", "N", row.detail)] += 1
            if row.failed:
                plain(console, f'{row.status}: {row.detail}\n  holdfast doctor --replay "{row.line}"')
            if record:
                print(json.dumps(row.plain()), file=record, flush=True)
            if totals["scenarios"] % 100 == 0:
                plain(console, _told(totals, time.monotonic() - started))
        if record:
            spent = round(time.monotonic() - started, 1)
            print(json.dumps({"totals": dict(totals), "seconds": spent}), file=record)
    for reason, times in reasons.most_common(12):
        plain(console, f"refused {times} times: {reason[:200]}")
    plain(console, _told(totals, time.monotonic() - started))
    if any(totals[status] for status in FAILURES):
        raise typer.Exit(1)


def _told(totals: Counter[str], seconds: float) -> str:
    counted = ", ".join(f"{totals[word]} {word}" for word in ("refused", "wrong", "raised", "crashed", "hung"))
    found = f"{totals['scenarios']} scenarios, {totals['calls']} calls, {totals['tensors']} tensors compared"
    return f"{found}: {counted}, in {seconds:.0f} s"


def replay(line: str) -> None:
    """Runs the scenario of a line again, in a process of its own; exits with 1 if it fails."""
    from holdfast.fuzz.scenario import parse

    try:
        line = parse(line).line()
    except ValueError as error:
        raise UserError(str(error)) from error
    from holdfast.fuzz.check import begin, check
    from holdfast.fuzz.workers import Pool

    (row,) = Pool(1, begin, check).rows([line])
    typer.echo(f"{row.status}: {row.detail}" if row.detail else row.status)
    if row.name:
        typer.echo(f"nearest to its limit: {row.name}, off by {row.error:.2g}, limit {row.limit:.2g}")
    typer.echo(f"{row.calls} calls, {row.tensors} tensors compared, in {row.seconds:.1f} s")
    if row.failed:
        raise typer.Exit(1)
