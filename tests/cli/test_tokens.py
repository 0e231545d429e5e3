"""`holdfast data prepare` and `train lm --data`: tokens on the disk, with and without a tokenizer."""

import json

import numpy as np
import pytest
import torch

from cli.tiny import make_text
from holdfast.cli import text as texts
from holdfast.cli import tokens, train_lm
from holdfast.cli.config import LanguageModelConfig
from holdfast.cli.errors import UserError
from holdfast.cli.train_lm import Training, train_language_model

CPU = torch.device("cpu")
SETTINGS = {"mixer": "gla", "layers": 1, "width": 16, "heads": 2, "length": 8, "batch": 2, "steps": 4, "threads": 1}


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "texts"
    place.mkdir()
    words = make_text(24000)
    for n in range(12):
        (place / f"{n}.txt").write_text(words[n * 2000 : (n + 1) * 2000] + " \N{GREEK SMALL LETTER LAMDA}")
    return place


def prepared(folder, tmp_path, tokenizer="bytes", vocabulary=300):
    return tokens.prepare(texts.find_folder(folder), tmp_path / f"of {tokenizer}", tokenizer, vocabulary)


def test_bytes_are_what_reading_the_text_gives(folder, tmp_path):
    read, made = texts.read_text(str(folder)), prepared(folder, tmp_path)
    assert isinstance(made.train, np.memmap)
    assert np.array_equal(made.train, read.train)
    assert np.array_equal(made.validation, read.validation)
    assert (made.fingerprint, made.vocabulary, made.bytes_per_token, made.unit) == (
        read.fingerprint, 256, (1.0, 1.0), "bytes",
    )  # fmt: skip
    assert (made.train_files, made.validation_files) == (read.train_files, read.validation_files)
    for step in range(3):
        assert np.array_equal(texts.training_batch(made, 1, step, 4, 9), texts.training_batch(read, 1, step, 4, 9))


def test_tokens_of_bpe_are_the_text_again(folder, tmp_path):
    read, made = texts.read_text(str(folder)), prepared(folder, tmp_path, "bpe")
    assert (made.vocabulary, made.train.dtype, made.unit) == (300, np.uint16, "tokens")
    for part, (mine, theirs) in enumerate(((made.train, read.train), (made.validation, read.validation))):
        assert made.bytes_per_token[part] == len(theirs) / len(mine) > 1
        end = made.encode(b"<|endoftext|>")[0]
        documents = np.split(mine, np.flatnonzero(mine == end) + 1)[:-1]
        assert b"".join(made.decode(x[:-1].tolist()) + texts.SEPARATOR for x in documents) == theirs.tobytes()
    sample = "norm \N{GREEK SMALL LETTER LAMDA} \N{SNOWMAN}".encode()
    assert made.decode(made.encode(sample)) == sample
    # the same tokenizer, given as a file, makes the same tokens
    again = tokens.prepare(
        texts.find_folder(folder), tmp_path / "again", str(tmp_path / "of bpe" / tokens.TOKENIZER), 256
    )
    assert (again.fingerprint, again.vocabulary) == (made.fingerprint, 300)
    # and one that would begin each text with a token of its own too
    beginning, place = tokens.load_tokenizer(made.tokenizer), tmp_path / "beginning.json"
    template = {"single": "<|endoftext|> $A", "special_tokens": [("<|endoftext|>", end)]}
    beginning.post_processor = pytest.importorskip("tokenizers").processors.TemplateProcessing(**template)
    beginning.save(str(place))
    other = tokens.prepare(texts.find_folder(folder), tmp_path / "other", str(place), 256)
    assert (other.fingerprint, other.encode(sample)) == (made.fingerprint, made.encode(sample))


@pytest.mark.parametrize(("vocabulary", "size"), [(256, 1), (257, 2), (2**16, 2), (2**16 + 1, 4)])
def test_a_token_takes_as_few_bytes_as_hold_it(vocabulary, size):
    dtype = tokens.narrowest(vocabulary)
    assert dtype.itemsize == size
    assert np.iinfo(dtype).max >= vocabulary - 1


def test_a_loss_is_told_in_bits_a_byte(folder, tmp_path):
    made = prepared(folder, tmp_path, "bpe")
    one = Training(LanguageModelConfig().changed(SETTINGS), made, CPU)
    assert one.model.embedding.weight.shape == (300, 16)
    with torch.no_grad():
        one.model.embedding.weight.zero_()
    # every token as likely
    assert one.validate() == pytest.approx(np.log2(300) / made.bytes_per_token[1], rel=1e-5)
    assert one.train_step() == pytest.approx(np.log2(300) / made.bytes_per_token[0], rel=1e-5)


def test_it_trains_and_goes_on_where_the_folder_has_moved(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_lm, "SAMPLE_TOKENS", 4)
    prepared(folder, tmp_path, "bpe")
    given = SETTINGS | {"data": str(tmp_path / "of bpe")}
    assert train_language_model(given, {}, "cpu", tmp_path / "run", None, "norm") == 0
    said = capsys.readouterr().out
    assert "tokens to train on (11 files)" in said or "tokens to train on (10 files)" in said
    (tmp_path / "of bpe").rename(tmp_path / "moved")
    assert train_language_model({"data": str(tmp_path / "moved")}, {}, "cpu", None, tmp_path / "run") == 0
    with pytest.raises(UserError, match=r"--data: cannot read .*data prepare makes such folders"):
        train_language_model({}, {}, "cpu", None, tmp_path / "run")


def test_what_is_wrong_is_named(folder, tmp_path):
    made = tmp_path / "of bytes"
    prepared(folder, tmp_path)
    with pytest.raises(UserError, match=r"--out: .*of bytes exists"):
        prepared(folder, tmp_path)
    with pytest.raises(UserError, match="--vocabulary: expected more than 256"):
        prepared(folder, tmp_path, "bpe", 256)
    (tmp_path / "odd.json").write_text("{}")
    with pytest.raises(UserError, match=r"cannot read the tokenizer .*odd.json"):
        tokens.prepare(texts.find_folder(folder), tmp_path / "new", str(tmp_path / "odd.json"), 0)
    assert not (tmp_path / "new").exists()
    with (made / "train.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=r"train.bin is damaged: [\d,]+ tokens, expected"):
        tokens.load(made)
    about = json.loads((made / "data.json").read_text())
    for spoilt, said in ((about | {"version": 9}, "is not of holdfast data, version 1"), ({"format": 1}, "is not of")):
        (made / "data.json").write_text(json.dumps(spoilt))
        with pytest.raises(UserError, match=said):
            tokens.load(made)
    (made / "data.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        tokens.load(made)
    with pytest.raises(UserError, match="--data: expected no --text or --glob"):
        LanguageModelConfig(data="a", text="b")


def test_a_disk_that_is_full_leaves_nothing(folder, tmp_path, monkeypatch):
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens, "fingerprint", full)
    with pytest.raises(UserError, match=r"cannot write .*no space left"):
        prepared(folder, tmp_path)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["texts"]
