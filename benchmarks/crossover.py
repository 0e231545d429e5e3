"""From how many chunks on inter_chunk_scan's kernel is faster than a loop over chunks in PyTorch, on an NVIDIA GPU.

    PYTHONPATH=src python benchmarks/crossover.py

Times in milliseconds, bfloat16, medians with the L2 cache flushed: between device events, which hold what the host
takes to launch where that is longer, and of CUDA-graph replays, which do not.
"""

import torch

from holdfast.cli.bench import clock
from holdfast.cli.bench.draw import DeviceDraw
from holdfast.ops import inter_chunk_scan

CHUNKS = (1, 2, 4, 8, 16, 64)
SHAPES = (
    {"B": 4, "H": 16, "K": 64, "V": 64},
    {"B": 1, "H": 4, "K": 16, "V": 16},
    {"B": 8, "H": 16, "K": 128, "V": 128},
)
METHODS: tuple[clock.Method, ...] = ("events", "graph")


def milliseconds(G: int, sizes: dict[str, int], backend: str | None, method: clock.Method) -> float:
    B, H, K, V = sizes.values()
    draw = DeviceDraw(0, torch.bfloat16, "cuda")
    states, decay = draw.normal(B, G, H, K, V), draw.log_decay(B, G, H)
    times = clock.time_runs(lambda: inter_chunk_scan(states, decay, backend=backend), states.device, method)
    return times.median_ms


def main() -> None:
    clock.SECONDS = 0.02
    for sizes in SHAPES:
        print(" ".join(f"{axis}{size}" for axis, size in sizes.items()))
        for method in METHODS:
            faster = []
            for G in CHUNKS:
                kernel, loop = (milliseconds(G, sizes, backend, method) for backend in (None, "chunked"))
                faster += [G] if kernel < loop else []
                print(f"  {method:6} G {G:3d}: kernel {kernel:.4f}, loop {loop:.4f}", flush=True)
            print(f"  {method:6} the kernel is faster at G of {', '.join(map(str, faster)) or 'none'}")


if __name__ == "__main__":
    main()
