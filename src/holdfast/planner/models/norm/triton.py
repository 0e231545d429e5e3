"""Rows of heads' outputs, normalised and gated: what counts is the bytes of o, gate and result."""

from collections.abc import Iterator

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked

# channels of a row; a row is held by one block
WIDEST = 8192
# of a tile, in float32 a thread; the backward pass holds five such tiles
TILE_REGISTERS = {"forward": 32, "backward": 16}


def covering(size: int) -> int:
    """The power of two that covers size."""
    return 1 << max(size - 1, 0).bit_length()


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans, the fastest first. values: rows a tile; warps; parts (backward), blocks that sum a weight's gradient."""
    return ranked(_candidates(problem, device, direction))


def _candidates(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
    B, T, H, D, G = (problem[name] for name in ("B", "T", "H", "D", "G"))
    size = 4 if problem.dtype == "float32" else 2
    wide, rows_of_one = covering(D), max(B * T * H // G, 1)
    # o, the gate and y, or their gradients beside o and the gate
    tensors = 2 + ("gate" in problem.traits)
    if direction == "backward":
        tensors += 1 + ("gate" in problem.traits)
    moved, operations = B * T * H * D * size * tensors, B * T * H * D * 12 * tensors
    for warps in (4, 8, 16):
        for share in (1, 2):
            rows = TILE_REGISTERS[direction] * 32 * warps // (wide * share)
            if rows < 1:
                continue
            rows = min(rows, covering(rows_of_one))
            tiles = -(-rows_of_one // rows)
            held = rows * wide // (32 * warps)
            registers = min(255, 32 + 2 * held if direction == "forward" else 40 + 5 * held)
            values = (("rows", rows), ("warps", warps))
            if direction == "forward":
                grid = Grid(tiles * G, 32 * warps, registers, 512)
            else:
                # as many blocks as a device holds at a time, at most one a tile
                together = Grid(1, 32 * warps, registers, 512).per_sm(device) * device.processors
                parts = max(1, min(tiles, together // G))
                values += (("parts", parts),)
                grid = Grid(parts * G, 32 * warps, registers, 512)
            if grid.fits(device):
                yield Candidate.of(Plan("triton", values), device, grid, moved, operations, tensor_cores=False)
