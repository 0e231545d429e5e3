"""The scan of states with a low rank on Hopper, its state in registers."""

from holdfast.planner import Candidate, Device, Direction, Problem
from holdfast.planner.constrint import divides
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned

from . import triton

RANKS = (1, 2, 4, 8, 16)
# a state of 256 rows would spill
KEYS = (16, 32, 64, 128)
# columns of a block
WIDTHS = (16, 32)
STAGES = 4
# All that a thread may have.
REGISTERS = 255
# Seconds from one chunk to the next in one block, by itself and for each row and rank: B4 H16 G64 64 x 64 bfloat16,
# rank 4, on an H200; backward with the forward pass that runs again.
STEP, READ = {"forward": 0.2e-6, "backward": 0.5e-6}, {"forward": 1.2e-9, "backward": 6e-9}


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Return plans: rows and columns of a block's tile, stages forward (as `group`) and backward, warps."""
    return planned(problem, device, direction, Kernel(model, candidate))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """Declare the tiles of a block, which has all rows of the state."""
    model, K, rank, size = KernelModel(device), problem["K"], problem["r"], triton.ELEMENT[problem.dtype]
    is_forward = direction == "forward"
    columns = model.variable("block_v", WIDTHS, "largest")
    # a warp has 8 columns; four warps keep all schedulers of an SM busy
    warps = model.let("warps", columns // 8)
    stages = model.variable("stages", (STAGES,) if is_forward else (2, 3), "largest")
    model.add(divides(columns, problem["V"]), "a block's columns are all there")
    model.let("block_k", K)
    model.let("group", STAGES)
    # and what decays leave of the state: of 64 chunks, or of 16 for each row
    shared = stages * size * K * (columns + 2 * rank) + size * K * columns
    shared += 64 * K if "decay=vector" in problem.traits else 256
    if not is_forward:
        # float32 histories, and sums over the columns of each of a row's threads
        shared += 4 * K * (stages * columns + 2 * min(rank, 4) * 4 * warps)
    model.block(warps, min(255, 64 + K + 4 * rank) if is_forward else REGISTERS, shared)
    return model


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    B, G, H, K, V, rank = (problem[name] for name in "BGHKVr")
    size, is_forward = triton.ELEMENT[problem.dtype], direction == "forward"
    states, factors, blocks = B * G * H * K * V, 2 * B * G * H * K * rank, V // values["block_v"]
    moved = (2 * states + factors) * size
    if not is_forward:
        # parts of the factors' gradients, written and read again
        moved = triton.backward_bytes(states, size) + factors * (size + 8 * blocks)
    names = ("block_k", "block_v", "group", "warps")
    plan = values.plan("hopper", *names, *(() if is_forward else ("stages",)))
    serial = triton.ENTRY + G * (STEP[direction] + READ[direction] * K * rank)
    operations = states * (2 + 4 * rank) * (1 if is_forward else 4)
    grid = values.grid(max(blocks * H * B, 1))
    return Candidate.of(plan, device, grid, moved, operations, False, serial)
