"""The diagonal scan on Hopper: a thread runs its channels or its pair through all steps; every byte once."""

from collections.abc import Iterator

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem

from . import ranked

# Steps between two states that the forward pass keeps: as many as the backward pass has registers for.
ROWS = 32
# Numbers (channels, or pairs) that rows come in, so that all are copied 16 bytes at a time.
UNIT = 16
# (numbers a block, warps), the measured best first: a thread has two channels; of pairs, twice the threads share the
# arithmetic of the gates, and backward what follows from each step's gradient.
BLOCKS = {
    ("forward", False): ((128, 2), (64, 1)),
    ("forward", True): ((64, 4),),
    ("backward", False): ((128, 2), (64, 1)),
    ("backward", True): ((64, 4), (32, 4)),
}
# Steps of a tile and tiles in shared memory, one of them at work.
TILES = {
    ("forward", False): ((16, 8),),
    ("forward", True): ((ROWS, 4),),
    ("backward", False): ((ROWS, 3), (ROWS, 2)),
    ("backward", True): ((ROWS, 3), (ROWS, 2)),
}
# Seconds of a step in a block that has its SM for itself, and before its first: B8 T4096 D2048 and B3 T512 D1536 in
# bfloat16 on an H200.
STEP = {
    ("forward", False): 0.020e-6,
    ("forward", True): 0.028e-6,
    ("backward", False): 0.025e-6,
    ("backward", True): 0.047e-6,
}
# Backward, half as many pairs in as many warps: less for each thread to finish, where SMs are left over for them.
NARROW, NARROW_STEP = 32, 0.034e-6
ENTRY = 1.5e-6


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans: numbers a block, steps of a tile, stages, warps."""
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
    # gates in float32, and backward their cosines and sines
    ready = 4 * ROWS * (0 if not pairs else 2 if direction == "forward" else 4)
    for block, warps in BLOCKS[direction, pairs]:
        for steps, stages in TILES[direction, pairs]:
            grid = Grid(max(-(-numbers // block) * B, 1), 32 * warps, 192, block * (stages * steps * read + ready))
            narrow = block == NARROW
            if not grid.fits(device) or (narrow and grid.blocks > (device.sms or 0)):
                continue
            serial = ENTRY + T * (NARROW_STEP if narrow else STEP[direction, pairs])
            plan = Plan("hopper", (("block", block), ("steps", steps), ("stages", stages), ("warps", warps)))
            operations = B * T * numbers * (80 if pairs else 6)
            yield Candidate.of(plan, device, grid, moved, operations, False, serial)
