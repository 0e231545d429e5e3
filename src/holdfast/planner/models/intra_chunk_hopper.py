"""Outputs inside chunks on Hopper: blocks of 64 steps and all values; backward as intra_chunk.py has it."""

from collections.abc import Iterator
from dataclasses import replace

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem

from . import intra_chunk, ranked

CHUNKS = (64, 128, 256, 512)
WIDTHS = (64, 128)
TILE = 64
# Seconds before the first tile, and of one of 64 steps: for a block alone on its SM, and for each that shares it. By
# columns of keys and values, fitted to chunks of 64, 128 and 256 steps in float16 on an H200; of 192 columns a guess.
ENTRY = {128: 1.9e-6, 192: 4e-6, 256: 7e-6}
UNIT = {128: (0.56e-6, 0.39e-6), 192: (0.7e-6, 0.5e-6), 256: (0.87e-6, 0.61e-6)}
# What the compiler takes (tests/kernels/matrix/test_hopper_intra_chunk.py), by values.
REGISTERS = {64: 128, 128: 168}


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans: stages of values; backward those of Triton."""
    if direction == "forward":
        return ranked(every(problem, device))
    found = intra_chunk.candidates(problem, device, direction)
    return tuple(replace(candidate, plan=Plan("hopper", candidate.plan.values)) for candidate in found)


def every(problem: Problem, device: Device) -> Iterator[Candidate]:
    """All that fit, in no order."""
    B, T, H, K, V, C = (problem[name] for name in "BTHKVC")
    chunks, tiles = -(-T // C), C // TILE
    for stages in (1, 2):
        # a query tile, two of keys, the state or the output, sums, barriers
        last = V * max(K if "states" in problem.traits else 0, TILE)
        shared = 2 * (3 * TILE * K + stages * TILE * V + last) + 8 * C + 256
        grid = Grid(max(tiles * chunks * B * H, 1), 128, REGISTERS[V], shared)
        if not grid.fits(device):
            continue
        assert device.sms is not None
        together = min(grid.per_sm(device), -(-grid.blocks // device.sms))
        alone, each = UNIT[K + V]
        waves = grid.blocks / grid.at_once(device)
        # in one wave the block with the most tiles counts, in many their mean
        units = (tiles if waves <= 1 else waves * (tiles + 1) / 2) + max(waves, 1) * ("states" in problem.traits)
        # a second stage of values is on its way while the first is used
        taken = ENTRY[K + V] + units * (alone + each * together) * (1.0 if stages == 2 else 1.02)
        serial = taken / grid.waves(device)
        operations = 2 * B * H * T * (K + V) * (C + TILE) // 2 + 2 * B * H * T * K * V
        moved = intra_chunk.moved_bytes(problem, "forward")
        yield Candidate.of(Plan("hopper", (("stages", stages),)), device, grid, moved, operations, True, serial)
