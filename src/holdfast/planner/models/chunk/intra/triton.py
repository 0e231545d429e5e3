"""Outputs inside chunks: tiles that fit, and how long an SM takes for the blocks that share it."""

from holdfast.planner import Candidate, Device, Direction, Problem
from holdfast.planner.constrint import Expression, ceil_div, maximum, minimum, truth
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned

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
    return planned(problem, device, "forward", Kernel(model, candidate))


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


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """Declare the tiles of a block, what it holds in registers and what in shared memory."""
    model, size, keys = KernelModel(device), ELEMENT[problem.dtype], covering(problem["K"])
    block = model.variable("block", list(UNIT))
    columns = model.variable("columns", list(WIDER))
    warps, stages = model.variable("warps", (4, 8)), model.variable("stages", (1, 2))
    model.add(block <= covering(problem["C"]), "steps of a block, of a chunk")
    model.add(columns <= covering(problem["V"]), "columns of a block, of V")
    tiles = model.let("tiles", ceil_div(problem["C"], block))
    model.add(stages <= 1 + truth(tiles > 2), "stages where several tiles follow one another")
    tile = block * (keys + columns)
    parts = _parts(problem)
    shared = model.let("shared", size * ((stages - 1) * tile + parts * (tile + block * keys + keys * columns)))
    # float32 sums, and as much again for what is on its way
    held = model.let("held", 2 * (block * (columns + block) // (32 * warps)))
    model.add(held <= 224, "sums, of registers")
    if (device.capability or (0, 0)) < (9, 0):
        # tensor cores take operands from registers too
        model.add(block * columns <= 16 * 32 * warps, "operands in registers")
    model.block(warps, _registers(block, columns, keys, warps, held), shared)
    spare = size * (keys + block) * columns + 2048
    model.add(shared + spare <= device.block_memory, "beside a float32 state on its way", "bytes")
    model.let("across", ceil_div(problem["V"], columns))
    return model


def _parts(problem: Problem) -> int:
    """Return the parts of an operand: three TF32 products have two of each."""
    return 2 if problem.dtype == "float32" else 1


def _registers(block: Expression, columns: Expression, keys: int, warps: Expression, held: Expression) -> Expression:
    """Return the most that a thread is taken to have, or is let have."""
    limit = most_registers(64, 64, keys, 4) or 0
    is_limited = truth(block == 64) * truth(columns == 64) * truth(warps == 4)
    # more than what it is else taken to have there
    return maximum(minimum(255, 32 + held), limit * is_limited)


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    B, T, H, K, V, C = (problem[name] for name in "BTHKVC")
    block, columns, warps, tiles = (values[name] for name in ("block", "columns", "warps", "tiles"))
    across = values["across"]
    grid = values.grid(max(tiles * across * -(-T // C) * B * H, 1))
    together = min(grid.per_sm(device), -(-grid.blocks // device.processors))
    units = (tiles + 1) / 2 + ("states" in problem.traits)
    unit = UNIT[block] * WIDER[columns] * AHEAD[values["stages"]] * _parts(problem)
    # twice the warps finish no sooner: they wait for one another
    serial = together * units * unit * (1.3 if warps > 4 and block < 128 else 1.0)
    serial += ENTRY / grid.waves(device)
    operations = 2 * B * H * T * (across * K + V) * (C + block) // 2 + 2 * B * H * T * K * V
    plan = values.plan("triton", "block", "columns", "stages", "warps")
    return Candidate.of(plan, device, grid, moved_bytes(problem, "forward"), operations, True, serial)
