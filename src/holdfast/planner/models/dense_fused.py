"""The whole time loop in one launch, R on chip: a head in one block, or spread over many that exchange h every step."""

from collections.abc import Iterator, Mapping

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked

HALF, FLOAT = 2, 4
# Registers of a thread beside weights, operands, sums and states: what ptxas took at head dimensions 16 to 128, and in
# the warps that multiply when a head is spread.
OVERHEAD, SPREAD_OVERHEAD = 40, 48
# Measured on an H200 with LSTMs of B 1 to 128, T 1024, when a block that has a head took four sequences. Seconds of a
# step with the head in one block: one that costs nothing, and what grows with its products, D^2 for each gate that R
# feeds; each more block on an SM adds a share.
STEP = {"forward": 0.132e-6, "backward": 0.254e-6}
SQUARE = {"forward": 5.6e-12, "backward": 9.5e-12}
SHARE = 0.55
# Seconds with the head spread: the exchange of a step; of a tile of 8 sequences, sums and cell, one product, 1 KiB of
# weights that are read from shared memory; filling the vectors that blocks exchange; backward beside forward.
EXCHANGE, CELLS, PRODUCT, SHARED_KIB, FILL, BACKWARD = 0.62e-6, 0.17e-6, 0.014e-6, 0.0014e-6, 5e-6, 1.6
SLICE, GROUP = 16, 32
# Of 12 warps, 8 multiply. A thread is launched with 168 registers; on Hopper those that multiply then take 208. Without
# that, 160 leave ptxas room for what only the others need.
WARPS, LAUNCHED, TAKEN, EVEN = 8, 168, 208, 160
# Turns in the ring of what the cells need of memory; as in spread.cuh.
SLOTS = 4
# Cycles from a block's own h to the first look for the others': of 0 to 900 the best at B 16, D 768, forward; backward
# 450 to 900 are within 2%.
PAUSE = 450
# Sequences of a block that has a head.
ROWS = 2


