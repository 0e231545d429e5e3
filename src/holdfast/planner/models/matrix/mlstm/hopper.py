"""mLSTM's sweeps on Hopper: one persistent block a (sequence, head), the state and its normaliser on the chip."""

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned
from holdfast.planner.models.matrix.scalar_decay.hopper import FILL_SECONDS, OTHER_WARPS, SCRATCH
from holdfast.planner.models.matrix.scalar_decay.saved_states import chunks_between_states
from holdfast.planner.models.matrix.tiles import CHUNK, registers_of, tile

# seconds of a chunk, by the wider tile. Of 128 columns H200, 128 blocks at once:
# docs/notes/mlstm.md#times-of-the-launches; of 64 estimates
FORWARD_SECONDS = {64: 2.1e-6, 128: 2.3e-6}
QUERIES_SECONDS = {64: 2.3e-6, 128: 3.2e-6}
ADJOINT_SECONDS = {64: 3.1e-6, 128: 4.1e-6}
# of the forward sweep, which has four for the normaliser
NORMALIZER_WARPS = 4
# chunks from one kept state to the next: shared memory has no room for the sums of more
RARELY = 16
# of tiles in flight of the launch for dk and dv
ADJOINT_STAGES = 2


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans, the fastest first.

    values: stages of tiles in flight, backward of the launch for dq; adjoint_stages of that for dk and dv, and save,
    chunks from one kept state to the next.
    """
    forward, backward = Kernel(forward_model, _forward), Kernel(backward_model, _backward)
    return planned(problem, device, direction, forward if direction == "forward" else backward)


def forward_model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    model, key, value = KernelModel(device), tile(problem["K"]), tile(problem["V"])
    stages = model.variable("stages", (2, 3), "largest", greedy=True)
    elements = CHUNK * (stages * (2 * key + value) + value + CHUNK) + 8 * (key + CHUNK)
    warps = max(key, value) // 16 + OTHER_WARPS + NORMALIZER_WARPS
    model.block(warps, registers_of(warps), 2 * elements + 4 * CHUNK * (5 * stages + 6) + SCRATCH)
    return model


def backward_model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    model, key, value = KernelModel(device), tile(problem["K"]), tile(problem["V"])
    model.require(key >= value, "tiles of keys are no narrower than those of values")
    stages = model.variable("stages", (2, 3), "largest", greedy=True)
    save = chunks_between_states(problem, RARELY)
    model.let("adjoint_stages", ADJOINT_STAGES)
    model.let("save", save)
    warps = key // 16 + OTHER_WARPS
    elements = CHUNK * (stages * 2 * (key + value) + CHUNK)
    floats = CHUNK * (8 * stages + key // 16 + 5)
    model.block(warps, registers_of(warps), 2 * elements + 4 * floats + SCRATCH, "dq")
    of_two = CHUNK * (5 * (key + value) + 2 * CHUNK) + key * value
    kept = 2 * (CHUNK * (9 + 4 + key // 16 + 2 * (key // 64)) + 2 * key) + (save - 1) * (CHUNK + 2)
    model.block(warps, registers_of(warps), 2 * of_two + 4 * kept + SCRATCH, "dk and dv")
    return model


def _launch(
    problem: Problem, device: Device, plan: Plan, grid: Grid, units: tuple[float, int], products: int, seconds: float
) -> Candidate:
    """units: tensors of K and of V columns that pass through memory."""
    pairs, chunks = problem["B"] * problem["H"], -(-problem["T"] // CHUNK)
    states = 2 * 4 * pairs * problem["K"] * (problem["V"] + 1)
    moved = int(pairs * problem["T"] * (2 * (problem["K"] * units[0] + problem["V"] * units[1]) + 24)) + states
    operations = pairs * chunks * 2 * CHUNK * products
    return Candidate.of(plan, device, grid, moved, operations, serial=FILL_SECONDS + chunks * seconds)


def _forward(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    key, value = tile(problem["K"]), tile(problem["V"])
    grid, plan = values.grid(problem["B"] * problem["H"]), values.plan("hopper", "stages")
    products, units = CHUNK * (key + value) + 2 * key * value, (2 * problem["Hq"] / problem["H"], 2)
    return _launch(problem, device, plan, grid, units, products, FORWARD_SECONDS[max(key, value)])


def _backward(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    key, value, pairs = tile(problem["K"]), tile(problem["V"]), problem["B"] * problem["H"]
    plan, keys = values.plan("hopper", "stages", "adjoint_stages", "save"), 1 + 2 * problem["Hq"] / problem["H"]
    products, grid = CHUNK * (2 * key + value) + 2 * key * value, values.grid(pairs, "dq")
    queries = _launch(problem, device, plan, grid, (keys, 2), products, QUERIES_SECONDS[key])
    products, grid = 2 * CHUNK * (key + value) + 3 * key * value, values.grid(pairs, "dk and dv")
    return _launch(problem, device, plan, grid, (keys, 3), products, ADJOINT_SECONDS[key]).after(queries)
