"""The training loop: when it validates and saves, what it says of it, and how it ends."""

import io
import math
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from holdfast.cli import checkpoint, train_lm
from holdfast.cli.config import DEMO, LanguageModelConfig
from holdfast.cli.errors import UserError
from holdfast.cli.interrupt import Interrupt
from holdfast.cli.language_model import LanguageModel, SwiGLU, autocast, count_parameters, next_token_loss
from holdfast.cli.ranks import ALONE
from holdfast.cli.report import Report
from holdfast.cli.text import Text
from holdfast.cli.train_lm import Training, resumed_config, run_training, settings, start, summarise

SETTINGS = {"mixer": "gla", "layers": 1, "width": 16, "heads": 2, "length": 8, "batch": 3, "steps": 7, "threads": 1}
CPU = torch.device("cpu")


def text(train=400, validation=300):
    draw = np.random.default_rng(0)
    parts = [draw.integers(97, 105, size, dtype=np.uint8) for size in (train, validation)]
    return Text("text", *parts, 1, 1, "digest")


def training(**changes):
    return Training(LanguageModelConfig().changed(SETTINGS | changes), text(), CPU)


class Lines(Report):
    def __init__(self, steps):
        self.text = io.StringIO()
        super().__init__(Console(file=self.text, width=120), steps)

    @property
    def lines(self):
        return self.text.getvalue().splitlines()


def test_it_validates_and_saves_when_it_says_so(tmp_path, monkeypatch):
    saved, validated = [], []
    monkeypatch.setattr(checkpoint, "save", lambda folder, state: saved.append((folder, state["step"])))
    one, report = training(validate_every=3, save_every=2), Lines(7)
    validate = one.validate
    monkeypatch.setattr(one, "validate", lambda: validated.append(one.step) or validate())
    with Interrupt() as interrupt:
        run_training(one, report, tmp_path, interrupt)
    # at the start and at the end too
    assert validated == [0, 3, 6, 7]
    assert saved == [(tmp_path, step) for step in (0, 2, 4, 6, 7)]
    assert [step for step, _ in one.validations] == [0, 3, 6, 7]
    assert len(one.losses) == 7
    assert report.lines[0] == f"validation before training: {one.validations[0][1]:.3f} bits a byte"
    assert f"validation after 6 steps: {one.validations[2][1]:.3f} bits a byte" in report.lines


def test_a_resumed_run_does_not_validate_before_it(monkeypatch):
    one, report = training(), Lines(7)
    one.validations = [(0, 8.0)]
    with Interrupt() as interrupt:
        run_training(one, report, None, interrupt)
    assert not [line for line in report.lines if line.startswith("validation before")]


def test_an_interrupt_at_the_last_step_saves_once(monkeypatch, tmp_path):
    saved = []
    monkeypatch.setattr(checkpoint, "save", lambda folder, state: saved.append(state["step"]))
    one = training(save_every=100)
    step = one.train_step

    def signalled():
        if one.step == 6:
            signal.raise_signal(signal.SIGTERM)
        return step()

    monkeypatch.setattr(one, "train_step", signalled)
    with Interrupt() as interrupt:
        run_training(one, Lines(7), tmp_path, interrupt)
    assert saved == [0, 7]


def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(monkeypatch, tmp_path):
    saved = []
    monkeypatch.setattr(checkpoint, "save", lambda folder, state: saved.append(state["step"]))
    one = training(save_every=1, lr=0.5)
    with torch.no_grad():
        one.model.norm.weight[0] = torch.inf
    with (
        pytest.raises(UserError, match=r"the loss is nan at step 1: try a lower --lr than 0.5"),
        Interrupt() as interrupt,
    ):
        run_training(one, Lines(7), tmp_path, interrupt)
    assert saved == [0]


