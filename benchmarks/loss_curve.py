"""Trains one language model with the kernels and with the PyTorch path: do their losses follow the same curve?

    PYTHONPATH=src python benchmarks/loss_curve.py --out benchmarks/results/h200/loss-curve

Two layers of a mixer, the same seed, data and steps; with the kernels that the planner chooses, with backend="chunked"
in the same dtype, and with that in float32. What rounding to bfloat16 changes in the PyTorch path is the noise that the
kernels' difference from it is held against. Writes OUT.json and OUT.svg; exits 1 where the difference is over twice
the noise.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from holdfast import __version__
from holdfast.cli.config import MIXERS, LanguageModelConfig
from holdfast.cli.device import choose_device
from holdfast.cli.text import read_text
from holdfast.cli.train_lm import Training

# a step's loss is one batch's; curves are compared by means over so many
WINDOW = 20
# of bits a byte: means nearer than this are the same whatever the noise
FLOOR = 0.005


def train(config: LanguageModelConfig, device: torch.device, backend: str | None) -> dict[str, object]:
    """Bits a byte of every step, and over the validation windows at the end."""
    torch.set_num_threads(1)
    training = Training(config, read_text(None, ()), device)
    for block in training.model.blocks:
        block.mixer.backend = backend
    start = time.perf_counter()
    for _ in range(config.steps):
        training.train_step()
    seconds = time.perf_counter() - start
    return {
        "backend": backend or "chosen by the planner",
        "dtype": config.dtype,
        "losses": [round(loss, 5) for loss in training.losses],
        "validation": round(training.validate(), 5),
        "seconds": round(seconds, 2),
    }


def means(losses: list[float]) -> list[float]:
    """Of each WINDOW of steps."""
    return [statistics.fmean(losses[n : n + WINDOW]) for n in range(0, len(losses), WINDOW)]


def difference(one: dict[str, object], other: dict[str, object]) -> float:
    """Root mean square of the differences between two curves' means, in bits a byte."""
    pairs = zip(means(one["losses"]), means(other["losses"]), strict=True)
    return statistics.fmean((x - y) ** 2 for x, y in pairs) ** 0.5


def draw(runs: list[dict[str, object]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for run, style in zip(runs, ("-", "--", ":"), strict=True):
        at = range(WINDOW // 2, WINDOW * len(means(run["losses"])), WINDOW)
        axes.plot(at, means(run["losses"]), style, label=f"{run['backend']}, {run['dtype']}")
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss, bits a byte (means of {WINDOW} steps)")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixer", choices=sorted(MIXERS), default="mamba2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=3, help="runs side by side")
    parser.add_argument("--out", type=Path, required=True, help="path of the results, without a suffix")
    given = parser.parse_args()

    device = choose_device(given.device)
    sizes = {name: getattr(given, name) for name in ("mixer", "steps", "width", "length", "batch")}
    config = LanguageModelConfig(**sizes, layers=2, heads=4, dtype="bfloat16")
    text = read_text(None, ())
    plain = config.changed({"dtype": "float32"})
    # side by side, in processes that make their own GPU contexts
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        runs = list(pool.map(train, (config, config, plain), (device,) * 3, (None, "chunked", "chunked")))
    apart, noise = difference(runs[0], runs[1]), difference(runs[1], runs[2])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    record = {
        "holdfast": __version__,
        "torch": torch.__version__,
        "device": name,
        "config": config.to_dict(),
        "text": [text.name, text.fingerprint],
        "difference": apart,
        "noise": noise,
        "runs": runs,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    draw(runs, f"{given.mixer}, 2 layers of width {given.width}, on {name}", given.out.with_suffix(".svg"))
    for run in runs:
        print(f"{run['backend']}, {run['dtype']}: validation {run['validation']:.4f} bits a byte, {run['seconds']} s")
    print(f"difference of the curves {apart:.5f} bits a byte; of bfloat16 from float32 {noise:.5f}")
    return int(apart > max(2 * noise, FLOOR))


if __name__ == "__main__":
    sys.exit(main())
