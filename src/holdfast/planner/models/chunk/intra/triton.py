"""Outputs inside chunks: tiles that fit, and how long an SM takes for the blocks that share it."""

from collections.abc import Iterator

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked

CHUNKS = (16, 512)
WIDTHS = (16, 256)
# Seconds of an SM for one tile of earlier steps, a block's own, or the state: by steps a block, 64 columns, in float16
# on an H200 (chunks of 32 to 256 steps, widths of 64 and 128). 16 steps: an estimate.
UNIT = {16: 0.42e-6, 32: 0.73e-6, 64: 1.25e-6, 128: 3.7e-6}
# The same for other columns, of that for 64.
WIDER = {16: 0.9, 32: 1.0, 64: 1.0, 128: 1.65, 256: 2.9}
# Seconds before the first tile.
ENTRY = 1e-6
# Loading a tile ahead costs a block a buffer and saves waiting where there are several.
AHEAD = {1: 1.0, 2: 0.93}
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


def candidates(problem: Problem, device: Device) -> tuple[Candidate, ...]:
    """Return plans of the forward pass: steps and values of a block, stages, warps."""
    return ranked(every(problem, device))


def covering(size: int) -> int:
    """Return the power of two, at least 16, that covers size: what a tile of tensor cores needs."""
    return max(16, 1 << (size - 1).bit_length())


def most_registers(block: int, columns: int, keys: int, warps: int) -> int | None:
    """Return the registers of a thread of the forward pass at most; None leaves that to the compiler.

    At 64 x 64 x 64 it takes 175, of which two blocks fit an SM; with 168, and 24 bytes spilt, three do: 0.0120 ms for
    0.0145 (B16 H12, chunks of 128 steps, float16, an H200).
    """
    return 168 if (block, columns, warps) == (64, 64, 4) and keys <= 64 else None


def moved_bytes(problem: Problem, direction: Direction) -> int:
    """Return the bytes that have to move at least, each tensor once; scores stay on chip."""
    B, T, H, Hq, K, V, C = (problem[name] for name in ("B", "T", "H", "Hq", "K", "V", "C"))
    has_gate = any(trait.startswith("gate=") for trait in problem.traits)
    size = ELEMENT[problem.dtype]
    inputs = size * B * T * (2 * Hq * K + H * V * (1 + has_gate))
    inputs += size * B * H * -(-T // C) * K * V * ("states" in problem.traits)
    # decays are taken to be float32
    inputs += 4 * B * T * H * ("decay=scalar" in problem.traits)
    o = size * B * T * H * V
    return inputs + o if direction == "forward" else 2 * inputs + o


def every(problem: Problem, device: Device) -> Iterator[Candidate]:
    """Yield all that fit, in no order."""
    B, T, H, K, V, C = (problem[name] for name in "BTHKVC")
    size = ELEMENT[problem.dtype]
    # three TF32 products have two parts of each operand
    parts = 2 if size == 4 else 1
    chunks, keys, wide = -(-T // C), covering(K), covering(V)
    assert device.capability is not None
    for block in UNIT:
        if block > covering(C):
            continue
        tiles = -(-C // block)
        for columns in sorted(WIDER):
            if columns > wide:
                continue
            for warps in (4, 8):
                for stages in (1, 2) if tiles > 2 else (1,):
                    tile = block * (keys + columns)
                    shared = size * ((stages - 1) * tile + parts * (tile + block * keys + keys * columns))
                    # for a float32 state on its way to the inputs' dtype
                    spare = size * (keys + block) * columns + 2048
                    held = block * (columns + block) // (32 * warps)
                    # float32 sums, and as much again for what is on its way
                    if 2 * held > 224:
                        continue
                    # before Hopper, tensor cores take operands from registers too
                    if device.capability < (9, 0) and block * columns > 16 * 32 * warps:
                        continue
                    across = -(-V // columns)
                    registers = most_registers(block, columns, keys, warps) or min(255, 32 + 2 * held)
                    grid = Grid(max(tiles * across * chunks * B * H, 1), 32 * warps, registers, shared)
                    if not grid.fits(device) or shared + spare > device.block_memory:
                        continue
                    assert device.sms is not None
                    together = min(grid.per_sm(device), -(-grid.blocks // device.sms))
                    units = (tiles + 1) / 2 + ("states" in problem.traits)
                    unit = UNIT[block] * WIDER[columns] * AHEAD[stages] * parts
                    # twice the warps finish no sooner: they wait for one another
                    serial = together * units * unit * (1.3 if warps > 4 and block < 128 else 1.0)
                    serial += ENTRY / grid.waves(device)
                    operations = 2 * B * H * T * (across * K + V) * (C + block) // 2 + 2 * B * H * T * K * V
                    plan = Plan(
                        "triton", (("block", block), ("columns", columns), ("stages", stages), ("warps", warps))
                    )
                    yield Candidate.of(plan, device, grid, moved_bytes(problem, "forward"), operations, True, serial)
