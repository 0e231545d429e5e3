"""Curves of a training for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import UserError


def check_tensorboard() -> None:
    """Raises UserError where it is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise UserError("--tensorboard needs the tensorboard package: pip install tensorboard") from error


class Scalars:
    """Writes to a folder; without one it does nothing. Steps from the first one on replace those of an earlier run."""

    def __init__(self, folder: Path | None = None, first: int = 0) -> None:
        self._writer: Any = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=first)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
