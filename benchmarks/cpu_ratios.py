"""What the PyTorch backends must keep to on a CPU: speed against the step loop and torch.nn's layers, and memory.

    python benchmarks/cpu_ratios.py

prints three tables and writes them, with versions and commit, to benchmarks/results/cpu/cpu_ratios.json.
Times are the best of several runs in one process, float32; keep the machine otherwise idle.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from holdfast import nn
from holdfast.ops.families import op_of
from holdfast.ops.parity import leaves, with_grad
from holdfast.recurrences import RECURRENCES, Draw, Sizes, oracle

MATRIX = [name for name, recurrence in RECURRENCES.items() if recurrence.family == "matrix"]
RESULTS = Path(__file__).parent / "results" / "cpu" / "cpu_ratios.json"


def best_ms(run: Callable[[], object], repeats: int) -> float:
    """The fastest of some runs, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def forward_and_backward(run: Callable[[], object]) -> Callable[[], None]:
    def both() -> None:
        sum(x.sum() for x in leaves(run())).backward()

    return both


def against_the_step_loop() -> list[dict]:
    """Matrix ops at B1 T4096 H4 K64 V64 against the plain loop under autograd."""
    rows = []
    for name in MATRIX:
        recurrence = RECURRENCES[name]
        arguments = with_grad(recurrence.example(Draw(), Sizes(B=1, T=4096, H=4, K=64, V=64)))
        op, loop = (lambda a=arguments, r=recurrence: op_of(r)(**a)), (lambda a=arguments, r=recurrence: oracle(r, a))
        with torch.no_grad():
            row = {"op": name, "fwd ms": best_ms(op, 5), "loop fwd ms": best_ms(loop, 2)}
        row |= {"fwd+bwd ms": best_ms(forward_and_backward(op), 5)}
        row |= {"loop fwd+bwd ms": best_ms(forward_and_backward(loop), 1)}
        row |= {"fwd x": row["loop fwd ms"] / row["fwd ms"], "fwd+bwd x": row["loop fwd+bwd ms"] / row["fwd+bwd ms"]}
        rows.append(row)
    return rows


def against_torch_nn() -> list[dict]:
    """nn.LSTM and nn.GRU against torch.nn's, and the ops, which take the input product as given."""
    rows = []
    for kind, B, D in (("LSTM", 4, 64), ("LSTM", 16, 256), ("GRU", 4, 64), ("GRU", 16, 256)):
        x = torch.randn(B, 256, D, requires_grad=True)
        theirs, ours = getattr(torch.nn, kind)(D, D, batch_first=True), getattr(nn, kind)(D, D, batch_first=True)
        ours.load_state_dict(theirs.state_dict())
        recurrence = RECURRENCES[kind.lower()]
        arguments = with_grad(recurrence.example(Draw(), Sizes(B=B, T=256, H=1, D=D)))
        run = {
            f"torch.nn.{kind}": lambda layer=theirs, x=x: layer(x)[0],
            f"holdfast.nn.{kind}": lambda layer=ours, x=x: layer(x)[0],
            f"holdfast.{kind.lower()}": lambda r=recurrence, a=arguments: op_of(r)(**a)[0],
        }
        times = {name: best_ms(forward_and_backward(layer), 9) for name, layer in run.items()}
        first = times[f"torch.nn.{kind}"]
        rows += [
            {"layer": name, "B": B, "D": D, "fwd+bwd ms": ms, "of torch.nn's": ms / first} for name, ms in times.items()
        ]
    return rows


def peak_memory(name: str, length: int) -> dict:
    """Peak extra resident memory of one forward + backward, against the bytes of the inputs; run in a fresh process."""

    def status(field: str) -> int:
        line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
        return int(line.split()[1]) * 1024

    recurrence = RECURRENCES[name]

    def call(T: int) -> None:
        arguments = with_grad(recurrence.example(Draw(), Sizes(B=1, T=T, H=4, K=64, V=64)))
        inputs = leaves(arguments)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = status("VmRSS")
        forward_and_backward(lambda: op_of(recurrence)(**arguments))()
        result.update(extra=status("VmHWM") - before, inputs=sum(x.numel() * x.element_size() for x in inputs))

    result: dict = {}
    call(64)  # libraries and thread pools take memory once
    call(length)
    return {"op": name, "T": length, "inputs MiB": result["inputs"] / 2**20, "extra MiB": result["extra"] / 2**20} | {
        "extra / inputs": result["extra"] / result["inputs"]
    }


def memory_in_fresh_processes() -> list[dict]:
    rows = []
    for name in MATRIX:
        for length in (4096, 8192, 16384):
            command = [sys.executable, __file__, "--memory", name, str(length)]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return rows


def show(title: str, rows: list[dict]) -> None:
    print(f"\n{title}\n" + "  ".join(f"{key:>18}" for key in rows[0]))
    for row in rows:
        print("  ".join(f"{value:18.2f}" if isinstance(value, float) else f"{value!s:>18}" for value in row.values()))


def main() -> None:
    if sys.argv[1:2] == ["--memory"]:
        print(json.dumps(peak_memory(sys.argv[2], int(sys.argv[3]))))
        return
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True)
    report = {
        "command": "python benchmarks/cpu_ratios.py",
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    report["matrix ops against their step loop"] = against_the_step_loop()
    show("matrix ops against their step loop, B1 T4096 H4 K64 V64", report["matrix ops against their step loop"])
    report["layers against torch.nn's"] = against_torch_nn()
    show("layers against torch.nn's, T256", report["layers against torch.nn's"])
    report["peak extra memory of forward + backward"] = memory_in_fresh_processes()
    show("peak extra memory, B1 H4 K64 V64", report["peak extra memory of forward + backward"])
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}")


if __name__ == "__main__":
    main()
