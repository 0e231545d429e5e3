"""The training loop of `holdfast train parity`."""

import time
from dataclasses import dataclass

import torch
from rich.console import Console

from .config import MIXERS, check_at_least, check_choice, check_learning_rate
from .device import choose_device, explained_memory_errors
from .errors import UserError
from .interrupt import Interrupt
from .parity import (
    EXTRAPOLATION,
    RANGES,
    ParityModel,
    accuracy_by_length,
    last_bit_loss,
    mean_accuracy,
    training_batch,
)
from .report import Report
from .schedule import learning_rate, make_optimizer, update

TEST_SEQUENCES = 512


@dataclass(frozen=True)
class ParityConfig:
    """Settings of `train parity`; batch, warm-up and decay are the paper's, the number of steps is not."""

    mixer: str = "lstm"
    layers: int = 1
    width: int = 64
    heads: int = 1
    steps: int = 500
    lr: float = 1e-2
    batch: int = 256
    seed: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        check_choice("mixer", self.mixer, MIXERS)
        for option in ("layers", "width", "heads", "steps", "batch", "threads"):
            check_at_least(option, getattr(self, option), 1)
        check_at_least("seed", self.seed, 0)
        check_learning_rate(self.lr)
        if self.width % self.heads:
            raise UserError(f"--width: expected a multiple of --heads ({self.heads}); got {self.width}")


def train_parity(config: ParityConfig, device_name: str = "auto") -> int:
    """Trains, prints a table of accuracy by length and returns the exit status."""
    device = choose_device(device_name)
    torch.set_num_threads(config.threads)
    report = Report(Console(), config.steps)
    began = time.perf_counter()
    with Interrupt() as interrupt, explained_memory_errors("try a smaller --batch or --width"):
        torch.manual_seed(config.seed)
        model = ParityModel(config.mixer, config.layers, config.width, config.heads).to(device)
        optimizer = make_optimizer(model, config.lr, weight_decay=0.0)
        drawn = torch.Generator().manual_seed(config.seed)
        report.line(
            f"parity, {config.mixer}, layers {config.layers}, width {config.width}, heads {config.heads}, "
            f"peak learning rate {config.lr:g}, seed {config.seed}, on {device}"
        )
        warmup = max(1, config.steps // 10)
        with report:
            for step in range(config.steps):
                bits, lengths, labels = (x.to(device) for x in training_batch(config.batch, drawn))
                loss, accuracy = last_bit_loss(model(bits), lengths, labels)
                loss.backward()
                update(model, optimizer, learning_rate(step, config.steps, config.lr, warmup))
                report.step(step + 1, f"loss {loss.item():.4f}  accuracy {accuracy.item():.3f}")
                if interrupt.signal is not None:
                    break
        if interrupt.signal is not None:
            report.line(f"stopped at step {step + 1} of {config.steps}")
            return interrupt.exit_code
        tested = torch.Generator().manual_seed(config.seed + 1)
        by_length = accuracy_by_length(model, TEST_SEQUENCES, config.batch, tested)
    rows = [(f"{first} - {last}", f"{mean_accuracy(by_length, (first, last)):.3f}") for first, last in RANGES]
    report.table(("length", "accuracy"), rows, title=f"Parity after {config.steps} steps, trained on lengths 1 - 40")
    report.line(
        f"extrapolation, lengths {EXTRAPOLATION[0]} - {EXTRAPOLATION[1]}: "
        f"{mean_accuracy(by_length, EXTRAPOLATION):.3f} (0.5 is chance); {time.perf_counter() - began:.0f} s"
    )
    return 0
