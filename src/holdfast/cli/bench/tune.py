"""holdfast bench --tune: times the plans of one call on this device and keeps them in its table, which then decides."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels import select as planning
from holdfast.kernels.backend import Backend, describe
from holdfast.ops.parity import leaves, relative_error
from holdfast.planner import Device, Direction, Plan, Problem, tables
from holdfast.planner.tables import Table, Timing

from .case import Case
from .clock import time_runs
from .failure import one_line
from .measure import LIMITS, lost, measure, one_pass
from .record import versions
from .roofs import Roofs
from .selection import EVERYTHING, Selection
from .subject import HoldfastRunner

Say = Callable[[str], None]
# Timed only when asked for by name: the loop over steps takes minutes where the others take milliseconds.
SLOW = "reference"
# measure() wants roofs to hold times against; nothing of them is shown here
_NO_ROOFS = Roofs(copy_bandwidth=1.0, rates={}, copy_bytes=0, matrix_size=0)


@contextmanager
def _planned(problem: Problem, plans: dict[Direction, Plan]) -> Iterator[None]:
    """Runs the call by these plans, whatever tables or models say."""
    timings = {(problem, direction): (Timing(plan, 1.0),) for direction, plan in plans.items()}
    planning.forget()
    try:
        with tables.instead(Table("", None, {}, timings)):
            yield
    finally:
        planning.forget()


class _Tuning:
    """One backend in one case, at full size. values: the outputs, then gradients, of its first plans."""

    def __init__(self, case: Case, backend: Backend, device: torch.device, say: Say) -> None:
        self.case, self.backend, self.device, self.say = case, backend, device, say
        self.what = describe(device)
        self.inputs, self.options = case.arguments(device), dict(case.options)
        grad = case.passes != "fwd"
        self.problem = case.work.problem(self.inputs, self.options, grad)
        self.directions: tuple[Direction, ...] = ("forward", "backward") if grad else ("forward",)
        self.candidates = {
            direction: [each.plan for each in backend.candidates(self.problem, self.what, direction)]
            for direction in self.directions
        }
        self.first = {direction: plans[0] for direction, plans in self.candidates.items() if plans}

    def call(self, inputs: Any) -> Any:
        return self.case.work.call(inputs, self.options, self.backend.name)

    def timings(self) -> dict[tuple[Problem, Direction], tuple[Timing, ...]]:
        """Of every plan of every pass that is right; the plans of the other pass are the first."""
        with _planned(self.problem, self.first):
            self.values = [x.clone() for x in one_pass(self.call, self.inputs, len(self.directions) > 1)()]
        found: dict[tuple[Problem, Direction], tuple[Timing, ...]] = {}
        for direction in self.directions:
            timed = [timing for plan in self.candidates[direction] if (timing := self.timing(direction, plan))]
            found[self.problem, direction] = tuple(sorted(timed, key=lambda timing: timing.seconds))
        return found

    def timing(self, direction: Direction, plan: Plan) -> Timing | None:
        """None, after saying why, for a plan that fails or whose results are off."""
        with _planned(self.problem, self.first | {direction: plan}):
            backends = self.case.work.backends()
            _, planned = planning.resolve(backends, self.problem, self.what, self.backend.name, direction)
            assert planned == plan
            try:
                error = self.error()
                seconds = self.seconds(direction) if error <= LIMITS[self.case.dtype] else None
            except Exception as failure:  # whatever a kernel raises, the other plans are still to be timed
                self.say(f"  {direction:<9} failed  {plan}: {one_line(failure)}")
                return None
        if seconds is None:
            self.say(f"  {direction:<9} wrong   {plan}: relative error {error:.1e} against the first plan")
            return None
        self.say(f"  {direction:<9} {seconds * 1e3:.4g} ms  {plan}")
        return Timing(plan, seconds)

    def error(self) -> float:
        """The largest relative error against the first plans, which were held against the oracle."""
        got = one_pass(self.call, self.inputs, len(self.directions) > 1)()
        errors = [relative_error(x.double(), y.double()) for x, y in zip(got, self.values, strict=True)]
        return float("nan") if any(error != error for error in errors) else max(errors)

    def seconds(self, direction: Direction) -> float:
        """Median of one pass alone."""
        tensors = leaves(self.inputs)
        for x in tensors:
            x.requires_grad_(len(self.directions) > 1)
        if direction == "forward":
            return time_runs(lambda: self.call(self.inputs), self.device).median_ms * 1e-3
        outputs: list[Tensor] = leaves(self.call(self.inputs))
        cotangents = [torch.randn_like(x) for x in outputs]

        def backward() -> object:
            return torch.autograd.grad(outputs, tensors, cotangents, retain_graph=True, allow_unused=True)

        return time_runs(backward, self.device).median_ms * 1e-3


def _tuned(case: Case, device: torch.device, wanted: Selection, say: Say) -> Table:
    timings: dict[tuple[Problem, Direction], tuple[Timing, ...]] = {}
    for backend in case.work.backends():
        runner = HoldfastRunner(backend.name)
        if not wanted.takes(runner.name, case) or (backend.name == SLOW and not wanted.items):
            continue
        # right first
        row = measure(case, runner, device, _NO_ROOFS)
        if broken := lost(device):
            raise ValueError(f"--tune: {backend.name} in {case} broke the device: {broken}")
        if row.status != "ok":
            say(f"  {backend.name}: {row.status}: {row.detail}")
            continue
        for key, found in _Tuning(case, backend, device, say).timings().items():
            # a backend whose gradients are another's kernels offers plans of that one
            earlier = {timing.plan: timing for timing in timings.get(key, ())}
            together = {timing.plan: timing for timing in found} | earlier
            timings[key] = tuple(sorted(together.values(), key=lambda timing: timing.seconds))
    what: Device = describe(device)
    return Table(what.name, what.sms, versions(), {key: found for key, found in timings.items() if found})


def tune_case(
    op: str,
    sizes: tuple[tuple[str, int], ...],
    dtype: str,
    passes: list[str],
    device: torch.device,
    wanted: Selection = EVERYTHING,
    say: Say = print,
    path: Path | None = None,
) -> Path:
    """Times every plan of the call that is right and puts the times into the device's table; returns where that is.

    passes: "fwd" for calls without gradients, "fwd+bwd" for those with. wanted: which backends; by default all but the
    slow reference. path: another file than the one that plans are read from.

    Raises ValueError for a bad case, for a table that is there and cannot be read, and where no plan is right, which
    leaves the table as it is; OSError where it cannot be written.
    """
    target = path or tables.path_of(describe(device))
    cases = [Case(op, sizes, dtype, each) for each in passes]
    wanted.check(cases, "--runners")
    for case in cases:
        say(f"{case} on {describe(device).name}")
        # read before anything is timed: a file that nobody can read should not cost a tuning run
        old = tables.read(target) if target.exists() else None
        found = _tuned(case, device, wanted, say)
        if not found.timings:
            raise ValueError(f"--tune: expected a right plan of {case} to time; got none, so {target} is as it was")
        tables.write(target, tables.merged(old, found))
        planning.forget()
    say(f"written to {target}")
    return target
