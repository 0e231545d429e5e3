"""The command as users run it: help, version, and one line for each mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as package
from cli.tiny import TINY
from holdfast.cli import main

WITHOUT_TORCH = """
import sys
from holdfast.cli import main
sys.argv = ["holdfast", *{options!r}]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = {{"torch", "triton"}} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("options", [["--help"], ["--version"], ["train", "--help"], ["train", "lm", "--help"]])
def test_help_does_not_import_torch(options, command):
    code = WITHOUT_TORCH.format(options=options)
    done = subprocess.run([sys.executable, "-c", code], env=command[1], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_names_the_commands(holdfast):
    done = holdfast("--help")
    assert done.returncode == 0
    assert "train" in done.stdout


def test_version(holdfast):
    assert holdfast("--version").stdout == f"holdfast {package.__version__}\n"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["train", "lm", "--mixer", "transformer"], "--mixer: expected one of gla, "),
        (["train", "lm", "--text", "missing.txt"], "--text: cannot read "),
        (["train", "lm", "--device", "cuda:99"], "--device cuda:99: not usable here: "),
        (["train", "lm", "--device", "toaster"], "--device toaster: not usable here: "),
        (["train", "lm", "--resume", "missing"], "no checkpoint to resume: missing/checkpoint.pt does not exist"),
        (["train", "parity", "--steps", "0"], "--steps: expected 1 or more; got 0"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(monkeypatch, capsys, options, complaint):
    monkeypatch.setattr(sys, "argv", ["holdfast", *options])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"holdfast: {complaint}")


def test_a_mistake_has_no_traceback(holdfast):
    done = holdfast("train", "lm", "--text", "missing.txt")
    assert done.returncode == 2
    assert (
        done.stderr
        == "holdfast: --text: cannot read " + str(Path("missing.txt").absolute()) + ": No such file or directory\n"
    )


def test_an_unknown_option_is_status_2(holdfast):
    done = holdfast("train", "lm", "--nonsense")
    assert done.returncode == 2
    assert "--nonsense" in done.stderr
    assert "Traceback" not in done.stderr


def test_training_from_end_to_end(holdfast, text_file):
    done = holdfast("train", "lm", "--text", text_file, *TINY, "--steps", 60, "--lr", 0.02, "--prompt", "state ")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    first, last = (
        float(line.split(":")[1].split()[0])
        for line in done.stdout.splitlines()
        if line.startswith(("validation before", "validation after 60"))
    )
    assert last < first - 1
    assert "tokens/s" in done.stdout
    assert "\nstate " in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_a_terminal_gets_a_progress_bar(command, text_file):
    line, environment = command
    ours, theirs = os.openpty()
    options = ["train", "lm", "--text", str(text_file), *TINY, "--steps", "8"]
    started = subprocess.Popen([*line, *options], env=environment | {"TERM": "xterm"}, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:
        pass  # Linux reports the other end's close as an error
    os.close(ours)
    assert started.wait() == 0
    assert "━" in shown.decode()
    assert "step 1 of 8" not in shown.decode()
