"""Notes which kernels a process launches, by the names of `sources.kernels`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime.jit import JITFunction

from holdfast.kernels.common import gluon_launch, nvrtc, triton_launch


def name_of(kernel: Any) -> str:
    """Of a jit function."""
    return f"{kernel.fn.__module__.removeprefix('holdfast.kernels.')}.{kernel.fn.__name__}"


@contextmanager
def noted() -> Iterator[set[str]]:
    """The set that the names of launched kernels come into, those launched before and not anew left out."""
    found: set[str] = set()
    launcher, load, run = triton_launch.launcher, nvrtc.load, JITFunction.run

    def noting(compiled: Any) -> Any:
        found.add(name_of(compiled.src.fn))
        return launcher(compiled)

    def loading(source: str, arch: str, name: str, *rest: Any) -> Any:
        found.add(f"dense.{'step' if name.startswith('step_') else 'cuda'}.{name}")
        return load(source, arch, name, *rest)

    def running(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        if not warmup:
            found.add(name_of(self))
        return run(self, *args, warmup=warmup, **kwargs)

    triton_launch.launcher = gluon_launch.launcher = noting
    nvrtc.load, JITFunction.run = loading, running
    try:
        yield found
    finally:
        triton_launch.launcher = gluon_launch.launcher = launcher
        nvrtc.load, JITFunction.run = load, run
