"""A checkpoint file that is either whole or not there."""

import contextlib
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from .errors import UserError, first_line, reason

NAME = "checkpoint.pt"
FORMAT = "holdfast train lm"
# 2: what the optimizer keeps goes by the names of the weights; 3: more settings, and of several ranks the weights apart
VERSION = 3


def write_bytes(path: Path, content: memoryview) -> None:
    """Writes and waits until the bytes are on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def settle(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    # The rename itself is lasting only once the folder is written; not every system can open a folder.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def save(folder: Path, content: dict[str, Any]) -> None:
    """Replaces the folder's checkpoint; whatever goes wrong, the previous one stays until the new one is whole."""
    path = folder / NAME
    partial = folder / f"{NAME}.partial"
    # In memory first: torch turns a failed write to a file into an error that no longer says why.
    buffer = io.BytesIO()
    torch.save(content | {"format": FORMAT, "version": VERSION}, buffer)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(partial, buffer.getbuffer())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        kept = "; the previous checkpoint is intact" if path.is_file() else ""
        raise UserError(f"cannot save {path}: {reason(error)}{kept}") from error
    settle(folder)


def load(folder: Path) -> dict[str, Any]:
    """The folder's checkpoint, on the CPU."""
    path = folder / NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"no checkpoint to resume: {path} does not exist") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from error
    try:
        # torch.load does not compare the checksums that torch.save stores; zipfile does.
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise UserError(f"{path} is damaged: the checksum of {broken} does not match")
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except zipfile.BadZipFile as error:
        raise UserError(f"{path} is damaged or no checkpoint: {len(content):,} bytes, not a whole archive") from error
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError, NotImplementedError) as error:
        raise UserError(f"{path} is damaged or no checkpoint: {first_line(error)}") from error
    if not isinstance(loaded, dict) or loaded.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of {FORMAT}")
    if loaded.get("version") != VERSION:
        raise UserError(f"{path} has format version {loaded.get('version')}; this version of holdfast reads {VERSION}")
    return loaded


def check_fits(path: Path, saved: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Names the first weight that the model and the checkpoint do not share."""
    expected = model.state_dict()
    for name in sorted(expected.keys() | saved.keys()):
        there = list(saved[name].shape) if name in saved else "missing"
        here = list(expected[name].shape) if name in expected else "missing"
        if there != here:
            raise UserError(f"{path} does not fit the model: {name} is {there} in the file and {here} in the model")
