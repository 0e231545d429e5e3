"""Peak memory of a run beyond what was there before it."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch


def _status(field: str) -> int:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) * 1024


def extra_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Peak bytes during a run less those before it: outputs, gradients, all that was saved and scratch.

    On a GPU as PyTorch's allocator counts them; on a CPU the process's resident memory, where the kernel and the C
    library can tell (Linux with glibc), otherwise None.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        return None
    try:
        # memory that the allocator keeps from earlier runs would not show as extra
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status("VmRSS")
    except (AttributeError, OSError, StopIteration):
        return None
    run()
    return max(0, _status("VmHWM") - before)
