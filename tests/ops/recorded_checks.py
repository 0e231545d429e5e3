"""What doctor's checks are made of, on record: a size that shrinks to one would check less without a word.

    PYTHONPATH=src:tests python -m ops.recorded_checks

writes tests/ops/checks.txt anew. One line for each call: the backends that try it, dtype and limit, and the shapes of
its arguments.
"""

from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from holdfast.ops import checks
from holdfast.ops.checks import Attempt
from holdfast.recurrences import Draw

CHECKS = Path(__file__).with_name("checks.txt")


def _shape(x: Any) -> str:
    if isinstance(x, tuple):
        return f"({', '.join(map(_shape, x))})"
    return "x".join(map(str, x.shape)) or "scalar" if isinstance(x, Tensor) else repr(x)


def _call(attempt: Attempt) -> str:
    dtypes = {x.dtype for x in attempt.arguments.values() if isinstance(x, Tensor) and x.is_floating_point()}
    named = " ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    given = ", ".join(f"{name} {_shape(x)}" for name, x in attempt.arguments.items())
    return f"{named}{'' if attempt.grads else ' no gradients'}, limit {attempt.limit:.3g}: {given}"


def lines() -> list[str]:
    """As doctor on a CPU has them, those of kernels included."""
    device = torch.device("cpu")
    calls: dict[tuple[str, str], dict[str, None]] = {}
    # without numbers, of which only the shapes count here
    with patch.object(checks, "Draw", lambda seed, dtype=torch.float32, place="": Draw(seed, dtype, "meta")):
        for check in chain(checks.every(device), checks.further(device)):
            for attempt, _ in check.tries:
                calls.setdefault((check.op, _call(attempt)), {})[check.backend.name] = None
    return [f"{op} {' '.join(backends)}; {call}" for (op, call), backends in calls.items()]


def main() -> None:
    """Writes the file."""
    CHECKS.write_text("\n".join(lines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
