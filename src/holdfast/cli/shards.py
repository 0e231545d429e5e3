"""Weights and what the optimizer keeps in a folder to which each rank writes a part: torch.distributed.checkpoint."""

import io
import pickle
import shutil
import warnings
import zipfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, state_dict

from .checkpoint import check_fits
from .errors import UserError, first_line, reason

PREFIX = "shards-"


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer, has_run: bool) -> dict[str, Any]:
    """This rank's, by name, in their own memory. has_run: whether the optimizer keeps anything."""
    # first: it has FSDP2 put the shards, which the optimizer knows, in the place of weights that it gathered
    weights = state_dict.get_model_state_dict(model)
    kept = state_dict.get_optimizer_state_dict(model, optimizer)["state"] if has_run else {}
    return {"model": weights, "optimizer": kept}


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: Any) -> Future[Any]:
    """Copies this rank's part and writes it while training goes on; every rank of the group calls.

    group: of its own, over gloo, as what is written is agreed upon beside training.
    """
    tensors = _tensors(model, optimizer, bool(optimizer.state))
    found = dcp.async_save(tensors, checkpoint_id=str(folder), process_group=group)
    assert isinstance(found, Future)
    return found


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, bare: nn.Module, has_run: bool) -> None:
    """Takes what `save` wrote, on however many ranks; every rank calls.

    bare: the model under the names that the checkpoint has. Raises UserError for what is damaged or does not fit.
    """
    try:
        described = dcp.FileSystemReader(folder).read_metadata()
        # a byte that has changed is not noticed by PyTorch, which stores checksums
        check_fits(folder, _shapes(described.state_dict_metadata, "model."), bare)
        _check(folder, described.storage_data)
        tensors = _tensors(model, optimizer, has_run)
        with warnings.catch_warnings():
            # that a process by itself loads by itself
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(tensors, checkpoint_id=str(folder))
    except (
        CheckpointException,
        OSError,
        EOFError,
        RuntimeError,
        ValueError,
        KeyError,
        pickle.UnpicklingError,
    ) as error:
        raise UserError(f"{folder} is damaged or not whole: {why(error)}") from error
    state_dict.set_model_state_dict(model, tensors["model"])
    if has_run:
        groups = state_dict.get_optimizer_state_dict(model, optimizer)["param_groups"]
        kept = {"state": tensors["optimizer"], "param_groups": groups}
        state_dict.set_optimizer_state_dict(model, optimizer, kept)


def _shapes(described: dict[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    """Tensors without data of what is stored under a prefix, by the names behind it."""
    found = {name.removeprefix(prefix): each for name, each in described.items() if name.startswith(prefix)}
    return {name: torch.empty(each.size, device="meta") for name, each in found.items()}


def _check(folder: Path, stored: dict[Any, Any]) -> None:
    """Compares the checksums of what is stored; of several ranks each those of a part."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    places = sorted({(each.relative_path, each.offset, each.length) for each in stored.values()})
    for name, offset, length in places[rank::ranks]:
        with (folder / name).open("rb") as file:
            file.seek(offset)
            content = file.read(length)
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                broken = archive.testzip()
        except zipfile.BadZipFile as error:
            raise ValueError(f"{name} has no whole archive at byte {offset}") from error
        if broken is not None:
            raise ValueError(f"the checksum of {broken} in {name} does not match")


def why(error: BaseException) -> str:
    """What went wrong on a rank, on one line, of what torch.distributed.checkpoint raises."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return reason(error) if isinstance(error, OSError) else first_line(error)


def remove_others(folder: Path, kept: str | None) -> None:
    """All folders of shards but the named one."""
    for path in folder.glob(f"{PREFIX}*"):
        if path.name != kept:
            shutil.rmtree(path, ignore_errors=True)
