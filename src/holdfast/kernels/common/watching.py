"""Who stands between a kernel's launch and what reads its results: nobody, but in doctor's self-check."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

# (the kernel's name, the tensors that it takes, what launches it) -> None; the last one of them is asked
Watcher = Callable[[str, list[Tensor], Callable[[], None]], None]
WATCHERS: list[Watcher] = []


def watched(kernel: Any, arguments: Iterable[Any], start: Callable[[], None]) -> None:
    """Has the watcher start a launch, of which there has to be one. kernel: a jit function, or a name.

    arguments: tensors, descriptors of them, and what else the kernel takes.
    """
    name = kernel if isinstance(kernel, str) else f"{kernel.fn.__module__}.{kernel.fn.__name__}"
    tensors = [getattr(x, "base", x) for x in arguments]
    WATCHERS[-1](name.removeprefix("holdfast.kernels."), [x for x in tensors if isinstance(x, Tensor)], start)
