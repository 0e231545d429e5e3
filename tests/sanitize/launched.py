"""Notes which kernels a process launches, by the names of `sources.kernels`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime.jit import JITFunction

from holdfast.kernels.runtime import descriptor_launch, nvrtc
from holdfast.kernels.runtime import launch as triton_launch

from .sources import MADE


def name_of(kernel: Any) -> str:
    """Of a jit function."""
    return f"{kernel.fn.__module__.removeprefix('holdfast.kernels.')}.{kernel.fn.__name__}"


def name_of_cuda(name: str) -> str:
    """Of a kernel that is compiled from a text: one that is launched a step is made, the others are written."""
    made = f"dense.alternating.cell_step.{name}"
    return made if made in MADE else f"dense.cuda.{name}"


@contextmanager
def noted() -> Iterator[set[str]]:
    """The set that the names of launched kernels come into, those launched before and not anew left out."""
    found: set[str] = set()
    launcher, load, run = triton_launch.launcher, nvrtc.load, JITFunction.run

    def noting(compiled: Any) -> Any:
        found.add(name_of(compiled.src.fn))
        return launcher(compiled)

    def loading(source: str, arch: str, name: str, *rest: Any) -> Any:
        found.add(name_of_cuda(name))
        return load(source, arch, name, *rest)

    def running(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        if not warmup:
            found.add(name_of(self))
        return run(self, *args, warmup=warmup, **kwargs)

    triton_launch.launcher = descriptor_launch.launcher = noting
    nvrtc.load, JITFunction.run = loading, running
    try:
        yield found
    finally:
        triton_launch.launcher = descriptor_launch.launcher = launcher
        nvrtc.load, JITFunction.run = load, run
