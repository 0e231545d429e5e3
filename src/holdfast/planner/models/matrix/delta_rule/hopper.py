"""The delta rule on Hopper: all chunks' inverses in one launch, then a persistent block a (sequence, head, columns)."""

from dataclasses import replace

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.constrint import Variable, ceil_div, truth
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned
from holdfast.planner.models.matrix.segments import chunks_of, cut_in_segments
from holdfast.planner.models.matrix.tiles import CHUNK, WIDEST, registers_left, tile
from holdfast.planner.models.varlen import as_batch

from . import hopper_backward, triton
from .hopper_backward import in_turn

# columns of v whose state four warps hold
COLUMNS = 64
STAGES = 3
# beside them: four warps multiply keys with queries, one copies, one has the gates, two fill up the group of four
SCORE_WARPS, OTHER_WARPS = 4, 4
# barriers, and what the compiler aligns
SCRATCH = 1024
# registers of a warp that prepares a chunk: next to nothing spills, and a dozen of them fit on a multiprocessor
PREPARE_REGISTERS = 168
# seconds, H200, docs/notes/delta-rule.md#times-of-the-launches: of a wave of warps that prepare; of a chunk of the
# sweep, and of one without outputs, by columns of v a block; of either before its first and after its last chunk; of a
# segment in the scan
PREPARE_SECONDS = 1.1e-5
SWEEP_SECONDS = {64: 1.2e-6, 128: 1.85e-6}
ADVANCE_SECONDS = {64: 0.75e-6, 128: 1.15e-6}
FILL_SECONDS = 1.0e-5
SCAN_SECONDS = 3.7e-6
# of both passes
PLAN = ("columns", "state_columns", "stages", "segment_chunks")
# columns of the state that a program of the scan carries
COMPOSED = 16
# segment_dstates.py's launch: a thread's registers, a block's shared memory, and seconds of a chunk
PULL_REGISTERS, PULL_SHARED, PULL_SECONDS = 98, 98304, 0.8e-6


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans, the fastest first.

    values, forward: columns of v a block; stages of tiles in flight; segment_chunks, which a block walks over: with
    fewer than the sequence has, the states that enter its segments are found first, by blocks of state_columns; saves,
    whether the inverses stay for the backward pass.
    Backward, those of hopper_backward.py; with a v wider than its kernels take, the Triton kernels' under their own
    name.
    """
    if direction == "backward" and problem["V"] > WIDEST:
        return triton.candidates(problem, device, direction)
    return planned(problem, device, direction, Kernel(model, _forward if direction == "forward" else _backward))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    model, one, wide = KernelModel(device), _one(problem), tile(problem["K"])
    widths = (COLUMNS, 2 * COLUMNS) if problem["V"] > COLUMNS else (COLUMNS,)
    segments, walked = cut_in_segments(model, one)
    walked = model.let("walked", walked)
    # a packed sequence has as many chunks as the longest may have
    whole = truth(segments == 1) * (chunks_of(problem) - chunks_of(one)) if problem.varlen else 0
    model.let("segment_chunks", walked + whole)
    parts = model.let("parts", ceil_div(max(1, one["T"]), walked * CHUNK))
    state_columns = model.variable("state_columns", widths, "largest")
    model.add(state_columns >= widths[-1] * truth(parts == 1), "one segment has no states to find")
    columns = model.variable("columns", widths, "largest")
    model.let("stages", STAGES)
    model.block(1, PREPARE_REGISTERS, 2 * CHUNK * wide + SCRATCH, "prepare")
    _sweep_block(model, wide, state_columns, True, False, "states")
    if direction == "forward":
        model.let("saves", int(saves_inverses(problem)))
        _sweep_block(model, wide, columns, True, True, "sweep")
    else:
        _sweep_block(model, wide, state_columns, False, True, "transitions")
        hopper_backward.blocks(model, problem, columns)
    return model


def _one(problem: Problem) -> Problem:
    """As the kernels walk over it: packed sequences are a batch of equally long ones."""
    return as_batch(problem) if problem.varlen else problem


def _sweep_block(model: KernelModel, wide: int, columns: Variable, has_values: bool, outputs: bool, name: str) -> None:
    """One launch of matrix/delta_rule/hopper/forward.py."""
    warps = 4 * (columns // COLUMNS) + OTHER_WARPS + outputs * SCORE_WARPS
    staged = (1 + outputs) * (wide + CHUNK) + (columns if has_values else 0)
    elements = CHUNK * (STAGES * staged + (columns if outputs else 0))
    warps = model.let(f"warps of {name}", warps)
    model.block(warps, registers_left(warps), 2 * elements + STAGES * 4 * CHUNK * 4 + SCRATCH, name)


def _forward(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    one = _one(problem)
    launches = [prepare(one, device, values)]
    if values["parts"] > 1:
        launches += [_sweep(one, device, values, "states", one["V"], one["K"], False), _scan(one, device, values)]
    launches.append(_sweep(one, device, values, "sweep", one["V"], 0, True))
    return replace(in_turn(launches), plan=values.plan("hopper", *PLAN, "saves"))


def _backward(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    one = _one(problem)
    # the forward pass has left the inverses, but of slices
    launches = [prepare(one, device, values)] if "slices" in problem.traits else []
    if values["parts"] > 1:
        transitions = _sweep(one, device, values, "transitions", 0, one["K"], True)
        states, scan = _sweep(one, device, values, "states", one["V"], 0, False), _scan(one, device, values)
        launches += [transitions, _pull(one, device, values), scan, states, scan]
    launches += hopper_backward.launches(one, device, values)
    return replace(in_turn(launches), plan=values.plan("hopper", *PLAN))


def saves_inverses(problem: Problem) -> bool:
    """Whether the forward pass leaves its inverses to the backward pass, as one of its own kernels reads them there."""
    return problem.needs_grad and max(problem["K"], problem["V"]) <= WIDEST


def prepare(problem: Problem, device: Device, values: Assignment) -> Candidate:
    """The launch of matrix/delta_rule/hopper/chunk_inverse.py."""
    pairs, chunks, wide = problem["B"] * problem["H"], -(-problem["T"] // CHUNK), tile(problem["K"])
    grid = values.grid(pairs * chunks, "prepare")
    keys = 2 * problem["K"] * problem["Hq"] / problem["H"]
    moved = int(pairs * problem["T"] * (keys + 2 * CHUNK + 8))
    operations = grid.blocks * 2 * CHUNK * CHUNK * (wide + CHUNK)
    return Candidate.of(Plan("hopper"), device, grid, moved, operations, serial=PREPARE_SECONDS)


def _sweep(
    problem: Problem, device: Device, found: Assignment, name: str, values: int, transitions: int, outputs: bool
) -> Candidate:
    """One launch of matrix/delta_rule/hopper/forward.py over so many of v's columns and of the transitions'.

    Without outputs, of all segments but the last: the state that it leaves behind is found with them.
    """
    wide, columns = tile(problem["K"]), found["columns" if name == "sweep" else "state_columns"]
    pairs, K, walked = problem["B"] * problem["H"], problem["K"], found["walked"]
    segments = max(1, found["parts"] - (not outputs))
    slices = -(-values // columns) + -(-transitions // columns)
    grid = found.grid(pairs * slices * segments, name)
    keys = K * problem["Hq"] / problem["H"] * (2 if outputs else 1)
    states = 4 * pairs * segments * K * (values * (1 + outputs) + transitions)
    written = (values + transitions) * outputs
    moved = int(pairs * problem["T"] * 2 * (keys + values + written + CHUNK)) + states
    # of a chunk: keys and queries with the state, A, scores with what is written, and what is written with keys
    products = columns * ((2 + outputs) * wide + (1 + outputs) * CHUNK) + outputs * CHUNK * wide
    operations = grid.blocks * walked * 2 * CHUNK * products
    seconds = (SWEEP_SECONDS if outputs else ADVANCE_SECONDS)[columns]
    return Candidate.of(Plan("hopper"), device, grid, moved, operations, serial=FILL_SECONDS + walked * seconds)


def _pull(problem: Problem, device: Device, values: Assignment) -> Candidate:
    """The launch of matrix/delta_rule/triton/segment_dstates.py."""
    pairs, K, V, segments = problem["B"] * problem["H"], problem["K"], problem["V"], values["parts"]
    grid = Grid(pairs * segments, 256, PULL_REGISTERS, PULL_SHARED)
    moved = 2 * pairs * problem["T"] * (K + V) + 4 * pairs * segments * K * V
    operations = 2 * pairs * problem["T"] * tile(K) * tile(V)
    serial = FILL_SECONDS + values["walked"] * PULL_SECONDS
    return Candidate.of(Plan("hopper"), device, grid, moved, operations, serial=serial)


def _scan(problem: Problem, device: Device, values: Assignment) -> Candidate:
    """The launch of matrix/delta_rule/triton/segment_scan.py."""
    pairs, K, V, segments = problem["B"] * problem["H"], problem["K"], problem["V"], values["parts"]
    blocks = -(-V // COMPOSED)
    grid = Grid(pairs * blocks, 256, 255, 2**17)
    moved = 4 * pairs * segments * K * (2 * V + K)
    operations = 3 * 2 * pairs * blocks * segments * tile(K) ** 2 * COMPOSED
    return Candidate.of(Plan("hopper"), device, grid, moved, operations, serial=(segments - 1) * SCAN_SECONDS)
