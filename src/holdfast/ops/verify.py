"""Runs backends against the oracle on this machine: compilers do miscompile such kernels."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from holdfast.kernels.common.backend import describe
from holdfast.recurrences import RECURRENCES, Draw, Recurrence, Sizes, oracle

from .families import backends_of, op_of, problem_of
from .parity import cast, relative_error, values_and_grads

# relative to the float64 oracle; outputs and gradients in float32
LIMIT = 2e-5
# crosses a chunk boundary, with a ragged tail, grouped heads and K != V
_SIZES = Sizes(B=2, T=70, H=4, Hq=2, K=16, V=8, D=16)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one backend of one op did: "right", "wrong" (detail says how far off) or "skipped" (detail says why)."""

    op: str
    backend: str
    status: Literal["right", "wrong", "skipped"]
    error: float | None
    seconds: float
    detail: str = ""


def verify(device: torch.device, seed: int = 0) -> Iterator[Verdict]:
    """One verdict for every backend of every op, forward and gradients, on random float32 arguments."""
    for recurrence in RECURRENCES.values():
        arguments = recurrence.example(Draw(seed), _SIZES)
        exact = values_and_grads(lambda a, r=recurrence: oracle(r, a), cast(arguments, torch.float64))
        for backend in backends_of(recurrence):
            yield _verdict(recurrence, backend, device, seed, exact)


def _verdict(
    recurrence: Recurrence, backend: Any, device: torch.device, seed: int, exact: list[torch.Tensor]
) -> Verdict:
    arguments = recurrence.example(Draw(seed, device=device), _SIZES)
    if reason := backend.reject(problem_of(recurrence, arguments, None, True), describe(device)):
        return Verdict(recurrence.name, backend.name, "skipped", None, 0.0, reason)
    start = time.perf_counter()
    op = op_of(recurrence)
    try:
        got = values_and_grads(lambda a: op(**a, output_final_state=True, backend=backend.name), arguments)
    except Exception as failure:  # whatever a backend raises is what doctor has to report
        detail = f"{type(failure).__name__}: {failure}".splitlines()[0]
        return Verdict(recurrence.name, backend.name, "wrong", None, time.perf_counter() - start, detail)
    seconds = time.perf_counter() - start
    errors = [relative_error(x, y) for x, y in zip(got, exact, strict=True)]
    # max() may pass over a NaN
    error = next((e for e in errors if e != e), max(errors))
    if error <= LIMIT:
        return Verdict(recurrence.name, backend.name, "right", error, seconds)
    detail = f"relative error {error:.1e} of output or gradient {errors.index(error)}, limit {LIMIT:.0e}"
    return Verdict(recurrence.name, backend.name, "wrong", error, seconds, detail)
