"""mLSTM's sweeps on Hopper: one persistent block a (sequence, head), the state and its normaliser on the chip."""

from collections.abc import Iterator

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked
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
    others: int = OTHER_WARPS,
) -> Candidate | None:
    """elements, floats: in shared memory. units: tensors of K and of V columns that pass through memory.

    others: warps beside those that multiply.
    """
    wide = tile(max(problem["K"], problem["V"]))
    warps = wide // 16 + others
    pairs, chunks = problem["B"] * problem["H"], -(-problem["T"] // CHUNK)
    shared = 2 * elements + 4 * floats + SCRATCH
    grid = Grid(pairs, 32 * warps, registers_of(warps), shared)
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
        elements = CHUNK * (stages * (2 * key + value) + value + CHUNK) + 8 * (key + CHUNK)
        floats = CHUNK * (5 * stages + 6)
        products = CHUNK * (key + value) + 2 * key * value
        seconds = FORWARD_SECONDS[max(key, value)]
        others = OTHER_WARPS + NORMALIZER_WARPS
        found = _launch(problem, device, plan, elements, floats, (2 * share, 2), products, seconds, others)
        if found is not None:
            yield found
            return


def _backward(problem: Problem, device: Device) -> Iterator[Candidate]:
    key, value = tile(problem["K"]), tile(problem["V"])
    if key < value:
        return
    share = problem["Hq"] / problem["H"]
    for stages in (3, 2):
        save = chunks_between_states(problem, RARELY)
        plan = Plan("hopper", (("stages", stages), ("adjoint_stages", 2), ("save", save)))
        elements = CHUNK * (stages * 2 * (key + value) + CHUNK)
        floats = CHUNK * (8 * stages + key // 16 + 5)
        products = CHUNK * (2 * key + value) + 2 * key * value
        units = 1 + 2 * share, 2
        queries = _launch(problem, device, plan, elements, floats, units, products, QUERIES_SECONDS[key])
        elements = CHUNK * (5 * (key + value) + 2 * CHUNK) + key * value
        floats = 2 * (CHUNK * (9 + 4 + key // 16 + 2 * (key // 64)) + 2 * key) + (save - 1) * (CHUNK + 2)
        products = 2 * CHUNK * (key + value) + 3 * key * value
        units = 1 + 2 * share, 3
        adjoint = _launch(problem, device, plan, elements, floats, units, products, ADJOINT_SECONDS[key])
        if queries is not None and adjoint is not None:
            yield adjoint.after(queries)
            return
