"""`holdfast train lm` on several processes, as torchrun starts them: the same training, shared out."""

import re
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch

from cli.tiny import make_text
from holdfast.cli import checkpoint
from holdfast.cli.config import MIXERS, LanguageModelConfig
from holdfast.cli.errors import UserError
from holdfast.cli.ranks import ALONE, Ranks, _axes
from holdfast.cli.train_lm import train_language_model
from parallel_support.pool import end_of_script

MODEL = ["--mixer", "gated-deltanet", "--layers", 2, "--width", 32, "--heads", 2, "--length", 24, "--batch", 4]
STEPS = ["--steps", 6, "--validate-every", 3, "--save-every", 2]
SCRIPT = """
import os, signal, sys
from holdfast.cli.app import run
from holdfast.cli import train_lm
train_lm.SAMPLE_TOKENS = 4
take = train_lm.Training.train_step
def step(training):
    if training.step == 3 and os.environ["RANK"] == "1" and {number}:
        os.kill(os.getpid(), {number})
    return take(training)
train_lm.Training.train_step = step
from torch.distributed.checkpoint import FileSystemWriter
write = FileSystemWriter.write_data
def write_data(writer, *arguments):
    if os.environ["RANK"] == "1" and str(writer.path).endswith("shards-4"):
        {writing}
    return write(writer, *arguments)
FileSystemWriter.write_data = write_data
sys.argv = {line!r}
run()
"""


@pytest.fixture
def train(tmp_path):
    text = tmp_path / "text.txt"
    # five windows to validate on, of which a rank may have a batch and a part of one
    text.write_text(make_text(1300))

    def lm(
        processes: int, name: str, *options: object, sent: int = 0, writing="pass", ends: tuple[int, ...] = (0,)
    ) -> str:
        """sent: a signal that the second process gets before its fourth step. writing: what it does while it writes its
        part of the checkpoint of step 4. ends: how processes may end."""
        line = ["holdfast", "train", "lm", "--device", "cpu", *options]
        line[3:3] = [] if "--resume" in options else ["--text", text, *MODEL, *STEPS, "--out", tmp_path / name]
        script = tmp_path / f"{name}.py"
        script.write_text(SCRIPT.format(line=[str(x) for x in line], number=int(sent), writing=writing))
        said, statuses = end_of_script(processes, script)
        assert set(statuses) <= set(ends), said
        return said

    return lm


