"""Runs backends against the oracle on this machine: compilers do miscompile such kernels."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.kernels.common.backend import Rejected
from holdfast.recurrences import RECURRENCES, Draw, Recurrence, Sizes, oracle
from holdfast.recurrences.simple_gla import SIMPLE_GLA

from .families import backends_of, op_of
from .gated_rms_norm import BACKENDS as GATED_NORM_BACKENDS
from .gated_rms_norm import gated_rms_norm
from .inter_chunk_scan import BACKENDS as INTER_CHUNK_BACKENDS
from .inter_chunk_scan import inter_chunk_scan
from .intra_chunk import BACKENDS as INTRA_CHUNK_BACKENDS
from .intra_chunk import intra_chunk
from .parity import cast, leaves, relative_error, values_and_grads

# relative to the float64 oracle; outputs and gradients in float32
LIMIT = 2e-5
# of backends that take half precision alone: four roundings of bfloat16
HALF_LIMIT = 4 * 2.0**-8
# crosses a chunk boundary, with a ragged tail, grouped heads and K != V
_SIZES = Sizes(B=2, T=70, H=4, Hq=2, K=16, V=8, D=16)
# what decoding takes
_TOKEN = replace(_SIZES, T=1)
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
    """One verdict for every backend of every op, on random arguments: forward and gradients in float32, or else in
    bfloat16, or else one token forward, whichever the backend takes first."""
    for recurrence in RECURRENCES.values():
        tries = [
            _Try.of(recurrence, seed, device, _SIZES),
            _Try.of(recurrence, seed, device, _SIZES, torch.bfloat16),
            _Try.of(recurrence, seed, device, _TOKEN, grads=False),
        ]
        for backend in backends_of(recurrence):

            def run(a: dict[str, Any], r: Recurrence = recurrence, name: str = backend.name) -> Any:
                return op_of(r)(**a, output_final_state=True, backend=name)

            verdicts = []
            for attempt in tries:
                verdicts.append(_verdict(recurrence.name, backend.name, run, attempt))
                if verdicts[-1].status != "skipped":
                    break
            yield verdicts[0] if verdicts[-1].status == "skipped" else verdicts[-1]
    # the two chunk halves compose to simple_gla
    attempt = _Try.of(SIMPLE_GLA, seed, device, _HALVES)
    for backend in INTER_CHUNK_BACKENDS:
        yield _verdict("inter_chunk_scan", backend.name, partial(_compose, inter=backend.name), attempt)
    for backend in INTRA_CHUNK_BACKENDS:
        yield _verdict("intra_chunk", backend.name, partial(_compose, intra=backend.name), attempt)
    on_cpu, arguments = (_normalised(Draw(seed, torch.float32, place)) for place in ("cpu", device))
    # held against its equation by tests/ops/test_gated_rms_norm.py
    attempt = _Try(partial(_normalise, backend="pytorch"), on_cpu, arguments, LIMIT, True)
    for backend in GATED_NORM_BACKENDS:
        yield _verdict("gated_rms_norm", backend.name, partial(_normalise, backend=backend.name), attempt)


@dataclass(frozen=True)
class _Try:
    """Arguments to run a backend on, what is right of them, and how near it has to come.

    grads: whether to check gradients too.
    """

    right: Callable[[Any], Any]
    on_cpu: dict[str, Any]
    arguments: dict[str, Any]
    limit: float
    grads: bool

    @staticmethod
    def of(
        recurrence: Recurrence,
        seed: int,
        device: torch.device,
        sizes: Sizes,
        dtype: torch.dtype = torch.float32,
        grads: bool = True,
    ) -> "_Try":
        on_cpu, arguments = (recurrence.example(Draw(seed, dtype, place), sizes) for place in ("cpu", device))
        limit = LIMIT if dtype == torch.float32 else HALF_LIMIT
        return _Try(partial(oracle, recurrence), on_cpu, arguments, limit, grads)

    @cached_property
    def exact(self) -> list[Tensor]:
        return self.results(self.right, cast(self.on_cpu, torch.float64))

    def results(self, run: Callable[[Any], Any], arguments: dict[str, Any]) -> list[Tensor]:
        if self.grads:
            return values_and_grads(run, arguments)
        with torch.no_grad():
            return [x.double().cpu() for x in leaves(run(arguments))]


def _compose(a: dict[str, Tensor], inter: str | None = None, intra: str | None = None) -> tuple[Tensor, Tensor]:
    k, v, g = (a[name].unflatten(1, (-1, _CHUNK)) for name in ("k", "v", "g"))
    total = g.sum(2)
    states = torch.einsum("bgchk,bgch,bgchv->bghkv", k, (total[:, :, None] - g.cumsum(2)).exp(), v)
    after, final = inter_chunk_scan(states, total, None, None, a["initial_state"], True, backend=inter)
    entering = torch.cat([a["initial_state"][:, None], after[:, :-1]], 1)
    return intra_chunk(a["q"], a["k"], a["v"], a["g"], entering, chunk_size=_CHUNK, backend=intra), final


def _normalised(draw: Draw) -> dict[str, Tensor]:
    B, T, H, D = _SIZES.B, _SIZES.T, _SIZES.H, _SIZES.D
    return {"o": draw.normal(B, T, H, D), "gate": draw.normal(B, T, H, D), "weight": draw.normal(H, D)}


def _normalise(a: dict[str, Tensor], backend: str) -> Tensor:
    return gated_rms_norm(**a, backend=backend)


def _verdict(op: str, backend: str, run: Callable[[Any], Any], attempt: _Try) -> Verdict:
    start = time.perf_counter()
    try:
        got = attempt.results(run, attempt.arguments)
    except Rejected as rejection:
        return Verdict(op, backend, "skipped", None, 0.0, rejection.reason)
    except Exception as failure:  # whatever a backend raises is what doctor has to report
        detail = f"{type(failure).__name__}: {failure}".splitlines()[0]
        return Verdict(op, backend, "wrong", None, time.perf_counter() - start, detail)
    seconds = time.perf_counter() - start
    errors = [relative_error(x, y) for x, y in zip(got, attempt.exact, strict=True)]
    # max() may pass over a NaN
    error = next((e for e in errors if e != e), max(errors))
    if error <= attempt.limit:
        return Verdict(op, backend, "right", error, seconds)
    detail = f"relative error {error:.1e} of output or gradient {errors.index(error)}, limit {attempt.limit:.0e}"
    return Verdict(op, backend, "wrong", error, seconds, detail)
