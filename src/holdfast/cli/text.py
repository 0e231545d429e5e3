"""Text: which files are read, which are held out for validation, and which windows a step trains on."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError, reason

# fmt: off
SUFFIXES = frozenset({
    ".c", ".cc", ".cpp", ".css", ".cu", ".cuh", ".go", ".h", ".hpp", ".html", ".java", ".js", ".json", ".kt", ".lua",
    ".md", ".pl", ".py", ".pyi", ".r", ".rb", ".rs", ".rst", ".sh", ".sql", ".swift", ".tex", ".toml", ".ts", ".txt",
    ".xml", ".yaml", ".yml",
})
# fmt: on
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
NOT_STANDARD_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
STANDARD_LIBRARY = "the Python standard library"

# Ends every file, so that a model sees where one stops and the next begins.
SEPARATOR = b"\0"
VALIDATION_TOKENS = 32768


@dataclass(frozen=True)
class Text:
    """The tokens to train on and to validate on, and a digest of both.

    A token is a byte, or stands for bytes_per_token of them on average (in training, in validation), by which losses
    are told in bits a byte. tokenizer: a file of the `tokenizers` library; None for bytes.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray
    train_files: int
    validation_files: int
    fingerprint: str
    vocabulary: int = 256
    bytes_per_token: tuple[float, float] = (1.0, 1.0)
    tokenizer: Path | None = None

    @property
    def unit(self) -> str:
        return "bytes" if self.tokenizer is None else "tokens"

    def encode(self, text: bytes) -> list[int]:
        if self.tokenizer is None:
            return list(text)
        return self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> bytes:
        return bytes(tokens) if self.tokenizer is None else self._tokenizer.decode(tokens).encode()

    @cached_property
    def _tokenizer(self) -> Any:
        from .tokens import load_tokenizer

        return load_tokenizer(self.tokenizer)


def _matches(place: str, globs: tuple[str, ...]) -> bool:
    name = place.rsplit("/", 1)[-1]
    if globs:
        return any(fnmatch(place if "/" in pattern else name, pattern) for pattern in globs)
    return Path(name).suffix.lower() in SUFFIXES


def find_files(folder: Path, globs: tuple[str, ...] = (), skipped: frozenset[str] = SKIPPED_FOLDERS) -> dict[str, Path]:
    """Files under the folder by relative path with forward slashes, sorted; hidden ones and caches left out."""

    def fail(error: OSError) -> None:
        raise error

    found = {}
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        for name in names:
            path = Path(parent, name)
            place = path.relative_to(folder).as_posix()
            if not name.startswith(".") and _matches(place, globs) and path.is_file():
                found[place] = path
    return dict(sorted(found.items()))


def _digest(place: str) -> int:
    return int.from_bytes(hashlib.blake2b(place.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")


def validation_places(places: list[str]) -> set[str]:
    """About a tenth of the files, chosen by a hash of their place, so that adding a file moves no other.

    At least one file is held out and at least one is not.
    """
    digests = {place: _digest(place) for place in places}
    chosen = {place for place, digest in digests.items() if digest % 10 == 0}
    if not chosen:
        chosen = {min(places, key=digests.__getitem__)}
    elif len(chosen) == len(places):
        chosen.remove(max(places, key=digests.__getitem__))
    return chosen


@dataclass(frozen=True)
class Document:
    """The bytes of a file from `first` to `end`, which is None for all that follow."""

    path: Path
    first: int = 0
    end: int | None = None

    def read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self.first)
                return file.read() if self.end is None else file.read(self.end - self.first)
        except OSError as error:
            raise UserError(f"--text: cannot read {error.filename or self.path}: {reason(error)}") from error


@dataclass(frozen=True)
class Corpus:
    """Which documents are trained on, and which are validated on."""

    name: str
    train: list[Document]
    validation: list[Document]


def find_file(path: Path) -> Corpus:
    """One file: its first nine tenths to train on, the rest to validate on."""
    if path.exists() and not path.is_file():
        raise UserError(f"--text: {path} is neither a file nor a folder")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"--text: cannot read {path}: {reason(error)}") from error
    if not size:
        raise UserError(f"--text: {path} is empty")
    cut = size * 9 // 10
    return Corpus(str(path), [Document(path, 0, cut)], [Document(path, cut)])


