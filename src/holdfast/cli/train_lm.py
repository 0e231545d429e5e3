"""The training loop of `holdfast train lm`."""

import math
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from . import checkpoint, shards
from .config import FREE_ON_RESUME, LanguageModelConfig
from .device import choose_device, explained_memory_errors
from .errors import UserError
from .flops import flops_per_token, peak_rate
from .generate import generate, printable
from .interrupt import Interrupt
from .language_model import LanguageModel, autocast, count_parameters, next_token_loss
from .ranks import ALONE, Ranks, joined, load_whole_state, local_device, whole_state
from .report import Report, sparkline
from .saver import Kept, Saver
from .scalars import Scalars, check_tensorboard
from .schedule import learning_rate, make_optimizer, update
from .text import Text, check_long_enough, read_text, training_batch, validation_windows
from .throughput import Throughput
from .tokens import load as load_tokens

PROMPT_TOKENS = 48
SAMPLE_TOKENS = 400


class Training:
    """A model under training: everything that a checkpoint has to hold."""

    def __init__(self, config: LanguageModelConfig, text: Text, device: torch.device, ranks: Ranks = ALONE) -> None:
        self.config = config
        self.text = text
        self.device = device
        self.ranks = ranks
        torch.manual_seed(config.seed)
        # under the names that a checkpoint has
        self._rows = config.rows_for(text.vocabulary, text.name)
        self._bare = self._fresh_model()
        self.parameters = count_parameters(self._bare)
        self.flops = flops_per_token(self._bare, config.length)
        self.model = ranks.wrapped(self._bare, config.sharding)
        self.optimizer = make_optimizer(self.model, config.lr)
        self.restored: Kept | None = None
        self.step = 0
        self.losses: list[float] = []
        self.validations: list[tuple[int, float]] = []
        self._windows = torch.from_numpy(validation_windows(text, config.length))

    def _fresh_model(self) -> LanguageModel:
        config = self.config
        model = LanguageModel(config.mixer, config.layers, config.width, config.heads, self._rows, config.tie)
        return model.to(self.device)

    def _loss(self, windows: torch.Tensor) -> torch.Tensor:
        """In nats, summed over this rank's tokens of windows [B, length + 1]."""
        inputs, targets = (self.ranks.tokens(x).to(self.device, torch.long) for x in (windows[:, :-1], windows[:, 1:]))
        with autocast(self.device, self.config.dtype):
            return next_token_loss(self.model, inputs, targets)

    def _bits_a_byte(self, nats: float, part: int) -> float:
        """Of nats a token in the training part, 0, or the validation part, 1."""
        return nats / math.log(2) / self.text.bytes_per_token[part]

    @property
    def rate(self) -> float:
        """The learning rate of the step to come."""
        config = self.config
        return learning_rate(self.step, config.steps, config.lr, config.warmup, config.floor)

    def throughput(self) -> Throughput:
        """Of this training on these devices, before its steps."""
        config, peak = self.config, peak_rate(self.device, self.config.dtype)
        peak = None if peak is None else self.ranks.count * peak
        return Throughput(config.batch * config.length, self.flops, peak, self.device)

    def last_validation(self) -> dict[str, float]:
        """Bits a byte, and of tokens that are not bytes the perplexity."""
        found = self.validations[-1][1]
        if self.text.tokenizer is None:
            return {"bits_a_byte": found}
        return {"bits_a_byte": found, "perplexity": 2 ** (found * self.text.bytes_per_token[1])}

    def train_step(self) -> float:
        """Takes one step; returns its loss in bits a byte."""
        config = self.config
        windows = training_batch(self.text, config.seed, self.step, config.batch, config.length)
        parts = self.ranks.rows(torch.from_numpy(windows)).chunk(config.parts(self.ranks.dp))
        nats = 0.0
        for n, part in enumerate(parts):
            with self.ranks.gradients_stay(self.model, n + 1 < len(parts)):
                # ranks with other tokens average their gradients
                loss = self._loss(part) * (self.ranks.data / (config.batch * config.length))
                loss.backward()
            nats += loss.detach()
        update(self.model, self.optimizer, self.rate, self.ranks.clip)
        self.step += 1
        self.losses.append(self._bits_a_byte(self.ranks.sum(nats) / self.ranks.count, 0))
        return self.losses[-1]

    @torch.no_grad()
    def validate(self) -> float:
        """Bits a byte over the fixed validation windows, which all ranks take that share a batch."""
        rows = max(1, self.config.batch // (self.ranks.dp * self.config.parts(self.ranks.dp)))
        nats = sum(self._loss(windows).item() for windows in self._windows.split(rows))
        count = len(self._windows) * self.config.length * self.ranks.dp * self.ranks.tp
        self.validations.append((self.step, self._bits_a_byte(self.ranks.sum(nats) / count, 1)))
        return self.validations[-1][1]

    def whole_model(self) -> LanguageModel | None:
        """The model in one piece, on the first rank; every rank calls."""
        if self.ranks.mesh is None:
            return self.model
        weights, _ = whole_state(self.model, self.optimizer)
        if not self.ranks.is_first:
            return None
        model = self._fresh_model()
        model.load_state_dict(weights)
        return model

    def state(self) -> dict[str, Any]:
        """For a checkpoint in one file; every rank calls, and the first one has all of it."""
        weights, kept = whole_state(self.model, self.optimizer)
        return self.head() | {"model": weights, "optimizer": kept, "shards": None}

    def head(self) -> dict[str, Any]:
        """Of a checkpoint all but the weights and what the optimizer keeps."""
        return {
            "config": self.config.to_dict(),
            "text": self.text.fingerprint,
            "step": self.step,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "validations": torch.tensor(self.validations, dtype=torch.float64).reshape(-1, 2),
        }

    def restore(self, saved: Mapping[str, Any], path: Path) -> None:
        try:
            if saved["shards"] is not None:
                folder = path.parent / saved["shards"]
                shards.load(folder, self.model, self.optimizer, self._bare, bool(saved["step"]))
            else:
                checkpoint.check_fits(path, saved["model"], self._bare)
                # an optimizer keeps nothing before its first step
                if bool(saved["optimizer"]) != bool(saved["step"]):
                    raise KeyError("optimizer")
                load_whole_state(self.model, self.optimizer, saved["model"], saved["optimizer"])
            torch.set_rng_state(saved["rng"])
            if self.device.type == "cuda" and saved["cuda_rng"] is not None:
                torch.cuda.set_rng_state(saved["cuda_rng"], self.device)
            self.step = saved["step"]
            self.losses = saved["losses"].tolist()
            self.validations = [(int(step), value) for step, value in saved["validations"].tolist()]
            self.restored = Kept(path.parent, self.step, saved["shards"])
        except (KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            raise UserError(f"{path} does not hold a whole training state: {error}") from error


def resumed_config(saved: Mapping[str, Any], path: Path, given: Mapping[str, Any]) -> LanguageModelConfig:
    """The checkpoint's settings; an option given now may only repeat them, but for those that change no result.

    Beside these more steps, or fewer that are not done yet: from here on the learning rate is that of so many, behind
    the warm-up that there was.
    """
    try:
        config = LanguageModelConfig.from_dict(saved["config"])
    except (UserError, KeyError, TypeError) as error:
        raise UserError(f"{path}: {error}") from error
    steps = given.get("steps")
    if steps is not None and steps != config.steps:
        if steps <= saved["step"]:
            raise UserError(f"--steps: expected more than the {saved['step']} that {path} has done; got {steps}")
        config = config.changed({"steps": steps, "warmup_steps": config.warmup})
    for name, value in given.items():
        there = getattr(config, name)
        if value is not None and value != there and name not in FREE_ON_RESUME:
            option = name.replace("_", "-")
            raise UserError(f"{path} was made with --{option} {there}, not {value}: leave --{option} out to resume")
    return config.changed({name: given.get(name) for name in FREE_ON_RESUME})


def settings(
    given: Mapping[str, Any], preset: Mapping[str, Any], out: Path | None, resume: Path | None
) -> tuple[LanguageModelConfig, dict[str, Any] | None]:
    """Of a fresh training, or of the one that a checkpoint holds, and the checkpoint."""
    if out is not None and out != resume and (out / checkpoint.NAME).exists():
        raise UserError(f"{out} already holds a checkpoint: go on with --resume {out}, or choose another --out")
    if resume is None:
        config = LanguageModelConfig().changed(preset).changed(given)
        return config.changed({"threads": config.threads or torch.get_num_threads()}), None
    saved = checkpoint.load(resume)
    return resumed_config(saved, resume / checkpoint.NAME, given), saved


def start(
    config: LanguageModelConfig, saved: Mapping[str, Any] | None, device: torch.device, ranks: Ranks, path: Path | None
) -> Training:
    """A training at its first step, or where saved, from path, has it."""
    torch.set_num_threads(config.threads)
    text = read_text(config.text, config.glob) if config.data is None else load_tokens(Path(config.data))
    check_long_enough(text, config.length)
    training = Training(config, text, device, ranks)
    if saved is not None:
        if saved.get("text") != text.fingerprint:
            raise UserError(
                f"{path} was made on other text than {text.name} has now: name the same one with --text or --data"
            )
        training.restore(saved, path)
    return training


def run_training(
    training: Training, report: Report, out: Path | None, interrupt: Interrupt, scalars: Scalars | None = None
) -> int:
    """Steps until the end or an interrupt, validating and saving on the way. Returns the signal that some rank got; 0
    at the end."""
    with Saver(out, training) as saver:
        return _steps(training, report, saver, interrupt, scalars or Scalars())


def _steps(training: Training, report: Report, saver: Saver, interrupt: Interrupt, scalars: Scalars) -> int:
    config = training.config

    def validate(when: str) -> None:
        training.validate()
        found = training.last_validation()
        perplexity = f", perplexity {found['perplexity']:.2f}" if "perplexity" in found else ""
        report.line(f"validation {when}: {found['bits_a_byte']:.3f} bits a byte{perplexity}")
        scalars.add(training.step, {f"validation/{name}": value for name, value in found.items()})

    if not training.validations:
        validate("before training")
        saver.save()
    throughput = training.throughput()
    while training.step < config.steps:
        if stopped := training.ranks.largest(interrupt.signal or 0):
            saver.save()
            return stopped
        saver.poll()
        rate, began = training.rate, time.perf_counter()
        loss = training.train_step()
        throughput.add(time.perf_counter() - began)
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss} at step {training.step}: try a lower --lr than {config.lr}")
        report.step(training.step, f"loss {loss:.3f} bits a byte  {throughput.said()}")
        scalars.add(training.step, {"training/bits_a_byte": loss, "learning_rate": rate} | throughput.scalars())
        is_last = training.step == config.steps
        if training.step % config.validate_every == 0 or is_last:
            validate(f"after {training.step} steps")
        if training.step % config.save_every == 0 or is_last:
            saver.save()
    if said := throughput.summary():
        report.line(said)
    return 0


def summarise(training: Training, report: Report) -> None:
    values = [value for _, value in training.validations]
    rows = []
    previous = 0
    for step, value in training.validations:
        trained = training.losses[previous:step]
        rows.append((str(step), f"{sum(trained) / len(trained):.3f}" if trained else "", f"{value:.3f}"))
        previous = step
    report.table(("step", "training, mean", "validation"), rows, title="Bits a byte")
    report.line(f"validation {values[0]:.3f} {sparkline(values)} {values[-1]:.3f}")


def show_sample(training: Training, report: Report, prompt: str | None) -> None:
    text = training.text
    first = [*map(int, text.validation[:PROMPT_TOKENS])] if prompt is None else text.encode(prompt.encode())
    model = training.whole_model()
    if model is None:
        return
    with autocast(training.device, training.config.dtype):
        made = generate(model, first, SAMPLE_TOKENS, training.config.seed, vocabulary=text.vocabulary)
    report.sample(printable(text.decode(first)), printable(text.decode(made)))


def train_language_model(
    given: Mapping[str, Any],
    preset: Mapping[str, Any],
    device_name: str = "auto",
    out: Path | None = None,
    resume: Path | None = None,
    prompt: str | None = None,
    tensorboard: Path | None = None,
) -> int:
    """Runs `holdfast train lm` and returns the exit status. None in `given` is an option that was not given."""
    if prompt == "":
        raise UserError("--prompt: expected at least one character")
    if tensorboard is not None:
        check_tensorboard()
    device = choose_device(local_device(device_name))
    config, saved = settings(given, preset, out, resume)
    with (
        Interrupt() as interrupt,
        explained_memory_errors("try a smaller --batch, --length or --width"),
        joined(device, config) as ranks,
    ):
        training = start(config, saved, device, ranks, resume and resume / checkpoint.NAME)
        text = training.text
        out = out or resume
        report = Report(Console(quiet=not ranks.is_first), config.steps)
        report.line(
            f"{config.mixer}, {config.layers} layers of width {config.width}, "
            f"{training.parameters:,} parameters, {config.dtype} on {ranks.described(device, config.sharding)}"
        )
        report.line(
            f"{text.name}: {len(text.train):,} {text.unit} to train on ({text.train_files} files), "
            f"{len(text.validation):,} to validate on ({text.validation_files} files)"
        )
        if resume is not None:
            report.line(f"resuming {resume} at step {training.step} of {config.steps}")
            if training.step == config.steps:
                report.line("all steps are done: --steps with a larger number goes on")
        # of a resumed run the curves go on behind the step that it goes on from
        curves = Scalars(tensorboard if ranks.is_first else None, 0 if resume is None else training.step + 1)
        with report, closing(curves):
            stopped = run_training(training, report, out, interrupt, curves)
        if stopped:
            how = f"go on with: {ranks.command} train lm --resume {out}" if out else "nothing is saved without --out"
            report.line(f"stopped at step {training.step} of {config.steps}; {how}")
            return 128 + stopped
        summarise(training, report)
        show_sample(training, report, prompt)
        if out is not None:
            report.line(f"saved in {out / checkpoint.NAME}")
    return 0
