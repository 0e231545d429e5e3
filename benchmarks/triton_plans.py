"""Times every plan that fits of the GPU scans and of intra_chunk, beside what the planner predicts of it and picks.

    python benchmarks/triton_plans.py --jobs 12  # on an NVIDIA GPU: times, and the plan that the op takes among them
    python benchmarks/triton_plans.py --list     # anywhere: the plans and predictions for an H200

A time is that of one call in a CUDA graph of several, each on inputs of its own, after a sweep that empties the cache.
--jobs: processes that compile the plans side by side before the first is timed. --out: a file for the results.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.cli.bench.draw import DeviceDraw
from holdfast.cli.bench.record import commit, device_facts, now, versions
from holdfast.kernels.backend import Backend, describe
from holdfast.kernels.chunk.inter.call import InterChunkCall
from holdfast.kernels.chunk.intra.call import IntraChunkCall
from holdfast.kernels.select import resolve
from holdfast.ops import chunk_primitives
from holdfast.ops.diagonal import BACKENDS as SCANS
from holdfast.ops.diagonal import ENTRY_STEPS
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.kernel_model import Kernel, planned
from holdfast.planner.models.chunk.inter import hopper as inter_chunk_hopper
from holdfast.planner.models.chunk.inter import triton as inter_chunk_scan
from holdfast.planner.models.chunk.intra import hopper as intra_chunk_hopper
from holdfast.planner.models.chunk.intra import triton as intra_chunk
from holdfast.planner.models.chunk.intra import triton_backward as intra_chunk_gradients
from holdfast.planner.models.diagonal import hopper as diagonal_hopper
from holdfast.planner.models.diagonal import triton as diagonal_scan
from holdfast.planner.whole_file import write_text
from holdfast.recurrences.definition import DiagonalCall

# A graph's calls read and write this much together: several times a GPU's cache.
BYTES = 2**28
REPLAYS = 7
STATES, INSIDE = chunk_primitives.INTER_CHUNK_BACKENDS, chunk_primitives.INTRA_CHUNK_BACKENDS


def named(backends: tuple[Backend, ...], name: str) -> Any:
    return next(backend for backend in backends if backend.name == name)


@dataclass(frozen=True)
class Case:
    """One pass of one call. models: backend -> all plans of this pass that fit. make: inputs. run: (plan, inputs)."""

    name: str
    problem: Problem
    direction: Direction
    backends: tuple[Backend, ...]
    models: dict[str, Sequence[Kernel]]
    make: Callable[[], Any]
    run: Callable[[Plan, Any], Any]

    def plans(self, device: Device) -> list[Candidate]:
        """All that fit, least predicted time first."""
        found: dict[Plan, Candidate] = {}
        for name, kernels in self.models.items():
            if named(self.backends, name).reject(self.problem, device) is None:
                for candidate in planned(self.problem, device, self.direction, *kernels, keep=10**6):
                    found.setdefault(candidate.plan, candidate)
        return sorted(found.values(), key=lambda candidate: candidate.seconds)

    def chosen(self, device: Device) -> Plan:
        """The plan that the op takes."""
        return resolve(self.backends, self.problem, device, None, self.direction)[1]


def kernel(model: Any) -> tuple[Kernel]:
    return (Kernel(model.model, model.candidate),)


def scan(B: int, T: int, D: int, pairs: bool, direction: Direction) -> Case:
    def make() -> Any:
        draw, numbers = DeviceDraw(0, torch.bfloat16, "cuda"), D // 2 if pairs else D
        call = DiagonalCall(
            draw.gate(B, T, numbers), draw.normal(B, T, D), draw.normal(B, T, numbers) if pairs else None
        )
        return call, torch.zeros(B * T // ENTRY_STEPS + B, D, device="cuda"), draw.normal(B, T, D)

    def run(plan: Plan, made: Any) -> Any:
        call, entries, grad = made
        backend = named(SCANS, plan.backend)
        if direction == "forward":
            return backend.forward(plan, call, None, entries)
        return backend.backward(plan, call, None, None, grad, None, entries)

    op, traits = "rotlru" if pairs else "rglru", {"complex": pairs, "needs_grad": True}
    problem = Problem.of(op, "diagonal", "bfloat16", {"B": B, "T": T, "D": D}, traits)
    models = {"triton": kernel(diagonal_scan), "hopper": kernel(diagonal_hopper)}
    return Case(f"{op} B{B} T{T} D{D} {direction}", problem, direction, SCANS, models, make, run)


def states(direction: Direction, B: int, G: int, H: int, K: int, V: int, rank: int = 0, rows: bool = False) -> Case:
    def make() -> Any:
        draw = DeviceDraw(0, torch.bfloat16, "cuda")
        factors = [draw.normal(B, G, H, K, rank, scale=0.1) for _ in range(2)] if rank else (None, None)
        decay = draw.log_decay(B, G, H, *([K] if rows else []))
        return InterChunkCall(draw.normal(B, G, H, K, V), decay, *factors), draw.normal(B, G, H, K, V)

    def run(plan: Plan, made: Any) -> Any:
        call, grad = made
        if direction == "forward":
            return named(STATES, plan.backend).forward(plan, call, None)
        return named(STATES, plan.backend).backward(plan, call, None, None, grad, None)

    sizes = {"B": B, "G": G, "H": H, "K": K, "V": V} | ({"r": rank} if rank else {})
    traits = {"low_rank": rank > 0, "decay=vector": rows, "decay=scalar": not rows}
    traits["needs_grad"] = direction == "backward"
    problem = Problem.of("inter_chunk_scan", "diagonal", "bfloat16", sizes, traits)
    kind = f" rank {rank}" * (rank > 0) + " decay a row" * rows
    low_rank = (Kernel(inter_chunk_scan.low_rank_model, inter_chunk_scan.candidate),)
    models = {"triton": low_rank if rank else kernel(inter_chunk_scan), "hopper": kernel(inter_chunk_hopper)}
    name = f"inter_chunk_scan B{B} H{H} G{G} {K}x{V}{kind} {direction}"
    return Case(name, problem, direction, STATES, models, make, run)


def inside(direction: Direction, B: int, T: int, H: int, C: int, width: int) -> Case:
    def make() -> Any:
        draw = DeviceDraw(0, torch.float16, "cuda")
        q, k, v, gate = (draw.normal(B, T, H, width) for _ in range(4))
        entering = draw.normal(B, T // C, H, width, width)
        call = IntraChunkCall(q, k, v, draw.log_decay(B, T, H), entering, gate, width**-0.5, C)
        return call, draw.normal(B, T, H, width)

    def run(plan: Plan, made: Any) -> Any:
        call, grad = made
        if direction == "forward":
            return named(INSIDE, plan.backend).forward(plan, call)
        return named(INSIDE, plan.backend).backward(plan, call, grad)

    sizes = {"B": B, "T": T, "H": H, "Hq": H, "K": width, "V": width, "C": C}
    traits = {"states": True, "gate=silu": True, "decay=scalar": True, "needs_grad": direction == "backward"}
    problem = Problem.of("intra_chunk", "matrix", "float16", sizes, traits)
    if direction == "forward":
        models = {"triton": kernel(intra_chunk), "hopper": kernel(intra_chunk_hopper)}
    else:
        models = {"triton": kernel(intra_chunk_gradients), "hopper": intra_chunk_hopper.GRADIENTS}
    return Case(f"intra_chunk B{B} T{T} H{H} C{C} d{width} {direction}", problem, direction, INSIDE, models, make, run)


CASES = (
    *(scan(8, 4096, 2048, pairs, direction) for pairs in (False, True) for direction in ("forward", "backward")),
    *(scan(3, 512, 1536, pairs, direction) for pairs in (False, True) for direction in ("forward", "backward")),
    *(states("forward", 4, G, 16, 64, 64) for G in (8, 64, 128)),
    states("forward", 4, 64, 16, 64, 64, rows=True),
    states("forward", 4, 64, 16, 64, 64, rank=4),
    states("forward", 8, 64, 16, 128, 128),
    *(states("backward", 4, 64, 16, 64, 64, rank=rank) for rank in (0, 4)),
    # one chunk a head, then the sequences, of proposal 032
    *(inside("forward", 16, C, 12, C, width) for C, width in ((64, 64), (128, 64), (256, 128))),
    *(inside("forward", 16, 2048, 12, C, width) for C, width in ((32, 64), (64, 64), (128, 64), (256, 64), (256, 128))),
    *(inside("backward", 16, 2048, 12, C, width) for C, width in ((32, 64), (64, 64), (128, 64), (256, 128))),
)


def milliseconds(calls: list[Callable[[], Any]]) -> float:
    """Of one call: the median over replays of a graph of all of them."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = [call() for call in calls]
    # while the device writes it, the host gets ahead
    sweep = torch.empty(BYTES, dtype=torch.int8, device="cuda")
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for start, end in marks:
        sweep.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    del held
    return statistics.median(start.elapsed_time(end) / len(calls) for start, end in marks)


