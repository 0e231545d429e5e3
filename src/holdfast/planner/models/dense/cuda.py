"""The whole time loop in one launch, R on chip: a head in one block, or spread over many that exchange h every step."""

from collections.abc import Mapping

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.constrint import Expression, Integer, ceil_div, maximum, minimum, truth
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned
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
# Stages of the ring of a block with a head.
RINGS = (3, 4, 6, 8)
# What a plan with a head over several blocks says.
MANY_BLOCKS: tuple[str, ...] = (
    "blocks",
    "rows",
    "heads",
    "channels",
    "warps",
    "in_registers",
    "in_shared",
    "taken",
    "left",
    "at_once",
)
MANY_BLOCKS += ("pause",)


def padded(bytes_a_row: int, remainder: int) -> int:
    """Bytes from row to row in shared memory, as in one_block/common.cuh."""
    return -(-(bytes_a_row - remainder) // 128) * 128 + remainder


def kept(gates: int) -> int:
    """Gates kept of one channel: padded to a power of two."""
    return 1 << (gates - 1).bit_length()


def one_block_threads(width: int) -> int:
    """Of a block that has a head: a warp for each 16 channels."""
    return 32 * -(-width // 16)


def one_block_shared(
    sizes: Mapping[str, int] | Problem, width: int, rows: int, stages: Integer, way: Direction
) -> Integer:
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


def matrices(sizes: Mapping[str, int] | Problem, channels: Integer, direction: Direction) -> Integer:
    """Of 16 rows of weights each, in a block that has so many channels of a head."""
    if direction == "forward":
        return (sizes["Gr"] * channels + 15) // 16
    return sizes["Gr"] * ((channels + 15) // 16)


def many_blocks_shared(
    sizes: Mapping[str, int] | Problem,
    tiles: Integer,
    channels: Integer,
    warps: int,
    in_shared: Integer,
    direction: Direction,
) -> Integer:
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
    """A head in one block, or over several: with the first number of channels that holds all weights, else with any."""
    one = planned(problem, device, direction, Kernel(one_block_model, _one_block, only=_seconds))
    on_chip, streamed = Kernel(on_chip_model, _many_blocks), Kernel(streamed_model, _many_blocks)
    several = planned(problem, device, direction, on_chip) or planned(problem, device, direction, streamed)
    return ranked([*one, *several]) or several


def one_block_model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """A head in one block, which has two sequences or, in the forward pass of a large batch, four."""
    model, width = KernelModel(device), -(-problem["D"] // 8) * 8
    model.let("blocks", 1)
    model.let("rows", 2)
    model.let("turns", TURNS.get((problem["S"], problem["Gr"]), 1))
    stages = model.variable("stages_2", RINGS, "largest", greedy=True)
    shared = one_block_shared(problem, width, 2, stages, direction)
    model.block(one_block_threads(width) // 32, _registers(problem, 2), shared, "two")
    if direction == "backward":
        model.variable("fours", (0,))
        return model
    # 0: there are no blocks of four
    stages = model.variable("stages_4", (0, *RINGS), "largest", greedy=True)
    exist, shared = truth(stages > 0), one_block_shared(problem, width, 4, stages, direction)
    model.block(one_block_threads(width) // 32, maximum(8, exist * _registers(problem, 4)), exist * shared, "four")
    fours = model.variable("fours", range(-(-problem["B"] // 4) + 1), "largest")
    model.add(fours <= exist * -(-problem["B"] // 4), "blocks of four, of a batch")
    return model


def _registers(problem: Problem, rows: int) -> int:
    """Of a thread of a block that has so many sequences; they come in eights."""
    steps, recurrent = -(-problem["D"] // 16), problem["Gr"]
    matrices, cells = (2 * -(-recurrent // 2), 2) if rows == 4 else (recurrent, 1)
    registers = 4 * matrices * steps + 2 * steps + 4 * matrices + cells * problem["S"] + OVERHEAD
    return -(-registers // 8) * 8


def _grid(problem: Problem, values: Assignment) -> Grid:
    """Blocks of four and of two sequences."""
    return values.grid(sum(_counts(problem, values)), "four" if values.get("stages_4") else "two")


def _counts(problem: Problem, values: Assignment) -> tuple[int, int]:
    """Blocks of four and of two sequences."""
    B, H, fours = problem["B"], problem["H"], values["fours"]
    return fours * H, max(0, -(-(B - 4 * fours) // 2)) * H


def _seconds(problem: Problem, device: Device, direction: Direction, values: Assignment) -> float:
    """Of all steps. Of like ones the most blocks of four: LSTM B 64, H 12, 0.282 ms with 11 a head, one an SM, and
    0.311 with 10."""
    more = max(problem["S"] - 2, 0)
    step = STEP[direction] + STATE[direction] * more
    step += SQUARE[direction] * problem["Gr"] * (8 * -(-problem["D"] // 8)) ** 2
    of_four = (OF_FOUR_KEEPING if problem.needs_grad else OF_FOUR) + OF_FOUR_STATE * more
    steps = {2: step, 4: step * of_four}
    # what fits an SM at a time; the rest waits
    grid, sms = _grid(problem, values), device.processors
    room = max(1, grid.per_sm(device))
    wide, narrow = _counts(problem, values)
    # blocks go to SMs in turn, those of four first
    blocks = -(-(wide + narrow) // sms)
    of_fours = -(-wide // sms)
    share = min(1.0, grid.threads / WHOLE)
    total = share * (of_fours * SHARE[4] * steps[4] + (blocks - of_fours) * SHARE[2] * steps[2])
    longest = max(steps[4] if wide else 0.0, steps[2] if narrow else 0.0)
    return problem["T"] * max(total, longest * -(-blocks // room))


def _one_block(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    rings = [name for name in ("stages_2", "stages_4") if values.get(name)]
    plan, grid = values.plan("fused", "blocks", "rows", "fours", "turns", *rings), _grid(problem, values)
    serial = _seconds(problem, device, direction, values) / grid.waves(device)
    return Candidate.of(plan, device, grid, *costs(problem, direction), serial=serial)


def stages_of(plan: Plan) -> dict[int, int]:
    """Of a head in one block: the numbers of sequences that a block may have, whatever the batch, and their stages."""
    stem = "stages_"
    return {int(name.removeprefix(stem)): count for name, count in plan.values if name.startswith(stem)}


def on_chip_model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """A head over several blocks, the first number of channels of which holds all weights."""
    return _many_blocks_model(problem, device, direction, False)


def streamed_model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """The same with weights that are read from the cache."""
    return _many_blocks_model(problem, device, direction, True)


def _many_blocks_model(problem: Problem, device: Device, direction: Direction, streams: bool) -> KernelModel:
    """A head over a block for so many channels each, and that once for each range of sequences; all run at once."""
    model, sms, D = KernelModel(device), device.processors, problem["D"]
    one_gate, moves = direction == "forward" and problem["Gr"] == 1, device.capability == (9, 0)
    channels = model.variable("channels", OF_ONE_GATE if one_gate else SLICES, "given", greedy=not streams)
    slices = model.let("blocks", ceil_div(-(-D // 8) * 8, channels))
    model.add(slices >= 2, "blocks of a head")
    # blocks wait for one another: each needs an SM of its own
    model.add(slices <= sms, "blocks of a head, of processors")
    heads = model.let("heads", minimum(problem["H"], maximum(1, sms // slices)))
    tiles, rows = _ranges(model, problem, sms // (slices * heads))
    model.let("ranges", ceil_div(problem["B"], maximum(1, rows)))
    per_warp, count = -(-D // (GROUP * WARPS)), model.let("matrices", matrices(problem, channels, direction))
    in_registers = model.variable("in_registers", range(per_warp + 1), "largest", greedy=True)
    in_shared = model.variable("in_shared", range(per_warp + 1), "largest", greedy=True)
    left = model.let("groups in the cache", per_warp - in_registers - in_shared)
    model.add(left >= 0, "groups in the cache")
    # weights that every tile reads again have to stay in the cache; only Hopper's has been tried
    cache = int(STREAMED * (device.l2_bytes or 0)) if streams and moves and D <= WIDEST else 0
    streamed = model.let("streamed", 1024 * count * left * WARPS * slices * heads)
    model.add(streamed <= cache, "weights in the cache", "bytes")
    turns = (problem["Gr"], 2, 1) if direction == "backward" else (1,) if streams else (2, 1)
    at_once = model.variable("at_once", turns, "given", greedy=True)
    registers = 8 * count * in_registers + 4 * per_warp * at_once + 4 * count + MANY_BLOCKS_OVERHEAD
    model.add(registers <= (TAKEN if moves else EVEN), "registers of a thread that multiplies")
    for name, value in _numbers(direction, one_gate, moves).items():
        model.let(name, value)
    # launched with as many registers as there are
    shared = many_blocks_shared(problem, tiles, channels, WARPS, in_shared, direction)
    model.block(WARPS + 4, LAUNCHED, shared, "slice")
    return model


def _ranges(model: KernelModel, problem: Problem, room: Expression) -> tuple[Expression, Expression]:
    """Tiles of eight sequences, and sequences, that a block takes in turn. room: ranges that run at once."""
    eights = -(-problem["B"] // 8)
    room = model.let("room", maximum(1, room))
    tiles = model.let("tiles", ceil_div(eights, maximum(1, minimum(eights, room))))
    rows = 8 * tiles
    if problem["Gr"] == 1:
        # a step is so short that reading half as much shows: Elman B 16, D 768 0.93 ms with 4, 1.02 with 8
        spread = ceil_div(problem["B"], minimum(problem["B"], room))
        rows = truth(room > eights) * spread + truth(room <= eights) * rows
    return tiles, model.let("rows", rows)


def _numbers(direction: Direction, one_gate: bool, moves: bool) -> dict[str, int]:
    """Of every plan with a head over several blocks."""
    pause = PAUSE_OF_ONE_GATE if one_gate else PAUSE[direction]
    return {"warps": WARPS, "taken": TAKEN if moves else 0, "left": LEFT if moves else 0, "pause": pause}


def _many_blocks(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    T, H, D = (problem[name] for name in "THD")
    slices, heads, tiles, count = (values[name] for name in ("blocks", "heads", "tiles", "matrices"))
    per_warp, grid = -(-D // (GROUP * WARPS)), values.grid(slices * values["ranges"] * heads, "slice")
    kib = count * values["in_shared"] * WARPS
    tile = CELLS + PRODUCT * count * per_warp * 2 * WARPS / 4 + SHARED_KIB * kib
    tile += values["streamed"] / (slices * heads) / STREAM
    step = max(EXCHANGE + PARTNER * grid.blocks + tile, tiles * tile)
    if direction == "backward":
        step += BACKWARD + grid.blocks * tiles * 8 * HALF * problem["Gr"] * D / EXCHANGED
    serial = -(-H // heads) * T * step + FILL
    plan = values.plan("fused", *MANY_BLOCKS)
    return Candidate.of(plan, device, grid, *costs(problem, direction), serial=serial)


def streams(plan: Plan, width: int) -> bool:
    """Whether a head over several blocks has weights that do not fit on the chip."""
    groups = -(-width // GROUP)
    return (plan["in_registers"] + plan["in_shared"]) * plan["warps"] < groups


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
