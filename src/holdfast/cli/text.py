"""Text as bytes: which files are read, which are held out for validation, and which windows a step trains on."""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

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
VALIDATION_BYTES = 32768


@dataclass(frozen=True)
class Text:
    """The bytes to train on and to validate on, and a digest of both."""

    name: str
    train: np.ndarray
    validation: np.ndarray
    train_files: int
    validation_files: int
    fingerprint: str


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


def _as_bytes(pieces: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(piece + SEPARATOR for piece in pieces), dtype=np.uint8)


def _make(name: str, train: list[bytes], validation: list[bytes], files: tuple[int, int]) -> Text:
    arrays = _as_bytes(train), _as_bytes(validation)
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(len(array).to_bytes(8, "big"))
        digest.update(array)
    return Text(name, *arrays, *files, digest.hexdigest())


def read_file(path: Path) -> Text:
    """One file: its first nine tenths to train on, the rest to validate on."""
    if path.exists() and not path.is_file():
        raise UserError(f"--text: {path} is neither a file nor a folder")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"--text: cannot read {path}: {reason(error)}") from error
    if not content:
        raise UserError(f"--text: {path} is empty")
    cut = len(content) * 9 // 10
    return _make(str(path), [content[:cut]], [content[cut:]], (1, 1))


def read_folder(
    folder: Path, globs: tuple[str, ...] = (), skipped: frozenset[str] = SKIPPED_FOLDERS, name: str | None = None
) -> Text:
    """The files of a folder, split by file."""
    wanted = ", ".join(globs) if globs else "text or source files (--glob chooses others)"
    try:
        paths = find_files(folder, globs, skipped)
        contents = {place: path.read_bytes() for place, path in paths.items()}
    except OSError as error:
        raise UserError(f"--text: cannot read {error.filename or folder}: {reason(error)}") from error
    contents = {place: content for place, content in contents.items() if content}
    if not contents:
        state = "only empty" if paths else "no"
        raise UserError(f"--text: {folder} has {state} files that match {wanted}")
    if len(contents) == 1:
        return read_file(folder / next(iter(contents)))
    held_out = validation_places(list(contents))
    train = [content for place, content in contents.items() if place not in held_out]
    validation = [content for place, content in contents.items() if place in held_out]
    return _make(name or str(folder), train, validation, (len(train), len(validation)))


def read_text(place: str | None, globs: tuple[str, ...] = ()) -> Text:
    """The text at a path, or the standard library's own source where none is given."""
    if place is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        return read_folder(folder, globs or ("*.py",), SKIPPED_FOLDERS | NOT_STANDARD_LIBRARY, STANDARD_LIBRARY)
    path = Path(place)
    if path.is_dir():
        return read_folder(path, globs)
    return read_file(path)


def check_long_enough(text: Text, length: int) -> None:
    """A window is `length` bytes and the one that follows, and must fit in both parts."""
    for part, held in (("training", text.train), ("validation", text.validation)):
        if len(held) < length + 1:
            raise UserError(
                f"--text: {text.name} is too short: its {part} part has {len(held):,} bytes, and "
                f"--length {length} needs {length + 1:,} or more"
            )


def training_batch(text: Text, seed: int, step: int, batch: int, length: int) -> np.ndarray:
    """Windows [batch, length + 1] for one step; seed and step alone decide them, so nothing has to be remembered."""
    starts = np.random.default_rng((seed, step)).integers(0, len(text.train) - length, size=batch)
    return text.train[starts[:, None] + np.arange(length + 1)]


def validation_windows(text: Text, length: int) -> np.ndarray:
    """The same windows [count, length + 1] every time, evenly spread over the validation part."""
    last = len(text.validation) - (length + 1)
    count = max(1, min(VALIDATION_BYTES, len(text.validation) - 1) // length)
    starts = np.linspace(0, last, count).astype(np.int64)
    return text.validation[starts[:, None] + np.arange(length + 1)]
