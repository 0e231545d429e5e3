"""The diagonal scan on Hopper: groups of warps share a tile of time, a thread its channels or pair; every byte once."""

from holdfast.planner import Candidate, Device, Direction, Problem
from holdfast.planner.constrint import one_of
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned

from .triton import numbers_of

# Steps between two states that the forward pass keeps: as many as the backward pass has registers for.
ROWS = 32
# Numbers (channels, or pairs) that rows come in, so that all are copied 16 bytes at a time.
UNIT = 16


# The measured best where memory is what takes time comes first: wide rows. Seconds of a step of all groups where a
# block has its SM for itself, and before a block's first step: B8 T4096 D2048 and B3 T512 D1536 in bfloat16 on an H200.
# By numbers a block (channels, or pairs), groups of warps that share a tile, steps of each, stages (tiles in shared
# memory, one of them at work), warps, and registers of a thread at most. Backward, a second group of warps takes the
# exponential of a logarithmic gate once more, which costs more than it saves where channels are many.
SHAPES: dict[tuple[str, bool], dict[tuple[int, ...], float]] = {
    ("forward", False): {(128, 2, 16, 4, 4, 168): 0.03e-6, (64, 4, ROWS, 3, 4, 168): 0.03e-6},
    ("forward", True): {(64, 2, ROWS, 3, 4, 200): 0.041e-6, (32, 8, ROWS, 2, 8, 168): 0.072e-6},
    ("backward", False): {(128, 1, ROWS, 3, 2, 255): 0.025e-6, (64, 4, ROWS, 2, 4, 255): 0.061e-6},
    ("backward", True): {
        (64, 4, ROWS, 2, 8, 255): 0.105e-6,
        (32, 8, ROWS, 2, 8, 255): 0.135e-6,
        (32, 4, ROWS, 2, 4, 255): 0.098e-6,
    },
}
ENTRY = 1.5e-6


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans: numbers a block, groups of warps, steps of each, stages, warps, registers a thread."""
    return planned(problem, device, direction, Kernel(model, candidate))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    model, shapes = KernelModel(device), SHAPES[direction, "complex" in problem.traits]
    block = model.variable("block", (32, 64, 128), "largest")
    groups = model.variable("groups", (1, 2, 4, 8), "largest")
    steps, stages = model.variable("steps", (16, ROWS)), model.variable("stages", (2, 3, 4))
    warps, registers = model.variable("warps", (2, 4, 8)), model.variable("registers", (168, 200, 255))
    model.add(one_of((block, groups, steps, stages, warps, registers), list(shapes)), "a shape that was measured")
    parts, (read, _) = numbers_of(problem)[1], _bytes(problem, direction)
    # what a group does to a state: a factor and what it adds
    model.block(warps, registers, block * groups * (stages * steps * read + 8 * parts))
    return model


def _bytes(problem: Problem, direction: Direction) -> tuple[int, int]:
    """Read and written of a number and step."""
    parts = numbers_of(problem)[1]
    word, gate = 2 * parts, parts * (4 if "wide_gate" in problem.traits else 2)
    return (gate + word, word) if direction == "forward" else (gate + 2 * word, gate + word)


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    B, T, pairs = problem["B"], problem["T"], "complex" in problem.traits
    numbers, parts = numbers_of(problem)
    kept = 4 * parts / ROWS if problem.needs_grad else 0
    moved = int(B * T * numbers * (sum(_bytes(problem, direction)) + kept))
    grid = values.grid(max(-(-numbers // values["block"]) * B, 1))
    plan = values.plan("hopper", "block", "groups", "steps", "stages", "warps", "registers")
    shape = tuple(value for _, value in plan.values)
    serial = ENTRY + -(-T // values["groups"]) * SHAPES[direction, pairs][shape]
    return Candidate.of(plan, device, grid, moved, B * T * numbers * (80 if pairs else 6), False, serial)
