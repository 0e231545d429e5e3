"""What the planner decides for calls of every op, on record, so that a change of a model shows what it changes.

    PYTHONPATH=src:tests python -m planner.recorded_plans

writes tests/planner/plans.txt anew. One line a call and device: of each pass the floor, the plan that runs and what it
should cost, then how many candidates there are, with digests of all of them, of the reasons why others do not run and
of every launch that was weighed, on the way or in vain: apart, so that a line says what a change has changed.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from holdfast.kernels.backend import Backend
from holdfast.kernels.select import ScoredCandidate, decide, forget
from holdfast.ops.causal_conv1d import BACKENDS as CONV_BACKENDS
from holdfast.ops.chunk_primitives import CHUNK_PRIMITIVES
from holdfast.ops.explain import AXES, named_problem
from holdfast.ops.families import backends_of
from holdfast.ops.gated_rms_norm import BACKENDS as NORM_BACKENDS
from holdfast.ops.layer_step import BACKENDS as STEP_BACKENDS
from holdfast.planner import Device, Direction, Grid, Problem, floor, tables
from holdfast.recurrences import RECURRENCES

PLANS = Path(__file__).with_name("plans.txt")
DEVICES = ("h200", "a100", "rtx3090")
PARTS = ("memory", "arithmetic", "serial", "launch", "exchange", "apart")

# each with dtype, whether a gradient is wanted and whether sequences are packed: sizes of a large model, few heads,
# heads of odd width in float32, wide ones without a gradient, packed ones, one long sequence, one token, wide states,
# no more than one block has to do, and about as much as a GPU does at once
LARGE = {"B": 4, "T": 4096, "H": 32, "Hq": 32, "K": 128, "V": 128, "D": 128}
FEW = {"B": 1, "T": 8200, "H": 4, "Hq": 2, "K": 64, "V": 64, "D": 768}
ODD = {"B": 3, "T": 77, "H": 6, "Hq": 2, "K": 33, "V": 17, "D": 34}
WIDE = {"B": 2, "T": 2000, "H": 8, "Hq": 8, "K": 256, "V": 200, "D": 2048}
LONG = {"B": 1, "T": 32768, "H": 2, "Hq": 1, "K": 64, "V": 128, "D": 256}
ONE = {"B": 64, "T": 1, "H": 16, "Hq": 16, "K": 128, "V": 64, "D": 512}
TINY = {"B": 1, "T": 40, "H": 1, "Hq": 1, "K": 16, "V": 16, "D": 16}
WIDER = {"B": 4, "T": 4096, "H": 8, "Hq": 8, "K": 256, "V": 512, "D": 1024}
MIDDLE = {"B": 2, "T": 1500, "H": 12, "Hq": 12, "K": 64, "V": 64, "D": 384}
CALLS = (
    (LARGE, "bfloat16", True, False), (FEW, "bfloat16", True, False), (ODD, "float32", True, False),
    (WIDE, "float16", False, False), (LARGE, "bfloat16", True, True), (LONG, "float16", True, False),
    (ONE, "bfloat16", False, False), (WIDER, "bfloat16", True, False),
    (TINY, "bfloat16", True, False), (MIDDLE, "bfloat16", True, False),
    # at limits: pairs for half of an H200's processors and few chunks, long segments, no token, one with gradients,
    # packed with columns that are no power of two
    ({"B": 2, "T": 32, "H": 33, "Hq": 33, "K": 96, "V": 48, "D": 1152}, "bfloat16", True, False),
    ({"B": 1, "T": 65536, "H": 8, "Hq": 2, "K": 128, "V": 64, "D": 328, "N": 256}, "float16", True, False),
    ({"B": 3, "T": 0, "H": 4, "Hq": 2, "K": 64, "V": 128, "D": 96}, "bfloat16", True, False),
    ({"B": 8, "T": 1, "H": 4, "Hq": 4, "K": 64, "V": 64, "D": 64, "N": 257}, "float32", True, False),
    ({"B": 1, "T": 2112, "H": 66, "Hq": 66, "K": 64, "V": 320, "D": 2688}, "bfloat16", True, True),
)  # fmt: skip
# of one op, in bfloat16 with a gradient: kept states of just less and just more than one window, many small heads, the
# widest head whose weights are read from the cache, blocks of one gate
OP_CALLS = (
    ("gated_delta_rule", {"B": 1, "T": 4096, "H": 32, "K": 128, "V": 128}),
    ("gated_delta_rule", {"B": 1, "T": 4032, "H": 33, "K": 128, "V": 128}),
    ("lstm", {"B": 256, "T": 64, "H": 12, "D": 64}), ("lstm", {"B": 1024, "T": 9, "H": 16, "D": 32}),
    ("slstm", {"B": 130, "T": 9, "H": 12, "D": 48}), ("lstm", {"B": 64, "T": 9, "H": 1, "D": 2688}),
    ("lstm", {"B": 16, "T": 9, "H": 1, "D": 2696}), ("elman", {"B": 16, "T": 9, "H": 1, "D": 768}),
    ("gru", {"B": 33, "T": 9, "H": 3, "D": 520}),
    # of two chunks or three, and channels that are too many
    *((op, {"B": 1, "T": T, "H": 2, "K": 64, "V": 64}) for T in (128, 192) for op in ("comba", "ssd", "kda")),
    ("mlstm", {"B": 1, "T": 192, "H": 2, "K": 128, "V": 64}), ("kda", {"B": 1, "T": 192, "H": 2, "K": 8, "V": 8}),
    *(("rglru", {"B": 1, "T": 2, "D": D}) for D in (2**22, 2**22 + 2)),
    *(("mamba1", {"B": 1, "T": 2, "D": D, "N": 4}) for D in (2**22, 2**22 + 1)),
)  # fmt: skip
HALF_CALLS = {
    "inter_chunk_scan": (
        {"B": 4, "G": 64, "H": 16, "K": 64, "V": 64}, {"B": 8, "G": 64, "H": 16, "K": 128, "V": 128, "Kg": 128},
        {"B": 1, "G": 33, "H": 3, "K": 40, "V": 24, "r": 16}, {"B": 4, "G": 64, "H": 16, "K": 64, "V": 64, "r": 4},
        {"B": 1, "G": 512, "H": 1, "K": 128, "V": 128, "Kg": 128, "r": 16}, {"B": 1, "G": 3, "H": 1, "K": 16, "V": 16},
        {"B": 2, "G": 40, "H": 9, "K": 64, "V": 128}, {"B": 2, "G": 9, "H": 5, "K": 16, "V": 48, "r": 2},
        {"B": 1, "G": 9, "H": 5, "K": 32, "V": 256, "r": 8}, {"B": 0, "G": 0, "H": 2, "K": 64, "V": 32},
        {"B": 1, "G": 9, "H": 2, "K": 8, "V": 16, "r": 4},
        # as many bytes on their way as keep memory busy, or a few more
        {"B": 1, "G": 9, "H": 81, "K": 64, "V": 64}, {"B": 1, "G": 9, "H": 83, "K": 64, "V": 64},
    ),
    "intra_chunk": (
        {"B": 16, "T": 1024, "H": 12, "K": 64, "V": 64, "C": 64},
        {"B": 4, "T": 4096, "H": 8, "K": 128, "V": 128, "C": 256},
        {"B": 1, "T": 333, "H": 4, "Hq": 2, "K": 40, "V": 24, "C": 128},
        {"B": 2, "T": 1000, "H": 2, "K": 64, "V": 256, "C": 256},
        {"B": 1, "T": 4096, "H": 4, "K": 256, "V": 256, "C": 64}, {"B": 1, "T": 40, "H": 1, "K": 16, "V": 16, "C": 64},
        # fewer blocks than a GPU has processors, and a little more than it runs at once
        {"B": 1, "T": 1024, "H": 2, "K": 64, "V": 64, "C": 128},
        {"B": 2, "T": 2048, "H": 9, "K": 128, "V": 128, "C": 128},
        {"B": 1, "T": 3000, "H": 3, "K": 64, "V": 128, "C": 192}, {"B": 0, "T": 64, "H": 2, "K": 32, "V": 32, "C": 32},
        {"B": 1, "T": 512, "H": 2, "K": 80, "V": 64, "C": 512}, {"B": 1, "T": 500, "H": 2, "K": 15, "V": 64, "C": 64},
        {"B": 1, "T": 500, "H": 2, "K": 64, "V": 257, "C": 64}, {"B": 1, "T": 500, "H": 2, "K": 16, "V": 256, "C": 64},
        {"B": 1, "T": 4096, "H": 8, "K": 128, "V": 64, "C": 64}, {"B": 1, "T": 64, "H": 1, "K": 64, "V": 64, "C": 64},
        {"B": 8, "T": 512, "H": 40, "K": 64, "V": 128, "C": 512},
    ),
}  # fmt: skip


# of gated_rms_norm, with a weight that heads share or one for each
NORMS = (
    {"B": 4, "T": 4096, "H": 32, "D": 128, "G": 32},
    {"B": 1, "T": 100, "H": 3, "D": 1500, "G": 1},
    {"B": 1, "T": 5, "H": 1, "D": 129, "G": 1},
    {"B": 2, "T": 900, "H": 5, "D": 64, "G": 5},
    {"B": 0, "T": 0, "H": 5, "D": 64, "G": 5},
)
# of causal_conv1d: a layer's, one long sequence, and a few tokens
CONVS = (
    {"B": 8, "T": 2048, "D": 2304, "W": 4},
    {"B": 1, "T": 32768, "D": 100, "W": 3},
    {"B": 2, "T": 5, "D": 64, "W": 7},
    {"B": 3, "T": 6000, "D": 1536, "W": 2},
    {"B": 1, "T": 3, "D": 2**20, "W": 16},
    {"B": 1, "T": 3, "D": 2**20 + 1, "W": 4},
    {"B": 1, "T": 3, "D": 32, "W": 17},
    {"B": 2, "T": 600, "D": 32, "W": 9},
    {"B": 2, "T": 600, "D": 33, "W": 8},
)
# and with a bias, packed, of heads that are normalised, with many taps, of few channels
CONVS_WITH = (
    ({"B": 8, "T": 2048, "D": 2304, "W": 4}, "bias"),
    ({"B": 1, "T": 16384, "D": 1024, "W": 4, "N": 9}, "varlen"),
    ({"B": 4, "T": 4096, "D": 3072, "W": 4, "H": 16, "K": 128}, "heads"),
    ({"B": 1, "T": 700, "D": 144, "W": 3, "H": 2, "K": 40}, "heads"),
    ({"B": 2, "T": 600, "D": 192, "W": 8, "H": 4, "K": 24}, "heads"),
    ({"B": 3, "T": 1000, "D": 24, "W": 16}, "bias"),
)
# of a layer's step: a matrix for a state, with what lies around it, one too wide, and a vector
STEPS = (
    {"B": 8, "H": 16, "K": 64, "V": 128, "W": 4, "N": 2048},
    {"B": 1, "H": 4, "K": 200, "V": 24, "W": 0, "N": 24},
    {"B": 2, "H": 4, "K": 512, "V": 64, "W": 16, "N": 16384},
    {"B": 2, "H": 4, "K": 513, "V": 64, "W": 0, "N": 0},
    {"B": 2, "H": 4, "K": 64, "V": 64, "W": 17, "N": 0},
    {"B": 2, "H": 4, "K": 64, "V": 64, "W": 0, "N": 16385},
    {"B": 4, "H": 1, "K": 0, "V": 4096, "W": 4, "N": 0},
)


@dataclass(frozen=True)
class Call:
    """What is planned, in words and as the planner sees it."""

    named: str
    backends: tuple[Backend, ...]
    problem: Problem


def _call(op: str, sizes: dict[str, int], dtype: str, grad: bool, varlen: bool) -> Call:
    backends, problem = named_problem(op, sizes, getattr(torch, dtype), grad, varlen)
    axes = " ".join(f"{axis}{size}" for axis, size in sizes.items())
    return Call(f"{op} {axes} {dtype}{'' if grad else ' no gradient'}{' packed' if varlen else ''}", backends, problem)


def calls() -> Iterable[Call]:
    for op, recurrence in RECURRENCES.items():
        for sizes, *rest in CALLS:
            yield _call(op, {axis: size for axis, size in sizes.items() if axis in AXES[recurrence.family]}, *rest)
    for op, sizes in OP_CALLS:
        yield _call(op, sizes, "bfloat16", True, False)
    for op in ("rglru", "rotlru"):
        # gates in the inputs' dtype, which no example has
        backends, traits = backends_of(RECURRENCES[op]), {"complex": op == "rotlru"}
        yield _of(op, "diagonal", backends, {"B": 8, "T": 4096, "D": 2048}, "bfloat16", True, **traits)
    for op in CHUNK_PRIMITIVES:
        for sizes in HALF_CALLS[op]:
            yield _call(op, sizes, "bfloat16", True, False)
            yield _call(op, sizes, "float32", False, False)
    for sizes in NORMS:
        for dtype, grad in (("bfloat16", True), ("float32", False)):
            yield _of("gated_rms_norm", "matrix", NORM_BACKENDS, sizes, dtype, grad, gate=grad, weight=True)
    for sizes in CONVS:
        for dtype, grad in (("bfloat16", True), ("float32", False)):
            yield _of("causal_conv1d", "conv", CONV_BACKENDS, sizes, dtype, grad)
    for sizes, trait in CONVS_WITH:
        for dtype in ("bfloat16", "float16", "float32"):
            yield _of("causal_conv1d", "conv", CONV_BACKENDS, sizes, dtype, True, **{trait: True})
    for sizes in STEPS:
        yield _of("layer_step", "matrix", STEP_BACKENDS, sizes, "bfloat16", False)


def _of(
    op: str, family: str, backends: tuple[Backend, ...], sizes: dict[str, int], dtype: str, grad: bool, **traits: bool
) -> Call:
    """Of an op that explain does not know."""
    problem = Problem.of(op, family, getattr(torch, dtype), sizes, traits | {"needs_grad": grad})
    axes = " ".join(f"{axis}{size}" for axis, size in sizes.items())
    named = [trait for trait in ("bias", "heads", "varlen") if traits.get(trait)]
    return Call(" ".join([op, axes, dtype, *named, *([] if grad else ["no gradient"])]), backends, problem)


def _cost(scored: ScoredCandidate) -> str:
    """All that a candidate says, to six digits."""
    found = scored.candidate
    times = [] if found.prediction is None else [f"{getattr(found.prediction, part):.6g}" for part in PARTS]
    numbers = (found.moved, found.operations, found.blocks, found.shared, found.registers)
    return " ".join([str(found.plan), *map(str, numbers), *times])


@contextmanager
def watched() -> Iterator[set[tuple[int, int, int, int]]]:
    """Blocks, threads, registers and shared memory of the launches that are weighed within."""
    made: set[tuple[int, int, int, int]] = set()
    make = Grid.__init__

    def noted(grid: Grid, *given: int, **named: int) -> None:
        make(grid, *given, **named)
        made.add((grid.blocks, grid.threads, grid.registers, grid.shared))

    with mock.patch.object(Grid, "__init__", noted):
        yield made


def _floor(problem: Problem, direction: Direction) -> str:
    if problem.op in ("gated_rms_norm", "causal_conv1d", "layer_step"):
        return ""
    least = floor(problem, direction)
    return f", floor {least.moved} B {least.operations} op"


def line(call: Call, name: str) -> str:
    # what was decided before would be weighed no more
    forget()
    with watched() as launches:
        decision = decide(call.backends, call.problem, Device.named(name), None)
    parts, weighed = [f"{call.named} {name}"], []
    for direction, ranked in decision.ranked.items():
        chosen, least = ranked[0], _floor(call.problem, direction)
        seconds = "no model" if chosen.candidate.prediction is None else f"{chosen.seconds:.4g} s"
        parts.append(f"{direction} {chosen.candidate.plan}: {seconds}{least}")
        weighed += map(_cost, ranked)
    reasons = [f"{backend} {reason}" for backend, reason in decision.passed_over.items()]
    parts.append(f"{len(weighed)} candidates {_digest(weighed)}")
    return "; ".join([*parts, f"reasons {_digest(reasons)}, launches {_digest(map(str, sorted(launches)))}"])


def _digest(said: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(said).encode(), digest_size=4).hexdigest()


def lines() -> list[str]:
    return [line(call, name) for call in calls() for name in DEVICES]


def main() -> None:
    """Writes the file, from the models alone."""
    with tables.instead(None):
        PLANS.write_text("\n".join(lines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
