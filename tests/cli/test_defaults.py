"""What the commands do where an option is left out, and the least that some take: users' scripts rely on both."""

import inspect
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from holdfast.cli import text, tokens, train_lm
from holdfast.cli.app import app
from holdfast.cli.checkpoint import VERSION
from holdfast.cli.config import DEMO, FLASHRNN_165M, LONGEST_WARMUP, PRESETS, LanguageModelConfig
from holdfast.cli.generate import generate
from holdfast.cli.train_parity import ParityConfig

from . import recorded_defaults

PARITY = {
    "mixer": "lstm", "layers": 1, "width": 64, "heads": 1, "steps": 500, "lr": 1e-2, "batch": 256, "seed": 0,
    "threads": 1,
}  # fmt: skip
# of each command the options that say something where they are left out
DEFAULTS = {
    "bench": {"device": "auto"},
    "bench report": {"out": Path("benchmarks/results/report.html")},
    "data": {},
    "data prepare": {"tokenizer": "bytes", "vocabulary": 32000},
    "doctor": {},
    "explain": {"dtype": "float32", "device": "cpu", "grad": True, "ranks": 1, "link": "nvlink"},
    "train": {},
    "train lm": {"device": "auto"},
    "train parity": {**{name: value for name, value in PARITY.items() if value}, "device": "auto"},
    "": {},
}


def test_defaults_limits_and_constants_are_those_on_record():
    kept = recorded_defaults.DEFAULTS.read_text(encoding="utf-8").splitlines()
    remedy = "if that is meant: PYTHONPATH=src:tests python -m cli.recorded_defaults, and look at its differences"
    assert recorded_defaults.lines() == kept, remedy


def commands(command, name=""):
    yield name, command
    for below, each in getattr(command, "commands", {}).items():
        yield from commands(each, f"{name} {below}".strip())


def test_options_that_are_left_out():
    every = dict(commands(typer.main.get_command(app)))
    assert {name: {x.name: x.default for x in each.params if x.default} for name, each in every.items()} == DEFAULTS


def test_settings_that_are_left_out():
    assert asdict(ParityConfig()) == PARITY
    assert asdict(LanguageModelConfig()) == {
        "mixer": "gla", "layers": 4, "width": 256, "heads": 4, "length": 256, "batch": 16, "accumulate": 1,
        "local_batch": None, "steps": 2000, "lr": 2e-3, "min_lr": None, "warmup_steps": None, "tie": True,
        "vocabulary": None, "seed": 0, "dtype": "float32", "validate_every": 200, "save_every": 200,
        "threads": 0, "sharding": "ddp", "cp": 1, "tp": 1, "text": None, "glob": (), "data": None,
    }  # fmt: skip
    assert DEMO == {
        "mixer": "gla", "layers": 2, "width": 128, "heads": 2, "length": 128, "batch": 16, "steps": 400, "lr": 4e-3,
        "validate_every": 50, "threads": 1,
    }  # fmt: skip
    assert FLASHRNN_165M == {
        "mixer": "lstm", "layers": 12, "width": 768, "heads": 12, "length": 1024, "batch": 512, "local_batch": 32,
        "steps": 30000, "lr": 1e-3, "warmup_steps": 750, "tie": False, "vocabulary": 50257, "dtype": "bfloat16",
        "validate_every": 1000, "save_every": 1000,
    }  # fmt: skip
    assert {"demo": DEMO, "flashrnn-165m": FLASHRNN_165M} == PRESETS


def test_the_sample_of_train_lm():
    parameters = inspect.signature(generate).parameters
    sampled = {name: x.default for name, x in parameters.items() if x.default is not x.empty}
    assert sampled == {"seed": 0, "temperature": 0.8, "vocabulary": None}
    assert (train_lm.PROMPT_TOKENS, train_lm.SAMPLE_TOKENS, LONGEST_WARMUP) == (48, 400, 200)


def test_checkpoints_that_were_saved_are_still_read():
    """A change of their form takes another number, and this one with it."""
    assert (VERSION, tokens.VERSION) == (3, 1)


def test_what_is_validated_on_and_how_many_documents_are_encoded_at_a_time():
    assert (text.VALIDATION_TOKENS, tokens.AT_ONCE) == (32768, 256)


@pytest.mark.parametrize(
    ("options", "least"),
    [
        (["bench", "--op", "gla", "--cold", "-1"], "0"),
        (["bench", "--op", "gla", "--seconds", "0"], "0.001"),
        (["doctor", "--fuzz", "-1"], "0"),
        (["doctor", "--scenarios", "0"], "1"),
        (["doctor", "--scenarios", "1", "--seed", "-1"], "0"),
        (["doctor", "--scenarios", "1", "--workers", "0"], "1"),
    ],
)
def test_the_least_that_options_take(options, least):
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 2
    # without the frame; versions of typer word it in two ways
    said = " ".join(done.output.replace("│", " ").split())
    assert re.search(rf"{options[-2]}'?.*(>=|greater than or equal to ){re.escape(least)}(?![.\d])", said)
