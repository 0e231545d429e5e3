"""Whether a change left the README's rows as fast as they were: the same calls by two source trees, in turns.

    git archive BEFORE src | tar -x -C /tmp/before
    python benchmarks/two_trees.py --before /tmp/before/src --after src --out times.json

Each turn is a process of its own. Times are medians in milliseconds, of CUDA-graph replays with the L2 cache
overwritten; "host" is what both passes at B2 T512 cost the host, beside PyTorch's scaled_dot_product_attention. On a
CPU sizes are small, and the times say nothing.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

A = {"B": 4, "T": 4096, "H": 32, "Hq": 32, "K": 128, "V": 128}
ROWS: tuple[tuple[str, dict[str, int], str, dict[str, Any]], ...] = (
    ("simple_gla", A, "bfloat16", {}),
    ("gla", A, "bfloat16", {}),
    ("gated_delta_rule", A, "bfloat16", {}),
    ("mlstm", A, "bfloat16", {"gating": "sigmoid"}),
    ("mlstm", A, "bfloat16", {}),
    ("ssd", A | {"Hq": 1, "V": 64}, "bfloat16", {}),
    ("simple_gla", A | {"B": 1, "T": 32768, "H": 16, "Hq": 16}, "bfloat16", {}),
    ("simple_gla", {"B": 8, "T": 2048, "H": 16, "Hq": 16, "K": 64, "V": 64}, "bfloat16", {}),
    ("lstm", {"B": 16, "T": 1024, "H": 12, "D": 64}, "bfloat16", {}),
    ("lstm", {"B": 16, "T": 1024, "H": 1, "D": 768}, "float16", {}),
    ("slstm", {"B": 16, "T": 1024, "H": 12, "D": 64}, "bfloat16", {}),
    ("rglru", {"B": 8, "T": 4096, "H": 1, "D": 2048}, "bfloat16", {}),
    ("rotlru", {"B": 8, "T": 4096, "H": 1, "D": 2048}, "bfloat16", {}),
)
SMALL = {"B": 2, "T": 64, "H": 2, "Hq": 2, "K": 16, "V": 16, "D": 16}
HOST = {"B": 2, "T": 512, "H": 4, "Hq": 4}


def measure(device: torch.device, ops: list[str] | None = None) -> list[dict[str, Any]]:
    """The rows, all or of some ops, by the tree that Python imports; small on a CPU."""
    from holdfast.cli.bench import clock
    from holdfast.cli.bench.measure import one_pass
    from holdfast.cli.bench.workload import workload

    on_gpu, found = device.type == "cuda", []
    if not on_gpu:
        # enough to see that it runs
        clock.SECONDS = 0.01
    for op, full, dtype, options in ROWS:
        if ops and op not in ops:
            continue
        sizes = full if on_gpu else {name: min(n, SMALL[name]) for name, n in full.items()}
        few = {name: min(n, HOST.get(name, n)) for name, n in sizes.items()}
        work = workload(op)

        def run(shape: dict[str, int], grad: bool, work: Any = work, options: Any = options, dtype: str = dtype) -> Any:
            inputs = work.example(shape, getattr(torch, dtype), device, 0, False)
            call = one_pass(lambda a: work.call(a, options, None), inputs, grad=grad)
            for _ in range(3):
                call()
            return call

        row: dict[str, Any] = {"op": op, "sizes": sizes, "dtype": dtype, "options": options}
        for name, grad in (("forward", False), ("both", True)):
            row[name] = clock.time_runs(run(sizes, grad), device, "graph" if on_gpu else "events").median_ms
        row["host"] = clock.time_calls(run(few, True), device).median_ms
        found.append(row)
    q = torch.randn(2, 4, HOST["T"] if on_gpu else 16, 128, device=device, dtype=torch.bfloat16, requires_grad=True)

    def attention() -> None:
        o = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        torch.autograd.grad(o, q, torch.ones_like(o))

    attention()
    found.append({"op": "scaled_dot_product_attention", "host": clock.time_calls(attention, device).median_ms})
    return found


def _turn(source: Path, device: str, ops: list[str] | None) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--device", device, "--one", *(["--op", *ops] if ops else [])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(source.resolve()), os.environ.get("PYTHONPATH", "")])
    }
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(said.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="folder of the first tree's packages")
    parser.add_argument("--after", type=Path, default=Path("src"), help="of the second's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--op", nargs="+", choices=sorted({op for op, *_ in ROWS}), help="those alone")
    parser.add_argument("--turns", type=int, default=2, help="of each tree")
    parser.add_argument("--commits", default="", help="of both trees, for the record")
    parser.add_argument("--out", type=Path, help="where to write")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(torch.device(given.device), given.op)))
        return
    if given.before is None or given.out is None:
        parser.error("expected --before and --out")
    turns = [
        (name, _turn(getattr(given, name), given.device, given.op))
        for _ in range(given.turns)
        for name in ("before", "after")
    ]
    on_gpu = given.device.startswith("cuda")
    record: dict[str, Any] = {"device": torch.cuda.get_device_name() if on_gpu else "cpu"}
    record |= {"commits": given.commits, "versions": {"torch": torch.__version__}, "rows": []}
    for rows in zip(*(rows for _, rows in turns), strict=True):
        row = {name: rows[0][name] for name in ("op", "sizes", "dtype", "options") if name in rows[0]}
        for name in ("forward", "both", "host"):
            if name in rows[0]:
                row[name] = {
                    tree: [r[name] for (t, _), r in zip(turns, rows, strict=True) if t == tree]
                    for tree in ("before", "after")
                }
        record["rows"].append(row)
        best = {
            n: min(x["after"]) / min(x["before"]) - 1 for n, x in row.items() if isinstance(x, dict) and "after" in x
        }
        print(row["op"], row.get("sizes", ""), *(f"{name} {change:+.1%}" for name, change in best.items()))
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
