"""One token a sequence: a program a (sequence, head, block of V's columns) reads and writes its part of the state.

On a pool of states, a few tokens: what a program computes between them counts too.
"""

from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.constrint import Model, maximum, minimum
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, covering, planned, powers_of_two

WIDEST = 512
# of the state a thread; loads of all of them are in flight at once
STATE_REGISTERS = 64


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans, the fastest first. values: columns, the block of V's columns; warps."""
    return planned(problem, device, direction, Kernel(model, candidate))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    model = KernelModel(device)
    model.require(direction == "forward", "a forward pass")
    # 32 columns are a whole cache line of each row
    columns = model.variable("columns", (32, 64, 16, 128), "given")
    warps = model.variable("warps", (4, 2, 8), "given")
    cells = model.let("cells", covering(problem["K"]) * columns)
    model.add(cells <= STATE_REGISTERS * 32 * warps, "numbers of a state, of those in registers")
    model.add(columns <= max(16, 2 * problem["V"] - 1), "columns, of less than twice V")
    model.block(warps, 2 * (cells // (32 * warps)) + 40, 1024)
    return model


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    B, H, K, V = (problem[name] for name in "BHKV")
    cells = B * H * K * (V + ("normalizer" in problem.traits))
    plan, grid = values.plan("decode", "columns", "warps"), values.grid(B * H * -(-V // values["columns"]))
    return Candidate.of(plan, device, grid, 8 * cells, 6 * cells, tensor_cores=False)


def pool_plan(keys: int, values: int, keys_last: bool, is_wide: bool) -> Plan:
    """The plan on a pool of states, in 32 bits if is_wide, else 16, the same for any number of sequences and tokens.

    Where K is a state's last axis, a row of it is a cache line or two, and one warp has all of a column: it sums over K
    without waiting for others. Where V is, 32 columns are half a line or a whole one, and two warps share them.
    """
    model = Model()
    most, least = (8 if is_wide else 16, 1) if keys_last else (32, 2)
    columns = model.variable("columns", powers_of_two(1, min(most, covering(values))), "largest")
    warps = model.variable("warps", powers_of_two(1, 8))
    cells = covering(keys) * columns
    model.add(cells <= STATE_REGISTERS * 32 * warps, "numbers of a state, of those in registers")
    # else one warp could read a cell after the other has written it
    model.add(warps <= maximum(1, cells // 32), "no cell is held by two warps")
    model.add(warps >= minimum(least, maximum(1, cells // 32)), "warps that share a column")
    found = model.first()
    return Plan("decode", (("columns", found["columns"]), ("warps", found["warps"])))
