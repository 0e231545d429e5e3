"""The delta rule with a vector decay in Triton: all chunks at once, a pass each way, and vector decay's gradients.

Rates are those of vector_decay/triton.py, whose kernels these are or resemble. Where vector decay's kernels on Hopper
serve the sizes, chunks are prepared and gradients found there. A scalar decay, beside an erase key, is copied for each
channel before all of it, and its gradients are added after it.
"""

from dataclasses import replace

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.constrint import Expression, Integer, as_expression, lookup, truth
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned, powers_of_two
from holdfast.planner.models.matrix.tiles import WIDEST as TILE
from holdfast.planner.models.matrix.tiles import tile
from holdfast.planner.models.matrix.vector_decay import hopper
from holdfast.planner.models.matrix.vector_decay import triton as additive
from holdfast.planner.models.matrix.vector_decay.triton import CHUNK, padded

# of both K and V: wider states leave no registers for anything else
WIDEST = additive.WIDEST
# of the state in float32 a thread, beside the tiles of a chunk: operands of 2 bytes, and of 4, which spill
STATE_REGISTERS = {2: 64, 4: 16}
# a chunk of a pass over one of vector decay's, forward and backward, by benchmarks/kda_launches.py on an H100
FORWARD_CHAIN, BACKWARD_CHAIN = 0.5, 0.7
# of a block of `kda_chunk_prepare`, two an SM, by columns of k's tiles: of 128 as that measures it at B4 T4096 H32, of
# 64 from that by instructions, 1,600 for 2,600 a warp
PREPARE_SECONDS = {64: 14e-6, 128: 23e-6}


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Return plans, the fastest first.

    values: columns, the block of V's columns of the passes; warps; stages of loads in flight; forward saves, whether
    what all chunks are at once stays for the backward pass.
    """
    return planned(problem, device, direction, Kernel(model, candidate))


def saves_chunks(problem: Problem) -> bool:
    """Whether the forward pass leaves what it finds of all chunks at once to the backward pass; not of slices."""
    return problem.needs_grad and max(problem["K"], problem["V"]) <= WIDEST


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    model, K, size = KernelModel(device), padded(problem["K"]), 4 if problem.dtype == "float32" else 2
    columns = model.variable("columns", powers_of_two(16, 128), "largest")
    warps = model.variable("warps", additive.WARPS[size])
    stages = model.variable("stages", (1, 2), "largest")
    if direction == "forward":
        model.let("saves", int(saves_chunks(problem)))
    model.add(columns <= padded(problem["V"]), "columns, of V")
    # the narrowest block spills, and is better than none
    held = K * columns * truth(columns > 16)
    model.add(held <= STATE_REGISTERS[size] * 32 * warps, "numbers of a state, of those in registers")
    model.block(warps, lookup(warps, additive.REGISTERS), shared_bytes(K, columns, warps, stages, size))
    return model


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    plan = values.plan("triton", "columns", "warps", "stages", *(("saves",) if direction == "forward" else ()))
    found = _pass(problem, device, plan, values, FORWARD_CHAIN, direction == "backward")
    if direction == "forward" or "slices" in problem.traits:
        found = found.after(_prepared(problem, device, plan))
    if "decay=scalar" in problem.traits:
        found = found.after(_by_channels(problem, device, plan))
    if direction == "forward":
        return found
    found = _pass(problem, device, plan, values, BACKWARD_CHAIN, True).after(found)
    is_hoppers = _is_hoppers(problem, device)
    gradients = hopper.gradients(problem, device) if is_hoppers else additive.gradients(problem, device, plan)
    found = gradients.after(gradients.after(found))
    if "decay=scalar" in problem.traits:
        found = found.after(_by_channels(problem, device, plan))
    return replace(found, plan=plan)


def _by_channels(problem: Problem, device: Device, plan: Plan) -> Candidate:
    """Model what PyTorch does with a scalar decay: it is copied for each key channel, or its gradients are added."""
    numbers = problem["B"] * problem["T"] * problem["H"] * problem["K"]
    grid = Grid(max(1, -(-numbers // 512)), 128, 32, 0)
    return Candidate.of(plan, device, grid, 4 * numbers, numbers, serial=0.0)


def _is_hoppers(problem: Problem, device: Device) -> bool:
    """Whether vector decay's kernels on Hopper prepare the chunks and take the gradients."""
    widths = problem["K"], problem["V"]
    return (
        device.capability == (9, 0)
        and problem.dtype != "float32"
        and max(widths) <= TILE
        and not any(x % 8 for x in widths)
    )


