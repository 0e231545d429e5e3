"""Measures one runner in one case: right first, then fast."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from holdfast.ops.parity import cast, leaves, relative_error

from .case import Case, checked
from .clock import Method, host_ms, seconds_of, time_runs
from .floor import floor_bytes
from .memory import extra_bytes
from .result import Result, of_case
from .roofs import Roofs
from .subject import Refused, Runner, Subject

# Largest relative error, Frobenius norm, of an output or a gradient against float64 on the same rounded inputs.
LIMITS = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 1.5e-2, "float16": 5e-3}


def _cotangent(like: Tensor, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=draw, dtype=torch.float32).to(like.device, like.dtype)


def _ready(inputs: Any, grad: bool) -> list[Tensor]:
    """Makes the inputs leaves that require gradients, or not, in place: some peers want their very own tensors."""
    tensors = leaves(inputs)
    for x in tensors:
        x.requires_grad_(grad)
    return tensors


def _one_pass(call: Callable[[Any], Tensor], inputs: Any, grad: bool) -> Callable[[], list[Tensor]]:
    """A function that runs the pass once and returns the output, then the gradient of each input."""
    tensors = _ready(inputs, grad)
    if not grad:

        def forward() -> list[Tensor]:
            with torch.no_grad():
                return [call(inputs)]

        return forward
    given: list[Tensor] = []

    def both() -> list[Tensor]:
        output = call(inputs)
        if not given:
            given.append(_cotangent(output))
        grads = torch.autograd.grad(output, tensors, given[0], allow_unused=True, materialize_grads=True)
        return [output.detach(), *grads]

    return both


def _compare(subject: Subject, got: list[Tensor], grad: bool) -> tuple[float, str]:
    """The largest relative error, and which tensor has it: "output", or "gradient 2" of the second input."""
    inputs = cast(subject.inputs, torch.float64)
    tensors = _ready(inputs, grad)
    with torch.set_grad_enabled(grad):
        output = subject.exact(inputs)
    if output.shape != got[0].shape:
        raise ValueError(f"output: expected {list(output.shape)}; got {list(got[0].shape)}")
    exact = [output.detach()]
    if grad:
        given = _cotangent(got[0]).double()
        exact += torch.autograd.grad(output, tensors, given, allow_unused=True, materialize_grads=True)
    errors = [relative_error(x.double(), y) for x, y in zip(got, exact, strict=True)]
    # max() may pass over a NaN
    worst = next((n for n, e in enumerate(errors) if e != e), max(range(len(errors)), key=errors.__getitem__))
    return errors[worst], f"gradient {worst}" if worst else "output"


def _measure(case: Case, runner: Runner, device: torch.device, roof: Roofs, method: Method) -> Result:
    grad, small = case.passes != "fwd", checked(case, device)
    row = replace(of_case(case, runner.name, "ok"), limit=LIMITS[case.dtype], checked_at=dict(small.sizes))
    subject = runner.prepare(small, device)
    run, got = _one_pass(subject.call, subject.inputs, grad), []
    first = seconds_of(lambda: got.extend(run()), device)
    error, where = _compare(subject, got, grad)
    row = replace(row, note=subject.note, error=error, first_call_s=first)
    if not error <= LIMITS[case.dtype]:
        detail = f"relative error {error:.1e} of the {where}, limit {LIMITS[case.dtype]:.0e}"
        return replace(row, status="wrong", detail=detail)
    if small != case:
        got.clear()
        subject = runner.prepare(case, device)
        run = _one_pass(subject.call, subject.inputs, grad)
        # another size may compile again
        row = replace(row, first_call_s=max(first, seconds_of(lambda: got.extend(run()), device)))
        if not all(x.isfinite().all().item() for x in got):
            return replace(row, status="wrong", detail="not all finite at full size, though right at the checked sizes")
    got.clear()
    times = time_runs(run, device, method)
    memory, host = extra_bytes(run, device), host_ms(run, device)
    moved = floor_bytes(case)
    floor_ms = moved / roof.copy_bandwidth * 1e3
    return replace(
        row,
        median_ms=times.median_ms,
        low_ms=times.low_ms,
        high_ms=times.high_ms,
        runs=times.runs,
        method=times.method,
        host_ms=host,
        memory_bytes=memory,
        floor_bytes=moved,
        floor_ms=floor_ms,
        floor_ratio=times.median_ms / floor_ms,
    )


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def measure(case: Case, runner: Runner, device: torch.device, roof: Roofs, method: Method = "events") -> Result:
    """The row of one runner in one case. Results are compared with the float64 oracle first; where they are off, or
    the runner raises, the row says so and has no time."""
    try:
        return _measure(case, runner, device, roof, method)
    except Refused as reason:
        return of_case(case, runner.name, "rejected", str(reason))
    except ImportError as error:
        return of_case(case, runner.name, "missing", _line(error))
    except Exception as error:  # whatever an implementation raises is a result, and the others are still to be measured
        return of_case(case, runner.name, "failed", _line(error))
    finally:
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