def find_folder(
    folder: Path, globs: tuple[str, ...] = (), skipped: frozenset[str] = SKIPPED_FOLDERS, name: str | None = None
) -> Corpus:
    """The files of a folder, split by file."""
    wanted = ", ".join(globs) if globs else "text or source files (--glob chooses others)"
    try:
        paths = find_files(folder, globs, skipped)
        found = {place: path for place, path in paths.items() if path.stat().st_size}
    except OSError as error:
        raise UserError(f"--text: cannot read {error.filename or folder}: {reason(error)}") from error
    if not found:
        state = "only empty" if paths else "no"
        raise UserError(f"--text: {folder} has {state} files that match {wanted}")
    if len(found) == 1:
        return find_file(folder / next(iter(found)))
    held_out = validation_places(list(found))
    train = [Document(path) for place, path in found.items() if place not in held_out]
    validation = [Document(path) for place, path in found.items() if place in held_out]
    return Corpus(name or str(folder), train, validation)


def find_text(place: str | None, globs: tuple[str, ...] = ()) -> Corpus:
    """The documents at a path, or the standard library's own source where none is given."""
    if place is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        return find_folder(folder, globs or ("*.py",), SKIPPED_FOLDERS | NOT_STANDARD_LIBRARY, STANDARD_LIBRARY)
    path = Path(place)
    return find_folder(path, globs) if path.is_dir() else find_file(path)


def read_text(place: str | None, globs: tuple[str, ...] = ()) -> Text:
    """The bytes of `find_text`, all of them in memory; each document ends in SEPARATOR."""
    corpus = find_text(place, globs)
    parts = corpus.train, corpus.validation
    train, validation = (
        np.frombuffer(b"".join(document.read() + SEPARATOR for document in part), dtype=np.uint8) for part in parts
    )
    return Text(corpus.name, train, validation, *map(len, parts), fingerprint((train, validation)))


def fingerprint(arrays: Iterable[np.ndarray]) -> str:
    """A digest of their contents and lengths."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(array.nbytes.to_bytes(8, "big"))
        digest.update(array)
    return digest.hexdigest()


def check_long_enough(text: Text, length: int) -> None:
    """A window is `length` tokens and the one that follows, and must fit in both parts."""
    for part, held in (("training", text.train), ("validation", text.validation)):
        if len(held) < length + 1:
            raise UserError(
                f"--text: {text.name} is too short: its {part} part has {len(held):,} {text.unit}, and "
                f"--length {length} needs {length + 1:,} or more"
            )


def training_batch(text: Text, seed: int, step: int, batch: int, length: int) -> np.ndarray:
    """Windows [batch, length + 1] for one step; seed and step alone decide them, so nothing has to be remembered."""
    starts = np.random.default_rng((seed, step)).integers(0, len(text.train) - length, size=batch)
    return _windows(text.train, starts, length)


def validation_windows(text: Text, length: int) -> np.ndarray:
    """The same windows [count, length + 1] every time, evenly spread over the validation part."""
    last = len(text.validation) - (length + 1)
    count = max(1, min(VALIDATION_TOKENS, len(text.validation) - 1) // length)
    return _windows(text.validation, np.linspace(0, last, count).astype(np.int64), length)


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Read from the disk where tokens are mapped. torch converts no unsigned numbers wider than a byte everywhere."""
    found = np.asarray(tokens[starts[:, None] + np.arange(length + 1)])
    return found if found.itemsize == 1 else found.astype(np.int64)
