"""The selective scan: bound by exponentials and instructions, not by bytes."""

from holdfast.planner import Candidate, Device, Direction, Problem
from holdfast.planner.constrint import lookup
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned

# Tokens between two states in memory. One for both passes: the backward pass starts where the forward pass left them.
CHUNK = 16
# Numbers of state that a program has at a time, a warp each.
BLOCK_N = WARPS = 4
# Channels of a program, a lane or several of them.
BLOCKS = {"forward": (32, 64), "backward": (32,)}
MOST_NUMBERS = 256
# Offsets inside a state are 32-bit.
MOST_CHANNELS = 2**22
# Cycles that a warp takes of a scheduler for a chunk: for each of its numbers of state, and for all that is done once.
# Instructions of sm_90's machine code, and at least 8 cycles an exponential, of which an SM does 16 a cycle.
CYCLES = {("forward", 32): (128, 328), ("forward", 64): (240, 620), ("backward", 32): (466, 563)}
# What a launch takes over these: B8 T2048 D1536 N16 in bfloat16 on an H100, 0.45 and 1.57 ms.
SLOWDOWN = {"forward": 1.8, "backward": 1.45}
# Cycles of the same where nothing else runs: loads that are waited for, chains, barriers. Estimates.
WAITS = {("forward", 32): (450, 1500), ("forward", 64): (650, 2000), ("backward", 32): (1100, 2500)}
# As Triton 3.6 compiles them for sm_90 in bfloat16.
REGISTERS = {"forward": {32: 128, 64: 216}, "backward": {32: 255}}
CLOCK, SCHEDULERS = 1.7e9, 4
# Seconds before and behind the kernel: A is scaled, parts are added up. An estimate.
AROUND = {"forward": 3e-6, "backward": 20e-6}
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans: tokens a chunk, channels a block, numbers of state at a time, warps."""
    return planned(problem, device, direction, Kernel(model, candidate))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    model = KernelModel(device)
    block = model.variable("block_d", BLOCKS[direction])
    model.add(block <= max(32, problem["D"] // problem["G"]), "channels of a block, of a group")
    for name, value in (("chunk", CHUNK), ("block_n", BLOCK_N)):
        model.let(name, value)
    model.block(WARPS, lookup(block, REGISTERS[direction]), 4 * CHUNK * BLOCK_N * block)
    return model


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    B, T, D, N, G = (problem[name] for name in "BTDNG")
    size, gate, block = ELEMENT[problem.dtype], "gate" in problem.traits, values["block_d"]
    steps = 4 if "wide_dt" in problem.traits else size
    chunks, blocks = -(-T // CHUNK), -(-(D // G) // block)
    # of B and C each block reads its own, of the second on mostly from the cache
    moved = B * T * (D * (size * (2 + gate) + steps) + 2 * G * N * size)
    moved += 4 * B * chunks * D * N if problem.needs_grad else 0
    if direction == "backward":
        parts = 4 * 2 * B * T * G * N * blocks
        moved += B * T * D * (size * (1 + gate) + steps) + 2 * parts
    grid = values.grid(max(1, B * G * blocks))
    # of one wave; programs that share an SM share its schedulers
    together, iterations = min(grid.per_sm(device), -(-grid.blocks // device.processors)), -(-N // BLOCK_N)
    (each, once), (wait, wait_once) = CYCLES[direction, block], WAITS[direction, block]
    busy = SLOWDOWN[direction] * together * WARPS / SCHEDULERS * chunks * (iterations * each + once) / CLOCK
    waits = chunks * (iterations * wait + wait_once) / CLOCK
    plan = values.plan("triton", "chunk", "block_d", "block_n", "warps")
    operations = (8 if direction == "forward" else 30) * B * T * D * N
    return Candidate.of(plan, device, grid, moved, operations, False, max(busy, waits) + AROUND[direction])
