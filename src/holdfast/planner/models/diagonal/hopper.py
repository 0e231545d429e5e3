"""The diagonal scan on Hopper: groups of warps share a tile of time, a thread its channels or pair; every byte once."""

from collections.abc import Iterator
from typing import NamedTuple

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked

# Steps between two states that the forward pass keeps: as many as the backward pass has registers for.
ROWS = 32
# Numbers (channels, or pairs) that rows come in, so that all are copied 16 bytes at a time.
UNIT = 16


class Shape(NamedTuple):
    """Of a block. each: seconds of a step of all groups where it has its SM for itself."""

    numbers: int  # channels, or pairs
    groups: int  # of warps that share a tile
    steps: int  # of each group
    stages: int  # tiles in shared memory, one of them at work
    warps: int
    registers: int  # of a thread at most
    each: float


# The measured best where memory is what takes time comes first: wide rows. Seconds, there and before a block's first
# step: B8 T4096 D2048 and B3 T512 D1536 in bfloat16 on an H200. Backward, a second group of warps takes the
# exponential of a logarithmic gate once more, which costs more than it saves where channels are many.
SHAPES = {
    ("forward", False): (Shape(128, 2, 16, 4, 4, 168, 0.03e-6), Shape(64, 4, ROWS, 3, 4, 168, 0.03e-6)),
    ("forward", True): (Shape(64, 2, ROWS, 3, 4, 200, 0.041e-6), Shape(32, 8, ROWS, 2, 8, 168, 0.072e-6)),
    ("backward", False): (Shape(128, 1, ROWS, 3, 2, 255, 0.025e-6), Shape(64, 4, ROWS, 2, 4, 255, 0.061e-6)),
    ("backward", True): (
        Shape(64, 4, ROWS, 2, 8, 255, 0.105e-6),
        Shape(32, 8, ROWS, 2, 8, 255, 0.135e-6),
        Shape(32, 4, ROWS, 2, 4, 255, 0.098e-6),
    ),
}
ENTRY = 1.5e-6


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans: numbers a block, groups of warps, steps of each, stages, warps, registers a thread."""
    return ranked(every(problem, device, direction))


def every(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
    """All that fit, in no order."""
    B, T, D = (problem[name] for name in "BTD")
    pairs = "complex" in problem.traits
    numbers, parts = (D // 2, 2) if pairs else (D, 1)
    word, gate = 2 * parts, parts * (4 if "wide_gate" in problem.traits else 2)
    read, written = (gate + word, word) if direction == "forward" else (gate + 2 * word, gate + word)
    kept = 4 * parts / ROWS if problem.needs_grad else 0
    moved = int(B * T * numbers * (read + written + kept))
    for shape in SHAPES[direction, pairs]:
        # what a group does to a state: a factor and what it adds
        shared = shape.numbers * shape.groups * (shape.stages * shape.steps * read + 8 * parts)
        blocks = max(-(-numbers // shape.numbers) * B, 1)
        grid = Grid(blocks, 32 * shape.warps, shape.registers, shared)
        if not grid.fits(device):
            continue
        serial = ENTRY + -(-T // shape.groups) * shape.each
        names = ("block", "groups", "steps", "stages", "warps", "registers")
        plan = Plan("hopper", tuple(zip(names, shape[:-1], strict=True)))
        operations = B * T * numbers * (80 if pairs else 6)
        yield Candidate.of(plan, device, grid, moved, operations, False, serial)
