"""Runs backends against the oracle on this machine: compilers do miscompile such kernels."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.kernels.common.backend import Rejected
from holdfast.recurrences import RECURRENCES, Draw, Recurrence, Sizes, oracle
from holdfast.recurrences.simple_gla import SIMPLE_GLA

from .families import backends_of, op_of
from .inter_chunk_scan import BACKENDS as INTER_CHUNK_BACKENDS
from .inter_chunk_scan import inter_chunk_scan
from .intra_chunk import BACKENDS as INTRA_CHUNK_BACKENDS
from .intra_chunk import intra_chunk
from .parity import cast, relative_error, values_and_grads

# relative to the float64 oracle; outputs and gradients in float32
LIMIT = 2e-5
# crosses a chunk boundary, with a ragged tail, grouped heads and K != V
_SIZES = Sizes(B=2, T=70, H=4, Hq=2, K=16, V=8, D=16)
_HALVES, _CHUNK = Sizes(B=2, T=64, H=4, K=16, V=8), 16


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
        exact = _exact(recurrence, recurrence.example(Draw(seed), _SIZES))
        arguments = recurrence.example(Draw(seed, device=device), _SIZES)
        for backend in backends_of(recurrence):

            def run(a: dict[str, Any], r: Recurrence = recurrence, name: str = backend.name) -> Any:
                return op_of(r)(**a, output_final_state=True, backend=name)

            yield _verdict(recurrence.name, backend.name, run, arguments, exact)
    # the two chunk halves compose to simple_gla
    exact = _exact(SIMPLE_GLA, SIMPLE_GLA.example(Draw(seed), _HALVES))
    arguments = SIMPLE_GLA.example(Draw(seed, device=device), _HALVES)
    for backend in INTER_CHUNK_BACKENDS:
        yield _verdict("inter_chunk_scan", backend.name, partial(_compose, inter=backend.name), arguments, exact)
    for backend in INTRA_CHUNK_BACKENDS:
        yield _verdict("intra_chunk", backend.name, partial(_compose, intra=backend.name), arguments, exact)


def _exact(recurrence: Recurrence, arguments: dict[str, Any]) -> list[Tensor]:
    return values_and_grads(lambda a: oracle(recurrence, a), cast(arguments, torch.float64))


def _compose(a: dict[str, Tensor], inter: str | None = None, intra: str | None = None) -> tuple[Tensor, Tensor]:
    k, v, g = (a[name].unflatten(1, (-1, _CHUNK)) for name in ("k", "v", "g"))
    total = g.sum(2)
    states = torch.einsum("bgchk,bgch,bgchv->bghkv", k, (total[:, :, None] - g.cumsum(2)).exp(), v)
    after, final = inter_chunk_scan(states, total, None, None, a["initial_state"], True, backend=inter)
    entering = torch.cat([a["initial_state"][:, None], after[:, :-1]], 1)
    return intra_chunk(a["q"], a["k"], a["v"], a["g"], entering, chunk_size=_CHUNK, backend=intra), final


def _verdict(
    op: str, backend: str, run: Callable[[Any], Any], arguments: dict[str, Any], exact: list[Tensor]
) -> Verdict:
    start = time.perf_counter()
    try:
        got = values_and_grads(run, arguments)
    except Rejected as rejection:
        return Verdict(op, backend, "skipped", None, 0.0, rejection.reason)
    except Exception as failure:  # whatever a backend raises is what doctor has to report
        detail = f"{type(failure).__name__}: {failure}".splitlines()[0]
        return Verdict(op, backend, "wrong", None, time.perf_counter() - start, detail)
    seconds = time.perf_counter() - start
    errors = [relative_error(x, y) for x, y in zip(got, exact, strict=True)]
    # max() may pass over a NaN
    error = next((e for e in errors if e != e), max(errors))
    if error <= LIMIT:
        return Verdict(op, backend, "right", error, seconds)
    detail = f"relative error {error:.1e} of output or gradient {errors.index(error)}, limit {LIMIT:.0e}"
    return Verdict(op, backend, "wrong", error, seconds, detail)
