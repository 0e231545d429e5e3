"""python -m holdfast.mlx.selftest: are the scans right on this machine, and what do they cost.

Every scan and every gradient is compared with the step-by-step loop in float64 on the CPU, twice, since runs repeat bit
for bit, and where kernels run (Metal, CUDA) once more under mx.compile. There a table of times and peak memory follows,
beside full history. `--path metal`, `cuda` or `mlx` says what to check. MLX compiles a CUDA kernel in some two seconds,
most of them its own headers': `--part 1/8` to `--part 8/8` side by side share them out, and no table follows.

Exit status: 0 where the kernels are right, 1 where anything is wrong, 2 where there are none to check: no Metal and no
CUDA, so that only the plain path was checked, the path that was asked for does not run here, or mlx is not installed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import mlx.core as mx

from . import chassis, delta, gla, legacy, rglru, rotlru, ssd
from .check import BACKENDS
from .memory import history_bytes, kept_bytes

# relative to the largest value of each array; bfloat16 rounds to 2^-9 and float16 to 2^-12, twice where a gradient uses
# a rounded output
LIMITS = {mx.float32: 2e-5, mx.bfloat16: 2**-7, mx.float16: 2**-10}
# of the document that this library's scans come from; the state of SSD is P x N, that of GLA P x P
SHAPE = {"B": 3, "L": 512, "H": 12, "P": 64, "N": 16}
RUNS = 20


@dataclass(frozen=True)
class Trial:
    """One scan at one size."""

    label: str
    scan: chassis.Scan
    function: Callable[..., tuple[mx.array, mx.array]]
    inputs: list[mx.array]
    state: mx.array

    def _loop(self, *given: mx.array) -> tuple[mx.array, mx.array]:
        *inputs, state = given
        if self.scan in (delta.GATED_DELTA, delta.KDA):
            each = inputs[2].shape[2] // inputs[0].shape[2]
            inputs[:2] = (mx.repeat(x, each, axis=2) for x in inputs[:2])
        return self.scan.loop(inputs, state)

    def errors(self, dtype: mx.Dtype, is_compiled: bool, path: str | None = None) -> list[float]:
        """Of y, the final state and each gradient; inf for what differs between two runs."""
        inputs = [x.astype(dtype) for x in self.inputs]
        keys = mx.random.split(mx.random.key(0))
        weights = [mx.random.normal(inputs[self.scan.value].shape, key=keys[0]).astype(dtype)]
        weights.append(mx.random.normal(self.state.shape, key=keys[1]))
        with mx.stream(mx.cpu):
            wide, wide_weights = ([x.astype(mx.float64) for x in xs] for xs in ((*inputs, self.state), weights))
            exact = values_and_grads(self._loop, wide_weights)(*wide)
            mx.eval(exact)
        ours = values_and_grads(lambda *xs: self.function(*xs[:-1], initial_state=xs[-1], backend=path), weights)
        ways = [ours, mx.compile(ours)] if is_compiled else [ours]
        runs = [way(*inputs, self.state) for way in ways for _ in range(2)]
        errors = [relative_error(x, e) for found in runs for x, e in zip(found, exact, strict=True)]
        repeats = all(mx.array_equal(x, y) for x, y in zip(*runs[:2], strict=True))
        return errors if repeats else [float("inf")]


def values_and_grads(function: Callable, weights: list[mx.array]) -> Callable[..., list[mx.array]]:
    """(*inputs, state) -> y, the final state and every gradient of the sum of weights * both."""

    def loss(*xs):
        found = function(*xs)
        return sum((w * x).sum() for w, x in zip(weights, found, strict=True)), found

    def run(*given):
        (_, values), grads = mx.value_and_grad(loss, argnums=list(range(len(given))))(*given)
        return [*values, *grads]

    return run


def relative_error(found: mx.array, exact: mx.array) -> float:
    """The largest difference over the largest value; inf for what is not finite."""
    mx.eval(found)
    with mx.stream(mx.cpu):
        difference = mx.abs(found.astype(mx.float64) - exact).max().item()
        error = difference / max(mx.abs(exact).max().item(), 1e-30)
    return error if error == error else float("inf")


def trials() -> Iterator[Trial]:
    """Sizes with remainders, and those of models: any tile, several segments."""
    normal, uniform = mx.random.normal, mx.random.uniform
    for B, L, D in ((2, 37, 45), (1, 70, 256)):
        inputs = [uniform(-1.1, 1.0, (B, L, D)), normal((B, L, D))]
        yield Trial(f"rglru D={D}", rglru.SCAN, rglru.rglru_scan_with_state, inputs, normal((B, D)))
        theta = uniform(-3, 3, (B, L, D))
        inputs = [uniform(-1, 1, (B, L, D)), mx.cos(theta), mx.sin(theta), normal((B, L, 2 * D))]
        yield Trial(f"rotlru D={2 * D}", rotlru.SCAN, rotlru.rotlru_scan_with_state, inputs, normal((B, 2 * D)))
    for B, L, H, K, V in ((2, 37, 2, 5, 7), (1, 70, 2, 64, 64), (1, 40, 1, 130, 70)):
        q, k, v = normal((B, L, H, K)), normal((B, L, H, K)), normal((B, L, H, V))
        for name, gates in (("a gate a head", uniform(-1, 1, (B, L, H))), ("a key", uniform(-1, 1, (B, L, H, K)))):
            label = f"gla K={K} V={V}, {name}"
            yield Trial(label, gla.SCAN, gla.gla_scan_with_state, [q, k, v, gates], normal((B, H, K, V)))
    for B, L, H, G, K, V in ((2, 37, 4, 2, 5, 7), (1, 70, 2, 1, 64, 64)):
        q, k, v, beta = normal((B, L, G, K)), normal((B, L, G, K)), normal((B, L, H, V)), uniform(0, 1, (B, L, H))
        # keys of length one, as in models: longer ones make a state that grows without bound
        k, state = k / mx.linalg.norm(k, axis=-1, keepdims=True), normal((B, H, K, V))
        inputs = [q, k, v, uniform(-1, 1, (B, L, H)), beta]
        yield Trial(f"gated delta K={K} G={G}", delta.GATED_DELTA, delta.gated_delta_scan_with_state, inputs, state)
        inputs = [q, k, v, uniform(-1, 1, (B, L, H, K)), beta]
        yield Trial(f"kda K={K} G={G}", delta.KDA, delta.kda_scan_with_state, inputs, state)
    for B, L, H, G, P, N in ((2, 37, 4, 2, 7, 5), (1, 70, 2, 2, 64, 16), (1, 40, 2, 1, 70, 128)):
        inputs = [normal((B, L, H, P)), uniform(0.01, 1, (B, L, H)), normal((B, L, G, N)), normal((B, L, G, N))]
        inputs.append(-mx.exp(normal((H, N))))
        yield Trial(f"ssd P={P} N={N} G={G}", ssd.SCAN, ssd.ssd_scan_with_state, inputs, normal((B, H, P, N)))


def check(is_compiled: bool, path: str | None = None, part: int = 0, parts: int = 1) -> bool:
    """Prints a line for each dtype and trial; whether all are within the limits.

    is_compiled: under mx.compile too. part of parts: of every so many trials, one.
    """
    is_right = True
    for dtype, limit in LIMITS.items():
        for trial in islice(trials(), part, None, parts):
            worst = max(trial.errors(dtype, is_compiled, path))
            is_right &= worst <= limit
            verdict = "right" if worst <= limit else f"WRONG, limit {limit:.1e}"
            name = str(dtype).removeprefix("mlx.core.")
            print(f"  {trial.label:28} {name:9} largest error {worst:.1e}  {verdict}", flush=True)
    return is_right


def measure(B: int, L: int, H: int, P: int, N: int, runs: int = RUNS) -> None:
    """Prints time and peak memory of the scans beside their full-history forms, in bfloat16."""
    print(
        f"\nB={B} L={L} H={H} P={P} N={N}, bfloat16, median of {runs}; peak memory with inputs, outputs and gradients"
    )
    print(f"  {'':24} {'fwd ms':>8} {'fwd+bwd ms':>11} {'peak MB':>8}")
    for label, function, inputs in _costs(B, L, H, P, N):
        inputs = [x.astype(mx.bfloat16) for x in inputs]
        mx.eval(inputs)
        backward = mx.grad(lambda *xs, f=function: f(*xs).astype(mx.float32).sum(), list(range(len(inputs))))
        forward_ms, _ = _cost(lambda f=function, xs=inputs: f(*xs), runs)
        both_ms, peak = _cost(lambda f=backward, xs=inputs: f(*xs), runs)
        print(f"  {label:24} {forward_ms:8.2f} {both_ms:11.2f} {peak / 1e6:8.0f}")


def _costs(B: int, L: int, H: int, P: int, N: int) -> Iterator[tuple[str, Callable, list[mx.array]]]:
    normal = mx.random.normal
    u, steps = normal((B, L, H, P)), mx.random.uniform(0.01, 0.1, (B, L, H))
    B_in, C_in, A = normal((B, L, H, N)), normal((B, L, H, N)), -mx.exp(normal((H, N)))
    flat = [u.reshape(B, L, H * P), mx.repeat(steps, P, axis=2), B_in[:, :, 0], C_in[:, :, 0], mx.repeat(A, P, axis=0)]
    yield "SSD, full history", legacy.selective_scan_metal, flat
    yield "SSD", ssd.ssd_scan, [u, steps, B_in, C_in, A]
    qkv = [normal((B, L, H, P)) * P**-0.5, normal((B, L, H, P)), normal((B, L, H, P))]
    gates = mx.sigmoid(normal((B, L, H)) + 3)
    yield "GLA, full history", legacy.gla_scan_metal, [*qkv, gates]
    yield "GLA", gla.gla_scan, [*qkv, gates]
    yield "GLA, a gate a key", gla.gla_scan, [*qkv, mx.sigmoid(normal((B, L, H, P)) + 3)]
    a, x = mx.sigmoid(normal((B, L, 2 * H * P)) + 3), normal((B, L, 2 * H * P))
    key = qkv[1] / mx.linalg.norm(qkv[1], axis=-1, keepdims=True)
    beta = mx.sigmoid(normal((B, L, H)))
    yield "gated delta rule", delta.gated_delta_scan, [qkv[0], key, qkv[2], gates, beta]
    yield "KDA", delta.kda_scan, [qkv[0], key, qkv[2], mx.sigmoid(normal((B, L, H, P)) + 3), beta]
    yield "RG-LRU", rglru.rglru_scan, [a, x]
    half, theta = a[..., : H * P], mx.random.uniform(0, 3, (B, L, H * P))
    yield "rotational LRU", rotlru.rotlru_scan, [half, mx.cos(theta), mx.sin(theta), x]


def _cost(run: Callable, runs: int) -> tuple[float, int]:
    """Milliseconds, the median of runs, and the peak of mlx's memory over one of them, bytes."""
    mx.eval(run())
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    mx.eval(run())
    peak = mx.get_peak_memory()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        mx.eval(run())
        mx.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * sorted(times)[len(times) // 2], peak


def print_formula(B: int, L: int, H: int, P: int, N: int) -> None:
    print(f"\nStates kept for the backward pass at B={B} L={L} H={H}, computed:")
    for label, K in ((f"SSD {P} x {N}", N), (f"GLA {P} x {P}", P)):
        kept, history = kept_bytes(B, L, H, K, P), history_bytes(B, L, H, K, P)
        ratio = f"{history / kept:.1f} times as much"
        print(f"  {label:12} {kept / 1e6:7.1f} MB; full history {history / 1e6:7.1f} MB, {ratio}")


def _part(text: str) -> tuple[int, int]:
    """'2/8' -> (1, 8)."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N; got {text!r}")
    return int(part) - 1, int(parts)


NAMES = {"metal": "the Metal kernels", "cuda": "the kernels by MLX's CUDA back end"}


def main(arguments: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(prog="python -m holdfast.mlx.selftest", description="Checks the scans.")
    parser.add_argument("--path", choices=BACKENDS, help="what to check; by default the kernels where they run")
    parser.add_argument("--part", type=_part, default=(0, 1), metavar="I/N", help="every N-th trial from the I-th on")
    asked = parser.parse_args(arguments)
    part, parts = asked.part
    try:
        path = chassis.choose_path(asked.path)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    has_kernels = path != "mlx"
    why = f"the plain path ({chassis.metal_missing()}; {chassis.cuda_missing()})"
    print(f"mlx {mx.__version__}: {NAMES.get(path, why)}")
    is_right = check(has_kernels, path, part, parts)
    if parts == 1:
        print_formula(**SHAPE)
        if has_kernels:
            measure(**SHAPE)
    if not is_right:
        print("\nSomething is wrong; see above.")
        return 1
    if not has_kernels:
        print("\nThe plain path is right. No kernel was checked: that takes a Mac with Apple silicon, or CUDA.")
        return 2
    print(f"\n{NAMES[path].replace('the', 'The', 1)} are right.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
