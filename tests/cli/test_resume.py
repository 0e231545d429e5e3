"""A run that is killed and resumed ends in the same bits as one that is not."""

import resource
import signal
import subprocess

import pytest
import torch

from cli.tiny import TINY
from holdfast.cli import checkpoint, train_lm
from holdfast.cli.errors import UserError
from holdfast.cli.train_lm import train_language_model

SETTINGS = {"mixer": "gla", "layers": 1, "width": 16, "heads": 2, "length": 16, "batch": 2, "validate_every": 4}


@pytest.fixture(autouse=True)
def short_sample(monkeypatch):
    monkeypatch.setattr(train_lm, "SAMPLE_TOKENS", 4)


def train(text=None, out=None, resume=None, **given):
    settings = {} if resume else {**SETTINGS, "text": str(text), "steps": 12, "save_every": 3}
    return train_language_model(settings | given, {}, "cpu", out, resume)


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.equal(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_bits(tmp_path, text_file, command, holdfast):
    options = ["train", "lm", "--text", text_file, *TINY, "--steps", 120, "--validate-every", 30, "--save-every", 7]
    whole = holdfast(*options, "--out", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    line, environment = command
    killed = subprocess.Popen(
        [*line, *map(str, options), "--out", str(tmp_path / "killed")],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    for printed in killed.stdout:
        if printed.startswith("step  60 "):
            killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    reached = checkpoint.load(tmp_path / "killed")["step"]
    assert 50 < reached < 120
    resumed = holdfast("train", "lm", "--device", "cpu", "--resume", tmp_path / "killed")
    assert resumed.returncode == 0, resumed.stderr
    assert f"at step {reached} of 120" in resumed.stdout
    assert same(checkpoint.load(tmp_path / "whole"), checkpoint.load(tmp_path / "killed"))
    assert (
        whole.stdout[whole.stdout.index("Bits a byte") :].replace("whole", "killed")
        == (resumed.stdout[resumed.stdout.index("Bits a byte") :])
    )


@pytest.mark.parametrize("death", [1, 5, 6, 12])
def test_a_death_at_any_step_resumes_to_the_same_bits(tmp_path, text_file, monkeypatch, death):
    class Killed(BaseException):
        pass

    take = train_lm.Training.train_step

    def die(training):
        if training.step + 1 == death:
            raise Killed
        return take(training)

    train(text_file, tmp_path / "whole")
    monkeypatch.setattr(train_lm.Training, "train_step", die)
    with pytest.raises(Killed):
        train(text_file, tmp_path / "killed")
    monkeypatch.undo()
    torch.manual_seed(99)
    assert train(resume=tmp_path / "killed") == 0
    assert same(checkpoint.load(tmp_path / "whole"), checkpoint.load(tmp_path / "killed"))


def test_control_c_saves_and_says_how_to_go_on(tmp_path, text_file, monkeypatch, capsys):
    take, before = train_lm.Training.train_step, signal.getsignal(signal.SIGINT)

    def interrupt(training):
        if training.step == 4:
            signal.raise_signal(signal.SIGINT)
        return take(training)

    train(text_file, tmp_path / "whole")
    monkeypatch.setattr(train_lm.Training, "train_step", interrupt)
    assert train(text_file, tmp_path / "stopped") == 130
    monkeypatch.undo()
    assert f"stopped at step 5 of 12; go on with: holdfast train lm --resume {tmp_path}" in capsys.readouterr().out
    assert checkpoint.load(tmp_path / "stopped")["step"] == 5
    assert signal.getsignal(signal.SIGINT) is before
    train(resume=tmp_path / "stopped")
    assert same(checkpoint.load(tmp_path / "whole"), checkpoint.load(tmp_path / "stopped"))


def test_a_finished_run_may_be_resumed(tmp_path, text_file, capsys):
    train(text_file, tmp_path / "a")
    before = (tmp_path / "a" / checkpoint.NAME).read_bytes()
    assert train(resume=tmp_path / "a") == 0
    assert (tmp_path / "a" / checkpoint.NAME).read_bytes() == before


def test_a_disk_that_fills_up_stops_with_one_line(tmp_path, text_file, holdfast):
    train(text_file, tmp_path / "whole", steps=3, save_every=1)
    # Room for the first checkpoint, which has no optimizer state yet, but not for the next.
    room = (tmp_path / "whole" / checkpoint.NAME).stat().st_size // 2

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    options = ["--text", text_file, *TINY, "--steps", 3, "--save-every", 1, "--validate-every", 4]
    full = holdfast("train", "lm", *options, "--out", tmp_path / "full", preexec_fn=limit)
    assert full.returncode == 2
    path = tmp_path / "full" / checkpoint.NAME
    complaint = f"holdfast: cannot save {path}: no space left (File too large); the previous checkpoint is intact"
    assert full.stderr.splitlines() == [complaint]
    assert list(path.parent.iterdir()) == [path]
    assert train(resume=path.parent) == 0
    assert same(checkpoint.load(tmp_path / "whole"), checkpoint.load(path.parent))


def test_a_half_written_checkpoint_leaves_the_previous_one(tmp_path, text_file, monkeypatch):
    write = checkpoint.write_bytes
    written = []

    def fill(path, data):
        if len(written) == 3:
            path.write_bytes(bytes(data)[:999])
            raise OSError(28, "No space left on device")
        written.append(write(path, data))

    train(text_file, tmp_path / "whole")
    monkeypatch.setattr(checkpoint, "write_bytes", fill)
    with pytest.raises(
        UserError, match=r"no space left \(No space left on device\); the previous checkpoint is intact"
    ):
        train(text_file, tmp_path / "full")
    monkeypatch.undo()
    assert checkpoint.load(tmp_path / "full")["step"] == 6
    train(resume=tmp_path / "full")
    assert same(checkpoint.load(tmp_path / "whole"), checkpoint.load(tmp_path / "full"))


def test_an_existing_checkpoint_is_not_overwritten(tmp_path, text_file):
    train(text_file, tmp_path / "a")
    with pytest.raises(
        UserError, match=r"already holds a checkpoint: go on with --resume .*a, or choose another --out"
    ):
        train(text_file, tmp_path / "a")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("width", 32, "was made with --width 16, not 32"),
        ("mixer", "retnet", "was made with --mixer gla, not retnet"),
        ("validate_every", 1, "was made with --validate-every 4, not 1"),
    ],
)
def test_a_mismatched_option_is_named(tmp_path, text_file, option, value, message):
    train(text_file, tmp_path / "a")
    with pytest.raises(UserError, match=rf"a/checkpoint.pt {message}"):
        train(resume=tmp_path / "a", **{option: value})


def test_a_run_goes_on_for_more_steps(tmp_path, text_file, capsys):
    train(text_file, tmp_path / "a")
    train(resume=tmp_path / "a")
    assert "all steps are done: --steps with a larger number goes on" in capsys.readouterr().out
    before = checkpoint.load(tmp_path / "a")
    train(resume=tmp_path / "a", steps=20)
    after = checkpoint.load(tmp_path / "a")
    assert (before["step"], after["step"]) == (12, 20)
    # the warm-up that there was, not a tenth of what there is now
    assert (after["config"]["steps"], after["config"]["warmup_steps"]) == (20, 1)
    assert len(after["losses"]) == 20
    assert after["losses"][:12].equal(before["losses"])


@pytest.mark.parametrize("steps", [12, 3])
def test_steps_that_are_done_are_not_taken_back(tmp_path, text_file, steps):
    train(text_file, tmp_path / "a")
    edit(tmp_path / "a", config=checkpoint.load(tmp_path / "a")["config"] | {"steps": 15})
    with pytest.raises(
        UserError, match=rf"--steps: expected more than the 12 that .*a/checkpoint.pt has done; got {steps}"
    ):
        train(resume=tmp_path / "a", steps=steps)


def test_repeated_options_and_a_moved_text_are_fine(tmp_path, text_file):
    train(text_file, tmp_path / "a")
    moved = text_file.rename(tmp_path / "moved.txt")
    assert train_language_model({"width": 16, "text": str(moved)}, {}, "cpu", resume=tmp_path / "a") == 0


def test_another_text_is_refused(tmp_path, text_file):
    train(text_file, tmp_path / "a")
    text_file.write_text(text_file.read_text().replace("a", "b", 1))
    with pytest.raises(UserError, match=r"a/checkpoint.pt was made on other text than .*text.txt has now"):
        train(resume=tmp_path / "a")


def edit(folder, **changes):
    saved = checkpoint.load(folder)
    checkpoint.save(folder, saved | changes)


def test_weights_of_another_size_are_named(tmp_path, text_file):
    train(text_file, tmp_path / "a")
    edit(tmp_path / "a", config=checkpoint.load(tmp_path / "a")["config"] | {"width": 32})
    with pytest.raises(
        UserError, match=r"a/checkpoint.pt does not fit the model: .* is \[.*\] in the file and \[.*\] in"
    ):
        train(resume=tmp_path / "a")


@pytest.mark.parametrize("key", ["config", "optimizer", "rng", "losses", "model"])
def test_a_missing_part_is_named(tmp_path, text_file, key):
    train(text_file, tmp_path / "a")
    edit(tmp_path / "a", **{key: None})
    with pytest.raises(UserError, match=r"a/checkpoint.pt"):
        train(resume=tmp_path / "a")
