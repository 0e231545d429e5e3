"""Vector decay on Hopper: one persistent block a (sequence, head), and a launch of all chunks for the gradients."""

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned
from holdfast.planner.models.matrix.tiles import tile
from holdfast.planner.models.varlen import as_batch

CHUNK = 64
# stages of q and k, and of the rest
QK_STAGES, V_STAGES = 3, 2
# of the decay partition; the mma partition has eight for values of 128 columns
DECAY_WARPS = 8
# barriers, decays, betas, and what the compiler aligns
SCRATCH = 3584
# of launches of 0.29 to 0.32 and 0.62 ms on an H200 (docs/notes/vector-decay.md#times-of-the-launches), that of 64
# columns estimated: seconds of a chunk of `gla_fwd`, by columns of k's tiles, and before and after a block's; of a
# block of 64 columns of `gla_bwd_grads`, two blocks an SM
CHUNK_SECONDS = {64: 2.5e-6, 128: 4.5e-6}
FILL_SECONDS = 7e-6
GRADS_SECONDS = 10e-6
BACKWARD = Plan("hopper")


def plan(saves: bool) -> Plan:
    """Return the plan of the forward pass. saves: whether it saves the state before each chunk for the backward one."""
    return Plan("hopper", (("saves", int(saves)),))


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Return the one plan of each pass; packed sequences are taken to be equally long."""
    return planned(as_batch(problem) if problem.varlen else problem, device, direction, Kernel(model, candidate))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """A block of `gla_fwd`: whether it saves states is all that its plan says."""
    model, tile_k, tile_v = KernelModel(device), tile(problem["K"]), tile(problem["V"])
    model.let("saves", int(direction == "backward" or problem.needs_grad))
    warps = tile_v // 16 + DECAY_WARPS
    # q and k, v, log decays of twice the width; tiles of two levels, scores, what the compiler exchanges
    columns = 2 * QK_STAGES * tile_k + V_STAGES * tile_v + 2 * tile_k + 2 * tile_k + 3 * CHUNK
    model.block(warps, 65536 // (32 * warps) // 8 * 8, 2 * CHUNK * columns + SCRATCH)
    return model


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    found = _forward(problem, device, values)
    if direction == "forward":
        return found
    if "slices" in problem.traits:
        # whose states no forward pass has saved
        found = found.after(found)
    return gradients(problem, device).after(found)


def _forward(problem: Problem, device: Device, values: Assignment) -> Candidate:
    """Model a launch of `gla_fwd`."""
    K, V, T, pairs = problem["K"], problem["V"], problem["T"], problem["B"] * problem["H"]
    tile_k, tile_v, chunks = tile(K), tile(V), -(-T // CHUNK)
    moved = pairs * (T * (4 * K * problem["Hq"] / problem["H"] + 4 * K + 4 * V) + 8 * K * V)
    moved += values["saves"] * pairs * chunks * 2 * tile_k * tile_v
    operations = pairs * chunks * 2 * CHUNK * (2 * tile_k * tile_v + CHUNK * tile_v + 6 * CHUNK * tile_k)
    serial = FILL_SECONDS + chunks * CHUNK_SECONDS[tile_k]
    plan, grid = values.plan("hopper", "saves"), values.grid(pairs)
    return Candidate.of(plan, device, grid, int(moved), operations, serial=serial)


def gradients(problem: Problem, device: Device) -> Candidate:
    """Model the launch of `gla_bwd_grads`, which other recurrences launch too."""
    K, V, T, pairs = problem["K"], problem["V"], problem["T"], problem["B"] * problem["H"]
    chunks, blocks, tile_v = -(-T // CHUNK), -(-K // CHUNK), tile(V)
    grid = Grid(pairs * chunks * blocks, 128, 255, 110 * 1024)
    reads = 4 * K * problem["Hq"] / problem["H"] + 4 * K + 4 * V
    moved = pairs * (T * (reads + 8 * K) + chunks * 4 * tile(K) * tile_v)
    products = 2 * CHUNK * tile_v + 2 * CHUNK * CHUNK + tile_v * CHUNK
    operations = grid.blocks * 2 * CHUNK * products
    return Candidate.of(BACKWARD, device, grid, int(moved), operations, serial=GRADS_SECONDS)