def shared_bytes(width: int, columns: Integer, warps: Integer, stages: Integer, size: int) -> Expression:
    """Return the bytes of a block of a pass, an upper bound of what Triton 3.6 allots for the larger one.

    In a pipeline the tiles of a chunk in each stage and the products of its keys once, without one two tiles at a time;
    and a state that changes hands where a warp does not keep its 16 rows of it.
    """
    columns, warps, stages = map(as_expression, (columns, warps, stages))
    exchanged = truth(16 * warps > columns) * width * columns * size
    square = CHUNK * CHUNK
    pipelined = stages * (CHUNK * (3 * width + 2 * columns) + 2 * square) * size + square * 4 + 1024
    two_tiles = CHUNK * 2 * (width + columns) * size + square * size
    return truth(stages > 1) * pipelined + truth(stages == 1) * two_tiles + exchanged


def prepared_on_hopper(problem: Problem, device: Device, plan: Plan) -> Candidate:
    """Model the launch of `kda_chunk_prepare`."""
    K, T, pairs = problem["K"], problem["T"], problem["B"] * problem["H"]
    tile_k, chunks = tile(K), -(-T // CHUNK)
    # q, k, log decays, tiles of keys of two levels; k decayed from the start of 64 columns, what the compiler
    # exchanges, barriers
    shared = CHUNK * tile_k * (2 + 2 + 4 + 4) + 2 * 2 * CHUNK * CHUNK + 64
    grid = Grid(pairs * chunks, 256, 128, shared)
    reads = 4 * K * problem["Hq"] / problem["H"] + 4 * K
    moved = pairs * (T * (reads + 6 * K + 6 * CHUNK) + 4 * chunks * K)
    # of pairs of tokens: four levels and the tokens themselves in blocks of 16, two levels of the whole chunk
    products = 2 * CHUNK * tile_k * (9 * 16 + 4 * CHUNK)
    serial = PREPARE_SECONDS[tile_k]
    return Candidate.of(plan, device, grid, int(moved), grid.blocks * products, serial=serial)


def _prepared(problem: Problem, device: Device, plan: Plan) -> Candidate:
    """Of what precedes the inverses, and these, which move the chunks' squares."""
    if _is_hoppers(problem, device) and "erase_key" not in problem.traits:
        before = prepared_on_hopper(problem, device, plan)
    else:
        once = additive.prepared(problem, device, plan)
        before = once.after(once)
    pairs, chunks = problem["B"] * problem["H"], -(-problem["T"] // CHUNK)
    size = 4 if problem.dtype == "float32" else 2
    grid = Grid(pairs * chunks, 128, 255, 4 * CHUNK * CHUNK * size)
    moved = pairs * problem["T"] * CHUNK * (4 + size)
    inverse = Candidate.of(plan, device, grid, moved, grid.blocks * 10 * 2 * CHUNK**3, serial=additive.PREPARE_SECONDS)
    return inverse.after(before)


def _pass(problem: Problem, device: Device, plan: Plan, values: Assignment, chain: float, saves: bool) -> Candidate:
    """Model a launch of `kda_fwd` or `kda_bwd`. saves: whether states go to memory."""
    K, V, T, pairs = problem["K"], problem["V"], problem["T"], problem["B"] * problem["H"]
    block, warps = values["columns"], values["warps"]
    size, chunks = 4 if problem.dtype == "float32" else 2, -(-T // CHUNK)
    grid = values.grid(pairs * -(-V // block))
    splits = -(-V // block)
    moved = pairs * (T * size * (splits * (3 * K + 2 * CHUNK) + 2 * V) + 8 * K * V + 4 * splits * chunks * K)
    if saves:
        moved += pairs * (chunks * size * K * V + T * size * V)
    operations = 2 * CHUNK * block * (3 * padded(K) + 3 * CHUNK)
    working = min(warps, max(1, block // 16))
    factor = additive.STAGE_FACTORS[plan["stages"]]
    serial = factor * chunks * chain * (additive.CHUNK_SECONDS + operations / (working * additive.WARP_RATE))
    return Candidate.of(plan, device, grid, moved, grid.blocks * chunks * operations, serial=serial)
