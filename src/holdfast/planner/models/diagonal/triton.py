"""The scan over channels: every byte once, or its inputs twice where sequences are cut into pieces."""

from collections.abc import Iterator

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked

# Threads hold SEGMENTS x STEPS steps of a tile between them. One shape for both passes: the backward pass finds the
# states that the forward pass left every ROWS steps, and computes those between again, bit for bit.
SEGMENTS, STEPS = 16, 8
ROWS = SEGMENTS * STEPS
# Offsets inside a tile and rows of states are 32-bit.
MOST_CHANNELS = 2**22
# Numbers (channels, or pairs) that a thread has of each step: more of them take fewer exchanges, until registers spill.
EACH = {("forward", False): 8, ("forward", True): 4, ("backward", False): 4, ("backward", True): 2}
# Blocks of so many numbers, the measured best first.
BLOCKS = {
    ("forward", False): (64, 32, 128),
    ("forward", True): (16, 32),
    ("backward", False): (32, 16, 64),
    ("backward", True): (8, 16),
}
# Seconds of an SM for each number and step, by stages in flight: B8 T4096 D2048 bfloat16 on an H200.
COST = {
    ("forward", False): {3: 0.225e-9, 1: 0.23e-9},
    ("forward", True): {3: 0.71e-9, 1: 0.9e-9},
    ("backward", False): {1: 0.5e-9, 3: 0.6e-9},
    ("backward", True): {3: 1.7e-9, 1: 1.9e-9},
}
# Seconds of a block for each tile where it has an SM for itself, and before its first: B3 T512 D1536, the same card.
TILE = {
    ("forward", False): 1.5e-6,
    ("forward", True): 4.2e-6,
    ("backward", False): 3.2e-6,
    ("backward", True): 6.4e-6,
}
ENTRY = 1.5e-6
# Seconds of the scan over pieces and of what PyTorch does around it; an estimate.
CARRY = 20e-6
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans: channels (pairs) a block, segments and steps of a tile, stages, warps, steps a piece (0: no pieces)."""
    return ranked(every(problem, device, direction))


def every(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
    """All that fit, in no order."""
    B, T, D = (problem[name] for name in "BTD")
    pairs = "complex" in problem.traits
    numbers, parts = (D // 2, 2) if pairs else (D, 1)
    word = parts * ELEMENT[problem.dtype]
    gates = parts * (4 if "wide_gate" in problem.traits else ELEMENT[problem.dtype])
    read, written = (gates + word, word) if direction == "forward" else (gates + 2 * word, gates + word)
    operations = 12 * B * T * numbers * (4 if pairs else 1)
    for block in BLOCKS[direction, pairs]:
        warps = block * SEGMENTS // (32 * EACH[direction, pairs])
        blocks = -(-numbers // block) * B
        for stages, cost in COST[direction, pairs].items():
            # a pipeline of n stages has n - 1 buffers; the scan over segments exchanges four numbers a channel
            shared = (stages - 1) * ROWS * block * read + 16 * block * parts * warps
            for pieces in _pieces(problem, blocks, device):
                rows = -(-T // pieces // ROWS) * ROWS
                grid = Grid(max(blocks * pieces, 1), 32 * warps, 255, shared)
                if not grid.fits(device):
                    continue
                assert device.sms is not None
                together = min(grid.per_sm(device), max(1.0, grid.blocks / device.sms))
                tiles = rows // ROWS
                serial = ENTRY + max(tiles * TILE[direction, pairs], together * tiles * ROWS * block * cost)
                values = {"block": block, "segments": SEGMENTS, "steps": STEPS, "stages": stages, "warps": warps}
                plan = Plan("triton", (*values.items(), ("piece", rows if pieces > 1 else 0)))
                moved = B * T * numbers * (read + written)
                found = Candidate.of(plan, device, grid, moved, operations, False, serial)
                if pieces > 1:
                    again = B * T * numbers * (gates + word)
                    first = Candidate.of(plan, device, grid, again, operations, False, serial, 1, CARRY)
                    found = found.after(first)
                yield found


def _pieces(problem: Problem, blocks: int, device: Device) -> Iterator[int]:
    """Into how many pieces to cut a sequence: none, or so that two or four blocks come on each SM."""
    yield 1
    if problem.varlen or device.sms is None:
        return
    for each in (2, 4):
        pieces = each * device.sms // max(blocks, 1)
        if 1 < pieces <= problem["T"] // (4 * ROWS):
            yield pieces
