"""Has initcheck see what TMA writes, which it does not follow: memory that a descriptor covers is copied onto itself.

A copy by the driver counts as a write, and before the launch: a kernel's blocks may read what others of them wrote. So
what a kernel leaves unwritten of such memory is not noticed either; tests fill memory with NaN for that.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.runtime import descriptor_launch
from holdfast.kernels.runtime.watching import WATCHERS


def _bytes_of(x: Tensor) -> Tensor:
    """All of the memory that x is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _watch(kernel: Any, arguments: Iterable[Any], start: Callable[[], None]) -> None:
    for base in (x.base for x in arguments if hasattr(x, "base")):
        whole = _bytes_of(base)
        whole.copy_(whole.cpu())
    start()


def _pass(kernel: str, tensors: dict[str, Tensor], start: Callable[[], None]) -> None:
    start()


@contextmanager
def counted_as_written() -> Iterator[None]:
    """Before each launch that takes descriptors."""
    before = descriptor_launch.watched
    descriptor_launch.watched = _watch
    WATCHERS.append(_pass)
    try:
        yield
    finally:
        WATCHERS.remove(_pass)
        descriptor_launch.watched = before
