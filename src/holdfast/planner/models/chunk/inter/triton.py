"""The scan of states between chunks: every state once; twice more in float32 where the backward pass runs again."""

from collections.abc import Iterator

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked

HIGHEST_RANK = 16
# K that low ranks take, since a block then holds all rows.
MOST_ROWS = 256
# Columns of a block under a low rank: the least that tensor cores take.
COLUMNS = 16
# Bytes that an SM has to have on their way to keep memory busy: its bandwidth times about 0.7 us.
IN_FLIGHT = 40 * 1024
# Seconds from one chunk to the next in one block, under a low rank or not, and before the first: B4 H16 G64 64 x 64
# bfloat16 on an H200, rank 4.
STEP = {
    ("forward", False): 0.05e-6,
    ("forward", True): 0.84e-6,
    ("backward", False): 1.15e-6,
    ("backward", True): 7.5e-6,
}
ENTRY = 2e-6
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Return plans: rows and columns of a block's tile, chunks loaded together (or stages, under a low rank), warps.

    Backward, these are of the forward pass that runs again, and `stages` of what follows.
    """
    return ranked(every(problem, device, direction))


def covering(size: int, least: int = 1) -> int:
    """Return the power of two that covers size."""
    return max(least, 1 << (size - 1).bit_length())


def backward_bytes(states: int, size: int) -> int:
    """Return the bytes of history, cotangents and gradients, and of the history that is written first where the output
    was rounded."""
    return states * (4 + 2 * size) + (0 if size == 4 else states * (4 + size))


def every(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
    """Yield all that fit, in no order."""
    B, G, H, K, V = (problem[name] for name in "BGHKV")
    rank = problem["r"] if "low_rank" in problem.traits else 0
    size = ELEMENT[problem.dtype]
    states = B * G * H * K * V
    moved = (2 * states + 2 * B * G * H * K * rank) * size
    if direction == "backward":
        moved = backward_bytes(states, size)
    passes = 1 if direction == "forward" else 3
    step = STEP[direction, rank > 0]
    tiles = _low_rank(K, rank, size) if rank else _tiles(problem, device, direction)
    for rows, columns, group, warps, registers, shared in tiles:
        for stages in (3, 2, 1) if direction == "backward" else (0,):
            # history, cotangents and factors of the chunks that are on their way
            ahead = max(stages - 1, 0) * rows * ((4 + size) * columns + 2 * size * max(rank, 1))
            grid = Grid(
                max(-(-K // rows) * -(-V // columns) * H * B, 1), 32 * warps, registers, max(shared, ahead + 1024)
            )
            if not grid.fits(device):
                continue
            values = {"block_k": rows, "block_v": columns, "group": group, "warps": warps}
            plan = Plan("triton", tuple((values | ({"stages": stages} if stages else {})).items()))
            yield Candidate.of(plan, device, grid, moved, states * (2 + 4 * rank) * passes, False, ENTRY + G * step)


Tile = tuple[int, int, int, int, int, int]


def _tiles(problem: Problem, device: Device, direction: Direction) -> Iterator[Tile]:
    """Yield tiles of 1024 elements a block, or 512, in rows as long as V.

    Where blocks fill memory's queues, half the threads with twice the elements are faster, with groups of 8 chunks: at
    B8 H16 G64 128 x 128 0.139 to 0.141 ms, 0.144 to 0.152 with 4.
    """
    B, H, K, V = (problem[name] for name in "BHKV")
    columns = min(covering(V), 256)
    # of a group of 8 chunks, whose loads are all on their way before the first is used
    full = B * H * K * V * ELEMENT[problem.dtype] * 8 // device.processors > IN_FLIGHT
    for each in (16, 8) if full else (8, 16):
        for elements in (1024, 512):
            rows = min(max(1, elements // columns), covering(K))
            warps = max(1, rows * columns // (32 * each))
            if direction == "backward":
                yield rows, columns, 8, warps, 128, 4096
                continue
            for group in (8, 4, 16) if full else (16, 8, 4):
                # a group beyond the last chunk is work for nothing
                if group > covering(problem["G"], 4):
                    continue
                yield rows, columns, group, warps, min(255, 16 + 3 * each * group // 2), 4096


def _low_rank(keys: int, rank: int, size: int) -> Iterator[Tile]:
    rows = covering(keys, 16)
    warps = max(1, rows * COLUMNS // 512)
    for stages in (4, 3, 2, 1):
        buffers = (stages - 1) * rows * (COLUMNS + 2 * max(16, covering(rank))) * size
        yield rows, COLUMNS, stages, warps, 255, buffers + 4 * rows * COLUMNS
