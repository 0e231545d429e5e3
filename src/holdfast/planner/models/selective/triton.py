"""The selective scan: bound by exponentials and instructions, not by bytes."""

from collections.abc import Iterator

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked

# Tokens between two states in memory. One for both passes: the backward pass starts where the forward pass left them.
CHUNK = 16
# Numbers of state that a program has at a time, a warp each.
BLOCK_N = WARPS = 4
# Channels of a program, a lane or several of them.
BLOCKS = {"forward": (32, 64), "backward": (32,)}
MOST_NUMBERS = 256
# Offsets inside a state are 32-bit.
MOST_CHANNELS = 2**22
# Cycles of one of an SM's four schedulers for 32 numbers of state and a token: its instructions as PTX has them, and at
# least the 8 of an exponential, of which an SM does 16 a cycle. No GPU has run them.
CYCLES = {("forward", 32): 12.0, ("forward", 64): 11.5, ("backward", 32): 36.0}
# As Triton 3.6 compiles them for sm_90 in bfloat16.
REGISTERS = {("forward", 32): 96, ("forward", 64): 216, ("backward", 32): 255}
CLOCK, SCHEDULERS = 1.7e9, 4
# Seconds of a chunk for all that is not its numbers of state: loads that are waited for, barriers. An estimate.
PER_CHUNK = {"forward": 1.5e-6, "backward": 3e-6}
# Seconds before and behind the kernel: A is scaled, parts are added up. An estimate.
AROUND = {"forward": 3e-6, "backward": 20e-6}
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans: tokens a chunk, channels a block, numbers of state at a time, warps."""
    return ranked(every(problem, device, direction))


def every(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
    """All that fit, in no order."""
    B, T, D, N, G = (problem[name] for name in "BTDNG")
    size, gate = ELEMENT[problem.dtype], "gate" in problem.traits
    steps = 4 if "wide_dt" in problem.traits else size
    channels = D // G
    chunks = -(-T // CHUNK)
    for block in BLOCKS[direction]:
        if block > max(32, channels):
            continue
        blocks = -(-channels // block)
        # of B and C each block reads its own, of the second on mostly from the cache
        tokens = B * T * (D * (size * (2 + gate) + steps) + 2 * G * N * size)
        states = 4 * B * chunks * D * N if problem.needs_grad else 0
        moved = tokens + states
        if direction == "backward":
            parts = 4 * 2 * B * T * G * N * blocks
            moved = tokens + states + B * T * D * (size * (1 + gate) + steps) + 2 * parts
        shared = 4 * CHUNK * BLOCK_N * block
        grid = Grid(max(1, B * G * blocks), 32 * WARPS, REGISTERS[direction, block], shared)
        if not grid.fits(device):
            continue
        assert device.sms is not None
        # programs that share an SM share its schedulers
        rounds = -(-grid.blocks // device.sms)
        numbers = -(-N // BLOCK_N) * CHUNK * BLOCK_N * block // 32
        busy = rounds * chunks * numbers * CYCLES[direction, block] / (SCHEDULERS * CLOCK)
        waits = -(-rounds // grid.per_sm(device)) * chunks * PER_CHUNK[direction]
        values = {"chunk": CHUNK, "block_d": block, "block_n": BLOCK_N, "warps": WARPS}
        plan = Plan("triton", tuple(values.items()))
        operations = (8 if direction == "forward" else 30) * B * T * D * N
        yield Candidate.of(plan, device, grid, moved, operations, False, max(busy, waits) + AROUND[direction])
