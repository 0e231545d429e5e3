"""Trains mixers and a Transformer on parity with several seeds, side by side, and writes accuracy by length.

    PYTHONPATH=src python benchmarks/parity.py --out benchmarks/results/h200/parity --commit 1a2b3c4

Table 2 of the FlashRNN paper (Pöppel, Beck and Hochreiter 2024, arXiv:2412.07752): nonlinear recurrences are to reach
1.00 on lengths that training never saw, linear ones and attention to stay near 0.5. The settings are those of `holdfast
train parity`, in bfloat16 under autocast, the dtype that the fused kernels take. Writes OUT.json with every run and
OUT.md with a table of means and worst seeds.
"""

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import torch

from holdfast import __version__
from holdfast.cli.config import ATTENTION
from holdfast.cli.device import choose_device
from holdfast.cli.parity import (
    EXTRAPOLATION,
    RANGES,
    ParityModel,
    accuracy_by_length,
    last_bit_loss,
    mean_accuracy,
    training_batch,
)
from holdfast.cli.schedule import learning_rate, make_optimizer, update
from holdfast.cli.train_parity import TEST_SEQUENCES, ParityConfig
from holdfast.planner.whole_file import write_text

NONLINEAR = ("elman", "gru", "lstm", "slstm")
LINEAR = ("gla", "retnet", "mamba2", "mlstm", "rglru")
TRANSFORMER = "transformer"


def model_of(mixer: str, config: ParityConfig) -> ParityModel:
    return ParityModel(ATTENTION if mixer == TRANSFORMER else mixer, config.layers, config.width, config.heads)


def train(run: tuple[str, int], steps: int, dtype: str, device_name: str) -> dict[str, object]:
    """One run. accuracy: of each range of lengths; extrapolation: of all that training never saw."""
    torch.set_num_threads(1)
    (mixer, seed), config = run, ParityConfig(steps=steps)
    device = choose_device(device_name)
    began = time.perf_counter()
    torch.manual_seed(seed)
    model = model_of(mixer, config).to(device)
    optimizer = make_optimizer(model, config.lr, weight_decay=0.0)
    drawn, warmup = torch.Generator().manual_seed(seed), max(1, steps // 10)
    cast = partial(torch.autocast, device.type, torch.bfloat16, enabled=dtype == "bfloat16")
    for step in range(steps):
        bits, lengths, labels = (x.to(device) for x in training_batch(config.batch, drawn))
        with cast():
            logits = model(bits)
        loss, _ = last_bit_loss(logits, lengths, labels)
        loss.backward()
        update(model, optimizer, learning_rate(step, steps, config.lr, warmup))
    tested = torch.Generator().manual_seed(seed + 1)
    with cast():
        by_length = accuracy_by_length(model, TEST_SEQUENCES, config.batch, tested)
    return {
        "mixer": mixer,
        "seed": seed,
        "accuracy": {f"{a}-{b}": round(mean_accuracy(by_length, (a, b)), 4) for a, b in RANGES},
        "extrapolation": round(mean_accuracy(by_length, EXTRAPOLATION), 4),
        "loss": round(loss.item(), 5),
        "seconds": round(time.perf_counter() - began, 1),
    }


def attempted(run: tuple[str, int], **options: object) -> dict[str, object]:
    """train; error instead of accuracy where the run failed."""
    try:
        row = train(run, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        row = {"mixer": run[0], "seed": run[1], "error": f"{type(error).__name__}: {error}"[:500]}
    print(json.dumps(row), flush=True)
    return row


def table(rows: list[dict[str, object]], about: str) -> str:
    """Of each mixer and range of lengths the mean accuracy over seeds, and the least where it is another."""
    names = list(dict.fromkeys(row["mixer"] for row in rows))
    heads = [f"{a} - {b}" for a, b in RANGES]
    lines = [about, "", "| mixer | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    for name in names:
        found = [row["accuracy"] for row in rows if row["mixer"] == name and "accuracy" in row]
        cells = []
        for a, b in RANGES:
            values = [accuracy[f"{a}-{b}"] for accuracy in found]
            if not values:
                cells.append("failed")
                continue
            mean, least = (f"{x:.2f}" for x in (sum(values) / len(values), min(values)))
            cells.append(mean if mean == least else f"{mean} ({least})")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="path of the results, without a suffix")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--mixers", nargs="+", default=[*NONLINEAR, *LINEAR, TRANSFORMER])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=ParityConfig.steps)
    parser.add_argument("--jobs", type=int, default=8)
    given = parser.parse_args()
    runs = [(mixer, seed) for seed in range(given.seeds) for mixer in given.mixers]
    device = choose_device(given.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    about = (
        f"Parity, accuracy at lengths; trained on lengths 1 - 40, {given.steps} steps, {given.dtype}, {name}. "
        f"Means of {given.seeds} seeds, the worst seed in brackets."
    )
    record = {"task": "parity", "holdfast": __version__, "torch": torch.__version__, "commit": given.commit}
    record |= {"device": name, "dtype": given.dtype, "steps": given.steps}
    work = partial(attempted, steps=given.steps, dtype=given.dtype, device_name=given.device)
    done = {}
    # a process of a GPU cannot be forked
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        pending = {pool.submit(work, run): run for run in runs}
        for future in as_completed(pending):
            done[pending[future]] = future.result()
            # at each run, so that an end before the last loses nothing
            rows = [done[run] for mixer in given.mixers for run in runs if run[0] == mixer and run in done]
            write_text(given.out.with_suffix(".json"), json.dumps(record | {"runs": rows}, indent=1) + "\n")
            write_text(given.out.with_suffix(".md"), table(rows, about))
    print(table(rows, about))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
