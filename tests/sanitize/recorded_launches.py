"""What an H200 is asked to launch for the sanitizer's calls, on record, so that a change of launch code shows.

    PYTHONPATH=src:tests python -m sanitize.recorded_launches

writes tests/sanitize/launches.txt anew. One line a launch: its call, the kernel, the grid, and a digest of everything
else that it is given: dtypes, shapes and strides of tensors, numbers, constants, warps.
"""

import hashlib
from collections.abc import Mapping, Sequence
from ctypes import c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sanitize.calls import CALLS, Call, planned
from sanitize.dry import pretending

LAUNCHES = Path(__file__).with_name("launches.txt")
REMEDY = "if that is meant: PYTHONPATH=src:tests python -m sanitize.recorded_launches, and look at its differences"


def shown(x: Any) -> str:
    """In words that hold no address."""
    if isinstance(x, Tensor):
        return f"{x.dtype} {list(x.shape)} {list(x.stride())}"
    if hasattr(x, "base"):
        # of a descriptor for TMA
        return f"{shown(x.base)} in {list(x.shape)} {list(x.strides)} by {list(x.block_shape)} {shown(x.layout)}"
    if isinstance(x, Mapping):
        return ", ".join(f"{name}={shown(value)}" for name, value in x.items())
    if isinstance(x, Sequence) and not isinstance(x, str):
        return f"[{', '.join(map(shown, x))}]"
    if hasattr(x, "value") and type(x).__module__ == "ctypes":
        # but of a pointer
        return "address" if isinstance(x, c_void_p) else f"{type(x).__name__} {x.value}"
    if x is None or isinstance(x, bool | int | float | str | torch.dtype):
        return str(x)
    # a layout, of which another version of Triton may know more
    return type(x).__name__


def lines(calls: Sequence[Call] = CALLS) -> list[str]:
    found: list[str] = []
    with pretending(lambda name, grid, *given: noted.append((name, grid, shown(given)))):
        for call in calls:
            noted: list[tuple[str, Any, str]] = []
            torch.manual_seed(0)
            with planned(call.plan):
                call.run(torch.device("cpu"))
            for name, grid, given in noted:
                digest = hashlib.blake2b(given.encode(), digest_size=4).hexdigest()
                found.append(f"{call.name}: {name} {'x'.join(map(str, grid)) or '-'} {digest}")
    return found


if __name__ == "__main__":
    LAUNCHES.write_text("\n".join(lines()) + "\n", encoding="utf-8")
