"""Vector decay on Hopper: one persistent block a (sequence, head), and a launch of all chunks for the gradients."""

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem

from .matrix_hopper import FILL_SECONDS, tile

CHUNK = 64
# chunks in flight of queries and keys, and of the rest
STAGES, PAIR = 3, 2
# eight warps multiply values of 128 columns, four weigh, one copies, three fill up the group of four
OTHER_WARPS = 8
# barriers, and what the compiler aligns
SCRATCH = 5120
# fitted to passes of 0.353 and 1.395 ms on an H200 (docs/lab-notes.md), how they share it estimated, as are 64 columns:
# seconds of a chunk, by columns of k's tiles: of the sweep, of the one for states alone; of a block of 64 columns of
# the gradients, two blocks an SM
SWEEP_SECONDS = {64: 2.8e-6, 128: 5.3e-6}
STATES_SECONDS = {64: 2.0e-6, 128: 3.6e-6}
GRADIENTS_SECONDS = 1.25e-5
FORWARD = Plan("hopper")
# blocks of the gradients that share an SM
AT_ONCE = 2


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """The one plan of each pass.

    values, backward: ahead, how many tokens later than a block of the gradients those start that follow it.
    """
    sweep = _sweep(problem, device, True, direction == "backward")
    if direction == "forward":
        return () if sweep is None else (sweep,)
    states = _sweep(problem, device, False, True)
    if sweep is None or states is None:
        return ()
    return (_gradients(problem, device).after(states.after(sweep)),)


def _sweep(problem: Problem, device: Device, outputs: bool, keeps: bool) -> Candidate | None:
    """A launch of hopper_gla_sweep.py. keeps: whether states go to memory."""
    K, V, T, pairs = problem["K"], problem["V"], problem["T"], problem["B"] * problem["H"]
    wide, tall, chunks = tile(K), tile(V), -(-T // CHUNK)
    warps = tall // 16 + OTHER_WARPS
    shared = 2 * CHUNK * ((1 + outputs) * STAGES * wide + PAIR * tall + outputs * (tall + CHUNK))
    grid = Grid(pairs, 32 * warps, 65536 // (32 * warps) // 8 * 8, shared + 4 * PAIR * CHUNK * wide + SCRATCH)
    if not grid.fits(device):
        return None
    keys = 2 * K * (1 + outputs) * problem["Hq"] / problem["H"] + 4 * K
    moved = pairs * T * (keys + 2 * V * (1 + outputs)) + 8 * pairs * K * V
    if keeps:
        moved += pairs * chunks * 2 * wide * tall
    products = wide * tall + outputs * (wide * tall + CHUNK * tall + 6 * CHUNK * wide)
    seconds = (SWEEP_SECONDS if outputs else STATES_SECONDS)[wide]
    operations = pairs * chunks * 2 * CHUNK * products
    return Candidate.of(FORWARD, device, grid, int(moved), operations, serial=FILL_SECONDS + chunks * seconds)


def _gradients(problem: Problem, device: Device) -> Candidate:
    """The launch of hopper_gla_gradients.py."""
    K, V, T, pairs = problem["K"], problem["V"], problem["T"], problem["B"] * problem["H"]
    chunks, blocks, tall = -(-T // CHUNK), -(-K // CHUNK), tile(V)
    grid = Grid(pairs * chunks * blocks, 128, 255, 110 * 1024)
    reads = 4 * K * problem["Hq"] / problem["H"] + 4 * K + 4 * V
    moved = pairs * (T * (reads + 8 * K) + chunks * 4 * tile(K) * tall)
    products = 2 * CHUNK * tall + 2 * CHUNK * CHUNK + tall * CHUNK
    operations = grid.blocks * 2 * CHUNK * products
    at_once = AT_ONCE * (device.sms or 1)
    plan = Plan("hopper", (("ahead", -(-at_once // (blocks * problem["H"])) * CHUNK),))
    return Candidate.of(plan, device, grid, int(moved), operations, serial=GRADIENTS_SECONDS)
