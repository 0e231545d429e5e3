"""The delta rule's backward pass on Hopper: inverses, states, then a sweep back with all gradients."""

from collections.abc import Sequence
from functools import reduce

from holdfast.planner import Candidate, Device, Plan, Problem
from holdfast.planner.constrint import Variable
from holdfast.planner.kernel_model import Assignment, KernelModel
from holdfast.planner.models.matrix.segments import chunks_of
from holdfast.planner.models.matrix.tiles import CHUNK, registers_left, tile

# columns of v whose state four warps hold
COLUMNS = 64
# of the tiles that the sweep has in flight
STAGES = 3
# beside the warps of the sweeps: one copies, one has the gates, two fill up the group of four
OTHER_WARPS = 4
# barriers, and what the compiler aligns
SCRATCH = 1024
# registers of a thread of the sweep with the gradients as it is launched; its groups of warps then divide them
ADJOINT_REGISTERS = 128
# Seconds, H200, docs/notes/delta-rule.md#times-of-the-launches: of a chunk of the sweep that keeps states, by columns
# of v a block, and what a block on every multiprocessor adds, of it; of any before its first and after its last chunk;
# of a chunk of the sweep with the gradients
STATES_SECONDS = {64: 1.45e-6, 128: 2.25e-6}
CROWDED = 0.4
FILL_SECONDS = 1.2e-5
ADJOINT_SECONDS = 9.4e-6


def in_turn(launches: Sequence[Candidate]) -> Candidate:
    """One launch after another."""
    return reduce(lambda before, after: after.after(before), launches)


def blocks(model: KernelModel, problem: Problem, columns: Variable) -> None:
    """The launches that find the gradients. columns: of v a block of the sweep that saves states."""
    wide, V = tile(problem["K"]), tile(problem["V"])
    staged, kept = STAGES * CHUNK * (columns + CHUNK + wide), columns * (wide + CHUNK)
    warps = model.let("warps of walk", 4 * (columns // COLUMNS) + OTHER_WARPS)
    model.block(warps, registers_left(warps), 2 * (staged + kept) + STAGES * 5 * CHUNK * 4 + SCRATCH, "walk")
    # two chunks of q, k and dO; U, Y; S, dS'; A and scores
    shared = 2 * (2 * CHUNK * (2 * wide + V) + 2 * CHUNK * V + 2 * wide * V + 4 * CHUNK * CHUNK) + 3 * SCRATCH
    model.block(V // 16 + 4 + OTHER_WARPS, ADJOINT_REGISTERS, shared, "adjoint")


def launches(problem: Problem, device: Device, values: Assignment) -> list[Candidate]:
    """Them, once the states that enter the segments, and the gradients of those that leave them, are there."""
    return [_walk(problem, device, values), _gradients(problem, device, values)]


def _states(problem: Problem) -> int:
    """Bytes of the rounded states of all chunks."""
    return 2 * problem["B"] * problem["H"] * chunks_of(problem) * problem["K"] * tile(problem["V"])


def _walk(problem: Problem, device: Device, values: Assignment) -> Candidate:
    """The sweep that saves states."""
    wide, pairs, chunks = tile(problem["K"]), problem["B"] * problem["H"], chunks_of(problem)
    columns, segments = values["columns"], -(-chunks // values["walked"])
    slices = pairs * -(-problem["V"] // columns)
    grid = values.grid(slices * segments, "walk")
    keys = problem["K"] * problem["Hq"] / problem["H"]
    moved = int(2 * pairs * problem["T"] * (keys + 2 * problem["V"] + CHUNK)) + _states(problem)
    moved += 4 * pairs * segments * problem["K"] * problem["V"] * (segments > 1)
    operations = slices * chunks * 2 * CHUNK * columns * (2 * wide + CHUNK)
    crowd = 1 + CROWDED * min(1.0, grid.blocks / device.processors)
    serial = FILL_SECONDS + values["walked"] * STATES_SECONDS[columns] * crowd
    return Candidate.of(Plan("hopper"), device, grid, moved, operations, serial=serial)


def _gradients(problem: Problem, device: Device, values: Assignment) -> Candidate:
    """The sweep back with all gradients."""
    wide, V, pairs, chunks = tile(problem["K"]), tile(problem["V"]), problem["B"] * problem["H"], chunks_of(problem)
    segments = -(-chunks // values["walked"])
    grid = values.grid(pairs * segments, "adjoint")
    keys = problem["K"] * problem["Hq"] / problem["H"]
    tokens = 2 * keys + 2 * problem["K"] + 3 * problem["V"] + CHUNK
    moved = int(2 * pairs * problem["T"] * tokens) + _states(problem)
    moved += 4 * pairs * segments * problem["K"] * problem["V"] * (segments > 1)
    operations = 2 * pairs * chunks * CHUNK * (6 * wide * V + CHUNK * (7 * wide + 4 * V))
    serial = FILL_SECONDS + values["walked"] * ADJOINT_SECONDS
    return Candidate.of(Plan("hopper"), device, grid, moved, operations, serial=serial)
