"""Outputs inside chunks and their gradients on Hopper, in tiles of 64 steps."""

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned

from . import triton as intra_chunk
from . import triton_backward as intra_chunk_gradients

CHUNKS = (64, 128, 256, 512)
WIDTHS = (64, 128)
TILE = 64
# Forward: seconds before the first tile, and of one: for a block alone on its SM, and for each that shares it. By
# columns of keys and values, fitted to chunks of 64, 128 and 256 steps in float16 on an H200; of 192 columns a guess.
ENTRY = {128: 1.9e-6, 192: 3e-6, 256: 4e-6}
UNIT = {128: (0.0, 0.53e-6), 192: (0.1e-6, 0.7e-6), 256: (0.22e-6, 0.9e-6)}
# What the compiler takes (tests/kernels/chunk/intra/hopper/test_backend.py), by values.
REGISTERS = {64: 128, 128: 168}
# Slots of the ring, the measured best: with fewer more blocks share an SM, with more each has more on its way.
# Where all blocks start at once, a slot more to fill keeps memory from what the first products wait for, so many
# seconds: 0.6e-6 to 0.9e-6 at C128 d64, 0.3e-6 at C64.
MEASURED_SLOTS = 4
FILL = 0.4e-6
# Backward, a chunk in one tile: seconds of a block, by columns, and warps and registers.
SINGLE_TILE = {128: (10e-6, 4, 168), 192: (10e-6, 8, 255), 256: (10e-6, 8, 255)}
# Backward, a tile of each kind, with others walked over so many steps at a time: seconds before its first pair of tiles
# and for each, by columns, when an SM is full; a prediction.
STEPS = 32
TILED_SLOTS = (18, 14, 13)
TILED_ENTRY = {128: 3e-6, 192: 4e-6, 256: 5e-6}
TILED_UNIT = {128: 2.6e-6, 192: 3.2e-6, 256: 4e-6}
TILED_REGISTERS = {128: 168, 192: 255, 256: 255}


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Return plans: slots of the ring; backward warps where a tile holds a chunk, slots otherwise.

    Where query heads serve several value heads, gradients are the Triton kernels', under their own name.
    """
    if direction == "forward":
        return planned(problem, device, direction, Kernel(model, candidate))
    if problem["Hq"] == problem["H"]:
        return planned(problem, device, direction, *GRADIENTS)
    return intra_chunk_gradients.candidates(problem, device)


def is_single_tile(plan: Plan) -> bool:
    """Return whether a plan of the backward pass takes a chunk in one tile."""
    return plan.values[0][0] == "warps"


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """Declare the forward pass."""
    model, K, V = KernelModel(device), problem["K"], problem["V"]
    slots = model.variable("slots", (3, 4), "largest")
    # the program's own tile and the ring, sums, barriers
    model.block(4, REGISTERS[V], 2 * (1 + slots) * TILE * max(K, V) + 8 * problem["C"] + 512)
    return model


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    B, T, H, K, V, C = (problem[name] for name in "BTHKVC")
    chunks, tiles = -(-T // C), C // TILE
    grid = values.grid(max(tiles * chunks * B * H, 1))
    together = min(grid.per_sm(device), -(-grid.blocks // device.processors))
    alone, each = UNIT[K + V]
    waves = grid.blocks / grid.at_once(device)
    # in one wave the block with the most tiles counts, in many their mean
    units = (tiles if waves <= 1 else waves * (tiles + 1) / 2) + max(waves, 1) * ("states" in problem.traits)
    entry = ENTRY[K + V] + (FILL * (values["slots"] - MEASURED_SLOTS) if waves <= 1 else 0)
    serial = (entry + units * (alone + each * together)) / grid.waves(device)
    operations = 2 * B * H * T * (K + V) * (C + TILE) // 2 + 2 * B * H * T * K * V
    moved = intra_chunk.moved_bytes(problem, "forward")
    return Candidate.of(values.plan("hopper", "slots"), device, grid, moved, operations, True, serial)


def single_tile_model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """Declare the backward pass with a chunk in one tile."""
    model, K, V, has_states = KernelModel(device), problem["K"], problem["V"], "states" in problem.traits
    model.require(problem["C"] == TILE, "a chunk is one tile")
    _, warps, registers = SINGLE_TILE[K + V]
    # what is read, the pairs and their gradients, sums
    shared = 2 * (2 * TILE * (K + 2 * V) + K * V * has_states + 2 * TILE * TILE) + 2048
    model.block(warps, registers, shared)
    return model


def single_tile(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    B, T, H, K, V, C = (problem[name] for name in "BTHKVC")
    grid = values.grid(max(-(-T // C) * B * H, 1))
    return _gradient(problem, device, grid, values.plan("hopper", "warps"), SINGLE_TILE[K + V][0], True)


def tiled_model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """Declare the backward pass with a program a tile of each kind."""
    model, K, V = KernelModel(device), problem["K"], problem["V"]
    slots = model.variable("slots", TILED_SLOTS, "largest")
    model.block(4, TILED_REGISTERS[K + V], 2 * slots * STEPS * max(K, V) + 8 * problem["C"] + 512)
    return model


def tiled(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    B, T, H, K, V, C = (problem[name] for name in "BTHKVC")
    tiles, has_states = C // TILE, "states" in problem.traits
    programs = 2 * tiles + has_states
    units = (tiles * (tiles + 1) + 1.5 * tiles * has_states) / programs
    taken = TILED_ENTRY[K + V] + units * TILED_UNIT[K + V]
    grid = values.grid(max(programs * -(-T // C) * B * H, 1))
    return _gradient(problem, device, grid, values.plan("hopper", "slots"), taken, False)


def _gradient(problem: Problem, device: Device, grid: Grid, plan: Plan, taken: float, single_tile: bool) -> Candidate:
    serial = taken * max(grid.blocks / grid.at_once(device), 1) / grid.waves(device)
    moved = intra_chunk_gradients.moved(problem, single_tile)
    operations = intra_chunk_gradients.operations(problem, TILE, single_tile)
    return Candidate.of(plan, device, grid, moved, operations, True, serial)


GRADIENTS = (Kernel(single_tile_model, single_tile), Kernel(tiled_model, tiled))