def compile_share(cases: list[Case], device: Device, share: int, shares: int) -> None:
    """Runs every shares-th plan once, which leaves its kernel in Triton's cache on disk."""
    number = 0
    for case in cases:
        made = None
        for candidate in case.plans(device):
            number += 1
            if number % shares == share:
                made = case.make() if made is None else made
                # where it fails, `measured` says how
                with suppress(Exception):
                    case.run(candidate.plan, made)
        torch.cuda.synchronize()


def compile_all(only: str, jobs: int) -> None:
    command = [sys.executable, __file__, "--only", only]
    for child in [subprocess.Popen([*command, "--share", f"{n}/{jobs}"]) for n in range(jobs)]:
        child.wait()


def measured(case: Case, device: Device) -> dict[str, Any]:
    """Times of all plans of a case, shortest first; `choice` of them is the op's, over the best of all.

    Of a call with gradients, over the best of its backend: that is chosen for both passes together.
    """
    found, chosen = case.plans(device), case.chosen(device)
    inputs = [case.make() for _ in range(max(1, min(16, BYTES // max(found[0].moved, 1))))]
    rows: list[dict[str, Any]] = []
    for candidate in found:
        row = {"plan": str(candidate.plan), "predicted_ms": candidate.seconds * 1e3}
        try:
            calls = [lambda made=made, plan=candidate.plan: case.run(plan, made) for made in inputs]
            rows.append(row | {"ms": milliseconds(calls)})
        except Exception as error:  # a plan that the model lists and the compiler does not take is a result
            rows.append(row | {"ms": None, "failed": f"{type(error).__name__}: {error}"[:200]})
    rows.sort(key=lambda row: row["ms"] or math.inf)
    rivals = [row for row in rows if not case.problem.needs_grad or row["plan"].split()[0] == chosen.backend]
    choice = next(row["ms"] or math.inf for row in rivals if row["plan"] == str(chosen)) / rivals[0]["ms"]
    return {"case": case.name, "bytes": found[0].moved, "chosen": str(chosen), "choice": choice, "plans": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print plans and predictions for an H200, time nothing")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile first")
    parser.add_argument("--share", default="", help="N/M: compile every M-th plan from the N-th on, time nothing")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--commit", default="", help="of the working tree, where there is no git")
    given = parser.parse_args()
    device = Device.named("h200") if given.list else describe(torch.device("cuda", 0))
    cases = [case for case in CASES if given.only in case.name]
    if given.share:
        return compile_share(cases, device, *map(int, given.share.split("/")))
    if given.list:
        for case in cases:
            chosen = case.chosen(device)
            print(case.name)
            for candidate in case.plans(device):
                mark = "*" if candidate.plan == chosen else " "
                print(f"  {candidate.seconds * 1e3:8.4f} ms {mark} {candidate.plan}")
        return None
    if given.jobs:
        compile_all(given.only, given.jobs)
    facts = {"date": now(), "commit": given.commit or commit(), "versions": versions()}
    facts["device"] = device_facts(torch.device("cuda", 0))
    results = []
    for case in cases:
        result = measured(case, device)
        results.append(result)
        plans = result["plans"]
        print(f"{case.name}: the op's plan takes {result['choice']:.3f} of the best of {len(plans)}", flush=True)
        for row in plans:
            mark = "*" if row["plan"] == result["chosen"] else " "
            said = row.get("failed") or f"{row['ms']:8.4f} ms, {row['predicted_ms']:8.4f} predicted"
            print(f"  {said} {mark} {row['plan']}")
        torch.cuda.empty_cache()
        if given.out:
            write_text(given.out, json.dumps(facts | {"cases": results}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
