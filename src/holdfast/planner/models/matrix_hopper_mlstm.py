"""mLSTM's sweeps on Hopper: one persistent block a (sequence, head), the state and its normaliser on the chip."""

from collections.abc import Iterator

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem

from . import ranked
from .matrix_hopper import CHUNK, FILL_SECONDS, OTHER_WARPS, SAVE, SCRATCH, tile

# seconds of a chunk, by the wider tile. Of 128 columns H200, 128 blocks at once: docs/lab-notes.md; of 64 estimates
FORWARD_SECONDS = {64: 2.7e-6, 128: 2.9e-6}
QUERIES_SECONDS = {64: 2.0e-6, 128: 3.0e-6}
ADJOINT_SECONDS = {64: 3.2e-6, 128: 4.65e-6}
# of the pass over the output and its gradient, tokens and heads a program
ROWS = 64


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans, the fastest first.

    values: stages of tiles in flight, backward of the launch for dq; adjoint_stages of that for dk and dv, and save,
    chunks from one kept state to the next.
    """
    return ranked(_forward(problem, device) if direction == "forward" else _backward(problem, device))


def _launch(
    problem: Problem,
    device: Device,
    plan: Plan,
    elements: int,
    floats: int,
    units: tuple[float, int],
    products: int,
    seconds: float,
) -> Candidate | None:
    """elements, floats: in shared memory. units: tensors of K and of V columns that pass through memory."""
    wide = tile(max(problem["K"], problem["V"]))
    warps = wide // 16 + OTHER_WARPS
    pairs, chunks = problem["B"] * problem["H"], -(-problem["T"] // CHUNK)
    shared = 2 * elements + 4 * floats + SCRATCH
    grid = Grid(pairs, 32 * warps, min(240, 65536 // (32 * warps) // 8 * 8), shared)
    if not grid.fits(device):
        return None
    states = 2 * 4 * pairs * problem["K"] * (problem["V"] + 1)
    moved = int(pairs * problem["T"] * (2 * (problem["K"] * units[0] + problem["V"] * units[1]) + 24)) + states
    operations = pairs * chunks * 2 * CHUNK * products
    return Candidate.of(plan, device, grid, moved, operations, serial=FILL_SECONDS + chunks * seconds)


def _forward(problem: Problem, device: Device) -> Iterator[Candidate]:
    key, value = tile(problem["K"]), tile(problem["V"])
    share = problem["Hq"] / problem["H"]
    for stages in (3, 2):
        plan = Plan("hopper", (("stages", stages),))
        elements = CHUNK * (stages * (2 * key + value) + value + CHUNK)
        floats = CHUNK * (4 * stages + 6) + key
        products = CHUNK * (key + value) + 2 * key * value
        seconds = FORWARD_SECONDS[max(key, value)]
        found = _launch(problem, device, plan, elements, floats, (2 * share, 2), products, seconds)
        if found is not None:
            yield found
            return


def _backward(problem: Problem, device: Device) -> Iterator[Candidate]:
    key, value = tile(problem["K"]), tile(problem["V"])
    if key < value:
        return
    share = problem["Hq"] / problem["H"]
    for stages in (3, 2):
        plan = Plan("hopper", (("stages", stages), ("adjoint_stages", 2), ("save", SAVE)))
        elements = CHUNK * (stages * 2 * (key + value) + key + CHUNK)
        floats = stages * CHUNK * (6 + key // 16)
        products = CHUNK * (key + value) + 2 * key * value
        units = 1 + 2 * share, 2
        queries = _launch(problem, device, plan, elements, floats, units, products, QUERIES_SECONDS[key])
        elements = CHUNK * (5 * (key + value) + 2 * CHUNK) + key * value
        floats = 2 * (CHUNK * (6 + 8 + key // 16 + key // 64) + key)
        products = 2 * CHUNK * (key + value) + 3 * key * value
        units = 1 + 2 * share, 3
        adjoint = _launch(problem, device, plan, elements, floats, units, products, ADJOINT_SECONDS[key])
        if queries is not None and adjoint is not None:
            yield adjoint.after(queries).after(_output(problem, device, plan))
            return


def _output(problem: Problem, device: Device, plan: Plan) -> Candidate:
    """The launch over the output and its gradient (triton_normalizer.output_gradient)."""
    rows = problem["B"] * problem["T"] * problem["H"]
    grid = Grid(-(-rows // ROWS), 128, 64)
    return Candidate.of(plan, device, grid, rows * (4 * problem["V"] + 20), 2 * rows * problem["V"], False)
