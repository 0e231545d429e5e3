"""Times of vector decay's Triton gradients by tiles: `PYTHONPATH=src python benchmarks/gradient_tiles.py`, on a GPU.

One launch of gla_chunk_grads, B4 T4096 K = V = 128, bfloat16 with 32 heads and float32 with 8; results are held against
those of the first tiles. A line each: columns of keys, warps, parts of a chunk's tokens, ms.
"""

from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from holdfast.cli.bench.clock import device_times
from holdfast.kernels.matrix.vector_decay.triton import launch as launches
from holdfast.planner import Plan
from holdfast.recurrences.definition import MatrixCall

BATCH, LENGTH, WIDTH = 4, 4096, 128
HEADS = {torch.bfloat16: 32, torch.float32: 8}
TILES = ((64, 4, 4), (32, 4, 8), (32, 4, 4), (32, 8, 8), (16, 4, 4))


def main() -> None:
    torch.manual_seed(0)
    real = launches.launch
    for dtype, heads in HEADS.items():
        q, k, v, do = torch.randn(4, BATCH, LENGTH, heads, WIDTH, device="cuda").to(dtype).unbind()
        g = F.logsigmoid(torch.randn(q.shape, device="cuda") + 3)
        call = MatrixCall(q, F.normalize(k, dim=-1), v, g, None, None, None, scale=WIDTH**-0.5)
        passes = launches.Passes.of(Plan("triton", ()), call, None)
        states, dstates = torch.randn(2, passes.slots, heads, WIDTH, WIDTH, device="cuda").to(dtype).unbind()
        first: list[torch.Tensor] = []
        for columns, warps, parts in TILES:
            found = [torch.empty_like(q), torch.empty_like(k), torch.empty_like(g)]

            def tiled(kernel: Any, grid: Any, tensors: Any, numbers: Any, constants: Any, _: int) -> None:
                constants = constants | {"BLOCK_K": columns, "PARTS": parts}  # noqa: B023
                blocks = (passes.slots * heads * (WIDTH // columns),)  # noqa: B023
                real(kernel, blocks, tensors, numbers, constants, warps)  # noqa: B023

            def run() -> None:
                passes.run_grads(do, states, dstates, launches.ChunkGrads(*found, None))  # noqa: B023

            with patch.object(launches, "launch", tiled):
                times, _, _ = device_times(run, torch.device("cuda"))
            first = first or [x.clone() for x in found]
            pairs = [(x.float(), y.float()) for x, y in zip(found, first, strict=True)]
            errors = [float((x - y).norm() / y.norm()) for x, y in pairs]
            print(f"{dtype} {columns} {warps} {parts}: {times.median_ms:.3f} ms, off by {max(errors):.0e}")


if __name__ == "__main__":
    main()
