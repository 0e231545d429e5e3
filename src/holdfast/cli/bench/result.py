"""One row of a results table."""

from dataclasses import dataclass
from typing import Any, Literal

from .case import Case

# ok: right and timed. wrong: ran, and its results are off. rejected: cannot run this case, with the reason.
# failed: raised. missing: not installed.
Status = Literal["ok", "wrong", "rejected", "failed", "missing"]


@dataclass(frozen=True)
class Result:
    """What one runner did in one case.

    error: the largest relative error of the output, and for fwd+bwd of every gradient, against the float64 oracle;
    limit: the most that counts as right; checked_at: the sizes at which they were compared; checked_by: the backend
    that stood in for the step-by-step oracle, in float64 too.
    first_call_s: seconds of the first call in a process of its own with empty compile caches; None where that was not
    measured. median_ms, low_ms, high_ms: median and quartiles of the runs; method: how they were taken. host_ms: what
    the host spends a call, on a GPU. memory_bytes: peak beyond the inputs; history_bytes: the state after every step in
    float32. floor_ms: bytes that must move / the copy bandwidth of this run; floor_ratio: median / floor. operations:
    of the step-by-step definition. predicted_bytes, predicted_ms, shared_bytes a block, plan: the planner's.
    step_errors: percentile -> absolute error of the output at each step. dram_bytes, tensor_percent, kernels: hardware
    counters, the matrix units' share of their peak, and how many kernels a run launches; counters_note: why there are
    none.
    """

    op: str
    sizes: dict[str, int]
    dtype: str
    passes: str
    label: str
    options: dict[str, Any]
    runner: str
    status: Status
    detail: str = ""
    note: str = ""
    error: float | None = None
    limit: float | None = None
    checked_at: dict[str, int] | None = None
    checked_by: str = ""
    first_call_s: float | None = None
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    runs: int | None = None
    method: str | None = None
    host_ms: float | None = None
    memory_bytes: int | None = None
    floor_bytes: int | None = None
    floor_ms: float | None = None
    floor_ratio: float | None = None
    kind: str = "time"
    state: bool = False
    operations: int | None = None
    history_bytes: int | None = None
    predicted_bytes: int | None = None
    predicted_ms: float | None = None
    shared_bytes: int | None = None
    plan: str = ""
    step_errors: dict[str, list[float]] | None = None
    dram_bytes: int | None = None
    tensor_percent: float | None = None
    kernels: int | None = None
    counters_note: str = ""

    def to_case(self) -> Case:
        """The case that it was measured in."""
        options, sizes = tuple(self.options.items()), tuple(self.sizes.items())
        return Case(self.op, sizes, self.dtype, self.passes, self.label, options, self.kind, self.state)

    @property
    def case(self) -> str:
        """The case in words."""
        return str(self.to_case())


def of_case(case: Case, runner: str, status: Status, detail: str = "") -> Result:
    """A row without figures."""
    return Result(
        case.op,
        dict(case.sizes),
        case.dtype,
        case.passes,
        case.label,
        dict(case.options),
        runner,
        status,
        detail,
        kind=case.kind,
        state=case.state,
    )