def test_speed_counts_the_tokens_of_this_run(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(train_lm.time, "perf_counter", lambda: now[0])
    one, report = training(), Lines(7)
    one.validations, one.step = [(0, 8.0)], 5
    step = one.train_step

    def half_a_second():
        now[0] += 0.5
        return step()

    monkeypatch.setattr(one, "train_step", half_a_second)
    with Interrupt() as interrupt:
        run_training(one, report, None, interrupt)
    # 3 sequences of 8 bytes each half second
    assert sum(line.endswith("48 tokens/s") for line in report.lines if line.startswith("step")) == 2
    assert report.lines[-1] == "median step 0.500 s  48 tokens/s"


def test_losses_are_bits_a_byte():
    one = training()
    with torch.no_grad():
        one.model.embedding.weight.zero_()
    assert one.train_step() == pytest.approx(8.0)
    with torch.no_grad():
        one.model.embedding.weight.zero_()
    assert one.validate() == pytest.approx(8.0)
    assert one.validations == [(1, pytest.approx(8.0))]


def test_validation_is_the_mean_over_all_windows(monkeypatch):
    """37 windows in batches of three, the last of one."""
    one = training()
    windows = one._windows
    assert windows.shape == (37, 9)
    with torch.no_grad():
        total = next_token_loss(one.model, windows[:, :-1].long(), windows[:, 1:].long()).item()
    assert one.validate() == pytest.approx(total / (37 * 8) / math.log(2), rel=1e-5)


def test_the_rate_follows_the_schedule_after_a_tenth_of_warm_up(monkeypatch):
    rates = []
    monkeypatch.setattr(train_lm, "update", lambda model, optimizer, rate, clip: rates.append(rate))
    monkeypatch.setattr(train_lm, "learning_rate", lambda *arguments: arguments)
    for steps, warmup in ((7, 1), (40, 4), (5000, 200)):
        one = training(steps=steps, lr=0.25)
        one.step = 3
        one.train_step()
        assert rates.pop() == (3, steps, 0.25, warmup, 0.1)
    one = training(lr=0.25, min_lr=0.125, warmup_steps=5)
    one.train_step()
    assert rates.pop() == (0, 7, 0.25, 5, 0.5)


def test_a_local_batch_is_taken_at_a_time(monkeypatch):
    whole, parts, taken = training(batch=6), training(batch=6, local_batch=2), []
    loss = parts._loss
    monkeypatch.setattr(parts, "_loss", lambda windows: taken.append(len(windows)) or loss(windows))
    assert parts.train_step() == pytest.approx(whole.train_step(), rel=1e-6)
    assert taken == [2, 2, 2]
    torch.testing.assert_close(parts.model.embedding.weight, whole.model.embedding.weight)


def test_the_model_has_the_rows_and_the_head_that_are_asked_for():
    one = training(vocabulary=320, tie=False)
    assert one.model.embedding.weight.shape == one.model.head.weight.shape == (320, 16)
    assert one.parameters == training().parameters + (2 * 320 - 256) * 16
    with pytest.raises(UserError, match=r"--vocabulary: expected the 256 tokens of text, .*; got 50,257. .* bpe"):
        training(vocabulary=50257)


def test_validation_tells_the_perplexity_of_tokens():
    one = training()
    one.validations = [(0, 0.5)]
    assert one.last_validation() == {"bits_a_byte": 0.5}
    one.text = replace(one.text, tokenizer=Path("a"), bytes_per_token=(9.0, 4.0))
    assert one.last_validation() == {"bits_a_byte": 0.5, "perplexity": 4.0}


def test_the_summary_has_the_mean_loss_since_each_validation():
    one, report = training(), Lines(7)
    one.losses, one.validations = [8.0, 6.0, 4.0, 3.0, 2.0], [(0, 8.0), (2, 6.5), (5, 3.5)]
    summarise(one, report)
    rows = [line.replace("│", " ").split() for line in report.lines if line.startswith("│")]
    assert rows == [["0", "8.000"], ["2", "7.000", "6.500"], ["5", "3.000", "3.500"]]
    assert report.lines[-1].startswith("validation 8.000 ")
    assert report.lines[-1].endswith(" 3.500")


def test_what_may_change_on_resume_changes_and_the_rest_may_be_repeated(tmp_path):
    saved = {"config": LanguageModelConfig(**SETTINGS | {"text": "/old"}).to_dict()}
    found = resumed_config(saved, tmp_path, {"text": "/new", "save_every": 5, "width": 16, "steps": None})
    assert (found.text, found.save_every, found.width, found.steps) == ("/new", 5, 16, 7)
    with pytest.raises(UserError, match="made with --seed 0, not 3: leave --seed out to resume"):
        resumed_config(saved, tmp_path, {"seed": 3})
    with pytest.raises(UserError, match="settings do not match"):
        resumed_config({"config": {"width": 3}}, tmp_path, {})


def test_options_win_over_the_demo_and_the_threads_are_kept(text_file):
    given = {"text": str(text_file), "width": 16, "layers": 1, "threads": None}
    one = start(*settings(given, DEMO, None, None), CPU, ALONE, None)
    assert (one.config.width, one.config.layers, one.config.heads, one.config.steps) == (16, 1, 2, 400)
    assert one.config.threads == 1
    unset = start(*settings(given, {}, None, None), CPU, ALONE, None)
    assert unset.config.threads == torch.get_num_threads()


def test_a_fresh_training_depends_on_its_seed_alone():
    torch.manual_seed(1)
    first = training(seed=4)
    torch.manual_seed(2)
    again, other = training(seed=4), training(seed=5)
    assert torch.equal(first.model.embedding.weight, again.model.embedding.weight)
    assert not torch.equal(first.model.embedding.weight, other.model.embedding.weight)


def test_the_loss_is_of_the_byte_that_follows():
    model, windows = LanguageModel("gla", 1, 16, 2), torch.randint(256, (2, 6))
    logits, _ = model(windows[:, :-1])
    right = logits.log_softmax(-1).gather(-1, windows[:, 1:, None]).sum()
    assert next_token_loss(model, windows[:, :-1], windows[:, 1:]).item() == pytest.approx(-right.item(), rel=1e-5)


def test_the_model_by_hand():
    """An embedding that is the head too, a norm before each of mixer and MLP, both added, and one at the end."""
    model = LanguageModel("gla", 1, 16, 2)
    (block,) = model.blocks
    tokens = torch.randint(256, (2, 6))
    x = model.embedding.weight[tokens]
    norm = lambda x, layer: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * layer.weight  # noqa: E731
    x = x + block.mixer(norm(x, block.mixer_norm))[0]
    gate, value = F.linear(norm(x, block.mlp_norm), block.mlp.enter.weight).chunk(2, -1)
    x = x + F.linear(F.silu(gate) * value, block.mlp.leave.weight)
    expected = norm(x, model.norm) @ model.embedding.weight.T
    torch.testing.assert_close(model(tokens)[0], expected, rtol=1e-4, atol=1e-5)
    assert count_parameters(model) == sum(x.numel() for x in model.state_dict().values())


def test_each_block_has_a_state():
    model, tokens = LanguageModel("gla", 2, 16, 2), torch.randint(256, (1, 4))
    states = model(tokens)[1]
    assert len(states) == 2
    with pytest.raises(ValueError, match="shorter"):
        model(tokens, states[:1])


def test_the_mlp_is_eight_thirds_as_wide_in_sixteens():
    assert [SwiGLU(width).leave.in_features for width in (16, 64, 256, 768)] == [48, 176, 688, 2048]


def test_the_embedding_starts_with_unit_rows():
    weight = LanguageModel("gla", 1, 64, 2).embedding.weight
    assert weight.std().item() == pytest.approx(1 / 8, rel=0.05)


@pytest.mark.parametrize(("dtype", "found"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_autocast_where_it_is_asked_for(dtype, found):
    x = torch.ones(2, 2)
    with autocast(CPU, dtype):
        assert (x @ x).dtype == found
