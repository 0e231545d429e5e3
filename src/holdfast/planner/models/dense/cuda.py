"""The whole time loop in one launch, R on chip: a head in one block, or spread over many that exchange h every step."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked

HALF, FLOAT = 2, 4
# Registers of a thread beside weights, operands, sums and states: what ptxas took at head dimensions 16 to 128, and in
# the warps that multiply when a head is spread.
OVERHEAD, MANY_BLOCKS_OVERHEAD = 40, 48
# Measured on an H200 with LSTMs of B 1 to 256, H 12, D 64, T 1024. Seconds of a step of a block that has a head and two
# sequences: one that costs nothing; more of it for each state but two, and what grows with its products, D^2 for each
# gate that R feeds. A block of four takes so many times as long, longer by a share for each state but two, and where
# gates are kept. Blocks on an SM take the longest one's time or the sum of their shares; a small one has a part of it.
STEP = {"forward": 0.10e-6, "backward": 0.205e-6}
STATE = {"forward": 0.05e-6, "backward": 0.06e-6}
SQUARE = {"forward": 4.3e-12, "backward": 8.5e-12}
OF_FOUR, OF_FOUR_KEEPING, OF_FOUR_STATE = 1.3, 1.6, 0.08
SHARE = {2: 0.62, 4: 0.68}
# Threads of a block that takes a whole share.
WHOLE = 128
# Turns of the loop over time that are compiled as one, by states and gates that R feeds; else one. B 16, H 12, D 64,
# T 1024, ms with two and with one: LSTM 0.181 and 0.189, Elman 0.128 and 0.136; but GRU 0.208 and 0.192, sLSTM 0.287
# and 0.276.
TURNS = {(2, 4): 2, (1, 1): 2}
# Seconds with the head spread: the exchange of a step, and more of it for each block that takes part; of a tile of 8
# sequences, sums and cell, one product, 1 KiB of weights that are read from shared memory; filling the vectors that
# blocks exchange. The backward pass takes longer by a constant and by what blocks read of one another, in bytes a
# second. From LSTMs of B 1 to 128, D 768, and D 256 to 2048, B 16.
EXCHANGE, PARTNER, CELLS, PRODUCT, SHARED_KIB = 0.7e-6, 0.0024e-6, 0.3e-6, 0.0052e-6, 0.0055e-6
FILL, BACKWARD, EXCHANGED = 5e-6, 0.35e-6, 15e12
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
# Turns in the ring of what the cells need of memory; as in many_blocks/common.cuh.
SLOTS = 4
# Cycles from a block's own vectors to the first look for the others'; looking earlier gets in the way of what all wait
# for. LSTM B 16, T 1024, D 768: forward 1.329, 1.331, 1.321, 1.321, 1.330 ms at 200, 300, 350, 400, 450, but B 1 1.062,
# 1.139, 1.210 at 300, 400, 500; backward with dR 2.349, 2.389, 2.373, 2.467 at 300, 400, 500, 600. Blocks of one gate
# are ready sooner: Elman 0.869, 0.861, 0.907 at 150, 200, 300.
PAUSE = {"forward": 350, "backward": 400}
PAUSE_OF_ONE_GATE = 200
# Sequences that a block with a head may have.
ROWS = {"forward": (2, 4), "backward": (2,)}


def padded(bytes_a_row: int, remainder: int) -> int:
    """Bytes from row to row in shared memory, as in one_block/common.cuh."""
    return -(-(bytes_a_row - remainder) // 128) * 128 + remainder


def kept(gates: int) -> int:
    """Gates kept of one channel: padded to a power of two."""
    return 1 << (gates - 1).bit_length()


def one_block_threads(width: int) -> int:
    """Of a block that has a head: a warp for each 16 channels."""
    return 32 * -(-width // 16)


def one_block_shared(sizes: Mapping[str, int] | Problem, width: int, rows: int, stages: int, way: Direction) -> int:
    """Bytes of shared memory of a block that has a head; in the backward pass as if all states were needed."""

    def row(count: int, element: int) -> int:
        return padded(count, 16 if rows == 4 else 32 if element == HALF else 64)

    vector = HALF * 16 * -(-width // 16)
    if way == "forward":
        stage, vectors = row(HALF * sizes["Gi"] * width, HALF), padded(vector, 32)
    else:
        # as if gates were kept in float32
        gates = FLOAT * kept(sizes["G"])
        stage = row(gates * width, gates) + 2 * row(HALF * width, HALF) + (sizes["S"] - 1) * row(FLOAT * width, FLOAT)
        vectors = padded(sizes["G"] * vector, 32)
    return rows * (2 * vectors + stages * stage)


def matrices(sizes: Mapping[str, int] | Problem, channels: int, direction: Direction) -> int:
    """Of 16 rows of weights each, in a block that has so many channels of a head."""
    if direction == "forward":
        return -(-sizes["Gr"] * channels // 16)
    return sizes["Gr"] * -(-channels // 16)


def many_blocks_shared(
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
    return ranked([*_one_block(problem, device, direction), *_slices(problem, device, direction)])


def _one_block(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
    """A head in one block, which has two sequences or, in the forward pass of a large batch, four."""
    B, H, T = problem["B"], problem["H"], problem["T"]
    fitting = {rows: found for rows in ROWS[direction] if (found := _stages(problem, device, direction, rows))}
    if 2 not in fitting:
        return
    more = max(problem["S"] - 2, 0)
    step = STEP[direction] + STATE[direction] * more
    step += SQUARE[direction] * problem["Gr"] * (8 * -(-problem["D"] // 8)) ** 2
    of_four = (OF_FOUR_KEEPING if problem.needs_grad else OF_FOUR) + OF_FOUR_STATE * more
    steps = {2: step, 4: step * of_four}
    _, grid = fitting[4 if 4 in fitting else 2]
    sms = device.processors
    # what fits an SM at a time; the rest waits
    room = max(1, grid.per_sm(device))

    def counts(fours: int) -> tuple[int, int]:
        """Blocks of four and of two sequences."""
        return fours * H, max(0, -(-(B - 4 * fours) // 2)) * H

    def seconds(fours: int) -> float:
        wide, narrow = counts(fours)
        # blocks go to SMs in turn, those of four first
        blocks = -(-(wide + narrow) // sms)
        of_fours = -(-wide // sms)
        share = min(1.0, grid.threads / WHOLE)
        total = share * (of_fours * SHARE[4] * steps[4] + (blocks - of_fours) * SHARE[2] * steps[2])
        longest = max(steps[4] if wide else 0.0, steps[2] if narrow else 0.0)
        return T * max(total, longest * -(-blocks // room))

    # of like ones the most blocks of four: LSTM B 64, H 12, 0.282 ms with 11 a head, one an SM, and 0.311 with 10
    fours = min(range(-(-B // 4) if 4 in fitting else 0, -1, -1), key=seconds)
    numbers = {"blocks": 1, "rows": 2, "fours": fours, "turns": TURNS.get((problem["S"], problem["Gr"]), 1)}
    numbers |= {f"stages_{rows}": stages for rows, (stages, _) in fitting.items()}
    grid = replace(grid, blocks=sum(counts(fours)))
    plan, serial = Plan("fused", tuple(numbers.items())), seconds(fours) / grid.waves(device)
    yield Candidate.of(plan, device, grid, *costs(problem, direction), serial=serial)


def _stages(problem: Problem, device: Device, direction: Direction, rows: int) -> tuple[int, Grid] | None:
    """Of a ring that fits beside R when a block has so many sequences, and the launch; None if none does."""
    width, recurrent = -(-problem["D"] // 8) * 8, problem["Gr"]
    threads, steps = one_block_threads(width), -(-width // 16)
    if threads > (device.threads_per_block or 0):
        return None
    matrices, cells = (2 * -(-recurrent // 2), 2) if rows == 4 else (recurrent, 1)
    registers = 4 * matrices * steps + 2 * steps + 4 * matrices + cells * problem["S"] + OVERHEAD
    for stages in (8, 6, 4, 3):
        shared = one_block_shared(problem, width, rows, stages, direction)
        grid = Grid(problem["H"] * -(-problem["B"] // rows), threads, -(-registers // 8) * 8, shared)
        if grid.fits(device):
            return stages, grid
    return None


def stages_of(plan: Plan) -> dict[int, int]:
    """Of a head in one block: the numbers of sequences that a block may have, whatever the batch, and their stages."""
    stem = "stages_"
    return {int(name.removeprefix(stem)): count for name, count in plan.values if name.startswith(stem)}


def _slices(problem: Problem, device: Device, direction: Direction) -> list[Candidate]:
    """A head over several blocks: with the first number of channels whose weights fit the chip, else with any."""
    found = []
    for channels in OF_ONE_GATE if direction == "forward" and problem["Gr"] == 1 else SLICES:
        for candidate in _many_blocks(problem, device, direction, channels):
            if not streams(candidate.plan, problem["D"]):
                return [candidate]
            found.append(candidate)
    return found


def _many_blocks(problem: Problem, device: Device, direction: Direction, channels: int) -> Iterator[Candidate]:
    """A head over a block for so many channels each, and that once for each range of sequences; all run at once."""
    B, T, H, D = (problem[name] for name in "BTHD")
    width = -(-D // 8) * 8
    slices, groups, eights = -(-width // channels), -(-width // GROUP), -(-B // 8)
    sms = device.processors
    # blocks wait for one another: each needs an SM of its own
    if slices > sms or slices == 1:
        return
    heads = min(H, sms // slices)
    room = sms // (slices * heads)
    tiles = -(-eights // min(eights, room))
    # with one gate a step is so short that reading half as much shows: Elman B 16, D 768 0.93 ms with 4, 1.02 with 8
    rows = -(-B // min(B, room)) if problem["Gr"] == 1 and room > eights else 8 * tiles
    ranges = -(-B // rows)
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
    step = max(EXCHANGE + PARTNER * grid.blocks + tile, tiles * tile)
    if direction == "backward":
        step += BACKWARD + grid.blocks * tiles * 8 * HALF * problem["Gr"] * D / EXCHANGED
    serial = rounds * T * step + FILL
    numbers = {
        "blocks": slices,
        "rows": rows,
        "heads": heads,
        "channels": channels,
        "warps": WARPS,
        "in_registers": in_registers,
        "in_shared": in_shared,
        "taken": TAKEN if moves else 0,
        "left": LEFT if moves else 0,
        "at_once": at_once,
        "pause": PAUSE_OF_ONE_GATE if direction == "forward" and problem["Gr"] == 1 else PAUSE[direction],
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
            shared = many_blocks_shared(problem, tiles, channels, WARPS, in_shared, direction)
            if shared <= device.block_memory:
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
            registers = 8 * count * in_registers + operands + 4 * count + MANY_BLOCKS_OVERHEAD
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
