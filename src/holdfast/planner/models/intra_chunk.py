"""Outputs inside chunks: tiles that fit, and how long an SM takes for the blocks that share it."""

from collections.abc import Iterator

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem

from . import ranked

CHUNKS = (16, 512)
WIDTHS = (16, 256)
# Seconds of an SM for one tile of earlier steps, a block's own, or the state: by steps a block, 64 columns, in float16
# on an H200 (chunks of 32 to 256 steps, widths of 64 and 128). 16 steps: an estimate.
UNIT = {16: 0.42e-6, 32: 0.73e-6, 64: 1.25e-6, 128: 3.7e-6}
# The same for other columns, of that for 64.
WIDER = {16: 0.9, 32: 1.0, 64: 1.0, 128: 1.65, 256: 2.9}
# Seconds before the first tile. Backward, all launches together are so many forward ones.
ENTRY, BACKWARD = 1e-6, 9.4
# Loading a tile ahead costs a block a buffer and saves waiting where there are several.
AHEAD = {1: 1.0, 2: 0.93}
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans: steps and values of a block, stages, warps."""
    return ranked(every(problem, device, direction))


def covering(size: int) -> int:
    """The power of two, at least 16, that covers size: what a tile of tensor cores needs."""
    return max(16, 1 << (size - 1).bit_length())


def most_registers(block: int, columns: int, keys: int, warps: int) -> int | None:
    """Registers a thread of the forward pass at most; None leaves that to the compiler.

    At 64 x 64 x 64 it takes 175, of which two blocks fit an SM; with 168, and 24 bytes spilt, three do: 0.0120 ms for
    0.0145 (B16 H12, chunks of 128 steps, float16, an H200).
    """
    return 168 if (block, columns, warps) == (64, 64, 4) and keys <= 64 else None


def moved_bytes(problem: Problem, direction: Direction) -> int:
    """What has to move at least, each tensor once; scores stay on chip."""
    B, T, H, Hq, K, V, C = (problem[name] for name in ("B", "T", "H", "Hq", "K", "V", "C"))
    has_gate = any(trait.startswith("gate=") for trait in problem.traits)
    inputs = B * T * (2 * Hq * K + H * V * (1 + has_gate))
    inputs += B * H * -(-T // C) * K * V * ("states" in problem.traits)
    o = B * T * H * V
    return ELEMENT[problem.dtype] * (inputs + o if direction == "forward" else 2 * inputs + o)


def every(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
    """All that fit, in no order."""
    B, T, H, K, V, C = (problem[name] for name in "BTHKVC")
    size = ELEMENT[problem.dtype]
    # three TF32 products have two parts of each operand
    parts = 2 if size == 4 else 1
    chunks, keys, wide = -(-T // C), covering(K), covering(V)
    assert device.capability is not None
    forward = direction == "forward"
    for block in UNIT:
        if block > covering(C):
            continue
        tiles = -(-C // block)
        for columns in sorted(WIDER, reverse=not forward):
            if columns > wide or (not forward and columns > 64):
                continue
            for warps in (4, 8):
                for stages in (1, 2) if forward and tiles > 2 else (1,):
                    if forward:
                        tile = block * (keys + columns)
                        shared = size * ((stages - 1) * tile + parts * (tile + block * keys + keys * columns))
                        # for a float32 state on its way to the inputs' dtype
                        spare = size * (keys + block) * columns + 2048
                        held = block * (columns + block) // (32 * warps)
                    else:
                        # what Triton 3.6 takes for keys and values, and for queries with a float32 state, at most
                        tile = block * (keys + wide)
                        for_keys = 16 * tile // 5 + 2 * block * block
                        for_queries = 2 * tile + 9 * keys * columns // 2 + 3 * block * block // 2
                        shared, spare = size * max(for_keys, for_queries), 0
                        held = block * (keys + wide + 2 * block) // (32 * warps)
                    # float32 sums, and as much again for what is on its way
                    if 2 * held > 224:
                        continue
                    # before Hopper, tensor cores take operands from registers too
                    if forward and device.capability < (9, 0) and block * columns > 16 * 32 * warps:
                        continue
                    across = -(-V // columns) if forward else 1
                    registers = most_registers(block, columns, keys, warps) if forward else None
                    registers = registers or min(255, 32 + 2 * held)
                    grid = Grid(max(tiles * across * chunks * B * H, 1), 32 * warps, registers, shared)
                    if not grid.fits(device) or shared + spare > (device.shared_per_block or 0):
                        continue
                    assert device.sms is not None
                    together = min(grid.per_sm(device), -(-grid.blocks // device.sms))
                    units = (tiles + 1) / 2 + ("states" in problem.traits)
                    # of gradients, all but that of the states take whole rows
                    columns_held = columns if forward else max(keys, wide)
                    unit = UNIT[block] * WIDER[columns_held] * AHEAD[stages] * parts
                    # twice the warps finish no sooner: they wait for one another
                    serial = together * units * unit * (1.3 if warps > 4 and block < 128 else 1.0)
                    serial = (serial + ENTRY / grid.waves(device)) * (1.0 if forward else BACKWARD)
                    operations = 2 * B * H * T * (across * K + V) * (C + block) // 2 + 2 * B * H * T * K * V
                    passes = 1 if forward else 5
                    plan = Plan(
                        "triton", (("block", block), ("columns", columns), ("stages", stages), ("warps", warps))
                    )
                    moved = moved_bytes(problem, direction)
                    yield Candidate.of(plan, device, grid, moved, passes * operations, True, serial)
