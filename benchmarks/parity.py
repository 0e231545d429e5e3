"""Trains every mixer on parity with several seeds, side by side, and writes accuracy by length as JSON.

    PYTHONPATH=src python benchmarks/parity.py --out benchmarks/results/h200/parity.json --commit 1a2b3c4

Table 2 of the FlashRNN paper: nonlinear recurrences are to reach 1.00 on lengths that training never saw, linear ones
to stay near 0.5. Each run is `holdfast train parity` in a process of its own; at most --jobs run at once.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NONLINEAR = ("elman", "gru", "lstm", "slstm")
LINEAR = ("gla", "retnet", "mamba2", "mlstm", "rglru")
ROW = re.compile(r"(\d+) - (\d+)\D+([01]\.\d{3})")


def train(mixer: str, seed: int, options: list[str], limit: float) -> dict[str, object]:
    """One run. accuracy: of each range of lengths; error instead where the run failed."""
    command = [sys.executable, "-m", "holdfast", "train", "parity", "--mixer", mixer, "--seed", str(seed), *options]
    began = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"mixer": mixer, "seed": seed, "error": f"not done after {limit:.0f} s"}
    row: dict[str, object] = {"mixer": mixer, "seed": seed, "seconds": round(time.perf_counter() - began, 1)}
    if done.returncode != 0:
        return row | {"error": (done.stderr or done.stdout).strip()[-500:]}
    # the line that follows the table has the mean over all lengths past the trained ones
    table, _, _ = done.stdout.partition("extrapolation")
    return row | {"accuracy": {f"{first}-{last}": float(found) for first, last, found in ROW.findall(table)}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--mixers", nargs="+", default=[*NONLINEAR, *LINEAR])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--limit", type=float, default=140.0, help="seconds that one run may take")
    given = parser.parse_args()
    options = ["--device", given.device, "--steps", str(given.steps)]
    runs = [(mixer, seed) for mixer in given.mixers for seed in range(given.seeds)]
    with ThreadPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(lambda run: train(*run, options, given.limit), runs))
    for row in rows:
        print(f"{row['mixer']:8} seed {row['seed']}  {row.get('accuracy', row.get('error'))}")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"task": "parity", "commit": given.commit, "device": given.device, "steps": given.steps, "runs": rows}
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
