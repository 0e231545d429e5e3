"""The dense family in portable Triton: a head of up to 128 channels in one program."""

from holdfast.planner import Candidate, Device, Direction, Problem
from holdfast.planner.constrint import Integer, lookup
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned, powers_of_two

from .cuda import costs

# Sequences of a program: the fewest rows of a matrix product on tensor cores.
ROWS = 16
MOST = 128
# Measured on an H200 with LSTMs of B 16, T 1024. Seconds of a step: one that costs nothing, and what each gate's
# product takes for 64 channels; it grows with the width's square.
STEP = {"forward": 2.5e-6, "backward": 4.8e-6}
PRODUCT = {"forward": 0.07e-6, "backward": 0.53e-6}


def shared(problem: Problem, wide: Integer, direction: Direction) -> Integer:
    """Bytes of shared memory of a program, at most: the matrices, and what changes from one layout to another."""
    row = 4 if direction == "forward" else 8 * (problem["G"] + problem["S"] - 1)
    return 2 * problem["Gr"] * wide * wide + row * ROWS * wide + 256


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    return planned(problem, device, direction, Kernel(model, candidate))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    model = KernelModel(device)
    wide = model.variable("block", powers_of_two(16, MOST), greedy=True)
    model.add(problem["D"] <= wide, "channels of a head in one program")
    warps = lookup(wide, {16: 4, 32: 4, 64: 8, 128: 8})
    model.block(warps, lookup(wide, {16: 184, 32: 184, 64: 184, 128: 255}), shared(problem, wide, direction))
    return model


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    grid = values.grid(problem["H"] * -(-problem["B"] // ROWS))
    beside = -(-grid.blocks // (device.processors * max(grid.per_sm(device), 1)))
    step = STEP[direction] + PRODUCT[direction] * problem["Gr"] * (values["block"] / 64) ** 2
    plan, serial = values.plan("triton", "block", "warps"), problem["T"] * step * beside
    return Candidate.of(plan, device, grid, *costs(problem, direction), serial=serial)
