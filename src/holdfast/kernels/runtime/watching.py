"""Who stands between a kernel's launch and what reads its results: nobody, but in doctor's self-check."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

# (the kernel's name, the tensors that it takes by its names for them, what launches it) -> None; the last one is asked
Watcher = Callable[[str, dict[str, Tensor], Callable[[], None]], None]
WATCHERS: list[Watcher] = []


def watched(kernel: Any, arguments: Iterable[Any], start: Callable[[], None]) -> None:
    """Has the watcher start a launch, of which there has to be one.

    kernel: a jit function, or the name of a CUDA kernel, whose arguments have numbers for names. arguments: tensors,
    descriptors of them, and what else the kernel takes, from the first one on.
    """
    given = [getattr(x, "base", x) for x in arguments]
    if isinstance(kernel, str):
        name, names = kernel, [str(n) for n in range(len(given))]
    else:
        name, names = f"{kernel.fn.__module__}.{kernel.fn.__name__}", kernel.arg_names
    tensors = {key: x for key, x in zip(names, given, strict=False) if isinstance(x, Tensor)}
    WATCHERS[-1](name.removeprefix(__name__.removesuffix("runtime.watching")), tensors, start)
