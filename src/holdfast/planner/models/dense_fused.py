"""The whole time loop in one launch, R on chip: a head in one block, or spread over many that exchange h every step."""

from collections.abc import Iterator, Mapping

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked

HALF, FLOAT = 2, 4
# Registers of a thread beside weights, operands, sums and states: what ptxas took at head dimensions 16 to 128, and in
# the warps that multiply when a head is spread.
OVERHEAD, SPREAD_OVERHEAD = 40, 48
# Measured on an H200 with LSTMs of B 1 to 128, H 12, D 64, T 1024. Seconds of a step with the head in one block: one
# that costs nothing, more of it for each state but two, and what grows with its products, D^2 for each gate that R
# feeds; each more block on an SM adds a share.
STEP = {"forward": 0.115e-6, "backward": 0.225e-6}
STATE = {"forward": 0.05e-6, "backward": 0.06e-6}
SQUARE = {"forward": 5.6e-12, "backward": 9.5e-12}
SHARE = {"forward": 0.38, "backward": 0.5}
# Seconds with the head spread: the exchange of a step, and more of it for each block that takes part; of a tile of 8
# sequences, sums and cell, one product, 1 KiB of weights that are read from shared memory; filling the vectors that
# blocks exchange; backward beside forward.
EXCHANGE, PARTNER, CELLS, PRODUCT, SHARED_KIB = 0.45e-6, 0.0043e-6, 0.3e-6, 0.006e-6, 0.004e-6
FILL, BACKWARD = 5e-6, 1.6
# Bytes a second of weights that a block reads from the L2 cache, how much of that weights may take, and the widest head
# that has been tried.
STREAM, STREAMED, WIDEST = 20e9, 0.9, 2688
GROUP = 32
# Of 12 warps, 8 multiply. A thread is launched with 168 registers; on Hopper those that multiply then take 208 and the
# others keep 88. Without that, 160 leave ptxas room for what only the others need.
WARPS, LAUNCHED, TAKEN, LEFT, EVEN = 8, 168, 208, 88, 160
# Channels of a head that a block may have, the first that fit; with one gate fewer blocks, which read one another's
# vectors sooner, hold the weights.
SLICES, OF_ONE_GATE = (16, 24, 32), (32, 24, 16)
# Turns in the ring of what the cells need of memory; as in spread.cuh.
SLOTS = 4
# Cycles from a block's own vectors to the first look for the others'; looking earlier gets in the way of what all wait
# for. LSTM B 16, T 1024: D 1024 forward 2.02, 1.96, 1.90 ms at 300, 450, 600 (D 768 by an earlier clock, 50 behind this
# one: 1.60, 1.48, 1.52); D 768 backward 2.66, 2.49, 2.48, 2.42 at 300, 450, 600, 750.
PAUSE = {"forward": 500, "backward": 750}
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
    return 32 * -(-width // 16)


def resident_shared(sizes: Mapping[str, int] | Problem, width: int, stages: int, way: Direction) -> int:
    """Bytes of shared memory of a block that has a head; in the backward pass as if all states were needed."""
    vector = HALF * 16 * -(-width // 16)
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


def matrices(sizes: Mapping[str, int] | Problem, channels: int, direction: Direction) -> int:
    """Of 16 rows of weights each, in a block that has so many channels of a head."""
    if direction == "forward":
        return -(-sizes["Gr"] * channels // 16)
    return sizes["Gr"] * -(-channels // 16)


def spread_shared(
    sizes: Mapping[str, int] | Problem, tiles: int, channels: int, warps: int, in_shared: int, direction: Direction
) -> int:
    """Bytes of shared memory of a block that has a slice of a head: weights, two sets of sums, a ring, states."""
    weights, cells = matrices(sizes, channels, direction) * in_shared * 1024 * warps, 8 * channels
    if direction == "forward":
        parts, turn = 16 * 8 * (channels + 1) * -(-sizes["Gr"] // 4) * warps, HALF * sizes["Gi"]
    else:
        # as if gates were kept in float32 and all states needed
        parts, turn = 4 * 8 * (channels + 4) * warps, FLOAT * kept(sizes["G"]) + FLOAT * (sizes["S"] - 1) + 2 * HALF
    # 16 bytes for the clock
    return weights + 2 * parts + SLOTS * turn * cells + 16 + tiles * sizes["S"] * FLOAT * cells


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    return ranked([*_resident(problem, device, direction), *_slices(problem, device, direction)])


def _resident(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
    """A head in one block: a warp has 16 channels, a block two sequences."""
    B, T, H, D = (problem[name] for name in "BTHD")
    recurrent, states = problem["Gr"], problem["S"]
    width = -(-D // 8) * 8
    threads, steps = resident_threads(width), -(-width // 16)
    if threads > (device.threads_per_block or 0):
        return
    registers = 4 * recurrent * steps + 2 * steps + 4 * recurrent + states + OVERHEAD
    for stages in (8, 6, 4, 3):
        shared = resident_shared(problem, width, stages, direction)
        grid = Grid(H * -(-B // ROWS), threads, -(-registers // 8) * 8, shared)
        if grid.fits(device):
            beside = min(grid.per_sm(device), -(-grid.blocks // (device.sms or 1))) - 1
            step = STEP[direction] + STATE[direction] * max(states - 2, 0) + SQUARE[direction] * recurrent * width**2
            step *= 1 + SHARE[direction] * beside
            plan = Plan("fused", (("blocks", 1), ("stages", stages)))
            yield Candidate.of(plan, device, grid, *costs(problem, direction), serial=T * step)
            return


def _slices(problem: Problem, device: Device, direction: Direction) -> list[Candidate]:
    """A head over several blocks: with the first number of channels whose weights fit the chip, else with any."""
    found = []
    for channels in OF_ONE_GATE if direction == "forward" and problem["Gr"] == 1 else SLICES:
        for candidate in _spread(problem, device, direction, channels):
            if not streams(candidate.plan, problem["D"]):
                return [candidate]
            found.append(candidate)
    return found


def _spread(problem: Problem, device: Device, direction: Direction, channels: int) -> Iterator[Candidate]:
    """A head over a block for so many channels each, and that once for each range of sequences; all run at once."""
    B, T, H, D = (problem[name] for name in "BTHD")
    width = -(-D // 8) * 8
    slices, groups, eights = -(-width // channels), -(-width // GROUP), -(-B // 8)
    sms = device.sms or 0
    # blocks wait for one another: each needs an SM of its own
    if slices > sms or slices == 1:
        return
    heads = min(H, sms // slices)
    tiles = -(-eights // min(eights, sms // (slices * heads)))
    ranges = -(-eights // tiles)
    per_warp, count = -(-groups // WARPS), matrices(problem, channels, direction)
    moves = device.capability == (9, 0)
    limit = TAKEN if moves else EVEN
    found = _on_chip(problem, device, direction, channels, tiles, limit)
    if found is None:
        return
    in_registers, in_shared, at_once, shared = found
    # launched with as many registers as there are
    grid = Grid(slices * ranges * heads, 32 * (WARPS + 4), LAUNCHED, shared)
    if not grid.fits(device):
        return
    streamed = 1024 * count * (per_warp - in_registers - in_shared) * WARPS * slices * heads
    # weights that every tile reads again have to stay in the cache; only Hopper's has been tried
    if streamed > (STREAMED * (device.l2_bytes or 0) if moves and D <= WIDEST else 0):
        return
    kib = count * in_shared * WARPS
    tile = CELLS + PRODUCT * count * per_warp * 2 * WARPS / 4 + SHARED_KIB * kib + streamed / (slices * heads) / STREAM
    rounds = -(-H // heads)
    step = max(EXCHANGE + PARTNER * grid.blocks + tile, tiles * tile) * (BACKWARD if direction == "backward" else 1)
    serial = rounds * T * step + FILL
    numbers = {
        "blocks": slices,
        "ranges": ranges,
        "heads": heads,
        "channels": channels,
        "warps": WARPS,
        "in_registers": in_registers,
        "in_shared": in_shared,
        "taken": TAKEN if moves else 0,
        "left": LEFT if moves else 0,
        "at_once": at_once,
        "pause": PAUSE[direction],
    }
    plan = Plan("fused", tuple(numbers.items()))
    yield Candidate.of(plan, device, grid, *costs(problem, direction), serial=serial)


def streams(plan: Plan, width: int) -> bool:
    """Whether a head over several blocks has weights that do not fit on the chip."""
    groups = -(-width // GROUP)
    return (plan["in_registers"] + plan["in_shared"]) * plan["warps"] < groups


def _on_chip(
    problem: Problem, device: Device, direction: Direction, channels: int, tiles: int, limit: int
) -> tuple[int, int, int, int] | None:
    """(groups of weights in registers, groups in shared memory, at_once, bytes of shared memory), most of the first.

    limit: registers of a thread that multiplies. None if not even operands fit.
    """
    groups, count = -(-problem["D"] // GROUP), matrices(problem, channels, direction)
    per_warp = -(-groups // WARPS)
    for streams in (False, True):
        fit = _weights(per_warp, count, problem["Gr"], limit, direction, streams)
        if fit is None:
            continue
        in_registers, at_once = fit
        for in_shared in range(per_warp - in_registers, -1 if streams else per_warp - in_registers - 1, -1):
            shared = spread_shared(problem, tiles, channels, WARPS, in_shared, direction)
            if shared <= (device.shared_per_block or 0):
                return in_registers, in_shared, at_once, shared
    return None


def _weights(
    per_warp: int, count: int, gates: int, limit: int, direction: Direction, streams: bool
) -> tuple[int, int] | None:
    """(groups of weights in registers, gates or in the forward pass turns asked for together), most of both.

    streams: whether there are groups that lie in memory, beside which one turn's vectors suffice. None if not even
    operands fit.
    """
    for in_registers in range(per_warp, -1, -1):
        for at_once in (gates, 2, 1) if direction == "backward" else (1,) if streams else (2, 1):
            operands = 4 * per_warp * at_once
            registers = 8 * count * in_registers + operands + 4 * count + SPREAD_OVERHEAD
            if at_once <= max(gates, 2) and registers <= limit:
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
