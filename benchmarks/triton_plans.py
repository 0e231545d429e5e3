"""Times every plan that fits of the GPU scans and of intra_chunk, beside what the planner predicts of it.

    python benchmarks/triton_plans.py            # on an NVIDIA GPU: predicted and measured times, the planner's rank
    python benchmarks/triton_plans.py --list     # anywhere: the plans and predictions for an H200

A time is that of one call in a CUDA graph of several, each on inputs of its own, so that none is found in the cache.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.kernels.common.backend import describe
from holdfast.kernels.diagonal.hopper_inter_chunk_scan import HopperInterChunkScan
from holdfast.kernels.diagonal.hopper_scan import HopperScan
from holdfast.kernels.diagonal.inter_chunk import InterChunkCall
from holdfast.kernels.diagonal.triton_inter_chunk_scan import TritonInterChunkScan
from holdfast.kernels.diagonal.triton_scan import TritonScan
from holdfast.kernels.matrix.hopper_intra_chunk import HopperIntraChunk
from holdfast.kernels.matrix.intra_chunk import IntraChunkCall
from holdfast.kernels.matrix.triton_intra_chunk import TritonIntraChunk
from holdfast.ops.diagonal import ENTRY_STEPS
from holdfast.planner import Candidate, Device, Direction, Problem
from holdfast.planner.models import (
    diagonal_hopper,
    diagonal_scan,
    inter_chunk_hopper,
    inter_chunk_scan,
    intra_chunk,
    intra_chunk_hopper,
)
from holdfast.recurrences import Draw
from holdfast.recurrences.definition import DiagonalCall

CACHE = 256 * 2**20
SCANS, STATES, INSIDE = (
    {backend.name: backend for backend in backends}
    for backends in (
        (TritonScan(), HopperScan()),
        (TritonInterChunkScan(), HopperInterChunkScan()),
        (TritonIntraChunk(), HopperIntraChunk()),
    )
)


@dataclass(frozen=True)
class Case:
    """One pass of one call: what the planner knows of it, its candidates, and how to make and run it."""

    name: str
    problem: Problem
    direction: Direction
    candidates: Callable[[Problem, Device, Direction], Iterator[Candidate]]
    make: Callable[[], Any]
    run: Callable[[Any, Any], Any]

    def plans(self, device: Device) -> list[Candidate]:
        return sorted(self.candidates(self.problem, device, self.direction), key=lambda candidate: candidate.seconds)


def scan(B: int, T: int, D: int, pairs: bool, direction: Direction) -> Case:
    def make() -> Any:
        draw, numbers = Draw(0, torch.bfloat16, "cuda"), D // 2 if pairs else D
        call = DiagonalCall(
            draw.gate(B, T, numbers), draw.normal(B, T, D), draw.normal(B, T, numbers) if pairs else None
        )
        return call, torch.zeros(B * T // ENTRY_STEPS + B, D, device="cuda"), draw.normal(B, T, D)

    def run(plan: Any, made: Any) -> Any:
        call, entries, grad = made
        if direction == "forward":
            return SCANS[plan.backend].forward(plan, call, None, entries)
        return SCANS[plan.backend].backward(plan, call, None, None, grad, None, entries)

    traits = {"complex": pairs, "needs_grad": True}
    problem = Problem.of("rotlru" if pairs else "rglru", "diagonal", "bfloat16", {"B": B, "T": T, "D": D}, traits)
    name = f"{problem.op} B{B} T{T} D{D} {direction}"

    def candidates(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
        yield from diagonal_scan.every(problem, device, direction)
        if SCANS["hopper"].reject(problem, device) is None:
            yield from diagonal_hopper.every(problem, device, direction)

    return Case(name, problem, direction, candidates, make, run)


def states(B: int, G: int, H: int, K: int, V: int, rank: int = 0) -> Case:
    def make() -> Any:
        draw = Draw(0, torch.bfloat16, "cuda")
        factors = [draw.normal(B, G, H, K, rank, scale=0.2) for _ in range(2)] if rank else (None, None)
        return InterChunkCall(draw.normal(B, G, H, K, V), draw.log_decay(B, G, H), *factors)

    sizes = {"B": B, "G": G, "H": H, "K": K, "V": V} | ({"r": rank} if rank else {})
    problem = Problem.of("inter_chunk_scan", "diagonal", "bfloat16", sizes, {"low_rank": rank > 0})
    name = f"inter_chunk_scan B{B} H{H} G{G} {K}x{V}" + (f" rank {rank}" if rank else "")

    def run(plan: Any, call: Any) -> Any:
        return STATES[plan.backend].forward(plan, call, None)

    def candidates(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
        yield from inter_chunk_scan.every(problem, device, direction)
        if STATES["hopper"].reject(problem, device) is None:
            yield from inter_chunk_hopper.every(problem, device)

    return Case(name, problem, "forward", candidates, make, run)


def inside(B: int, H: int, C: int, width: int) -> Case:
    def make() -> Any:
        draw = Draw(0, torch.float16, "cuda")
        q, k, v, gate = (draw.normal(B, C, H, width) for _ in range(4))
        entering = draw.normal(B, 1, H, width, width)
        return IntraChunkCall(q, k, v, draw.log_decay(B, C, H), entering, gate, width**-0.5, C)

    sizes = {"B": B, "T": C, "H": H, "Hq": H, "K": width, "V": width, "C": C}
    problem = Problem.of("intra_chunk", "matrix", "float16", sizes, {"states": True, "gate=silu": True})

    def run(plan: Any, call: Any) -> Any:
        return INSIDE[plan.backend].forward(plan, call)

    def candidates(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
        yield from intra_chunk.every(problem, device, direction)
        if INSIDE["hopper"].reject(problem, device) is None:
            yield from intra_chunk_hopper.every(problem, device)

    return Case(f"intra_chunk B{B} H{H} C{C} d{width}", problem, "forward", candidates, make, run)


CASES = (
    scan(8, 4096, 2048, False, "forward"),
    scan(8, 4096, 2048, False, "backward"),
    scan(3, 512, 1536, False, "forward"),
    scan(8, 4096, 2048, True, "forward"),
    scan(8, 4096, 2048, True, "backward"),
    states(4, 64, 16, 64, 64),
    states(8, 64, 16, 128, 128),
    states(4, 64, 16, 64, 64, rank=4),
    inside(16, 12, 64, 64),
    inside(16, 12, 128, 64),
    inside(16, 12, 256, 128),
)


def milliseconds(case: Case, candidate: Candidate, inputs: list[Any]) -> float:
    """The median over replays of a graph of one call on each of the inputs."""
    calls = [lambda made=made: case.run(candidate.plan, made) for made in inputs]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = [call() for call in calls]
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    del held
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print plans and predictions for an H200, time nothing")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    arguments = parser.parse_args()
    device = Device.named("h200") if arguments.list else describe(torch.device("cuda", 0))
    for case in CASES:
        if arguments.only not in case.name:
            continue
        found = case.plans(device)
        print(f"{case.name}: {found[0].moved / 1e6:.1f} MB at least")
        if arguments.list:
            for candidate in found:
                print(f"  {candidate.seconds * 1e3:8.4f} ms predicted  {candidate.plan}")
            continue
        inputs = [case.make() for _ in range(max(1, min(16, CACHE // max(found[0].moved, 1))))]
        timed = sorted((milliseconds(case, candidate, inputs), n) for n, candidate in enumerate(found))
        for measured, n in timed:
            candidate = found[n]
            print(f"  {measured:8.4f} ms, {candidate.seconds * 1e3:8.4f} predicted, rank {n + 1}  {candidate.plan}")
        best, chosen = timed[0][0], next(measured for measured, n in timed if n == 0)
        print(f"  the planner's plan takes {chosen / best:.3f} of the best of {len(found)}")
        del inputs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
