"""Text as a folder of tokens, made once and mapped into memory: `holdfast data prepare` and `train lm --data`."""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError, reason
from .text import SEPARATOR, Corpus, Document, Text, fingerprint

FORMAT = "holdfast data"
VERSION = 1
DESCRIPTION = "data.json"
TOKENIZER = "tokenizer.json"
PARTS = ("train", "validation")
# what ends a document, in the order in which a given tokenizer is asked for it
ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
# documents that are encoded side by side
AT_ONCE = 256


def load_tokenizer(path: Path) -> Any:
    """Raises UserError where the library or the file is not there."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UserError("tokens other than bytes need the tokenizers library: pip install 'holdfast[data]'") from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises its own, without a type
        raise UserError(f"cannot read the tokenizer {path}: {error}") from error


def train_tokenizer(documents: list[Document], vocabulary: int) -> Any:
    """Byte-pair encoding on bytes, so that any text has tokens, of the documents to train on."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise UserError("--tokenizer bpe needs the tokenizers library: pip install 'holdfast[data]'") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocabulary <= len(alphabet):
        raise UserError(f"--vocabulary: expected more than {len(alphabet)}, the bytes; got {vocabulary}")
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[ENDS[0]], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((_characters(x.read()) for x in documents), trainer, length=len(documents))
    return tokenizer


def _characters(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _end_of(tokenizer: Any, path: Path) -> int:
    for name in ENDS:
        if (found := tokenizer.token_to_id(name)) is not None:
            return found
    raise UserError(f"{path}: expected a token that ends a document, one of {', '.join(ENDS)}; it has none")


def _encoded(documents: list[Document], tokenizer: Any, end: int) -> Iterator[tuple[int, Sequence[int] | np.ndarray]]:
    """Of each document its bytes and its tokens, the end's among both."""
    if tokenizer is None:
        for document in documents:
            read = np.frombuffer(document.read() + SEPARATOR, np.uint8)
            yield len(read), read
        return
    for first in range(0, len(documents), AT_ONCE):
        read = [x.read() for x in documents[first : first + AT_ONCE]]
        made = tokenizer.encode_batch([*map(_characters, read)], add_special_tokens=False)
        yield from ((len(x) + 1, [*y.ids, end]) for x, y in zip(read, made, strict=True))


def narrowest(vocabulary: int) -> np.dtype[Any]:
    """Of unsigned integers that hold the numbers of so many tokens."""
    return np.dtype("uint8" if vocabulary <= 2**8 else "<u2" if vocabulary <= 2**16 else "<u4")


def prepare(corpus: Corpus, out: Path, tokenizer: str, vocabulary: int) -> Text:
    """Writes the corpus as tokens to a new folder, which appears when it is whole.

    tokenizer: "bytes"; "bpe", trained on the corpus to a vocabulary of that size; or a file of the tokenizers library.
    """
    if out.exists():
        raise UserError(f"--out: {out} exists; expected a folder to make")
    path = Path(tokenizer)
    if tokenizer == "bytes":
        made, end, size = None, 0, 256
    else:
        made = train_tokenizer(corpus.train, vocabulary) if tokenizer == "bpe" else load_tokenizer(path)
        end, size = _end_of(made, path), made.get_vocab_size()
    dtype = narrowest(size)
    partial = out.with_name(f"{out.name}.partial")
    about: dict[str, Any] = {"format": FORMAT, "version": VERSION, "name": corpus.name, "vocabulary": size}
    about |= {"dtype": dtype.name, "tokenizer": None if made is None else TOKENIZER}
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if made is not None:
            made.save(str(partial / TOKENIZER))
        for part in PARTS:
            documents, bytes_read, tokens = getattr(corpus, part), 0, 0
            with (partial / f"{part}.bin").open("wb") as file:
                for length, ids in _encoded(documents, made, end):
                    file.write(np.asarray(ids, dtype))
                    bytes_read, tokens = bytes_read + length, tokens + len(ids)
            about[part] = {"documents": len(documents), "bytes": bytes_read, "tokens": tokens}
        arrays = [np.memmap(partial / f"{part}.bin", dtype, "r") for part in PARTS]
        about["fingerprint"] = fingerprint(arrays)
        (partial / DESCRIPTION).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"cannot write {out}: {reason(error)}") from error
    return load(out)


def load(folder: Path) -> Text:
    """The tokens of a folder that `prepare` made, mapped into memory. Raises UserError for any other."""
    path = folder / DESCRIPTION
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"--data: cannot read {path}: {reason(error)}; holdfast data prepare makes such folders"
        ) from error
    except ValueError as error:
        raise UserError(f"--data: {path} is damaged: {error}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT or about.get("version") != VERSION:
        raise UserError(f"--data: {path} is not of {FORMAT}, version {VERSION}")
    arrays = []
    try:
        for part in PARTS:
            array = np.memmap(folder / f"{part}.bin", np.dtype(about["dtype"]).newbyteorder("<"), "r")
            if len(array) != about[part]["tokens"]:
                raise UserError(
                    f"--data: {folder / part}.bin is damaged: {len(array):,} tokens, expected {about[part]['tokens']:,}"
                )
            arrays.append(array)
        return Text(
            about["name"],
            *arrays,
            *(about[part]["documents"] for part in PARTS),
            about["fingerprint"],
            about["vocabulary"],
            tuple(about[part]["bytes"] / about[part]["tokens"] for part in PARTS),
            folder / about["tokenizer"] if about["tokenizer"] else None,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"--data: cannot read the tokens of {folder}: {error}") from error
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"--data: {path} is damaged: {error!r}") from error
