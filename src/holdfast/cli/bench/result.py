"""One row of a results table."""

from dataclasses import dataclass
from typing import Any, Literal

from .case import Case

# ok: right and timed. wrong: ran, and its results are off. rejected: cannot run this case, with the reason.
# failed: raised. missing: not installed.
Status = Literal["ok", "wrong", "rejected", "failed", "missing"]


@dataclass(frozen=True, slots=True)
class Result:
    """What one runner did in one case.

    error: the largest relative error of the output, and for fwd+bwd of every gradient, against the float64 oracle;
    limit: the most that counts as right; checked_at: the sizes at which they were compared.
    first_call_s: seconds of the first call, compilation included. median_ms, low_ms, high_ms: median and quartiles of
    the runs. host_ms: what the host spends a call, on a GPU. memory_bytes: peak beyond the inputs. floor_ms: bytes
    that must move / the copy bandwidth of this run; floor_ratio: median / floor.
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

    @property
    def case(self) -> str:
        """The case in words."""
        return str(Case(self.op, tuple(self.sizes.items()), self.dtype, self.passes, "", tuple(self.options.items())))


def of_case(case: Case, runner: str, status: Status, detail: str = "") -> Result:
    """A row without figures."""
    options = dict(case.options)
    return Result(case.op, dict(case.sizes), case.dtype, case.passes, case.label, options, runner, status, detail)
