"""Launches of Triton kernels with little host time: what a call needs compiled is looked up by its types alone."""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from holdfast.kernels.runtime.replay.recording import RECORDING, mark_unrecordable, note_launch

from .assembler import assembler_of
from .compile_pool import compiled
from .driver import Run, launcher
from .watching import WATCHERS, watched

# what Triton does not promise: without it, its own launch serves
LAUNCHES_COMPILED = hasattr(CompiledKernel, "__getitem__") and hasattr(triton.JITFunction, "warmup")
_COMPILED: dict[tuple[Any, ...], Run] = {}


@lru_cache(maxsize=4096)
def _kinds(numbers: tuple[int | float, ...], types: tuple[type, ...]) -> tuple[Any, ...]:
    """Return what Triton compiles in of numbers: types, whether an integer is 1 or divisible by 16, and its width.

    types: of the numbers, since 1, 1.0 and True are equal.
    """
    return tuple(
        (kind, x == 1, x % 16 == 0, -(2**31) <= x < 2**31) if isinstance(x, int) else kind
        for x, kind in zip(numbers, types, strict=True)
    )


@lru_cache
def has_pdl(device: torch.device) -> bool:
    """Return whether a launch may start there before the one ahead of it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Makes x's device the current one, on which `launch` runs."""
    # entering torch.cuda's own context takes longer than finding that it is not needed
    is_current = not x.is_cuda or x.device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device_of(x)


def launch(
    kernel: Any,
    blocks: tuple[int, ...],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[int | float, ...],
    constants: dict[str, Any],
    warps: int,
    pdl: bool = False,
    registers: int | None = None,
) -> None:
    """Run kernel on the current device and stream: tensors, numbers and constexpr arguments, in its order.

    pdl: whether it may start before the launch ahead of it has ended, as in descriptor_launch.py. registers: the
    most that a thread may take; None leaves it to the compiler.
    Triton's own launch examines every argument in Python; a sweep has sixty: docs/notes/host-time.md#direct-launch. It
    runs only where a version of Triton has no other. Raises ValueError where constants are not what the kernel's
    signature ends with.
    """
    # what the interpreter runs is no JITFunction
    if not (LAUNCHES_COMPILED and isinstance(kernel, triton.JITFunction)):
        mark_unrecordable()
        if hasattr(kernel, "arg_names"):
            # by name any order will do, and on a GPU none but this
            _check_order(kernel, len(tensors) + len(numbers), constants)
        launch_by_triton(kernel, blocks, *tensors, *numbers, **constants, **_options(warps, False, registers))
        return
    places = [None if x is None else x.data_ptr() for x in tensors]
    types = [None if x is None else (x.dtype, p % 16) for x, p in zip(tensors, places, strict=True)]
    device = torch.cuda.current_device()
    values = constants.values()
    kinds = (*map(type, values), *types, _kinds(numbers, tuple(map(type, numbers))))
    key = (kernel.fn, device, warps, pdl, registers, *values, *kinds)
    run = _COMPILED.get(key)
    if run is None:
        _check_order(kernel, len(tensors) + len(numbers), constants)
        named = constants | _options(warps, pdl, registers)
        found = compiled(key, kernel, blocks, (*tensors, *numbers), named, device, bool(RECORDING))
        if found is None:
            return
        run = _COMPILED[key] = launcher(found)
    # of a tensor, Triton would ask the driver whether its address is one of the device
    grid = (*blocks, 1, 1)[:3]
    if RECORDING:
        note_launch(run, grid, (*tensors, *numbers))
    if WATCHERS:
        watched(kernel, tensors, lambda: run(grid, (*places, *numbers), values))
        return
    run(grid, (*places, *numbers), values)


def _check_order(kernel: Any, before: int, constants: dict[str, Any]) -> None:
    expected = kernel.arg_names[before:]
    if expected != list(constants):
        raise ValueError(f"constants: expected {', '.join(expected)}; got {', '.join(constants)}")


def _options(warps: int, pdl: bool, registers: int | None) -> dict[str, Any]:
    options = {"num_warps": warps, "launch_pdl": pdl, "maxnreg": registers}
    return {name: value for name, value in options.items() if value}


def launch_by_triton(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run kernel by Triton's own launch, for calls that are not repeated from a record: arguments as the kernel has
    them, constants and the compiler's options by name."""
    # it may compile
    with assembler_of(kernel):
        if WATCHERS:
            watched(kernel, arguments, lambda: kernel[grid](*arguments, **options))
            return
        kernel[grid](*arguments, **options)
