"""Launches of the fused kernels: from a plan and arrays to the machine code that runs them."""

from ctypes import c_float, c_int
from functools import cache, lru_cache

import torch
from torch import Tensor

from holdfast.kernels.common import nvrtc
from holdfast.planner import Direction, Plan
from holdfast.planner.models import dense_fused
from holdfast.recurrences.cell import Cell

from .source import assemble

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
    rows = 8 * ceil(ceil(size["B"], 8), plan["ranges"]) if spread else dense_fused.ROWS
    kernel, threads, shared = _prepare(plan, cell, direction, dtype, device, size["W"], resets, keeps, rows)
    if not spread:
        kernel.launch((ceil(size["B"], rows), size["H"], 1), threads, shared, values)
        return
    values.insert(-4, _failed(device))
    for first in range(0, size["H"], plan["heads"]):
        heads = min(plan["heads"], size["H"] - first)
        grid = (plan["blocks"] * heads, plan["ranges"], 1)
        rest = [c_int(rows), c_int(first), c_int(plan["pause"])]
        kernel.launch(grid, threads, shared, [*values, *rest], cooperative=True)


def ceil(dividend: int, divisor: int) -> int:
    """dividend / divisor, rounded up."""
    return -(-dividend // divisor)


def raise_if_stuck(device: torch.device) -> None:
    """Raises RuntimeError if a spread launch on the device has given up waiting since the last look; waits for none."""
    failed = _failed(device)
    if failed.item():
        failed.zero_()
        raise RuntimeError(
            "an earlier fused launch of the dense family gave up waiting for its other blocks; its results are wrong; "
            "another program may have kept some of them off the device"
        )


def source_of(
    plan: Plan, cell: Cell, direction: Direction, dtype: str, width: int, resets: bool, keeps: bool, rows: int
) -> tuple[str, str, int, int]:
    """(source, the kernel's name, threads, bytes of shared memory). rows: sequences of a block.

    Sources for different batches, lengths and numbers of heads are the same.
    """
    sizes = {"Gi": len(cell.input), "Gr": len(cell.recurrent), "G": len(cell.gates), "S": len(cell.states)}
    numbers = {"WIDTH": width, "RESETS": int(resets)}
    if plan["blocks"] == 1:
        stem, threads = "resident", dense_fused.resident_threads(width)
        shared = dense_fused.resident_shared(sizes, width, plan["stages"], direction)
        numbers |= {"STAGES": plan["stages"], "SHARED_BYTES": shared, "KEEPS": int(keeps)}
        # small blocks share an SM when there are more of them than SMs
        numbers["BLOCKS_A_SM"] = max(1, 384 // threads)
    else:
        stem, threads = "spread", 32 * (plan["warps"] + 4)
        held = plan["in_registers"], plan["in_shared"]
        shared = dense_fused.spread_shared(sizes, rows // 8, plan["channels"], plan["warps"], held[1], direction)
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
    rows: int,
) -> tuple[nvrtc.Kernel, int, int]:
    """(kernel, threads, bytes of shared memory)."""
    source, name, threads, shared = source_of(plan, cell, direction, dtype, width, resets, keeps, rows)
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
