"""How a scenario went: what a worker sends and a record keeps."""

import math
from dataclasses import asdict, dataclass
from typing import Any

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
        """For a record, whose readers may know no infinity."""
        found = asdict(self)
        del found["spoilt"]
        return {name: str(x) if x == math.inf else x for name, x in found.items()}
