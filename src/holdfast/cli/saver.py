"""The checkpoints of a training: of one process a file, of several each its part, written while training goes on."""

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from . import checkpoint, shards
from .errors import UserError
from .ranks import Ranks, is_of_another


@dataclass(frozen=True)
class Kept:
    """A checkpoint: its folder, its step, and within the folder that of the ranks' parts, if it is of several."""

    folder: Path
    step: int
    shards: str | None


class Saved(Protocol):
    """What a saver reads of a training. restored: what it goes on from."""

    ranks: Ranks
    model: Any
    optimizer: Any
    step: int
    restored: Kept | None

    def state(self) -> dict[str, Any]: ...

    def head(self) -> dict[str, Any]: ...


class Saver:
    """Keeps a folder's checkpoint.pt, which alone decides what the checkpoint is. Without a folder it keeps nothing.

    Of several ranks the file names the folder with their parts. It is written when they are whole, and only then are
    those of the checkpoint before removed. Every rank calls the same methods after the same step.
    """

    def __init__(self, folder: Path | None, training: Saved) -> None:
        self._folder, self._training = folder, training
        self._kept = training.restored if training.restored and training.restored.folder == folder else None
        self._group: Any = None
        self._pending: tuple[dict[str, Any], Future[Any]] | None = None
        if folder is not None and training.ranks.count > 1:
            if training.ranks.is_first:
                # what a run left that ended while it wrote
                shards.remove_others(folder, self._kept and self._kept.shards)
            self._group = dist.new_group(backend="gloo")
            dist.barrier(self._group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # what the user can mend ends a run, and what it has begun to write is whole
        if error is None or isinstance(error, UserError):
            self.finish()

    def save(self) -> None:
        """One process writes this step's checkpoint; several begin to, after the last one is whole."""
        folder, training = self._folder, self._training
        if folder is None:
            return
        if self._group is None:
            checkpoint.save(folder, training.state())
            shards.remove_others(folder, None)
            return
        self.finish()
        if self._kept is not None and self._kept.step == training.step:
            return
        name = f"{shards.PREFIX}{training.step}"
        written = shards.save(folder / name, training.model, training.optimizer, self._group)
        self._pending = training.head() | {"shards": name}, written

    def poll(self) -> None:
        """Lets the begun checkpoint take its place if all parts are written."""
        if self._pending is not None and self._pending[1].done():
            self.finish()

    def finish(self) -> None:
        """Waits for the begun checkpoint. The first rank raises UserError where it could not be written."""
        if self._folder is None or self._pending is None:
            return
        (head, written), self._pending = self._pending, None
        is_first = self._training.ranks.is_first
        try:
            written.result()
        except (Exception, CheckpointException) as error:
            if is_first:
                raise self._explained(error) from error
            # the first one says it, and ends all
            return
        if is_first:
            checkpoint.settle(self._folder / head["shards"])
            checkpoint.save(self._folder, head)
            shards.remove_others(self._folder, head["shards"])
        self._kept = Kept(self._folder, head["step"], head["shards"])

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, RuntimeError) and is_of_another(error):
            return error
        assert self._folder is not None
        shards.remove_others(self._folder, self._kept and self._kept.shards)
        kept = "" if self._kept is None else "; the previous checkpoint is intact"
        return UserError(f"cannot save {self._folder / checkpoint.NAME}: {shards.why(error)}{kept}")
