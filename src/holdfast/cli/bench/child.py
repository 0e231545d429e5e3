"""What a child process is asked to run, as JSON: runners in cases."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from .case import Case
from .selection import runners_of
from .subject import Runner


def write_request(what: Iterable[tuple[Case, str]], device: torch.device, folder: Path) -> Path:
    """Writes cases and the names of runners for a child to a file in the folder, which becomes its only argument."""
    wanted = [{"case": asdict(case), "runner": runner} for case, runner in what]
    path = folder / "request.json"
    path.write_text(json.dumps({"wanted": wanted, "device": str(device)}), encoding="utf-8")
    return path


def request() -> tuple[list[tuple[Case, Runner]], torch.device]:
    """What the file that this process's argument names asks for."""
    data = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return [(case_of(each["case"]), _runner(each)) for each in data["wanted"]], torch.device(data["device"])


def case_of(fields: dict[str, object]) -> Case:
    """The case that asdict took apart."""
    pairs = {name: tuple(tuple(pair) for pair in fields[name]) for name in ("sizes", "options")}
    return Case(**fields | pairs)


def _runner(each: dict[str, object]) -> Runner:
    return next(runner for runner in runners_of(case_of(each["case"])) if runner.name == each["runner"])
