"""Hardware counters of one run, read by Nsight Compute in a child process: DRAM bytes, and how busy the matrix units
were."""

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .child import write_request
from .result import Result

READ, WRITTEN, NANOSECONDS = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
METRICS = (READ, WRITTEN, NANOSECONDS, TENSOR)
KERNEL = "Kernel Name"
SWEEP_BYTES = 2**28
# a run
LIMIT_S = 120.0


@dataclass(frozen=True)
class Counters:
    """dram_bytes: read and written, what was still in the L2 cache at the end included. tensor_percent: cycles in which
    the matrix units worked, of all cycles of the kernels, weighted by their times."""

    dram_bytes: int
    tensor_percent: float
    kernels: int


def summed(lines: Iterable[str]) -> list[Counters]:
    """From ncu's CSV of raw values, a line a kernel: the counters of each run, which ends with the sweep of `profiled`.

    The sweep reads SWEEP_BYTES, more than the cache, and so drives out what the run left there: its writes are the
    run's. Raises ValueError for output of another form.
    """
    table = list(csv.DictReader(line for line in lines if line.startswith('"')))
    if len(table) < 3 or any(name not in table[0] for name in (*METRICS, KERNEL)):
        raise ValueError("ncu: expected a line of units, one for each kernel and one for the sweep")
    # the first line holds the units
    units, *kernels = table
    if (units[READ], units[WRITTEN]) != ("byte", "byte"):
        raise ValueError(f"ncu: expected bytes; got {units[READ]} and {units[WRITTEN]}")
    sweeper, run, found = kernels[-1][KERNEL], [], []
    for kernel in kernels:
        row = {metric: float(kernel[metric].replace(",", "")) for metric in METRICS}
        if kernel[KERNEL] != sweeper or not 0.95 < row[READ] / SWEEP_BYTES < 1.05:
            run.append(row)
        elif run:
            found.append(_of_run(run, row))
            run = []
    if run:
        raise ValueError(f"ncu: expected the last kernel to read {SWEEP_BYTES} bytes; it read {run[-1][READ]:.0f}")
    return found


def _of_run(run: list[dict[str, float]], sweep: dict[str, float]) -> Counters:
    time = sum(row[NANOSECONDS] for row in run)
    return Counters(
        dram_bytes=round(sum(row[READ] + row[WRITTEN] for row in run) + sweep[WRITTEN]),
        tensor_percent=sum(row[TENSOR] * row[NANOSECONDS] for row in run) / time,
        kernels=len(run),
    )


def command(ncu: str) -> list[str]:
    """Every metric in one pass, so that no kernel runs twice, with the caches and clocks as they are."""
    options = ["--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
    options += ["--cache-control", "none", "--clock-control", "none", "--metrics", ",".join(METRICS)]
    return [ncu, *options, sys.executable, "-m", "holdfast.cli.bench.profiled"]


def _why(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "==ERROR==" in line or "ERR_" in line or "Error" in line]
    found = " ".join(lines or text.split("\n")[-3:])
    if "ERR_NVGPUCTRPERM" in found:
        return "this user is not permitted to read hardware counters"
    return f"ncu failed: {found}"[:300]


def _read(done: subprocess.CompletedProcess[str], number: int) -> list[Counters | str]:
    """The counters of each of the runs that were asked for, or why there are none."""
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"profiled"')]
    if done.returncode or len(outcomes) < number:
        return [_why(done.stdout + done.stderr)] * number
    try:
        found = iter(summed(done.stdout.splitlines()) if any(not each["failed"] for each in outcomes) else [])
        return [each["failed"] or next(found) for each in outcomes]
    except (ValueError, StopIteration) as error:
        return [str(error) or "ncu: fewer runs than were asked for"] * number


def count(rows: Sequence[Result], device: torch.device) -> list[Counters | str]:
    """The counters of one run of each row's runner in its case, or why there are none."""
    if device.type != "cuda":
        return ["hardware counters need an NVIDIA GPU"] * len(rows)
    if (ncu := shutil.which("ncu")) is None:
        return ["ncu, Nsight Compute, is not installed"] * len(rows)
    try:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
            request = write_request([(row.to_case(), row.runner) for row in rows], device, Path(folder))
            line = [*command(ncu), str(request)]
            done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S * len(rows))
    except subprocess.TimeoutExpired:
        return [f"ncu took more than {LIMIT_S * len(rows):.0f} s"] * len(rows)
    return _read(done, len(rows))


def counted(rows: Sequence[Result], device: torch.device) -> list[Result]:
    """The rows with their counters, or with a note of why they have none; one child process for all."""
    return [
        replace(row, counters_note=found)
        if isinstance(found, str)
        else replace(row, dram_bytes=found.dram_bytes, tensor_percent=found.tensor_percent, kernels=found.kernels)
        for row, found in zip(rows, count(rows, device), strict=True)
    ]
