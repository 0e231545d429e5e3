"""Runs cases one after the other and keeps the record on disk up to date."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import torch

from .case import Case
from .clock import Method
from .measure import measure
from .peers import PEERS, peers_of
from .record import Record, commit, device_facts, now, versions, write
from .result import Result
from .roofs import Roofs
from .subject import Runner, holdfast_runners


def runners_of(case: Case, wanted: Collection[str] | None = None) -> list[Runner]:
    """Holdfast's backends, then the peers.

    wanted: only those of these names, or of these first words such as "holdfast" or "fla"; None for all.
    """
    runners: list[Runner] = [*holdfast_runners(case), *peers_of(case.op)]
    if wanted is None:
        return runners
    return [runner for runner in runners if runner.name in wanted or runner.name.split()[0] in wanted]


def check_runners(wanted: Collection[str], cases: Collection[Case]) -> None:
    """Raises ValueError for a wanted runner that is no peer's and none of these cases' backends."""
    known = {peer.name for peer in PEERS} | {runner.name for case in cases for runner in holdfast_runners(case)}
    starts = {name.split()[0] for name in known}
    for name in wanted:
        if name not in known | starts:
            raise ValueError(
                f"--runners: expected some of {', '.join(sorted(known))} or their first words; got {name!r}"
            )


def run(
    name: str,
    title: str,
    command: str,
    cases: list[Case],
    device: torch.device,
    roof: Roofs,
    out: Path,
    wanted: Collection[str] | None = None,
    method: Method = "events",
    each: Callable[[Case, Runner, Result | None], None] = lambda case, runner, result: None,
) -> Record:
    """Measures every runner in every case. The file is rewritten after each case, so that a crash leaves the others.

    each: called with None before a runner is measured, and with its row after.
    """
    record = Record(
        suite=name,
        title=title,
        command=command,
        date=now(),
        commit=commit(),
        device=device_facts(device),
        versions=versions(),
        roofs=roof,
        rows=(),
        complete=False,
    )
    for case in cases:
        for runner in runners_of(case, wanted):
            each(case, runner, None)
            result = measure(case, runner, device, roof, method)
            record = replace(record, rows=(*record.rows, result))
            each(case, runner, result)
        write(record, out)
    record = replace(record, complete=True)
    write(record, out)
    return record
