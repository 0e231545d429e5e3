"""The scan of states between chunks: every state once; twice more in float32 where the backward pass runs again."""

from holdfast.planner import Candidate, Device, Direction, Problem
from holdfast.planner.constrint import Integer, maximum, minimum
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, covering, planned

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
    is_low_rank = "low_rank" in problem.traits
    return planned(problem, device, direction, Kernel(low_rank_model if is_low_rank else model, candidate))


def backward_bytes(states: int, size: int) -> int:
    """Return the bytes of history, cotangents and gradients, and of the history that is written first where the output
    was rounded."""
    return states * (4 + 2 * size) + (0 if size == 4 else states * (4 + size))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """Declare tiles of 1024 elements a block, or 512, in rows as long as V.

    Where blocks fill memory's queues, half the threads with twice the elements are faster, with groups of 8 chunks: at
    B8 H16 G64 128 x 128 0.139 to 0.141 ms, 0.144 to 0.152 with 4.
    """
    B, H, G, K, V = (problem[name] for name in "BHGKV")
    model, is_forward, width = KernelModel(device), direction == "forward", min(covering(V), 256)
    # of a group of 8 chunks, whose loads are all on their way before the first is used
    full = B * H * K * V * ELEMENT[problem.dtype] * 8 // device.processors > IN_FLIGHT
    each = model.variable("each", (8, 16), "largest" if full else "smallest")
    elements = model.variable("elements", (512, 1024), "largest")
    groups = ((8, 4, 16) if full else (16, 8, 4)) if is_forward else (8,)
    group = model.variable("group", groups, "given")
    if is_forward:
        model.add(group <= covering(G, 4), "a group has no chunks beyond the last")
    rows = minimum(maximum(1, elements // width), covering(K))
    warps = maximum(1, rows * width // (32 * each))
    registers = minimum(255, 16 + 3 * each * group // 2) if is_forward else 128
    _block(model, problem, direction, (rows, width), (warps, registers, 4096))
    return model


def low_rank_model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """Declare tiles of all rows, a few columns wide."""
    model, rows, size = KernelModel(device), covering(problem["K"], 16), ELEMENT[problem.dtype]
    group = model.variable("group", (1, 2, 3, 4), "largest")
    buffers = (group - 1) * rows * (COLUMNS + 2 * max(16, covering(problem["r"]))) * size
    takes = max(1, rows * COLUMNS // 512), 255, buffers + 4 * rows * COLUMNS
    _block(model, problem, direction, (rows, COLUMNS), takes)
    return model


def _block(
    model: KernelModel,
    problem: Problem,
    direction: Direction,
    tile: tuple[Integer, Integer],
    takes: tuple[Integer, Integer, Integer],
) -> None:
    """Declare the block: its tile, rows and columns; what it takes, warps, registers and shared memory forward; and how
    many chunks' history, cotangents and factors are on their way, backward."""
    rows, columns = model.let("block_k", tile[0]), model.let("block_v", tile[1])
    warps, registers, shared = takes
    stages = model.variable("stages", (0,) if direction == "forward" else (1, 2, 3), "largest")
    size, rank = ELEMENT[problem.dtype], max(_rank(problem), 1)
    ahead = maximum(stages - 1, 0) * rows * ((4 + size) * columns + 2 * size * rank)
    model.block(warps, registers, maximum(shared, ahead + 1024))


def _rank(problem: Problem) -> int:
    return problem["r"] if "low_rank" in problem.traits else 0


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    B, G, H, K, V = (problem[name] for name in "BGHKV")
    rank, size, is_forward = _rank(problem), ELEMENT[problem.dtype], direction == "forward"
    states = B * G * H * K * V
    moved = (2 * states + 2 * B * G * H * K * rank) * size if is_forward else backward_bytes(states, size)
    grid = values.grid(max(-(-K // values["block_k"]) * -(-V // values["block_v"]) * H * B, 1))
    names = ("block_k", "block_v", "group", "warps")
    plan = values.plan("triton", *names, *(() if is_forward else ("stages",)))
    operations = states * (2 + 4 * rank) * (1 if is_forward else 3)
    serial = ENTRY + G * STEP[direction, rank > 0]
    return Candidate.of(plan, device, grid, moved, operations, False, serial)
