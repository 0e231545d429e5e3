"""Times the MLX scans on the path that runs here, beside the PyTorch ops where torch has a GPU.

    PYTHONPATH=src python benchmarks/mlx_scans.py --out results.json

Each time is the median of runs of the whole call, from its arguments to what it returns being there: forward, and the
gradients of all inputs. `--path mlx` takes the plain path, `--shape small` what a CPU does in seconds, `--loop` adds
the loop that steps through the tokens. Errors are those of `python -m holdfast.mlx.selftest`; run it first.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

import holdfast.mlx as hm

SHAPES = {
    "short": {"B": 1, "L": 8, "H": 4, "D": 64, "N": 16},
    "small": {"B": 1, "L": 256, "H": 4, "D": 64, "N": 16},
    "document": {"B": 3, "L": 512, "H": 12, "D": 64, "N": 16},
    "model": {"B": 4, "L": 4096, "H": 16, "D": 64, "N": 64},
}
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
Inputs = list[mx.array]


def cases(B: int, L: int, H: int, D: int, N: int) -> Iterator[tuple[str, Callable, Inputs, str]]:
    """Name, scan, inputs, and the PyTorch op of the same values."""
    normal = mx.random.normal
    a, x = mx.sigmoid(normal((B, L, H * D)) + 3), normal((B, L, H * D))
    yield "rglru", hm.rglru_scan, [a, x], "rglru"
    theta = mx.random.uniform(0, 3, (B, L, H * D // 2))
    yield "rotlru", hm.rotlru_scan, [a[..., : H * D // 2], mx.cos(theta), mx.sin(theta), x], "rotlru"
    q, k, v = normal((B, L, H, D)) * D**-0.5, normal((B, L, H, D)), normal((B, L, H, D))
    yield "gla, a gate a head", hm.gla_scan, [q, k, v, mx.sigmoid(normal((B, L, H)) + 3)], "simple_gla"
    yield "gla, a gate a key", hm.gla_scan, [q, k, v, mx.sigmoid(normal((B, L, H, D)) + 3)], "gla"
    key, beta = k / mx.linalg.norm(k, axis=-1, keepdims=True), mx.sigmoid(normal((B, L, H)))
    gates = mx.sigmoid(normal((B, L, H, D)) + 3)
    yield "gated delta rule", hm.gated_delta_scan, [q, key, v, gates[..., 0], beta], "gated_delta_rule"
    # PyTorch's side has no op of it
    yield "kda", hm.kda_scan, [q, key, v, gates, beta], "kda"
    delta, rates = mx.random.uniform(0.01, 0.1, (B, L, H)), -mx.exp(normal((H, N)))
    yield "ssd", hm.ssd_scan, [v, delta, normal((B, L, H, N)), normal((B, L, H, N)), rates], "ssd"


def median_ms(run: Callable[[], None], runs: int) -> float:
    for _ in range(3 if runs else 1):
        run()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times) if times else 0.0


def of_mlx(scan: Callable, inputs: Inputs, path: str, runs: int) -> dict[str, float]:
    grad = mx.grad(lambda *xs: scan(*xs, backend=path).astype(mx.float32).sum(), list(range(len(inputs))))

    def run(function: Callable) -> None:
        mx.eval(function(*inputs))
        mx.synchronize()

    forward = median_ms(lambda: run(lambda *xs: scan(*xs, backend=path)), runs)
    mx.clear_cache()
    mx.reset_peak_memory()
    both = median_ms(lambda: run(grad), runs)
    return {"forward_ms": forward, "both_ms": both, "peak_mb": mx.get_peak_memory() / 1e6}


def of_loop(op: str, inputs: Inputs, runs: int) -> dict[str, float]:
    """The plain path without its chunked form."""
    name = {"simple_gla": "gla", "gated_delta_rule": "gated_delta"}.get(op, op)
    whole = {"gated_delta": hm.delta.GATED_DELTA, "kda": hm.delta.KDA}.get(name) or getattr(hm, name).SCAN
    scan = replace(whole, chunked=None)
    value = inputs[scan.value]
    state = getattr(hm, f"{name}_scan_with_state")(*inputs)[1]
    zeros = mx.zeros_like(state)
    return of_mlx(
        lambda *xs, backend: scan.run(xs, zeros, value.shape, hm.DEFAULT_SEG, backend)[0], inputs, "mlx", runs
    )


def of_torch(op: str, inputs: Inputs, runs: int) -> dict[str, float] | None:
    """The PyTorch op on the same values; None where torch is missing or has no GPU."""
    try:
        import numpy as np
        import torch
    except ImportError:
        return None
    import holdfast

    if not torch.cuda.is_available() or not hasattr(holdfast, op):
        return None
    dtype = torch.bfloat16 if inputs[0].dtype == mx.bfloat16 else torch.float32
    given = [torch.from_numpy(np.array(x.astype(mx.float32))).cuda().to(dtype) for x in inputs]
    if op == "rotlru":
        a, cs, sn, x = given
        given = [a, torch.atan2(sn.float(), cs.float()).to(dtype), x]
    elif op in ("simple_gla", "gla", "gated_delta_rule"):
        given[3] = given[3].float().log().to(dtype)
    elif op == "ssd":
        u, delta, B, C, rates = given
        given = [u, delta, rates.float(), B, C]
    options = {"scale": 1.0} if op in ("simple_gla", "gla", "gated_delta_rule") else {}
    function = getattr(holdfast, op)
    given = [x.requires_grad_() for x in given]

    def forward() -> None:
        with torch.no_grad():
            function(*given, **options)
        torch.cuda.synchronize()

    def both() -> None:
        torch.autograd.grad(function(*given, **options)[0].float().sum(), given)
        torch.cuda.synchronize()

    return {"forward_ms": median_ms(forward, runs), "both_ms": median_ms(both, runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", choices=("metal", "cuda", "mlx"))
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["document", "model"])
    parser.add_argument("--scan", nargs="+", help="the PyTorch op's name of those to run")
    parser.add_argument("--runs", type=int, default=20, help="0: compile alone")
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    path = hm.choose_path(asked.path)
    rows = []
    for shape in asked.shape:
        for dtype, kind in DTYPES.items():
            for name, scan, inputs, op in cases(**SHAPES[shape]):
                if asked.scan and op not in asked.scan:
                    continue
                inputs = [x.astype(kind) for x in inputs]
                mx.eval(inputs)
                row = {"shape": shape, "dtype": dtype, "scan": name, "mlx": of_mlx(scan, inputs, path, asked.runs)}
                row["torch"] = of_torch(op, inputs, asked.runs)
                row["loop"] = of_loop(op, inputs, 3) if asked.loop else None
                rows.append(row)
                said = [f"{shape:9} {dtype:9} {name:20}"]
                for who in ("mlx", "torch", "loop"):
                    if row[who]:
                        said.append(who + "".join(f" {key} {value:.2f}" for key, value in row[who].items()))
                print("; ".join(said), flush=True)
    if asked.out:
        found = {"mlx": mx.__version__, "path": path, "device": str(mx.device_info()), "rows": rows}
        asked.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
