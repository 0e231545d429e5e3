"""The delta rule on Hopper with keys of more than 128 columns: walks of 64 of v's columns, Triton's other launches."""

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models.matrix.tiles import CHUNK
from holdfast.planner.models.varlen import as_batch

from .triton import gradients_of, prepare, windows_of

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
    planned = as_batch(problem) if problem.varlen else problem
    prepared = prepare(planned, device, CHUNK)
    common = (("chunk", CHUNK), ("prepare_warps", 4))
    if direction == "forward":
        walk = _walk(planned, device, "forward")
        return () if walk is None else (_with_plan(walk.after(prepared), Plan("hopper", common)),)
    windows = windows_of(problem, CHUNK, 2)
    last = gradients_of(planned, device, CHUNK, 2, windows)
    states, reverse = (_walk(planned, device, name) for name in ("states", "reverse"))
    if last is None or states is None or reverse is None:
        return ()
    blocks = (("grad_columns", last.plan["grad_columns"]), ("grad_warps", last.plan["grad_warps"]))
    whole = _more(planned, device, last).after(reverse.after(states.after(prepared)))
    return (_with_plan(whole, Plan("hopper", (*common, *blocks, ("windows", windows)))),)


def _more(problem: Problem, device: Device, last: Candidate) -> Candidate:
    """The gradients with the time of more blocks than Triton's model counts."""
    grid = Grid(last.blocks, 32 * last.plan["grad_warps"], last.registers, last.shared)
    serial = GRADIENT_SECONDS + BLOCK_SECONDS * (-(-problem["V"] // last.plan["grad_columns"]) - 1)
    return Candidate.of(last.plan, device, grid, last.moved, last.operations, serial=serial)


def _with_plan(found: Candidate, plan: Plan) -> Candidate:
    return Candidate(plan, found.prediction, found.moved, found.operations, found.blocks, found.shared, found.registers)


def _walk(problem: Problem, device: Device, name: str) -> Candidate | None:
    """One launch of matrix/delta_rule/hopper/wide/kernel.py: "forward", "states" or "reverse"."""
    pairs, K, V = problem["B"] * problem["H"], problem["K"], problem["V"]
    chunks, slices = max(1, -(-problem["T"] // CHUNK)), -(-V // COLUMNS)
    reads = 1 if name == "states" else 2
    tiles = STAGES * CHUNK * (reads * WIDEST + COLUMNS + CHUNK + (reads - 1) * CHUNK)
    shared = 2 * (tiles + COLUMNS * WIDEST + (name == "forward") * CHUNK * COLUMNS) + SCRATCH
    grid = Grid(pairs * slices, 32 * (WARPS if reads == 2 else WARPS - 4), 168, shared)
    if not grid.fits(device):
        return None
    keys = K * problem["Hq"] / problem["H"] * reads
    kept = 0 if name == "forward" else 2 * pairs * chunks * K * V
    moved = int(2 * pairs * problem["T"] * (keys + V * (1 + (name == "forward")) + CHUNK)) + kept + 4 * pairs * K * V
    products = COLUMNS * ((1 + reads) * WIDEST + (1 + reads) * CHUNK) + (reads - 1) * CHUNK * WIDEST
    operations = grid.blocks * chunks * 2 * CHUNK * products
    serial = FILL_SECONDS + chunks * WALK_SECONDS[name]
    return Candidate.of(Plan("hopper"), device, grid, moved, operations, serial=serial)
