"""Measures one runner in one case: right first, then fast."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from holdfast.ops.parity import cast, leaves, relative_error

from .case import Case, better_in_chunks, checked
from .clock import Method, device_times, time_calls
from .failure import one_line
from .floor import floor_bytes, history_bytes, operations
from .memory import extra_bytes
from .result import Result, of_case
from .roofs import Roofs
from .step_errors import step_errors
from .subject import Refused, Runner, Subject

# Largest relative error, Frobenius norm, of an output or a gradient against float64 on the same rounded inputs.
LIMITS = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 1.5e-2, "float16": 5e-3}


def _cotangents(likes: list[Tensor], seed: int = 1) -> list[Tensor]:
    draw = torch.Generator(likes[0].device).manual_seed(seed)
    return [torch.randn(x.shape, generator=draw, dtype=torch.float32, device=x.device).to(x.dtype) for x in likes]


def _ready(inputs: Any, grad: bool) -> list[Tensor]:
    """Makes the inputs leaves that require gradients, or not, in place: some peers want their very own tensors."""
    tensors = leaves(inputs)
    for x in tensors:
        x.requires_grad_(grad)
    return tensors


def one_pass(call: Callable[[Any], Any], inputs: Any, grad: bool) -> Callable[[], list[Tensor]]:
    """A function that runs the pass once and returns its outputs, then with grad the gradient of each input."""
    tensors = _ready(inputs, grad)
    if not grad:

        def forward() -> list[Tensor]:
            with torch.no_grad():
                return leaves(call(inputs))

        return forward
    given: list[Tensor] = []

    def both() -> list[Tensor]:
        outputs = leaves(call(inputs))
        if not given:
            given.extend(_cotangents(outputs))
        grads = torch.autograd.grad(outputs, tensors, given, allow_unused=True, materialize_grads=True)
        return [*(x.detach() for x in outputs), *grads]

    return both


def _exact(subject: Subject, dtypes: list[torch.dtype], grad: bool) -> list[Tensor]:
    """Outputs in float64, then with grad the gradients for the cotangents that an implementation with outputs of these
    dtypes gets."""
    inputs = cast(subject.inputs, torch.float64)
    tensors = _ready(inputs, grad)
    with torch.set_grad_enabled(grad):
        outputs = leaves(subject.exact(inputs))
    exact = [x.detach() for x in outputs]
    if grad:
        likes = [x.to(dtype) for x, dtype in zip(exact, dtypes, strict=False)]
        given = [x.double() for x in _cotangents(likes)]
        exact += torch.autograd.grad(outputs, tensors, given, allow_unused=True, materialize_grads=True)
    return exact


# Holdfast's backends, and peers in the same layout, are held against one and the same result; only the last is kept.
_shared: dict[Any, list[Tensor]] = {}


def _shared_exact(case: Case, subject: Subject, dtypes: list[torch.dtype], device: torch.device) -> list[Tensor]:
    key = (case, device, tuple(dtypes))
    if key not in _shared:
        _shared.clear()
        _shared[key] = _exact(subject, dtypes, case.passes != "fwd")
    return _shared[key]


def _compare(case: Case, subject: Subject, got: list[Tensor], device: torch.device) -> tuple[float, str, list[Tensor]]:
    """The largest relative error, which tensor has it ("output", "gradient 2" of the second input), and the exact
    results."""
    grad, inputs = case.passes != "fwd", len(leaves(subject.inputs))
    dtypes = [x.dtype for x in got[: len(got) - inputs if grad else None]]
    if subject.shared:
        exact = _shared_exact(case, subject, dtypes, device)
    else:
        exact = _exact(subject, dtypes, grad)
    shapes, wanted = [list(x.shape) for x in got], [list(x.shape) for x in exact]
    if shapes != wanted:
        raise ValueError(f"outputs: expected shapes {wanted}; got {shapes}")
    errors = [relative_error(x.double(), y) for x, y in zip(got, exact, strict=True)]
    # max() may pass over a NaN
    worst = next((n for n, e in enumerate(errors) if e != e), max(range(len(errors)), key=errors.__getitem__))
    if worst >= len(dtypes):
        return errors[worst], f"gradient {worst - len(dtypes) + 1}", exact
    return errors[worst], "output" if worst == 0 else "final state", exact


def _timed(
    row: Result, case: Case, run: Callable[[], object], device: torch.device, roof: Roofs, method: Method
) -> Result:
    if case.kind == "host":
        times, host, note = time_calls(run, device), None, ""
    else:
        times, host, note = device_times(run, device, method)
    row = replace(
        row,
        note="; ".join(filter(None, (row.note, note))),
        median_ms=times.median_ms,
        low_ms=times.low_ms,
        high_ms=times.high_ms,
        runs=times.runs,
        method=times.method,
        memory_bytes=extra_bytes(run, device),
    )
    if case.kind == "host":
        return row
    moved = floor_bytes(case)
    floor_ms = moved / roof.copy_bandwidth * 1e3
    return replace(
        row,
        host_ms=host,
        floor_bytes=moved,
        floor_ms=floor_ms,
        floor_ratio=times.median_ms / floor_ms,
        operations=operations(case),
        history_bytes=history_bytes(case) if case.work.has_state else None,
    )


def _measure(case: Case, runner: Runner, device: torch.device, roof: Roofs, method: Method) -> Result:
    grad, small, by = case.passes != "fwd", checked(case, device), ""
    subject = runner.prepare(case, device)
    if subject.shared and better_in_chunks(case, device):
        # the very run that is timed; a smaller one may go by another plan
        small, by = case, "chunked"
        subject = replace(subject, exact=lambda a: case.work.in_chunks(a, dict(case.options)))
    elif small != case:
        subject = runner.prepare(small, device)
    row = replace(
        of_case(case, runner.name, "ok"), limit=LIMITS[case.dtype], checked_at=dict(small.sizes), checked_by=by
    )
    run = one_pass(subject.call, subject.inputs, grad)
    got = run()
    error, where, exact = _compare(small, subject, got, device)
    row = replace(row, note=subject.note, error=error)
    if not error <= LIMITS[case.dtype]:
        detail = f"relative error {error:.1e} of the {where}, limit {LIMITS[case.dtype]:.1e}"
        return replace(row, status="wrong", detail=detail)
    if case.kind == "error":
        return replace(row, step_errors=step_errors(got[0], exact[0], dict(small.sizes)["T"]))
    del exact
    if small != case:
        got.clear()
        subject = runner.prepare(case, device)
        run = one_pass(subject.call, subject.inputs, grad)
        got = run()
        if not all(x.isfinite().all().item() for x in got):
            return replace(row, status="wrong", detail="not all finite at full size, though right at the checked sizes")
    got.clear()
    if (predicted := subject.predicted) is not None:
        row = replace(
            row,
            predicted_bytes=predicted.moved or None,
            predicted_ms=predicted.ms,
            shared_bytes=predicted.shared or None,
            plan=predicted.plan,
        )
    return _timed(row, case, run, device, roof, method)


def measure(case: Case, runner: Runner, device: torch.device, roof: Roofs, method: Method = "events") -> Result:
    """The row of one runner in one case. Results are compared with the float64 oracle first; where they are off, or
    the runner raises, the row says so and has no time."""
    try:
        return _measure(case, runner, device, roof, method)
    except Refused as reason:
        return of_case(case, runner.name, "rejected", str(reason))
    except ImportError as error:
        return of_case(case, runner.name, "missing", one_line(error))
    except Exception as error:  # whatever an implementation raises is a result, and the others are still to be measured
        return of_case(case, runner.name, "failed", one_line(error))


def lost(device: torch.device) -> str:
    """Frees what a row took; in words, why nothing runs on the device any more in this process, or ""."""
    gc.collect()
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError as error:  # an invalid address, an assertion: the context is gone, and with it all memory
        return one_line(error)
    return ""
