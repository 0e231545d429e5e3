"""The scan of states with a low rank on Hopper, its state in registers."""

from collections.abc import Iterator

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked

from . import triton

RANKS = (1, 2, 4, 8, 16)
# a state of 256 rows would spill
KEYS = (16, 32, 64, 128)
# (columns of a block, warps), the faster first: a warp has 8. Four warps keep all schedulers of an SM busy.
BLOCKS = ((32, 4), (16, 2))
STAGES = 4
# All that a thread may have.
REGISTERS = 255
# Seconds from one chunk to the next in one block, by itself and for each row and rank: B4 H16 G64 64 x 64 bfloat16,
# rank 4, on an H200; backward with the forward pass that runs again.
STEP, READ = {"forward": 0.2e-6, "backward": 0.5e-6}, {"forward": 1.2e-9, "backward": 6e-9}


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Return plans: rows and columns of a block's tile, stages forward (as `group`) and backward, warps."""
    return ranked(every(problem, device, direction))


def every(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
    """Yield all that fit, in no order."""
    B, G, H, K, V, rank = (problem[name] for name in "BGHKVr")
    size = triton.ELEMENT[problem.dtype]
    states, factors = B * G * H * K * V, 2 * B * G * H * K * rank
    for columns, warps in BLOCKS:
        # a block's columns are all there
        if V % columns:
            continue
        values = {"block_k": K, "block_v": columns, "group": STAGES, "warps": warps}
        for stages in (STAGES,) if direction == "forward" else (3, 2):
            # and what decays leave of the state: of 64 chunks, or of 16 for each row
            shared = stages * size * K * (columns + 2 * rank) + size * K * columns
            shared += 64 * K if "decay=vector" in problem.traits else 256
            registers, moved = min(255, 64 + K + 4 * rank), (2 * states + factors) * size
            plan = Plan("hopper", tuple(values.items()))
            if direction == "backward":
                # float32 histories, and sums over the columns of each of a row's threads
                shared += 4 * K * (stages * columns + 2 * min(rank, 4) * 4 * warps)
                # parts of the factors' gradients, written and read again
                moved = triton.backward_bytes(states, size) + factors * (size + 8 * (V // columns))
                registers, plan = 255, Plan("hopper", (*values.items(), ("stages", stages)))
            grid = Grid(max(V // columns * H * B, 1), 32 * warps, registers, shared)
            if grid.fits(device):
                serial = triton.ENTRY + G * (STEP[direction] + READ[direction] * K * rank)
                operations = states * (2 + 4 * rank) * (1 if direction == "forward" else 4)
                yield Candidate.of(plan, device, grid, moved, operations, False, serial)
