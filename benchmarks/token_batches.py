"""How long `holdfast train lm --data` takes to lay out a step's tokens, beside a step at so many tokens a second.

holdfast data prepare --out tokens/stdlib
PYTHONPATH=src python benchmarks/token_batches.py tokens/stdlib
"""

import argparse
import statistics
import time
from pathlib import Path

from holdfast.cli.text import training_batch
from holdfast.cli.tokens import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path, help="a folder that `holdfast data prepare` made")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=500_000, help="tokens a second")
    given = parser.parse_args()
    text, times = load(given.tokens), []
    for step in range(200):
        begun = time.perf_counter()
        training_batch(text, 0, step, given.batch, given.length)
        times.append(time.perf_counter() - begun)
    took, whole = statistics.median(times), given.batch * given.length / given.rate
    print(f"{took * 1e3:.3f} ms a batch of {given.batch} x {given.length}, {took / whole:.2%} of a step")


if __name__ == "__main__":
    main()
