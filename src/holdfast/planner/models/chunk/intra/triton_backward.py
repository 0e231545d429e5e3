"""Gradients inside chunks in Triton: one launch where a tile holds a chunk and its state, else one, and the sums of
decays.

Such a launch has a program for the queries of each tile, one for its keys and values, and some for the state. Programs
of one chunk run at about the same time and find in the L2 cache what another has read: memory moves everything once.
"""

from holdfast.planner import Candidate, Device, Direction, Problem
from holdfast.planner.constrint import Expression, ceil_div, maximum, truth
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned, powers_of_two

from .triton import ELEMENT, covering, moved_bytes

# Seconds of a block of 8 warps that has its SM for itself: before its first product, and for each pair of tiles or tile
# of the state, by steps of a tile, of 128 columns of keys and values together. Fitted to chunks of 64, 128 and 256
# steps in float16 on an H200; 16 and 32 steps are estimates.
ENTRY = 3.6e-6
UNIT = {16: 1.1e-6, 32: 1.6e-6, 64: 2.5e-6}
# What a second block of 4 warps on an SM adds to the time of one, by whether a block takes a chunk in one tile.
SECOND = {True: 0.18, False: 0.64}
# Widest keys and values of a chunk that a block takes in one tile.
WIDEST_SINGLE_TILE = 128
AHEAD = {1: 1.0, 2: 0.93}


def candidates(problem: Problem, device: Device) -> tuple[Candidate, ...]:
    """Return plans: steps of a tile, columns of a tile of the state, stages, warps."""
    return planned(problem, device, "backward", Kernel(model, candidate))


def is_single_tile(block: int, columns: int, chunk: int, keys: int, values: int) -> bool:
    """Return whether one program computes all gradients of a chunk: one tile holds its steps, and one its state."""
    return block >= chunk and columns >= max(covering(keys), covering(values))


def moved(problem: Problem, single_tile: bool) -> int:
    """Return the bytes that move: each tensor once, and in float32 two sums of each step, written and read, if a chunk
    has several tiles."""
    sums = 0 if single_tile or "decay=scalar" not in problem.traits else 16 * problem["B"] * problem["T"] * problem["H"]
    return moved_bytes(problem, "backward") + sums


def operations(problem: Problem, block: int, single_tile: bool) -> int:
    """Return the operations of six products of each pair of tiles, eight where queries and keys have programs of their
    own, and of the state's."""
    B, T, H, K, V, C = (problem[name] for name in "BTHKVC")
    pairs = B * H * T * (C + block) * (K + V) * (3 if single_tile else 4) // 2
    return pairs + (6 * B * H * T * K * V if "states" in problem.traits else 0)


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """Declare the tiles of a block, what it holds in registers and what in shared memory."""
    H, Hq, K, V, C = (problem[name] for name in ("H", "Hq", "K", "V", "C"))
    model, size, keys, wide = KernelModel(device), ELEMENT[problem.dtype], covering(K), covering(V)
    block = model.variable("block", list(UNIT))
    columns = model.variable("columns", powers_of_two(16, 128), "largest")
    warps, stages = model.variable("warps", (4, 8)), model.variable("stages", (1, 2))
    model.add(block <= covering(C), "steps of a tile, of a chunk")
    if (device.capability or (0, 0)) < (9, 0):
        # tensor cores take operands from registers, which larger tiles spill
        model.add(block <= max(16, 4096 // (keys + wide)), "steps of a tile whose operands registers hold")
    model.add(columns <= max(keys, wide), "columns of a tile, of the state")
    single = model.let("single_tile", truth(block >= C) * truth(columns >= max(keys, wide)))
    model.add(single * columns <= WIDEST_SINGLE_TILE, "columns of a chunk in one tile")
    if size == 4:
        # their products, each in three parts, spill 1,760 bytes at widths of 64, and dgate was off by 2e-4
        model.add(block <= 32 + 32 * single, "steps of a tile in float32")
    tiles = model.let("tiles", ceil_div(C, block))
    model.add(block * (keys + wide) * (size // 2) <= 2048 * warps, "numbers of a tile, of those in registers")
    model.add(single * keys * wide <= 2048 * warps, "numbers of a state, of those in registers")
    model.add(stages <= 1 + truth(tiles > 2), "stages where several tiles follow one another")
    states = ceil_div(K, columns) * ceil_div(V, columns) if "states" in problem.traits else 0
    model.let("programs", single + (1 - single) * (2 * tiles + states))
    has_gate = any(trait.startswith("gate=") for trait in problem.traits)
    tiled = _tiled_bytes(block, columns, keys, wide, size, int(Hq < H and has_gate))
    model.block(warps, 255, single * _single_tile_bytes(block, keys, wide, size) + (1 - single) * tiled)
    return model


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    B, T, H, Hq, C = (problem[name] for name in ("B", "T", "H", "Hq", "C"))
    keys, wide, has_states = covering(problem["K"]), covering(problem["V"]), "states" in problem.traits
    block, tiles, programs, single = (values[name] for name in ("block", "tiles", "programs", "single_tile"))
    # in tiles: what the longest program does, and all of a chunk's together
    longest = 2 + 1.5 * has_states if single else tiles + 1.0
    all_units = longest if single else tiles * (tiles + 1) + 1.5 * tiles * has_states
    grid = values.grid(max(programs * -(-T // C) * B * Hq, 1))
    unit = UNIT[block] * (keys + wide) / 128 * AHEAD[values["stages"]] * (2 if problem.dtype == "float32" else 1)
    waves = grid.blocks / grid.at_once(device)
    serial = ENTRY + longest * unit if waves <= 1 else waves * (ENTRY + all_units / programs * unit)
    # four warps have 255 registers each and two blocks an SM, eight one
    together = min(grid.per_sm(device), -(-grid.blocks // device.processors))
    serial *= (1 + SECOND[bool(single)] * (together - 1)) * (H // Hq) / grid.waves(device)
    plan, amount = (
        values.plan("triton", "block", "columns", "stages", "warps"),
        operations(problem, block, bool(single)),
    )
    return Candidate.of(plan, device, grid, moved(problem, bool(single)), amount, True, serial)


def _single_tile_bytes(block: Expression, keys: int, wide: int, size: int) -> Expression:
    """Return the shared memory that Triton 3.6 takes at most, for a float32 state."""
    return 17 * keys * wide // 2 + 3 * size * block * (keys + wide) // 2 + 2 * size * block * block


def _tiled_bytes(
    block: Expression, columns: Expression, keys: int, wide: int, size: int, keeps_queries: int
) -> Expression:
    """Return the same where tiles of queries, of keys and of the state have programs of their own.

    keeps_queries: between the value heads of a query head, where a gate takes the registers.
    """
    pipelined = size * block * (keys + wide)
    pipelined = maximum(5 * pipelined, 9 * pipelined // 2 + 8192)
    # of a float32 state two tiles are loaded ahead, with two of queries or of grad_o and the gate, and 16-bit inputs
    # take it in another copy; a float32 operand has two parts
    state, parts = (10, 1) if size == 2 else (8, 2)
    by_keys = state * keys * columns + 4 * size * block * columns + keeps_queries * parts * size * block * keys
    by_values = state * wide * columns + 2 * size * block * columns + parts * size * block * (keys + wide)
    return maximum(pipelined, by_keys, by_values, 10 * max(keys, wide) * columns + 2 * size * block * (keys + wide))
