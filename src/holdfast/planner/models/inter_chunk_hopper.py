"""The scan of states with a low rank on Hopper, its state in registers; backward as inter_chunk_scan.py has it."""

from collections.abc import Iterator
from dataclasses import replace

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem

from . import inter_chunk_scan, ranked

RANKS = (1, 2, 4, 8, 16)
# a state of 256 rows would spill
KEYS = (16, 32, 64, 128)
# Columns of a block, and of a warp.
COLUMNS, EACH = 16, 8
STAGES = 4
# Seconds from one chunk to the next in one block, by itself and for each row and rank; an estimate from instructions.
STEP, READ = 0.2e-6, 0.4e-9


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans: rows and columns of a block's tile, stages (as `group`), warps."""
    if direction == "forward":
        return ranked(every(problem, device))
    found = inter_chunk_scan.candidates(problem, device, direction)
    return tuple(replace(candidate, plan=Plan("hopper", candidate.plan.values)) for candidate in found)


def every(problem: Problem, device: Device) -> Iterator[Candidate]:
    """All that fit, in no order."""
    B, G, H, K, V, rank = (problem[name] for name in "BGHKVr")
    size = inter_chunk_scan.ELEMENT[problem.dtype]
    states = B * G * H * K * V
    shared = STAGES * size * K * (COLUMNS + 2 * rank) + 2 * 4 * K * rank
    grid = Grid(max(-(-V // COLUMNS) * H * B, 1), 32 * COLUMNS // EACH, min(255, 64 + 3 * K // 4 + 8), shared)
    if grid.fits(device):
        moved = (2 * states + 2 * B * G * H * K * rank) * size
        serial = inter_chunk_scan.ENTRY + G * (STEP + READ * K * rank)
        values = (("block_k", K), ("block_v", COLUMNS), ("group", STAGES), ("warps", COLUMNS // EACH))
        yield Candidate.of(Plan("hopper", values), device, grid, moved, states * (2 + 4 * rank), False, serial)
