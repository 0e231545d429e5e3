"""Vector decay in Triton: all chunks prepared at once, states from chunk to chunk, all gradients at once.

The seconds of `gla_chunk_fwd` are those of the scalar decay's kernel, those of `gla_chunk_prepare` come from its
instructions, and those of `gla_chunk_grads` are fitted to the whole backward pass on an H200 (B4 T4096 H32 K128
V128, bfloat16).
"""

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.constrint import Expression, lookup, maximum, truth
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned, powers_of_two
from holdfast.planner.models.matrix.tiles import padded

CHUNK = 64
# wider states leave no registers for anything else
WIDEST = 256
# of K's columns, that a block of `gla_chunk_prepare` holds at a time, and that one of `gla_chunk_grads` has
PIECE = 64
GRADIENT_PIECE = 32
# of `gla_chunk_fwd`, and of its state in float32 a thread: beside operands of 2 bytes, and of 4
WARPS = {2: (4, 8), 4: (4,)}
STATE_REGISTERS = {2: 64, 4: 32}
# of a thread at most, by warps
REGISTERS = {4: 255, 8: 232}
# A chunk's products wait for one another: so long whatever their size, and a rate for each warp.
CHUNK_SECONDS = 1.2e-6
WARP_RATE = 3.6e11
# of a block alone on its SM with so many stages in flight; another block hides the wait
STAGE_FACTORS = {3: 1.0, 2: 1.28, 1: 1.45}
# a block's piece, two blocks an SM; of the gradients an H100 took 2.92 ms in pieces of 64, fitted as 4.2e-5, and 2.18
PREPARE_SECONDS = 5e-6
GRADIENT_SECONDS = 1.55e-5


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Return plans, the fastest first.

    values, of `gla_chunk_fwd`: columns, the block of V's columns; warps; stages of loads in flight.
    """
    return planned(problem, device, direction, Kernel(model, candidate))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    model, K, size = KernelModel(device), padded(problem["K"]), 4 if problem.dtype == "float32" else 2
    columns = model.variable("columns", powers_of_two(16, 128), "largest")
    warps = model.variable("warps", WARPS[size])
    stages = model.variable("stages", (1, 2, 3), "largest")
    model.add(columns <= padded(problem["V"]), "columns, of V")
    model.add(K * columns <= STATE_REGISTERS[size] * 32 * warps, "numbers of a state, of those in registers")
    model.block(warps, lookup(warps, REGISTERS), _shared(K, columns, warps, stages, size))
    return model


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    plan = values.plan("triton", "columns", "warps", "stages")
    found = _all_chunks(problem, device, plan, "gla_chunk_prepare")
    if direction == "forward":
        return _chunk_fwd(problem, device, plan, values, reads=True, saves=False).after(found)
    found = _chunk_fwd(problem, device, plan, values, reads=True, saves=True).after(found)
    found = _chunk_fwd(problem, device, plan, values, reads=False, saves=True).after(found)
    return _all_chunks(problem, device, plan, "gla_chunk_grads").after(found)


def prepared(problem: Problem, device: Device, plan: Plan) -> Candidate:
    """Model `gla_chunk_prepare`, which other recurrences launch too."""
    return _all_chunks(problem, device, plan, "gla_chunk_prepare")


def gradients(problem: Problem, device: Device, plan: Plan) -> Candidate:
    """Model `gla_chunk_grads`, likewise."""
    return _all_chunks(problem, device, plan, "gla_chunk_grads")


def _shared(width: int, columns: Expression, warps: Expression, stages: Expression, size: int) -> Expression:
    """Return the bytes of a block of `gla_chunk_fwd`, an upper bound of what Triton 3.6 allots.

    Tiles in flight, and a state that changes hands between warps: on its way to memory, and where a warp does not keep
    its 16 rows of it. Without a pipeline float32 goes through shared memory a tile at a time.
    """
    exchanged = (1 + truth(16 * warps > columns)) * width * columns * size
    tiles = stages * (CHUNK * (2 * width + columns + CHUNK) * size + 4 * width)
    if size == 4:
        tiles = truth(stages > 1) * tiles + truth(stages == 1) * CHUNK * maximum(width, columns) * size
    return tiles + exchanged


def _chunk_fwd(problem: Problem, device: Device, plan: Plan, values: Assignment, reads: bool, saves: bool) -> Candidate:
    """Model a launch of `gla_chunk_fwd`. reads: whether it has an output. saves: whether states go to memory."""
    K, V, T, pairs = problem["K"], problem["V"], problem["T"], problem["B"] * problem["H"]
    block, warps, stages = values["columns"], values["warps"], values["stages"]
    size, tile_k = 4 if problem.dtype == "float32" else 2, padded(K)
    chunks = -(-T // CHUNK)
    grid = values.grid(pairs * -(-V // block))
    moved = pairs * (T * size * (K + V) + 8 * K * V + 4 * chunks * K)
    if reads:
        moved += pairs * T * size * (K + V + CHUNK)
    if saves:
        moved += pairs * chunks * size * K * V
    operations = 2 * CHUNK * block * (tile_k + (tile_k + CHUNK if reads else 0))
    # a warp takes 16 rows of the transposed state; more warps than that repeat each other's work
    working = min(warps, max(1, block // 16))
    alone = min(grid.per_sm(device), -(-grid.blocks // device.processors)) < 2
    factor = STAGE_FACTORS[stages] if alone else 1.0
    serial = factor * chunks * (CHUNK_SECONDS + operations / (working * WARP_RATE))
    return Candidate.of(plan, device, grid, moved, grid.blocks * chunks * operations, serial=serial)


def _all_chunks(problem: Problem, device: Device, plan: Plan, name: str) -> Candidate:
    """Model a launch of `gla_chunk_prepare` or `gla_chunk_grads`."""
    K, V, T, pairs = problem["K"], problem["V"], problem["T"], problem["B"] * problem["H"]
    size = 4 if problem.dtype == "float32" else 2
    piece = PIECE if name == "gla_chunk_prepare" else GRADIENT_PIECE
    pieces, chunks = -(-K // piece), -(-T // CHUNK)
    shared = CHUNK * piece * (3 * size + 4)
    # decays are taken to be float32
    reads = 2 * K * size * problem["Hq"] / problem["H"] + 4 * K
    products = 2 * CHUNK * piece * (7 * CHUNK)
    if name == "gla_chunk_prepare":
        grid = Grid(pairs * chunks, 128, 255, shared)
        moved = pairs * T * (reads + size * (2 * K + CHUNK))
        return Candidate.of(
            plan, device, grid, int(moved), grid.blocks * pieces * products, serial=pieces * PREPARE_SECONDS
        )
    grid = Grid(pairs * chunks * pieces, 128, 255, shared)
    moved = pairs * (T * (reads + 2 * V * size + 2 * K * size + 4 * K) + 2 * chunks * size * K * V)
    products = 2 * products + 2 * CHUNK * V * (CHUNK + 2 * piece)
    return Candidate.of(plan, device, grid, int(moved), grid.blocks * products, serial=GRADIENT_SECONDS)
