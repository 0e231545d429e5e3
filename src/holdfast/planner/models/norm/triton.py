"""Rows of heads' outputs, normalised and gated: what counts is the bytes of o, gate and result."""

from holdfast.planner import Candidate, Device, Direction, Problem
from holdfast.planner.constrint import ceil_div, maximum, minimum
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, covering, planned

# channels of a row; a row is held by one block
WIDEST = 8192
# of a tile, in float32 a thread; the backward pass holds five such tiles
TILE_REGISTERS = {"forward": 32, "backward": 16}
# bytes of shared memory for the sums of a row
SHARED = 512


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans, the fastest first. values: rows a tile; warps; parts (backward), blocks that sum a weight's gradient."""
    return planned(problem, device, direction, Kernel(model, candidate))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    wide, rows_of_one = covering(problem["D"]), _rows(problem)
    model, tile, is_forward = KernelModel(device), TILE_REGISTERS[direction], direction == "forward"
    warps = model.variable("warps", (4, 8, 16))
    share = model.variable("share", (1, 2))
    fitting = model.let("fitting", tile * 32 * warps // (wide * share))
    rows = model.let("rows", minimum(fitting, covering(rows_of_one)))
    model.add(fitting >= 1, "a row fits the registers")
    held = model.let("held", rows * wide // (32 * warps))
    registers = model.let("registers", minimum(255, 32 + 2 * held if is_forward else 40 + 5 * held))
    model.block(warps, registers, SHARED)
    tiles = model.let("tiles", ceil_div(rows_of_one, maximum(rows, 1)))
    if not is_forward:
        # as many blocks as a device holds at a time, at most one a tile
        together = model.let("together", model.at_once(warps, registers, SHARED))
        model.let("parts", maximum(1, minimum(tiles, together // problem["G"])))
    return model


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    size, gate = 4 if problem.dtype == "float32" else 2, "gate" in problem.traits
    # o, the gate and y, or their gradients beside o and the gate
    tensors = 2 + gate if direction == "forward" else 3 + 2 * gate
    cells = problem["B"] * problem["T"] * problem["H"] * problem["D"] * tensors
    forward = direction == "forward"
    plan = values.plan("triton", "rows", "warps", *(() if forward else ("parts",)))
    grid = values.grid(values["tiles" if forward else "parts"] * problem["G"])
    return Candidate.of(plan, device, grid, cells * size, cells * 12, tensor_cores=False)


def _rows(problem: Problem) -> int:
    """Of one weight, which all heads share or each has of its own."""
    return max(problem["B"] * problem["T"] * problem["H"] // problem["G"], 1)
