"""Every kernel of the front end as mlx generates it, and the snapshot of their signatures.

`cd tests && python -m mlx_support.kernels` writes the snapshot anew, after a change that is meant.
"""

from pathlib import Path

import mlx.core as mx

import holdfast.mlx as hm
from holdfast.mlx import chassis

from .cases import SCANS, normal
from .cpu import Metal
from .cuda_sources import Cuda
from .msl import signature_text

SNAPSHOT = Path(__file__).with_name("signatures.txt")

# more than 8 elements in every array: mlx keeps smaller ones in Metal's constant address space
LARGE = {name: {} for name in SCANS}
SMALL = {
    "rglru": {"B": 1, "L": 1, "D": 1},
    "rotlru": {"B": 1, "L": 1, "P": 1},
    "gla": {"B": 1, "L": 1, "H": 1, "K": 1, "V": 1},
    "ssd": {"B": 1, "L": 1, "H": 1, "G": 1, "P": 1, "N": 1},
    "gated_delta": {"B": 1, "L": 1, "H": 1, "G": 1, "K": 1, "V": 1},
    "kda": {"B": 1, "L": 1, "H": 1, "G": 1, "K": 1, "V": 1},
}


def sources(metal: Metal | Cuda) -> dict[str, str]:
    """Generated sources by label: each kernel in float32, in bfloat16, on arrays of one element, and more.

    metal stands in for mx.fast.metal_kernel, or for mx.fast.cuda_kernel, and runs nothing.
    """
    assert isinstance(metal, Cuda) or not metal.runs
    found = {}

    def note(suffix):
        found.update({f"{launch.kernel}{suffix}": launch.source for launch in metal.launches})
        metal.launches.clear()

    for suffix, sizes, dtype in (("", LARGE, mx.float32), ("-bf16", LARGE, mx.bfloat16), ("-small", SMALL, mx.float32)):
        for name, case in ((name, SCANS[name](**sizes[name]).cast(dtype)) for name in SCANS):
            case.run()
            if name == "gla":
                q, k, v, _ = case.inputs
                _gradient(hm.gla_scan_metal, q, k, v, q[..., 0])
            if name == "ssd":
                u, _, B, C, A = case.inputs
                _gradient(hm.selective_scan_metal, u[:, :, 0], u[:, :, 0], B[:, :, 0], C[:, :, 0], _rates(u, A))
            note(f"-vector{suffix}" if name == "kda" else suffix)
    SCANS["gla"](vector=True).run()
    note("-vector")
    # the tile of a model's head: the most registers
    SCANS["gla"](K=64, V=64).run()
    SCANS["ssd"](P=64, N=16).run()
    SCANS["kda"](K=64, V=64).run()
    note("-model")
    return found


def _rates(u: mx.array, A: mx.array) -> mx.array:
    return normal((u.shape[-1], A.shape[-1])).astype(A.dtype)


def _gradient(scan, *inputs):
    mx.grad(lambda *xs: scan(*xs).sum(), argnums=list(range(len(inputs))))(*inputs)


def snapshot(found: dict[str, str]) -> str:
    return "\n".join(f"{label}\n\n{signature_text(text)}" for label, text in sorted(found.items()))


def write() -> None:
    metal = Metal(runs=False)
    mx.fast.metal_kernel = metal.metal_kernel
    chassis.metal_missing = lambda: None
    SNAPSHOT.write_text(snapshot(sources(metal)))


if __name__ == "__main__":
    write()
