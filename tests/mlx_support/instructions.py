"""A proxy for the work of a kernel without a GPU: SASS instructions a token and head, of the loops over tokens.

`cd tests && python -m mlx_support.instructions [FOLDER]` prints those of holdfast.mlx at the document's shape, and with
the folder of mlx-recurrence's source distribution (`mlx_support/peer.py` gets it) those of its kernels and the ratios.

Metal sources are compiled by NVRTC for sm_90 as CUDA, loops over the elements that a thread holds unrolled. Each
instruction of a loop over tokens counts once, in all sweeps of a backward pass, times the simdgroups of a head.
"""

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx

import holdfast.mlx as hm
from holdfast.mlx import chassis, kernel

from .cpu import Launch
from .cuda_sources import Cuda

SHAPE = {"B": 3, "L": 512, "H": 12, "D": 64, "N": 16}


def cases():
    normal, (B, L, H, D, N) = mx.random.normal, SHAPE.values()
    x, gate = normal((B, L, H, D)), mx.sigmoid(normal((B, L, H)))
    flat, half = x.reshape(B, L, H * D), normal((B, L, H * D // 2))
    rows = normal((B, L, H, N))
    return {
        "rglru": [mx.sigmoid(flat), flat],
        "rotlru": [half, half, half, flat],
        "gla": [x, x, x, gate],
        "ssd": [x, gate, rows, rows, normal((H, N))],
    }


Loop = tuple[int, int]


def loops_of(sass: str) -> tuple[list[Loop], list[int], list[tuple[int, str]]]:
    """Loops from a backward branch's target to it, the places of all instructions, and places and names of markers."""
    places, markers, labels, branches, at = [], [], {}, [], 0
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_\S+):", line):
            labels[label[1]] = at
        elif code := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*);", line):
            place = int(code[1], 16)
            at = place + 16
            if mark := re.search(r"PMTRIG (\S+)", code[2]):
                markers.append((place, mark[1]))
            elif "NOP" not in code[2]:
                places.append(place)
            if target := re.search(r"\bBRA\b.*`\((\.L_\S+?)\)", code[2]):
                branches.append((place, target[1]))
    ends: dict[int, int] = {}
    for place, label in branches:
        # a branch to itself ends the code
        if labels[label] < place:
            ends[labels[label]] = max(place, ends.get(labels[label], 0))
    return sorted(ends.items()), places, markers


def a_token(sass: str, ahead: int) -> float:
    """Instructions for each token of the loops that hold markers; of one loop where a marker is of `ahead` tokens."""
    loops, places, markers = loops_of(sass)

    def size(loop: Loop) -> int:
        return sum(loop[0] <= place <= loop[1] for place in places)

    marked: dict[Loop, list[str]] = {}
    for place, name in markers:
        # a marker in no loop is of a token that the compiler took out of one
        if around := [x for x in loops if x[0] <= place <= x[1]]:
            marked.setdefault(min(around, key=size), []).append(name)
    found = []
    for loop, names in marked.items():
        if not any(loop[0] <= other[0] and other[1] <= loop[1] and other != loop for other in marked):
            # an unrolled loop has as many of each as tokens
            found.append(size(loop) / max(map(names.count, names)))
    # what an unrolled loop leaves over is a loop of its own
    return min(found) / ahead if ahead else sum(found)


def sass_of(source: str) -> str:
    import triton
    from cuda.core import Program, ProgramOptions

    # an instruction that does nothing but show where a loop over tokens is, and which
    marks = iter(range(16))
    source = re.sub(
        r"for \((?:int (?:t|tl) = |; (?:t \+|to >) AHEAD)[^{}]*?\) \{",
        lambda m: f'{m[0]} asm volatile("pmevent {next(marks)};");',
        source,
    )
    source = re.sub(r"(for \(int [a-su-z] = 0; \w+ < \d+; )", r"#pragma unroll\n\1", source)
    options = ProgramOptions(std="c++17", arch="sm_90")
    cubin = Program(source, "c++", options).compile("cubin", logs=io.StringIO()).code
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True).stdout


def count(launch: Launch) -> float:
    """Instructions a token and head: those of a simdgroup, times the simdgroups of a head."""
    ahead = re.search(r"constexpr int AHEAD = (\d+);", launch.source)
    simdgroups = -(-launch.grid[0] * launch.grid[1] * launch.grid[2] // 32)
    return a_token(sass_of(launch.source), int(ahead[1]) if ahead else 0) * simdgroups / (SHAPE["B"] * SHAPE["H"])


def gradient(scan, inputs) -> None:
    mx.grad(lambda *xs: scan(*xs).sum(), list(range(len(inputs))))(*inputs)


def ours() -> dict[str, float]:
    stand_in = Cuda()
    mx.fast.cuda_kernel = stand_in.cuda_kernel
    chassis.cuda_missing = lambda: None
    kernel.has_cuda = lambda: True
    found = {}
    for name, inputs in cases().items():
        gradient(getattr(hm, f"{name}_scan"), inputs)
        for launch in stand_in.launches:
            found[launch.kernel] = count(launch)
        stand_in.launches.clear()
    return found


def of_peer(folder: Path) -> dict[str, float]:
    """Its kernels write every size into their source, and have no template."""
    sys.path.insert(0, str(folder))
    import mlx_recurrence

    stand_in = Cuda()
    names, positions = ((kernel.CUDA / file).read_text() for file in ("metal_names.cuh", "positions.cuh"))

    def metal_kernel(name, input_names, output_names, source, header=""):
        plain = re.sub(r"\b(device|constant|thread) ", "", source)
        uint = "typedef unsigned int uint;\n"
        return stand_in.cuda_kernel(f"holdfast_{name}_x", input_names, output_names, positions + plain, names + uint)

    mx.fast.metal_kernel = metal_kernel
    found = {}
    for name, inputs in cases().items():
        gradient(getattr(mlx_recurrence, f"{name}_scan"), inputs)
        for launch, way in zip(stand_in.launches, ("forward", "backward"), strict=True):
            found[f"{name}_{way}"] = count(launch)
        stand_in.launches.clear()
    return found


def main() -> None:
    peers = of_peer(Path(sys.argv[1])) if len(sys.argv) > 1 else {}
    for name, instructions in ours().items():
        beside = f", mlx-recurrence {peers[name]:7.0f}, ratio {instructions / peers[name]:.2f}" if peers else ""
        print(f"{name:16} {instructions:7.0f} instructions a token and head{beside}")


if __name__ == "__main__":
    main()
