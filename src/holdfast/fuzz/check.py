"""Runs one scenario in this process and says how it went."""

import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from .blame import is_ours, place
from .case import Fault
from .judge import Comparison, Judge
from .modes import CaptureFailed, run_mode
from .row import Row
from .scenario import Scenario, parse

# of memory that the allocator keeps; other workers want some too
_MOST_KEPT = 6 * 2**30


def begin() -> dict[str, Any]:
    """Readies a worker's process; versions and device, for a record."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("holdfast", "triton", "cuda-core", "cuda-bindings"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return found


def check(line: str) -> Row:
    """Runs the scenario of a line, forward and backward in its mode, and judges every tensor. Raises for a bad line."""
    s, row, begun = parse(line), Row(line, "right"), time.perf_counter()
    try:
        _judged(s, row)
    except Fault as fault:
        row.status, row.detail = "wrong", str(fault)
    except CaptureFailed as failed:
        _explain(row, failed.__cause__, True)
        row.spoilt = True
    except Exception as error:
        _explain(row, error, s.mode == "jvp")
    if not row.spoilt and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _MOST_KEPT:
        torch.cuda.empty_cache()
    row.seconds = round(time.perf_counter() - begun, 3)
    return row


def _judged(s: Scenario, row: Row) -> None:
    results = run_mode(s)
    if s.device == "cuda":
        torch.cuda.synchronize()
    judge, worst = Judge(), None
    for result in results:
        result.case.check_unchanged()
        compared = judge.compare(result)
        row.calls, row.tensors = row.calls + 1, row.tensors + len(compared)
        for each in compared:
            if worst is None or _beyond(each) > _beyond(worst):
                worst = each
    if worst is not None:
        row.name, row.error, row.limit = worst.name, worst.error, worst.limit
        if not worst.is_right:
            row.status, row.detail = "wrong", str(worst)


def _beyond(compared: Comparison) -> float:
    return compared.error / compared.limit


def _explain(row: Row, error: BaseException | None, may_be_plain: bool) -> None:
    said = " ".join(f"{type(error).__name__}: {error}".split())[:600]
    row.detail = said
    if "CUDA error" in said or "illegal" in said or "unspecified launch failure" in said:
        row.status, row.spoilt = "crashed", True
    elif is_ours(error, may_be_plain):
        row.status = "refused"
    else:
        row.status = "raised"
        row.detail += f" at {place(error)}"
