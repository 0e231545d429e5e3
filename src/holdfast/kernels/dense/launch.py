"""Launches of the fused kernels: from a plan and arrays to the machine code that runs them."""

from collections.abc import Callable
from ctypes import c_float, c_int, c_void_p
from functools import cache, lru_cache

import torch
from torch import Tensor

from holdfast.kernels.common import nvrtc
from holdfast.planner import Direction, Plan
from holdfast.planner.models import dense_fused
from holdfast.recurrences.cell import Cell

from .source import assemble, within

Arrays = list[Tensor | None]


def run(
    plan: Plan, cell: Cell, direction: Direction, arrays: Arrays, clip: float | None, resets: bool, size: dict[str, int]
) -> None:
    """arrays: the kernel's tensors in its order. clip: of the backward pass. size: B, T, H, D, and W, the padded D."""
    device = arrays[0].device
    values = list(arrays)
    if direction == "backward":
        # the bound comes before the four outputs
        values.insert(-4, c_float(float("inf") if clip is None else clip))
    keeps = direction == "forward" and arrays[-1] is not None
    values += [c_int(size[name]) for name in "BTHD"]
    dtype = str(arrays[0].dtype).removeprefix("torch.")
    spread = plan["blocks"] > 1
    ranges = ceil(size["B"], plan["rows"])
    kernel, threads, shared = _prepare(plan, cell, direction, dtype, device, size["W"], resets, keeps)
    if not spread:
        kernel.launch((ranges, size["H"], 1), threads, shared, values)
        return
    values.insert(-4, c_void_p(_failed(device).data_ptr()))
    look = _look(device)
    for first in range(0, size["H"], plan["heads"]):
        heads = min(plan["heads"], size["H"] - first)
        grid = (plan["blocks"] * heads, ranges, 1)
        rest = [c_int(plan["rows"]), c_int(first), c_int(plan["pause"])]
        kernel.launch(grid, threads, shared, [*values, *rest], cooperative=True, first=look)


def ceil(dividend: int, divisor: int) -> int:
    """dividend / divisor, rounded up."""
    return -(-dividend // divisor)


@cache
def _look(device: torch.device) -> Callable[[], None]:
    """Raises RuntimeError if a spread launch on the device has given up waiting since the last look; waits for none."""
    failed = c_int.from_address(_failed(device).data_ptr())

    def look() -> None:
        if failed.value:
            failed.value = 0
            raise RuntimeError(
                "an earlier fused launch of the dense family gave up waiting for its other blocks; its results are "
                "wrong; another program may have kept some of them off the device"
            )

    return look


def source_of(
    plan: Plan, cell: Cell, direction: Direction, dtype: str, width: int, resets: bool, keeps: bool
) -> tuple[str, str, int, int]:
    """(source, the kernel's name, threads, bytes of shared memory).

    Sources for different batches, lengths and numbers of heads are the same.
    """
    sizes = {"Gi": len(cell.input), "Gr": len(cell.recurrent), "G": len(cell.gates), "S": len(cell.states)}
    numbers = {"WIDTH": width, "RESETS": int(resets)}
    if plan["blocks"] == 1:
        threads, shared = dense_fused.resident_threads(width, plan["rows"]), 0
        source = assemble(cell, dtype, numbers | {"KEEPS": int(keeps)}, "ptx.cuh", "gates.cuh")
        # for every number of sequences that another batch size may want, so that it finds its machine code made
        for each, stages in dense_fused.variants(plan):
            needed = dense_fused.resident_shared(sizes, width, each, stages, direction)
            # small blocks share an SM when there are more of them than SMs
            own = {"ROWS": each, "STAGES": stages, "SHARED_BYTES": needed}
            own["BLOCKS_A_SM"] = max(1, (512 if each == 8 else 384) // dense_fused.resident_threads(width, each))
            named = f"resident_{direction}", f"resident_{direction}_{each}"
            source += "\n" + within(f"rows_{each}", own, named, "resident.cuh", f"resident_{direction}.cu")
            shared = needed if each == plan["rows"] else shared
        return source, f"resident_{direction}_{plan['rows']}", threads, shared
    stem, threads = "spread", 32 * (plan["warps"] + 4)
    held = plan["in_registers"], plan["in_shared"]
    shared = dense_fused.spread_shared(
        sizes, ceil(plan["rows"], 8), plan["channels"], plan["warps"], held[1], direction
    )
    numbers |= {"SLICE": plan["channels"], "WARPS": plan["warps"], "IN_REGISTERS": held[0], "IN_SHARED": held[1]}
    numbers |= {"TAKEN": plan["taken"], "LEFT": plan["left"], "AT_ONCE": plan["at_once"]}
    source = assemble(cell, dtype, numbers, "ptx.cuh", "gates.cuh", f"{stem}.cuh", f"{stem}_{direction}.cu")
    return source, f"{stem}_{direction}", threads, shared


@lru_cache(maxsize=1024)
def _prepare(
    plan: Plan,
    cell: Cell,
    direction: Direction,
    dtype: str,
    device: torch.device,
    width: int,
    resets: bool,
    keeps: bool,
) -> tuple[nvrtc.Kernel, int, int]:
    """(kernel, threads, bytes of shared memory)."""
    source, name, threads, shared = source_of(plan, cell, direction, dtype, width, resets, keeps)
    major, minor = torch.cuda.get_device_capability(device)
    # Hopper's own instructions need the target named sm_90a
    arch = f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
    return nvrtc.load(source, arch, name, shared, device.index), threads, shared


@cache
def _failed(device: torch.device) -> Tensor:
    """Where a kernel says that it gave up: in the host's memory, so that reading it waits for nothing."""
    # writable from every mode, whichever the first call is in
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int32).pin_memory()
