"""Which device a command runs on, and what its memory errors mean."""

import contextlib
from collections.abc import Iterator

import torch

from .errors import UserError, first_line


def choose_device(name: str) -> torch.device:
    """A device by torch's name; "auto" is the first CUDA device, or else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device {name}: not usable here: {first_line(error)}") from error
    if device.type == "meta":
        raise UserError("--device meta: holds no data to work on")
    return device


@contextlib.contextmanager
def explained_memory_errors(hint: str) -> Iterator[None]:
    """Turns running out of memory into one line with what to do about it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if not is_memory:
            raise
        raise UserError(f"out of memory: {hint}") from error
