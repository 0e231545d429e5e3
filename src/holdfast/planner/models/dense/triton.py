"""The dense family in portable Triton: a head of up to 128 channels in one program."""

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked

from .cuda import costs

# Sequences of a program: the fewest rows of a matrix product on tensor cores.
ROWS = 16
MOST = 128
# Measured on an H200 with LSTMs of B 16, T 1024. Seconds of a step: one that costs nothing, and what each gate's
# product takes for 64 channels; it grows with the width's square.
STEP = {"forward": 2.5e-6, "backward": 4.8e-6}
PRODUCT = {"forward": 0.07e-6, "backward": 0.53e-6}


def block(width: int) -> int:
    """Channels of a program: a power of two."""
    return max(16, 1 << (width - 1).bit_length())


def shared(problem: Problem, wide: int, direction: Direction) -> int:
    """Bytes of shared memory of a program, at most: the matrices, and what changes from one layout to another."""
    row = 4 if direction == "forward" else 8 * (problem["G"] + problem["S"] - 1)
    return 2 * problem["Gr"] * wide * wide + row * ROWS * wide + 256


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    B, T, H, D = (problem[name] for name in "BTHD")
    if D > MOST:
        return ()
    wide = block(D)
    warps = 4 if wide < 64 else 8
    grid = Grid(H * -(-B // ROWS), 32 * warps, 255 if wide > 64 else 184, shared(problem, wide, direction))
    if not grid.fits(device):
        return ()
    beside = -(-grid.blocks // (device.processors * max(grid.per_sm(device), 1)))
    step = STEP[direction] + PRODUCT[direction] * problem["Gr"] * (wide / 64) ** 2
    plan = Plan("triton", (("block", wide), ("warps", warps)))
    return ranked([Candidate.of(plan, device, grid, *costs(problem, direction), serial=T * step * beside)])
