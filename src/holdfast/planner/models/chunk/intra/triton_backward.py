"""Gradients inside chunks in Triton: one launch where a tile holds a chunk and its state, else one, and the sums of
decays.

Such a launch has a program for the queries of each tile, one for its keys and values, and some for the state. Programs
of one chunk run at about the same time and find in the L2 cache what another has read: memory moves everything once.
"""

from collections.abc import Iterator

from holdfast.planner import Candidate, Device, Grid, Plan, Problem
from holdfast.planner.models import ranked

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
    return ranked(every(problem, device))


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


def every(problem: Problem, device: Device) -> Iterator[Candidate]:
    """Yield all that fit, in no order."""
    B, T, H, Hq, K, V, C = (problem[name] for name in ("B", "T", "H", "Hq", "K", "V", "C"))
    size, has_states = ELEMENT[problem.dtype], "states" in problem.traits
    has_gate = any(trait.startswith("gate=") for trait in problem.traits)
    chunks, keys, wide = -(-T // C), covering(K), covering(V)
    assert device.capability is not None
    assert device.sms is not None
    for block in UNIT:
        tiles = -(-C // block)
        # before Hopper, tensor cores take operands from registers, which larger tiles spill
        if block > covering(C) or (device.capability < (9, 0) and block > 16 and block * (keys + wide) > 4096):
            continue
        for columns in (128, 64, 32, 16):
            single_tile = is_single_tile(block, columns, C, K, V)
            if columns > max(keys, wide) or (single_tile and columns > WIDEST_SINGLE_TILE):
                continue
            # their products, each in three parts, spill 1,760 bytes at widths of 64, and dgate was off by 2e-4
            if size == 4 and block == 64 and not single_tile:
                continue
            shared = (
                _single_tile_bytes(block, columns, keys, wide, size)
                if single_tile
                else _tiled_bytes(block, columns, keys, wide, size, Hq < H and has_gate)
            )
            states = -(-K // columns) * -(-V // columns) if has_states else 0
            programs = 1 if single_tile else 2 * tiles + states
            # in tiles: what the longest program does, and all of a chunk's together
            longest = tiles + 1.0 if not single_tile else 2 + 1.5 * has_states
            all_units = tiles * (tiles + 1) + 1.5 * tiles * has_states if not single_tile else longest
            for warps in (4, 8):
                # more would spill
                if block * (keys + wide) * (size // 2) > 2048 * warps or (single_tile and keys * wide > 2048 * warps):
                    continue
                for stages in (1, 2) if tiles > 2 else (1,):
                    grid = Grid(max(programs * chunks * B * Hq, 1), 32 * warps, 255, shared)
                    if not grid.fits(device):
                        continue
                    unit = UNIT[block] * (keys + wide) / 128 * AHEAD[stages] * (2 if size == 4 else 1)
                    waves = grid.blocks / grid.at_once(device)
                    serial = ENTRY + longest * unit if waves <= 1 else waves * (ENTRY + all_units / programs * unit)
                    # four warps have 255 registers each and two blocks an SM, eight one
                    together = min(grid.per_sm(device), -(-grid.blocks // device.sms))
                    serial *= (1 + SECOND[single_tile] * (together - 1)) * (H // Hq) / grid.waves(device)
                    plan = Plan(
                        "triton", (("block", block), ("columns", columns), ("stages", stages), ("warps", warps))
                    )
                    amount = operations(problem, block, single_tile)
                    yield Candidate.of(plan, device, grid, moved(problem, single_tile), amount, True, serial)


def _single_tile_bytes(block: int, columns: int, keys: int, wide: int, size: int) -> int:
    """Return the shared memory that Triton 3.6 takes at most, for a float32 state."""
    return 17 * keys * wide // 2 + 3 * size * block * (keys + wide) // 2 + 2 * size * block * block


def _tiled_bytes(block: int, columns: int, keys: int, wide: int, size: int, keeps_queries: bool) -> int:
    """Return the same where tiles of queries, of keys and of the state have programs of their own.

    keeps_queries: between the value heads of a query head, where a gate takes the registers.
    """
    pipelined = size * block * (keys + wide)
    pipelined = max(5 * pipelined, 9 * pipelined // 2 + 8192)
    # of a float32 state two tiles are loaded ahead, with two of queries or of grad_o and the gate, and 16-bit inputs
    # take it in another copy; a float32 operand has two parts
    state, parts = (10, 1) if size == 2 else (8, 2)
    by_keys = state * keys * columns + 4 * size * block * columns + keeps_queries * parts * size * block * keys
    by_values = state * wide * columns + 2 * size * block * columns + parts * size * block * (keys + wide)
    return max(pipelined, by_keys, by_values, 10 * max(keys, wide) * columns + 2 * size * block * (keys + wide))
