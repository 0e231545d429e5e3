"""Launches of Gluon kernels with little host time: what a call needs compiled is looked up by its types alone."""

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.kernels.runtime.replay.recording import RECORDING, mark_unrecordable, note_launch

from .compile_pool import compiled
from .driver import Run, launcher
from .launch import LAUNCHES_COMPILED, launch_by_triton
from .watching import WATCHERS, watched

_COMPILED: dict[tuple[Any, ...], Run] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: Sequence[Any],
    constants: dict[str, Any],
    warps: int,
    types: tuple[Any, ...],
    registers: int | None = None,
    pdl: bool = False,
    cooperative: bool = False,
) -> None:
    """Run kernel on the current stream: arguments in its order, then constants in its order.

    types: what tells the arguments' types apart from those of other calls with the same constants: dtypes, which are
    None, and which integers may take more than 32 bits. The first argument is a descriptor, and its device the one that
    runs. registers: the most that a thread may take; None leaves it to the compiler. pdl: whether it may start
    before the launch ahead of it has ended, and waits itself before it touches what that one may write or read.
    cooperative: all blocks run at once, or the launch fails.
    What a compiled kernel is looked up by holds neither values nor alignments. So the kernel must not be specialised on
    them (do_not_specialize), but for pointers that are always at a multiple of 16 bytes. Where a version of Triton
    launches no compiled kernels, its own launch runs.
    """
    device = arguments[0].base.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, arguments, constants, warps, types, registers, pdl, cooperative)
    options = {"num_warps": warps, "maxnreg": registers, "launch_pdl": pdl}
    options["launch_cooperative_grid"] = cooperative
    if not LAUNCHES_COMPILED:
        mark_unrecordable()
        launch_by_triton(kernel, grid, *arguments, **constants, **options)
        return None
    # the function, since a kernel's hash is that of its source and of all that it reads
    values = constants.values()
    key = (kernel.fn, device, warps, registers, pdl, cooperative, *values, *map(type, values), *types)
    run = _COMPILED.get(key)
    if run is None:
        found = compiled(key, kernel, grid, arguments, constants | options, device, bool(RECORDING))
        if found is None:
            return None
        run = _COMPILED[key] = launcher(found)
    if RECORDING:
        note_launch(run, grid, arguments)
    if WATCHERS:
        return watched(kernel, arguments, lambda: run(grid, arguments, values))
    run(grid, arguments, values)
    return None
