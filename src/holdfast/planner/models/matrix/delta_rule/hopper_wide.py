"""The delta rule on Hopper with keys of more than 128 columns: walks of 64 of v's columns, Triton's other launches."""

from dataclasses import replace

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned
from holdfast.planner.models.matrix.tiles import CHUNK
from holdfast.planner.models.varlen import as_batch

from .triton import gradient_block, gradients_of, prepare, windows_of

# of the state's keys; its rounded copy takes half of the shared memory that chunks do
WIDEST = 256
COLUMNS = 64
STAGES = 2
# four warps multiply, four score, one copies, one has the gates, two fill up the group of four
WARPS = 12
SCRATCH = 4096
# Estimates, seconds of a chunk of a walk: the rates of four warps at the products of hopper.py's sweeps,
# with twice the keys; and of a block before its first and after its last chunk
WALK_SECONDS = {"forward": 2.4e-6, "states": 1.8e-6, "reverse": 2.7e-6}
FILL_SECONDS = 1.0e-5
# of a program of the gradients, and of each of its blocks of v's columns beside the first
GRADIENT_SECONDS, BLOCK_SECONDS = 2.4e-5, 3.0e-6


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """The one plan of each pass, of the values that matrix/delta_rule/triton/launch.py reads."""
    return planned(as_batch(problem) if problem.varlen else problem, device, direction, Kernel(model, candidate))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """Walks as they were compiled; the widest block of the gradients is to be found."""
    model = KernelModel(device)
    model.let("chunk", CHUNK)
    model.let("prepare_warps", 4)
    if direction == "forward":
        _walk_block(model, "forward")
        return model
    _walk_block(model, "states")
    _walk_block(model, "reverse")
    gradient_block(model, problem, CHUNK, 2)
    model.let("windows", windows_of(problem, CHUNK, 2))
    return model


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    prepared = prepare(problem, device, CHUNK)
    names = ("chunk", "prepare_warps")
    if direction == "forward":
        found = _walk(problem, device, values, "forward").after(prepared)
        return replace(found, plan=values.plan("hopper", *names))
    states, reverse = (_walk(problem, device, values, name) for name in ("states", "reverse"))
    found = _more(problem, device, gradients_of(problem, device, values)).after(reverse.after(states.after(prepared)))
    return replace(found, plan=values.plan("hopper", *names, "grad_columns", "grad_warps", "windows"))


def _more(problem: Problem, device: Device, last: Candidate) -> Candidate:
    """The gradients with the time of more blocks than Triton's model counts."""
    grid = Grid(last.blocks, 32 * last.plan["grad_warps"], last.registers, last.shared)
    serial = GRADIENT_SECONDS + BLOCK_SECONDS * (-(-problem["V"] // last.plan["grad_columns"]) - 1)
    return Candidate.of(last.plan, device, grid, last.moved, last.operations, serial=serial)


def _walk_block(model: KernelModel, name: str) -> None:
    """Of one launch of matrix/delta_rule/hopper/wide/kernel.py: "forward", "states" or "reverse"."""
    reads = 1 if name == "states" else 2
    tiles = STAGES * CHUNK * (reads * WIDEST + COLUMNS + CHUNK + (reads - 1) * CHUNK)
    shared = 2 * (tiles + COLUMNS * WIDEST + (name == "forward") * CHUNK * COLUMNS) + SCRATCH
    model.block(WARPS if reads == 2 else WARPS - 4, 168, shared, name)


def _walk(problem: Problem, device: Device, values: Assignment, name: str) -> Candidate:
    """The same."""
    pairs, K, V = problem["B"] * problem["H"], problem["K"], problem["V"]
    chunks, slices, reads = max(1, -(-problem["T"] // CHUNK)), -(-V // COLUMNS), 1 if name == "states" else 2
    grid = values.grid(pairs * slices, name)
    keys = K * problem["Hq"] / problem["H"] * reads
    kept = 0 if name == "forward" else 2 * pairs * chunks * K * V
    moved = int(2 * pairs * problem["T"] * (keys + V * (1 + (name == "forward")) + CHUNK)) + kept + 4 * pairs * K * V
    products = COLUMNS * ((1 + reads) * WIDEST + (1 + reads) * CHUNK) + (reads - 1) * CHUNK * WIDEST
    operations = grid.blocks * chunks * 2 * CHUNK * products
    serial = FILL_SECONDS + chunks * WALK_SECONDS[name]
    return Candidate.of(Plan("hopper"), device, grid, moved, operations, serial=serial)
