"""Launches of the fused kernels: from a plan and arrays to the machine code that runs them."""

from collections.abc import Callable
from ctypes import c_float, c_int, c_void_p
from functools import cache, lru_cache

import torch
from torch import Tensor

from holdfast.kernels.runtime import nvrtc
from holdfast.planner import Direction, Plan
from holdfast.planner.models.dense import cuda as model
from holdfast.recurrences.cell import Cell

from .assemble import assemble, part, within

Arrays = list[Tensor | None]
# Steps of what blocks exchange that are filled before a launch; the kernel fills the rest, as many steps ahead, so that
# it is still in the L2 cache. LSTM B 16, D 768, backward with dR: 2.74, 2.41, 2.39, 2.34 ms with 256, 64, 32, 16.
REACH = 32


def run(
    plan: Plan, cell: Cell, direction: Direction, arrays: Arrays, clip: float | None, resets: bool, size: dict[str, int]
) -> None:
    """Launch a pass.

    arrays: the kernel's tensors in its order. clip: of the backward pass. size: B, T, H, D, and W, the padded D.
    """
    device = arrays[0].device
    values = list(arrays)
    if direction == "backward":
        # the bound comes before the four outputs
        values.insert(-4, c_float(float("inf") if clip is None else clip))
    saves = direction == "forward" and arrays[-1] is not None
    values += [c_int(size[name]) for name in "BTHD"]
    dtype = str(arrays[0].dtype).removeprefix("torch.")
    is_one_block = plan["blocks"] == 1
    ranges = ceil(size["B"], plan["rows"])
    source, name, threads, shared = _source(plan, cell, direction, dtype, size["W"], resets, saves)
    arch = _architecture(device)
    if not nvrtc.is_made(source, arch):
        return
    kernel = nvrtc.load(source, arch, name, shared, device.index)
    if is_one_block:
        grid = (ranges, size["H"], 1)
        if direction == "forward":
            twos = max(0, ceil(size["B"] - 4 * plan["fours"], 2))
            grid = ((plan["fours"] + twos) * size["H"], 1, 1)
            values.append(c_int(plan["fours"]))
        kernel.launch(grid, threads, shared, values)
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
    """Return a function that raises RuntimeError if a launch has given up waiting since the last call of it."""
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
    plan: Plan, cell: Cell, direction: Direction, dtype: str, width: int, resets: bool, saves: bool
) -> tuple[str, str, int, int]:
    """Return (source, the kernel's name, threads, bytes of shared memory).

    Sources for different batches, lengths and numbers of heads are the same.
    """
    sizes = {"Gi": len(cell.input), "Gr": len(cell.recurrent), "G": len(cell.gates), "S": len(cell.states)}
    numbers = {"WIDTH": width, "RESETS": int(resets)}
    if plan["blocks"] == 1:
        threads, shared = model.one_block_threads(width), 0
        # small blocks share an SM when there are more of them than SMs
        numbers |= {"SAVES": int(saves), "BLOCKS_A_SM": max(1, 384 // threads)}
        source = assemble(cell, dtype, numbers, "ptx.cuh", "gates.cuh")
        stages_of = model.stages_of(plan)
        for rows, stages in stages_of.items():
            needed = model.one_block_shared(sizes, width, rows, stages, direction)
            own = {"ROWS": rows, "STAGES": stages, "SHARED_BYTES": needed, "TURNS": plan["turns"] if rows == 2 else 1}
            source += within(f"rows_{rows}", own, "one_block/common.cuh", f"one_block/{direction}.cu")
            shared = max(shared, needed)
        if direction == "forward":
            if 4 not in stages_of:
                source += "namespace rows_4 = rows_2;\n"
            source += f"constexpr bool HAS_FOURS = {int(4 in stages_of)};\n" + part("one_block/grid.cu")
        return source, f"dense_one_block_{direction}", threads, shared
    threads = 32 * (plan["warps"] + 4)
    held = plan["in_registers"], plan["in_shared"]
    shared = model.many_blocks_shared(sizes, ceil(plan["rows"], 8), plan["channels"], plan["warps"], held[1], direction)
    numbers |= {"SLICE": plan["channels"], "WARPS": plan["warps"], "IN_REGISTERS": held[0], "IN_SHARED": held[1]}
    numbers |= {"TAKEN": plan["taken"], "LEFT": plan["left"], "AT_ONCE": plan["at_once"], "REACH": REACH}
    parts = "ptx.cuh", "gates.cuh", "many_blocks/common.cuh", f"many_blocks/{direction}.cu"
    source = assemble(cell, dtype, numbers, *parts)
    return source, f"dense_many_blocks_{direction}", threads, shared


_source = lru_cache(maxsize=1024)(source_of)


@cache
def _architecture(device: torch.device) -> str:
    """Return the architecture to compile for: Hopper's own instructions need the target named sm_90a."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


@cache
def _failed(device: torch.device) -> Tensor:
    """Return the flag that a kernel sets when it gives up: in the host's memory, where reading it waits for nothing."""
    # writable from every mode, whichever the first call is in
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int32).pin_memory()
