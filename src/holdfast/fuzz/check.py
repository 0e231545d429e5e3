"""Runs one scenario in this process and says how it went."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .blame import is_ours, place
from .case import Fault
from .judge import Comparison, Judge
from .modes import CaptureFailed, run_mode
from .scenario import Scenario, parse

# of these statuses any fails a run
FAILURES = ("wrong", "raised", "crashed", "hung")


@dataclass(slots=True)
class Row:
    """How a scenario went.

    status: "right"; "refused", by an error of ours that says why; "wrong"; "raised", by an error that is not ours;
    "crashed" with the worker; "hung". detail: the reason or the worst tensor. calls, tensors: how many were judged.
    error, limit: of the tensor that came nearest to its limit, or went furthest beyond. spoilt: the process is not to
    be used again.
    """

    line: str
    status: str
    detail: str = ""
    calls: int = 0
    tensors: int = 0
    name: str = ""
    error: float = 0.0
    limit: float = 0.0
    seconds: float = 0.0
    spoilt: bool = False

    @property
    def failed(self) -> bool:
        return self.status in FAILURES

    def plain(self) -> dict[str, Any]:
        """For a record."""
        found = asdict(self)
        del found["spoilt"]
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
