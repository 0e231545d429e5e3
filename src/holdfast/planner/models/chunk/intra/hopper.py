"""Outputs inside chunks and their gradients on Hopper, in tiles of 64 steps."""

from collections.abc import Iterator

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked

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
# Slots of the ring, the measured best first: with fewer more blocks share an SM, with more each has more on its way.
# Where all blocks start at once, a slot more to fill keeps memory from what the first products wait for, so many
# seconds: 0.6e-6 to 0.9e-6 at C128 d64, 0.3e-6 at C64.
SLOTS = (4, 3)
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
        return ranked(every(problem, device))
    if problem["Hq"] == problem["H"]:
        return ranked(every_gradient(problem, device))
    return intra_chunk_gradients.candidates(problem, device)


def is_single_tile(plan: Plan) -> bool:
    """Return whether a plan of the backward pass takes a chunk in one tile."""
    return plan.values[0][0] == "warps"


def every(problem: Problem, device: Device) -> Iterator[Candidate]:
    """Yield all of the forward pass that fit, in no order."""
    B, T, H, K, V, C = (problem[name] for name in "BTHKVC")
    chunks, tiles = -(-T // C), C // TILE
    moved = intra_chunk.moved_bytes(problem, "forward")
    operations = 2 * B * H * T * (K + V) * (C + TILE) // 2 + 2 * B * H * T * K * V
    for slots in SLOTS:
        # the program's own tile and the ring, sums, barriers
        shared = 2 * (1 + slots) * TILE * max(K, V) + 8 * C + 512
        grid = Grid(max(tiles * chunks * B * H, 1), 128, REGISTERS[V], shared)
        if not grid.fits(device):
            continue
        assert device.sms is not None
        together = min(grid.per_sm(device), -(-grid.blocks // device.sms))
        alone, each = UNIT[K + V]
        waves = grid.blocks / grid.at_once(device)
        # in one wave the block with the most tiles counts, in many their mean
        units = (tiles if waves <= 1 else waves * (tiles + 1) / 2) + max(waves, 1) * ("states" in problem.traits)
        entry = ENTRY[K + V] + (FILL * (slots - SLOTS[0]) if waves <= 1 else 0)
        serial = (entry + units * (alone + each * together)) / grid.waves(device)
        yield Candidate.of(Plan("hopper", (("slots", slots),)), device, grid, moved, operations, True, serial)


def every_gradient(problem: Problem, device: Device) -> Iterator[Candidate]:
    """Yield all of the backward pass that fit, in no order."""
    B, T, H, K, V, C = (problem[name] for name in "BTHKVC")
    chunks, tiles, wide, has_states = -(-T // C), C // TILE, max(K, V), "states" in problem.traits
    if C == TILE:
        taken, warps, registers = SINGLE_TILE[K + V]
        # what is read, the pairs and their gradients, sums
        shared = 2 * (2 * TILE * (K + 2 * V) + K * V * has_states + 2 * TILE * TILE) + 2048
        grid = Grid(max(chunks * B * H, 1), 32 * warps, registers, shared)
        yield _gradient(problem, device, grid, Plan("hopper", (("warps", warps),)), taken, True)
    programs = 2 * tiles + has_states
    units = (tiles * (tiles + 1) + 1.5 * tiles * has_states) / programs
    taken = TILED_ENTRY[K + V] + units * TILED_UNIT[K + V]
    for slots in TILED_SLOTS:
        shared = 2 * slots * STEPS * wide + 8 * C + 512
        grid = Grid(max(programs * chunks * B * H, 1), 128, TILED_REGISTERS[K + V], shared)
        if grid.fits(device):
            yield _gradient(problem, device, grid, Plan("hopper", (("slots", slots),)), taken, False)


def _gradient(problem: Problem, device: Device, grid: Grid, plan: Plan, taken: float, single_tile: bool) -> Candidate:
    serial = taken * max(grid.blocks / grid.at_once(device), 1) / grid.waves(device)
    moved = intra_chunk_gradients.moved(problem, single_tile)
    operations = intra_chunk_gradients.operations(problem, TILE, single_tile)
    return Candidate.of(plan, device, grid, moved, operations, True, serial)
