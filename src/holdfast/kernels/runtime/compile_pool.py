"""Kernels of a call compiled side by side, which the call alone would compile one after another as it launches them.

Where a launch finds no compiled kernel, its op has a dry run: it runs, and after it its backward pass if a gradient is
recorded, with launches that launch nothing but have a thread compile what is missing. Triton keeps Python's lock for
less than half of that. Then the op runs, and waits where it launches what is not ready; the backward pass's kernels go
on compiling behind it. What fails to compile is raised where it is launched.
"""

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .torch_private import dispatch_modes

_ATTEMPT, _DRY_RUN = 1, 2
# each takes some hundred MiB while it compiles; an op's passes have up to six kernels
_THREADS = 8


class _Missing(BaseException):
    """A launch of an attempt found no compiled kernel. An op that tries one thing after another is not to catch it."""


class _Here(threading.local):
    """The stage of this thread: nothing, an attempt that a missing kernel ends, or a dry run."""

    stage = 0


_HERE = _Here()
# kernels that a thread compiles, by what they are looked up by
_SUBMITTED: dict[Hashable, Future[Any]] = {}


@cache
def _pool() -> ThreadPoolExecutor:
    # Python joins its threads when it exits
    return ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "holdfast-compile")


def _after_fork() -> None:
    """A child has none of the threads that were to compile what was future."""
    _SUBMITTED.clear()
    _pool.cache_clear()


os.register_at_fork(after_in_child=_after_fork)


def is_dry_run() -> bool:
    """Return whether this thread is in a dry run: launches do nothing, and what they were to write holds anything."""
    return _HERE.stage == _DRY_RUN


def with_parallel_compile(
    run: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
    then: Callable[[tuple[Any, ...], Any], Any] | None = None,
) -> Any:
    """run(*arguments, **named); where kernels are missing, after a dry run of it and of then(arguments, its outputs).

    run and then may be run several times, so they write to nothing but what they make.
    """
    # a dispatch mode is to see each operation once
    if _HERE.stage or dispatch_modes():
        return run(*arguments, **named)
    _HERE.stage = _ATTEMPT
    try:
        return run(*arguments, **named)
    except _Missing:
        pass
    finally:
        _HERE.stage = 0
    _HERE.stage = _DRY_RUN
    try:
        # what fails here fails again where it is needed
        with suppress(Exception):
            _run_dry(run, arguments, named, then)
    finally:
        _HERE.stage = 0
    return run(*arguments, **named)


def _run_dry(run: Any, arguments: tuple[Any, ...], named: dict[str, Any], then: Any) -> None:
    outputs = run(*arguments, **named)
    if then is not None:
        then(arguments, outputs)


def compiled(
    key: Hashable,
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    named: dict[str, Any],
    device: Any,
    is_recorded: bool,
) -> Any:
    """Return the kernel compiled for these arguments, here or by a thread. None in a dry run, where a thread begins to.

    key: what it is looked up by. named: constants and options. device: that of the launch. is_recorded: whether a
    recording would see what is run twice. Raises what Triton raises.
    """

    def task() -> tuple[Any, ...]:
        # memory is not to wait for a compiler
        return _compile, kernel, grid, [without_memory(x) for x in arguments], named, device

    return get_or_compile(key, lambda: _warm(kernel, grid, arguments, named), task, is_recorded)


def get_or_compile(
    key: Hashable, make: Callable[[], Any], task: Callable[[], tuple[Any, ...]], is_recorded: bool
) -> Any:
    """Return what make does, here or in a thread that runs a task: a function and its arguments. None in a dry run."""
    future = _SUBMITTED.get(key)
    if future is None and _HERE.stage == _ATTEMPT and not (is_recorded or _is_capturing()):
        raise _Missing
    if _HERE.stage == _DRY_RUN:
        if future is None:
            _SUBMITTED[key] = _pool().submit(*task())
        return None
    if future is None:
        return make()
    try:
        return future.result()
    finally:
        _SUBMITTED.pop(key, None)


def _compile(kernel: Any, grid: tuple[int, ...], likes: Sequence[Any], named: dict[str, Any], device: Any) -> Any:
    # of a thread of the pool another device may be the current one
    with torch.cuda.device(device):
        return _warm(kernel, grid, likes, named)


def _warm(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    from .assembler import assembler_of

    with assembler_of(kernel):
        return kernel.warmup(*arguments, **named, grid=grid)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class _Like:
    """What Triton compiles for of a tensor: its dtype, and an address that has its alignment to 16 bytes."""

    def __init__(self, x: Tensor) -> None:
        self.dtype, self.address = x.dtype, x.data_ptr() % 16

    def data_ptr(self) -> int:
        return self.address


def without_memory(x: Any) -> Any:
    """x without its memory: a tensor, a descriptor of one, or a number."""
    if isinstance(x, Tensor):
        return _Like(x)
    if not hasattr(x, "base"):
        return x
    descriptor = copy(x)
    descriptor.base = _Like(x.base)
    return descriptor
