"""Runs backends against the oracle on this machine: compilers do miscompile such kernels."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from holdfast.kernels.backend import Rejected

from .checks import Attempt, Check, every


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one backend of one op did: "right", "wrong" (detail says how far off) or "skipped" (detail says why)."""

    op: str
    backend: str
    status: Literal["right", "wrong", "skipped"]
    error: float | None
    detail: str = ""


def verify(device: torch.device, seed: int = 0) -> Iterator[Verdict]:
    """One verdict for every backend of every op, on random arguments: forward and gradients in float32, or else in
    bfloat16, or else one token forward, whichever the backend takes first."""
    return (verdict_of(check) for check in every(device, seed))


def verdict_of(check: Check) -> Verdict:
    """Of the first arguments that the backend takes; "skipped" with its reason for the first where it takes none."""
    verdicts = []
    for attempt, run in check.tries:
        verdicts.append(_verdict(check, run, attempt))
        if verdicts[-1].status != "skipped":
            return verdicts[-1]
    return verdicts[0]


def _verdict(check: Check, run: Callable[[Any], Any], attempt: Attempt) -> Verdict:
    op, backend = check.op, check.backend.name
    try:
        got = attempt.results(run)
    except Rejected as rejection:
        return Verdict(op, backend, "skipped", None, rejection.reason)
    except Exception as failure:  # whatever a backend raises is what doctor has to report
        detail = f"{type(failure).__name__}: {failure}".splitlines()[0]
        return Verdict(op, backend, "wrong", None, detail)
    error, detail = attempt.judge(got)
    return Verdict(op, backend, "wrong" if detail else "right", error, detail)
