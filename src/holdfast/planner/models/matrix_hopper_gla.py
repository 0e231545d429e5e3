"""Vector decay on Hopper: one persistent block a (sequence, head), and a launch of all chunks for the gradients."""

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem

from .matrix_hopper import FILL_SECONDS, tile

CHUNK = 64
# chunks in flight of queries and keys, and of the rest
STAGES, PAIR = 3, 2
# eight warps multiply values of 128 columns, eight weigh
OTHER_WARPS = 8
# barriers, and what the compiler aligns
SCRATCH = 3072
# of launches of 0.35, 0.204 and 0.605 ms on an H200 (docs/lab-notes.md), those of 64 columns estimated: seconds of a
# chunk, by columns of k's tiles, of the sweep and of the one for states alone; of a block of 64 columns of the
# gradients, two blocks an SM
SWEEP_SECONDS = {64: 2.8e-6, 128: 5.1e-6}
STATES_SECONDS = {64: 1.8e-6, 128: 3.1e-6}
GRADIENTS_SECONDS = 10e-6
PLAN = Plan("hopper")


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """The one plan of each pass."""
    first = sweep(problem, device, True, direction == "backward")
    if direction == "forward":
        return () if first is None else (first,)
    states = sweep(problem, device, False, True)
    if first is None or states is None:
        return ()
    return (_gradients(problem, device).after(states.after(first)),)


def sweep(problem: Problem, device: Device, outputs: bool, keeps: bool) -> Candidate | None:
    """A launch of hopper_gla_sweep.py. keeps: whether states go to memory."""
    K, V, T, pairs = problem["K"], problem["V"], problem["T"], problem["B"] * problem["H"]
    wide, tall, chunks = tile(K), tile(V), -(-T // CHUNK)
    warps = tall // 16 + OTHER_WARPS
    # queries and keys, values, log decays of twice the width; tiles of two levels, scores, what the compiler exchanges
    columns = (1 + outputs) * STAGES * wide + PAIR * tall + 2 * wide + outputs * (2 * wide + 2 * CHUNK)
    shared = 2 * CHUNK * columns + keeps * 2 * tall * (CHUNK if outputs else wide) + SCRATCH
    grid = Grid(pairs, 32 * warps, 65536 // (32 * warps) // 8 * 8, shared)
    if not grid.fits(device):
        return None
    keys = 2 * K * (1 + outputs) * problem["Hq"] / problem["H"] + 4 * K
    moved = pairs * T * (keys + 2 * V * (1 + outputs)) + 8 * pairs * K * V
    if keeps:
        moved += pairs * chunks * 2 * wide * tall
    products = wide * tall + outputs * (wide * tall + CHUNK * tall + 6 * CHUNK * wide)
    seconds = (SWEEP_SECONDS if outputs else STATES_SECONDS)[wide]
    operations = pairs * chunks * 2 * CHUNK * products
    return Candidate.of(PLAN, device, grid, int(moved), operations, serial=FILL_SECONDS + chunks * seconds)


def _gradients(problem: Problem, device: Device) -> Candidate:
    """The launch of hopper_gla_gradients.py."""
    K, V, T, pairs = problem["K"], problem["V"], problem["T"], problem["B"] * problem["H"]
    chunks, blocks, tall = -(-T // CHUNK), -(-K // CHUNK), tile(V)
    grid = Grid(pairs * chunks * blocks, 128, 255, 110 * 1024)
    reads = 4 * K * problem["Hq"] / problem["H"] + 4 * K + 4 * V
    moved = pairs * (T * (reads + 8 * K) + chunks * 4 * tile(K) * tall)
    products = 2 * CHUNK * tall + 2 * CHUNK * CHUNK + tall * CHUNK
    operations = grid.blocks * 2 * CHUNK * products
    return Candidate.of(PLAN, device, grid, int(moved), operations, serial=GRADIENTS_SECONDS)
