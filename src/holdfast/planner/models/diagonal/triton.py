"""The scan over channels: every byte once, or its inputs twice where sequences are cut into pieces."""

from holdfast.planner import Candidate, Device, Direction, Problem
from holdfast.planner.constrint import ceil_div, maximum, minimum, truth
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned

# Threads hold SEGMENTS x STEPS steps of a tile between them. One shape for both passes: the backward pass finds the
# states that the forward pass left every ROWS steps, and computes those between again, bit for bit.
SEGMENTS, STEPS = 16, 8
ROWS = SEGMENTS * STEPS
# Offsets inside a tile and rows of states are 32-bit.
MOST_CHANNELS = 2**22
# Numbers (channels, or pairs) that a thread has of each step: more of them take fewer exchanges, until registers spill.
EACH = {("forward", False): 8, ("forward", True): 4, ("backward", False): 4, ("backward", True): 2}
# Blocks of so many numbers, the measured best first.
BLOCKS = {
    ("forward", False): (64, 32, 128),
    ("forward", True): (16, 32),
    ("backward", False): (32, 16, 64),
    ("backward", True): (8, 16),
}
# Seconds of an SM for each number and step, by stages in flight: B8 T4096 D2048 bfloat16 on an H200.
COST = {
    ("forward", False): {3: 0.225e-9, 1: 0.23e-9},
    ("forward", True): {3: 0.71e-9, 1: 0.9e-9},
    ("backward", False): {1: 0.5e-9, 3: 0.6e-9},
    ("backward", True): {3: 1.7e-9, 1: 1.9e-9},
}
# Seconds of a block for each tile where it has an SM for itself, and before its first: B3 T512 D1536, the same card.
TILE = {
    ("forward", False): 1.5e-6,
    ("forward", True): 4.2e-6,
    ("backward", False): 3.2e-6,
    ("backward", True): 6.4e-6,
}
ENTRY = 1.5e-6
# Seconds of the scan over pieces and of what PyTorch does around it; an estimate.
CARRY = 20e-6
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans: channels (pairs) a block, segments and steps of a tile, stages, warps, steps a piece (0: no pieces)."""
    return planned(problem, device, direction, Kernel(model, candidate))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    T, pairs = problem["T"], "complex" in problem.traits
    numbers, parts = numbers_of(problem)
    model, kind = KernelModel(device), (direction, pairs)
    block = model.variable("block", BLOCKS[kind], "given")
    stages = model.variable("stages", list(COST[kind]), "given")
    # none, or so many that two or four blocks come on each SM
    each = model.variable("pieces on each SM", (0,) if problem.varlen else (0, 2, 4))
    warps = model.let("warps", block * SEGMENTS // (32 * EACH[kind]))
    blocks = model.let("blocks", ceil_div(numbers, block) * problem["B"])
    pieces = model.let("pieces", maximum(1, each * device.processors // maximum(blocks, 1)))
    model.add(pieces > minimum(each, 1), "several pieces or none")
    model.add(pieces <= maximum(1, minimum(each, 1) * (T // (4 * ROWS))), "pieces of four tiles at least")
    rows = model.let("rows", ceil_div(ceil_div(T, pieces), ROWS) * ROWS)
    model.let("piece", rows * truth(pieces > 1))
    model.let("segments", SEGMENTS)
    model.let("steps", STEPS)
    # a pipeline of n stages has n - 1 buffers; the scan over segments exchanges four numbers a channel
    shared = (stages - 1) * ROWS * block * _bytes(problem, direction)[0] + 16 * block * parts * warps
    model.block(warps, 255, shared)
    return model


def numbers_of(problem: Problem) -> tuple[int, int]:
    """Channels, or pairs of them, and the parts of each."""
    return (problem["D"] // 2, 2) if "complex" in problem.traits else (problem["D"], 1)


def _bytes(problem: Problem, direction: Direction) -> tuple[int, int, int]:
    """Read and written of a number and step, and read where only a piece's last state is wanted."""
    parts = numbers_of(problem)[1]
    word = parts * ELEMENT[problem.dtype]
    gates = parts * (4 if "wide_gate" in problem.traits else ELEMENT[problem.dtype])
    read, written = (gates + word, word) if direction == "forward" else (gates + 2 * word, gates + word)
    return read, written, gates + word


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    kind, steps = (direction, "complex" in problem.traits), problem["B"] * problem["T"] * numbers_of(problem)[0]
    read, written, again = _bytes(problem, direction)
    grid = values.grid(max(values["blocks"] * values["pieces"], 1))
    together = min(grid.per_sm(device), max(1.0, grid.blocks / device.processors))
    tiles, cost = values["rows"] // ROWS, COST[kind][values["stages"]]
    serial = ENTRY + max(tiles * TILE[kind], together * tiles * ROWS * values["block"] * cost)
    plan = values.plan("triton", "block", "segments", "steps", "stages", "warps", "piece")
    operations = 12 * steps * (4 if kind[1] else 1)
    found = Candidate.of(plan, device, grid, steps * (read + written), operations, False, serial)
    if values["pieces"] == 1:
        return found
    return found.after(Candidate.of(plan, device, grid, steps * again, operations, False, serial, 1, CARRY))