def reached(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    saved = checkpoint.load(folder)
    return saved["losses"], saved["validations"]


def assert_alike(one: Path, other: Path, tolerance: float = 1e-5) -> None:
    """As sums in another order leave it, in float32."""
    for x, y in zip(reached(one), reached(other), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=0)


@pytest.fixture
def alone(train, tmp_path):
    """What a process by itself reaches."""
    train(1, "alone")
    return tmp_path / "alone"


def test_ranks_share_a_batch(train, alone, tmp_path):
    said = train(2, "ddp", "--accumulate", 2)
    assert "on 2 x cpu (ddp)" in said
    # one rank speaks
    assert said.count("validation after 6 steps") == said.count("sample") == 1
    assert_alike(tmp_path / "ddp", alone)
    # each its part, which a process without others takes too, and nothing that warns of it
    assert sorted(x.name for x in (tmp_path / "ddp").iterdir()) == [checkpoint.NAME, "shards-6"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train_language_model({}, {}, "cpu", resume=tmp_path / "ddp") == 0


@pytest.mark.slow
def test_ranks_share_a_sequence_and_the_weights(train, alone, tmp_path):
    assert "on 2 x cpu (fsdp, 2 to a sequence)" in train(2, "fsdp", "--sharding", "fsdp", "--cp", 2)
    assert_alike(tmp_path / "fsdp", alone)


@pytest.mark.slow
def test_ranks_share_layers(train, alone, tmp_path):
    assert "on 2 x cpu (ddp, 2 to a layer)" in train(2, "heads", "--tp", 2)
    assert_alike(tmp_path / "heads", alone)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_ranks_share_a_batch_and_layers(train, alone, tmp_path, sharding):
    assert f"on 4 x cpu ({sharding}, 2 to a layer)" in train(4, "heads", "--sharding", sharding, "--tp", 2)
    assert_alike(tmp_path / "heads", alone)


@pytest.mark.slow
def test_ranks_share_sequences_and_layers_and_go_on_otherwise(train, alone, tmp_path):
    shared = ("--sharding", "fsdp", "--cp", 2, "--tp", 2)
    said = train(4, "stopped", *shared, sent=signal.SIGINT, ends=(130,))
    assert "on 4 x cpu (fsdp, 2 to a sequence, 2 to a layer)" in said
    for processes, options in ((1, ("--cp", 1, "--tp", 1)), (2, ("--cp", 1)), (4, ("--cp", 1, "--sharding", "ddp"))):
        folder = tmp_path / f"on{processes}"
        shutil.copytree(tmp_path / "stopped", folder)
        train(processes, f"resumed{processes}", "--resume", folder, *options)
        assert_alike(folder, alone)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [name for name in MIXERS if name not in ("rglru", "rotlru")])
def test_every_mixer_with_heads_is_shared(train, tmp_path, mixer):
    options = ("--mixer", mixer, "--heads", 4, "--width", 64)
    train(1, "one", *options)
    train(2, "two", *options, "--tp", 2)
    assert_alike(tmp_path / "two", tmp_path / "one", 1e-4)


@pytest.mark.slow
def test_heads_that_do_not_divide_are_named(train):
    said = train(2, "heads", "--mixer", "rglru", "--tp", 2, ends=(2,))
    (line,) = {line for line in said.splitlines() if line.startswith("holdfast: ")}
    assert "--tp 2: num_heads of RGLRU at 'blocks.0.mixer': expected a multiple of 2" in line


AGAIN = "torchrun --nproc-per-node 4 -m holdfast.cli"
SHARED = ("--sharding", "fsdp", "--cp", 2, "--accumulate", 2)


@pytest.mark.slow
def test_four_ranks_stop_together_and_go_on_as_one_as_two_and_as_four(train, tmp_path):
    train(4, "four", *SHARED)
    said = train(4, "stopped", *SHARED, sent=signal.SIGINT, ends=(130,))
    assert said.count(f"stopped at step 4 of 6; go on with: {AGAIN} train lm --resume {tmp_path}") == 1
    for processes in (1, 2, 4):
        folder = tmp_path / f"on{processes}"
        shutil.copytree(tmp_path / "stopped", folder)
        assert checkpoint.load(folder)["step"] == 4
        train(processes, f"resumed{processes}", "--resume", folder, *(("--cp", 1) if processes == 1 else ()))
        assert_alike(folder, tmp_path / "four")
    for x, y in zip(reached(tmp_path / "on4"), reached(tmp_path / "four"), strict=True):
        assert torch.equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_a_rank_that_is_killed_ends_the_others_with_one_line(train, tmp_path, sharding):
    said = train(3, "killed", "--batch", 6, "--sharding", sharding, sent=signal.SIGKILL, ends=(2, -signal.SIGKILL))
    (line,) = (line for line in said.splitlines() if line.startswith("holdfast: "))
    assert line.startswith("holdfast: one of the 3 processes has ended, and the others with it (")
    assert line.endswith("start all again with --resume")
    assert "Traceback" not in said
    # that of step 2 is written while step 3 is taken; if it was not whole, the one before it is
    assert checkpoint.load(tmp_path / "killed")["step"] in (0, 2)
    train(2, "resumed", "--resume", tmp_path / "killed")
    train(1, "alone", "--batch", 6)
    assert_alike(tmp_path / "killed", tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("writing", "ends", "line"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", (2, -signal.SIGKILL), "one of the 2 processes has ended, .* --resume"),
        ("raise OSError(28, 'No space left on device')", (2,), "cannot save .*: no space left .*checkpoint is intact"),
    ],
    ids=["killed", "full"],
)
def test_a_rank_that_cannot_write_its_part_leaves_the_previous_checkpoint(train, tmp_path, writing, ends, line):
    said = train(2, "stopped", "--sharding", "fsdp", writing=writing, ends=ends)
    (found,) = (x for x in said.splitlines() if x.startswith("holdfast: "))
    assert re.fullmatch(f"holdfast: {line}", found)
    assert "Traceback" not in said
    assert checkpoint.load(tmp_path / "stopped")["step"] == 2
    train(2, "whole", "--sharding", "fsdp")
    train(2, "resumed", "--resume", tmp_path / "stopped")
    for x, y in zip(reached(tmp_path / "stopped"), reached(tmp_path / "whole"), strict=True):
        assert torch.equal(x, y)
    assert sorted(x.name for x in (tmp_path / "stopped").iterdir()) == [checkpoint.NAME, "shards-6"]


def test_what_does_not_fit_is_named():
    config = LanguageModelConfig(batch=12, accumulate=3, cp=2)
    assert _axes(config, 4) == (2, 2, 1)
    assert _axes(LanguageModelConfig(cp=2, tp=3), 12) == (2, 2, 3)
    with pytest.raises(UserError, match="--tp: expected a divisor of the number of processes, 4; got 3"):
        _axes(LanguageModelConfig(tp=3), 4)
    with pytest.raises(UserError, match="--cp: expected a divisor of the number of processes, 6 / --tp 2 = 3; got 2"):
        _axes(LanguageModelConfig(cp=2, tp=2), 6)
    with pytest.raises(UserError, match="--cp: expected a divisor of the number of processes, 3; got 2"):
        _axes(config, 3)
    with pytest.raises(UserError, match=r"--batch: expected a multiple of 12, for 4 .* --accumulate 3; got 18"):
        _axes(LanguageModelConfig(batch=18, accumulate=3, cp=2), 8)
    with pytest.raises(UserError, match="--batch: expected a multiple of 5, for 1 processes"):
        _axes(LanguageModelConfig(batch=16, accumulate=5), 1)
    with pytest.raises(UserError, match=r"--batch: expected a multiple of 12, for 4 .* --local-batch 3; got 16"):
        _axes(LanguageModelConfig(batch=16, local_batch=3), 4)


def test_a_process_by_itself_has_all():
    x = torch.arange(12).view(3, 4)
    assert torch.equal(ALONE.rows(x), x)
    assert torch.equal(ALONE.tokens(x), x)
    assert (ALONE.sum(torch.tensor(2.5)), ALONE.largest(3), ALONE.count) == (2.5, 3, 1)
    assert ALONE.command == "holdfast"
    assert Ranks(dp=3, cp=2, tp=2).count == 12
    assert Ranks(dp=3, cp=2, tp=2).data == 6
