"""Calls as an H200 would run them, with no GPU and no kernel run: which kernels they launch."""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from holdfast.kernels import backend
from holdfast.kernels import select as planning
from holdfast.kernels.dense import saved as kept
from holdfast.kernels.dense.alternating import cell_step as step
from holdfast.kernels.dense.cuda import launch
from holdfast.kernels.dense.torch import pointwise
from holdfast.kernels.runtime import descriptor_launch, nvrtc
from holdfast.kernels.runtime import launch as triton_launch
from holdfast.kernels.runtime.replay.recording import RECORDING, note_launch
from holdfast.planner import Device

from . import sources
from .launched import name_of, name_of_cuda

H200 = Device.named("h200")


@contextmanager
def pretending(note: Callable[..., None] = lambda name, grid, *given: None) -> Iterator[set[str]]:
    """Has tensors of this machine pass for an H200's; the set that kernels come into where they would be launched.

    note: called with the name, the grid and all else that a launch is given.
    """
    found: set[str] = set()
    # what is imported meanwhile would keep what it finds in place of a launch
    for path in sources.KERNELS.rglob("*.py"):
        importlib.import_module(f"holdfast.kernels.{sources.module_of(path)}".removesuffix(".__init__"))
    _forget()
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            _pretend(monkeypatch, found, note)
            yield found
    finally:
        _forget()


class _NoKernel:
    """In place of a compiled kernel, for a recording of its launch: nothing is launched."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.places = [(n, self if hasattr(x, "base") else None) for n, x in enumerate(arguments)]

    def encoder(self, _: Any) -> Any:
        return lambda address: b""

    def start(self, *_: Any) -> None: ...

    def bound(self, *_: Any) -> Any:
        return lambda: None


def _forget() -> None:
    """Plans, and kernels that are launched a step."""
    planning.forget()
    for remembered in (step._load, pointwise.forward, pointwise.backward, launch._look):
        remembered.cache_clear()


def _pretend(monkeypatch: pytest.MonkeyPatch, found: set[str], note: Callable[..., None]) -> None:
    def noting(kernel: Any, grid: Any, arguments: Any, *args: Any, **kwargs: Any) -> None:
        found.add(name_of(kernel))
        note(name_of(kernel), grid, arguments, args, kwargs)
        if RECORDING:
            note_launch(_NoKernel(arguments), grid, arguments)

    def noting_numbers(kernel: Any, blocks: Any, tensors: Any, numbers: Any, *args: Any, **kwargs: Any) -> None:
        noting(kernel, blocks, (*tensors, *numbers), *args, **kwargs)

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def launch(self, grid: Any, *args: Any, **kwargs: Any) -> None:
            note(self.name, grid, args, {k: x for k, x in kwargs.items() if not callable(x)})

        def repeated(self, *args: Any) -> Any:
            note(self.name, (), args)
            return lambda *args: None

    def load(source: str, arch: str, name: str, *rest: Any) -> Kernel:
        found.add(name_of_cuda(name))
        return Kernel(name_of_cuda(name))

    def running(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.add(name_of(self))
        note(name_of(self), grid if isinstance(grid, tuple) else (), args, kwargs)

    monkeypatch.setattr(JITFunction, "run", running)
    for name, value in {"load": load, "missing": lambda *_: None, "is_made": lambda *_: True}.items():
        monkeypatch.setattr(nvrtc, name, value)
    instead = {descriptor_launch.launch: noting, triton_launch.launch: noting_numbers, backend.describe: lambda _: H200}
    for module in [m for name, m in sys.modules.items() if name.startswith("holdfast.")]:
        for name, value in [*vars(module).items()]:
            if callable(value) and type(value).__hash__ is not None and value in instead:
                monkeypatch.setattr(module, name, instead[value])
    monkeypatch.setattr(kept, "compact", lambda x: x.dtype in kept.HALF)
    monkeypatch.setattr(launch, "_failed", lambda _: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(launch, "_architecture", lambda _: "sm_90a")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    nowhere = {"device": lambda _: nullcontext(), "device_of": lambda _: nullcontext(), "current_device": lambda: None}
    nowhere |= {"get_device_capability": lambda *_: (9, 0), "is_current_stream_capturing": lambda: False}
    nowhere["get_device_properties"] = lambda _: SimpleNamespace(multi_processor_count=H200.sms)
    for name, value in nowhere.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    product = torch.mm

    def mm(x: torch.Tensor, y: torch.Tensor, out_dtype: torch.dtype | None = None, **out: torch.Tensor) -> torch.Tensor:
        # PyTorch has none into another dtype on a CPU
        return product(x, y, **out) if out_dtype is None else (x @ y).to(out_dtype)

    monkeypatch.setattr(torch, "mm", mm)