def rows_of(bytes_a_row: int, element: int) -> int:
    """Bytes from row to row in shared memory; as row_bytes in resident.cuh."""
    offset = 32 if element == HALF else 64
    return -(-(bytes_a_row - offset) // 128) * 128 + offset


def kept(gates: int) -> int:
    """Gates kept of one channel: padded to a power of two."""
    return 1 << (gates - 1).bit_length()


def resident_threads(width: int) -> int:
    """Of a block that has a head: a warp for each 16 channels."""
    return 32 * -(-width // SLICE)


def resident_shared(sizes: Mapping[str, int] | Problem, width: int, stages: int, way: Direction) -> int:
    """Bytes of shared memory of a block that has a head; in the backward pass as if all states were needed."""
    vector = HALF * SLICE * -(-width // SLICE)
    if way == "forward":
        stage = rows_of(HALF * sizes["Gi"] * width, HALF)
        vectors = rows_of(vector, FLOAT)
    else:
        # as if gates were kept in float32
        gates = FLOAT * kept(sizes["G"])
        stage = rows_of(gates * width, gates) + 2 * rows_of(HALF * width, HALF)
        stage += (sizes["S"] - 1) * rows_of(FLOAT * width, FLOAT)
        vectors = rows_of(sizes["G"] * vector, FLOAT)
    return ROWS * (2 * vectors + stages * stage)


def spread_shared(
    sizes: Mapping[str, int] | Problem, tiles: int, warps: int, in_shared: int, direction: Direction
) -> int:
    """Bytes of shared memory of a block that has a slice of a head: weights, two sets of sums, a ring, states."""
    weights, cells = sizes["Gr"] * in_shared * 1024 * warps, 8 * SLICE
    if direction == "forward":
        parts, turn = 16 * 8 * 17 * -(-sizes["Gr"] // 4) * warps, HALF * sizes["Gi"]
    else:
        # as if gates were kept in float32 and all states needed
        parts, turn = 4 * 8 * 20 * warps, FLOAT * kept(sizes["G"]) + FLOAT * (sizes["S"] - 1) + 2 * HALF
    return weights + 2 * parts + SLOTS * turn * cells + tiles * sizes["S"] * FLOAT * cells


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    return ranked([*_resident(problem, device, direction), *_spread(problem, device, direction)])


def _resident(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
    """A head in one block: a warp has 16 channels, a block two sequences."""
    B, T, H, D = (problem[name] for name in "BTHD")
    recurrent, states = problem["Gr"], problem["S"]
    width = -(-D // 8) * 8
    threads, steps = resident_threads(width), -(-width // SLICE)
    if threads > (device.threads_per_block or 0):
        return
    registers = 4 * recurrent * steps + 2 * steps + 4 * recurrent + states + OVERHEAD
    for stages in (8, 6, 4, 3):
        shared = resident_shared(problem, width, stages, direction)
        grid = Grid(H * -(-B // ROWS), threads, -(-registers // 8) * 8, shared)
        if grid.fits(device):
            beside = min(grid.per_sm(device), -(-grid.blocks // (device.sms or 1))) - 1
            step = (STEP[direction] + SQUARE[direction] * recurrent * width**2) * (1 + SHARE * beside)
            plan = Plan("fused", (("blocks", 1), ("stages", stages)))
            yield Candidate.of(plan, device, grid, *costs(problem, direction), serial=T * step)
            return


def _spread(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
    """A head over a block for each 16 channels, and once for each range of sequences; all at once on the device."""
    B, T, H, D = (problem[name] for name in "BTHD")
    recurrent = problem["Gr"]
    width = -(-D // 8) * 8
    slices, groups, eights = -(-width // SLICE), -(-width // GROUP), -(-B // 8)
    sms = device.sms or 0
    # blocks wait for one another: each needs an SM of its own
    if slices > sms or slices == 1:
        return
    heads = min(H, sms // slices)
    tiles = -(-eights // min(eights, sms // (slices * heads)))
    ranges = -(-eights // tiles)
    per_warp = -(-groups // WARPS)
    fit = _weights(per_warp, recurrent, TAKEN if device.capability == (9, 0) else EVEN, direction)
    if fit is None:
        return
    in_registers, at_once = fit
    in_shared = per_warp - in_registers
    shared = spread_shared(problem, tiles, WARPS, in_shared, direction)
    # launched with as many registers as there are
    grid = Grid(slices * ranges * heads, 32 * (WARPS + 4), LAUNCHED, shared)
    if not grid.fits(device):
        return
    kib = recurrent * in_shared * WARPS
    tile = CELLS + PRODUCT * recurrent * per_warp * 2 * WARPS / 4 + SHARED_KIB * kib
    rounds = -(-H // heads)
    step = max(EXCHANGE + tile, tiles * tile) * (BACKWARD if direction == "backward" else 1)
    serial = rounds * T * step + FILL
    numbers = {
        "blocks": slices,
        "ranges": ranges,
        "heads": heads,
        "warps": WARPS,
        "in_registers": in_registers,
        "at_once": at_once,
        "pause": PAUSE,
    }
    plan = Plan("fused", tuple(numbers.items()))
    yield Candidate.of(plan, device, grid, *costs(problem, direction), serial=serial)


def _weights(per_warp: int, recurrent: int, limit: int, direction: Direction) -> tuple[int, int] | None:
    """(groups of weights in registers, gates asked for together), most of both; None if not even operands fit."""
    for in_registers in range(per_warp, -1, -1):
        for at_once in (recurrent, 2, 1) if direction == "backward" else (1,):
            operands = 4 * per_warp * at_once
            registers = 8 * recurrent * in_registers + operands + 4 * recurrent + SPREAD_OVERHEAD
            if at_once <= recurrent and registers <= limit:
                return in_registers, at_once
    return None


def costs(problem: Problem, direction: Direction) -> tuple[int, int]:
    """Bytes of memory and operations of a pass."""
    B, T, H, D = (problem[name] for name in "BTHD")
    cells = B * T * H * D
    operations = 2 * cells * problem["Gr"] * D
    kept_bytes = HALF * kept(problem["G"]) + FLOAT * (problem["S"] - 1)
    weights = HALF * problem["Gr"] * H * D * D
    if direction == "forward":
        each = HALF * (problem["Gi"] + 1) + (kept_bytes if problem.needs_grad else 0)
        return cells * each + weights, operations
    # dR reads dx and h again, and multiplies as much as the recurrence does
    return cells * (kept_bytes + HALF * (2 * problem["Gi"] + 4)) + 3 * weights, 2 * operations
