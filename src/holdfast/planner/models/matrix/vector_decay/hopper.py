"""Vector decay on Hopper: one persistent block a (sequence, head), and a launch of all chunks for the gradients."""

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models.matrix.scalar_decay.hopper import tile
from holdfast.planner.models.varlen import as_batch

CHUNK = 64
# chunks in flight of queries and keys, and of the rest
STAGES, PAIR = 3, 2
# eight warps multiply values of 128 columns, eight weigh
OTHER_WARPS = 8
# barriers, decays, strengths, and what the compiler aligns
SCRATCH = 3584
# of launches of 0.29 to 0.32 and 0.62 ms on an H200 (docs/notes/vector-decay.md#times-of-the-launches), that of 64
# columns estimated: seconds of a chunk of the sweep, by columns of k's tiles, and before and after a block's; of a
# block of 64 columns of the gradients, two blocks an SM
SWEEP_SECONDS = {64: 2.5e-6, 128: 4.5e-6}
FILL_SECONDS = 7e-6
GRADIENTS_SECONDS = 10e-6
BACKWARD = Plan("hopper")


def plan(keeps: bool) -> Plan:
    """Of the forward pass. keeps: whether it leaves the state before each chunk to the backward pass."""
    return Plan("hopper", (("keeps", int(keeps)),))


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """The one plan of each pass; packed sequences are taken to be equally long."""
    if problem.varlen:
        problem = as_batch(problem)
    found = sweep(problem, device, direction == "backward" or problem.needs_grad)
    if found is None or direction == "forward":
        return () if found is None else (found,)
    if "slices" in problem.traits:
        # whose states no forward pass has kept
        found = found.after(found)
    return (_gradients(problem, device).after(found),)


def sweep(problem: Problem, device: Device, keeps: bool) -> Candidate | None:
    """A launch of matrix/vector_decay/hopper/forward.py. keeps: whether states go to memory."""
    K, V, T, pairs = problem["K"], problem["V"], problem["T"], problem["B"] * problem["H"]
    wide, tall, chunks = tile(K), tile(V), -(-T // CHUNK)
    warps = tall // 16 + OTHER_WARPS
    # queries and keys, values, log decays of twice the width; tiles of two levels, scores, what the compiler exchanges
    columns = 2 * STAGES * wide + PAIR * tall + 2 * wide + 2 * wide + 3 * CHUNK
    grid = Grid(pairs, 32 * warps, 65536 // (32 * warps) // 8 * 8, 2 * CHUNK * columns + SCRATCH)
    if not grid.fits(device):
        return None
    moved = pairs * (T * (4 * K * problem["Hq"] / problem["H"] + 4 * K + 4 * V) + 8 * K * V)
    if keeps:
        moved += pairs * chunks * 2 * wide * tall
    operations = pairs * chunks * 2 * CHUNK * (2 * wide * tall + CHUNK * tall + 6 * CHUNK * wide)
    serial = FILL_SECONDS + chunks * SWEEP_SECONDS[wide]
    return Candidate.of(plan(keeps), device, grid, int(moved), operations, serial=serial)


def _gradients(problem: Problem, device: Device) -> Candidate:
    """The launch of matrix/vector_decay/hopper/backward_grads.py."""
    K, V, T, pairs = problem["K"], problem["V"], problem["T"], problem["B"] * problem["H"]
    chunks, blocks, tall = -(-T // CHUNK), -(-K // CHUNK), tile(V)
    grid = Grid(pairs * chunks * blocks, 128, 255, 110 * 1024)
    reads = 4 * K * problem["Hq"] / problem["H"] + 4 * K + 4 * V
    moved = pairs * (T * (reads + 8 * K) + chunks * 4 * tile(K) * tall)
    products = 2 * CHUNK * tall + 2 * CHUNK * CHUNK + tall * CHUNK
    operations = grid.blocks * 2 * CHUNK * products
    return Candidate.of(BACKWARD, device, grid, int(moved), operations, serial=GRADIENTS_SECONDS)
