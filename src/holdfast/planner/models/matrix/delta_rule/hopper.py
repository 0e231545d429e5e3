"""The delta rule on Hopper: all chunks' inverses in one launch, then a persistent block a (sequence, head, columns)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked
from holdfast.planner.models.matrix.tiles import CHUNK, WIDEST, registers_of, tile
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
    find = _candidates if direction == "forward" else _gradients
    if not problem.varlen:
        return ranked(find(problem, device))
    apart = as_batch(problem)
    whole = {_chunks(apart): _chunks(problem)}
    return tuple(_with_segment_chunks(found, whole) for found in ranked(find(apart, device)))


def _with_segment_chunks(candidate: Candidate, others: Mapping[int, int]) -> Candidate:
    """With another number of a segment's chunks in the plan, where there is one for it."""
    values = dict(candidate.plan.values)
    values["segment_chunks"] = others.get(values["segment_chunks"], values["segment_chunks"])
    return replace(candidate, plan=Plan(candidate.plan.backend, tuple(values.items())))


def _chunks(problem: Problem) -> int:
    return max(1, -(-problem["T"] // CHUNK))


def _segment_chunks(problem: Problem, device: Device) -> Iterator[int]:
    """The whole sequence, and segments of it as long as blocks are too few for the device."""
    chunks = _chunks(problem)
    pairs, segments = problem["B"] * problem["H"], 1
    yield chunks
    while 2 * segments <= chunks and pairs * segments < device.processors:
        segments *= 2
        yield -(-chunks // segments)


def _columns(problem: Problem) -> tuple[int, ...]:
    return (2 * COLUMNS, COLUMNS) if problem["V"] > COLUMNS else (COLUMNS,)


def _segments(problem: Problem, segment_chunks: int) -> int:
    return -(-max(1, problem["T"]) // (segment_chunks * CHUNK))


def _boundary_states(problem: Problem, device: Device, back: bool) -> Iterator[tuple[int, int, list[Candidate]]]:
    """segment_chunks and state_columns, and the launches until the states that enter the segments are there.

    back: and the gradients of those that leave them. The forward pass has left the inverses, but of slices.
    """
    prepared, widths = prepare(problem, device), _columns(problem)
    for segment_chunks in _segment_chunks(problem, device):
        segments = _segments(problem, segment_chunks)
        for columns in widths if segments > 1 else widths[:1]:
            launches = [] if back and "slices" not in problem.traits else [prepared]
            if segments > 1 and back:
                scan = _scan(problem, device, segments)
                transitions = _sweep(problem, device, columns, segment_chunks, 0, problem["K"], True)
                states = _sweep(problem, device, columns, segment_chunks, problem["V"], 0, False)
                launches += [transitions, _pull(problem, device, segment_chunks), scan, states, scan]
            elif segments > 1:
                states = _sweep(problem, device, columns, segment_chunks, problem["V"], problem["K"], False)
                launches += [states, _scan(problem, device, segments)]
            if None not in launches:
                yield segment_chunks, columns, launches


def saves_inverses(problem: Problem) -> bool:
    """Whether the forward pass leaves its inverses to the backward pass, as one of its own kernels reads them there."""
    return problem.needs_grad and max(problem["K"], problem["V"]) <= WIDEST


def _candidates(problem: Problem, device: Device) -> Iterator[Candidate]:
    pairs = product(_boundary_states(problem, device, False), _columns(problem))
    for (segment_chunks, state_columns, launches), columns in pairs:
        values = (
            ("columns", columns),
            ("state_columns", state_columns),
            ("stages", STAGES),
            ("segment_chunks", segment_chunks),
            ("saves", int(saves_inverses(problem))),
        )
        if found := _sweep(problem, device, columns, segment_chunks, problem["V"], 0, True):
            yield replace(in_turn([*launches, found]), plan=Plan("hopper", values))


def _gradients(problem: Problem, device: Device) -> Iterator[Candidate]:
    for segment_chunks, state_columns, launches in _boundary_states(problem, device, True):
        yield from hopper_backward.candidates(problem, device, launches, segment_chunks, state_columns)


def prepare(problem: Problem, device: Device) -> Candidate | None:
    """The launch of matrix/delta_rule/hopper/chunk_inverse.py."""
    pairs, chunks = problem["B"] * problem["H"], -(-problem["T"] // CHUNK)
    wide = tile(problem["K"])
    grid = Grid(pairs * chunks, 32, PREPARE_REGISTERS, 2 * CHUNK * wide + SCRATCH)
    if not grid.fits(device):
        return None
    keys = 2 * problem["K"] * problem["Hq"] / problem["H"]
    moved = int(pairs * problem["T"] * (keys + 2 * CHUNK + 8))
    operations = grid.blocks * 2 * CHUNK * CHUNK * (wide + CHUNK)
    return Candidate.of(Plan("hopper"), device, grid, moved, operations, serial=PREPARE_SECONDS)


def _sweep(
    problem: Problem, device: Device, columns: int, segment_chunks: int, values: int, transitions: int, outputs: bool
) -> Candidate | None:
    """One launch of matrix/delta_rule/hopper/forward.py over so many of v's columns and of the transitions'.

    Without outputs, of all segments but the last: the state that it leaves behind is found with them.
    """
    wide, consumers = tile(problem["K"]), columns // COLUMNS
    pairs, K = problem["B"] * problem["H"], problem["K"]
    segments = max(1, _segments(problem, segment_chunks) - (not outputs))
    slices = -(-values // columns) + -(-transitions // columns)
    warps = 4 * consumers + OTHER_WARPS + outputs * SCORE_WARPS
    staged = (1 + outputs) * (wide + CHUNK) + (columns if values else 0)
    elements = CHUNK * (STAGES * staged + outputs * columns)
    shared = 2 * elements + STAGES * 4 * CHUNK * 4 + SCRATCH
    grid = Grid(pairs * slices * segments, 32 * warps, registers_of(warps), shared)
    if not grid.fits(device):
        return None
    keys = K * problem["Hq"] / problem["H"] * (2 if outputs else 1)
    states = 4 * pairs * segments * K * (values * (1 + outputs) + transitions)
    written = (values + transitions) * outputs
    moved = int(pairs * problem["T"] * 2 * (keys + values + written + CHUNK)) + states
    # of a chunk: keys and queries with the state, A, scores with what is written, and what is written with keys
    products = columns * ((2 + outputs) * wide + (1 + outputs) * CHUNK) + outputs * CHUNK * wide
    operations = grid.blocks * segment_chunks * 2 * CHUNK * products
    seconds = (SWEEP_SECONDS if outputs else ADVANCE_SECONDS)[columns]
    return Candidate.of(Plan("hopper"), device, grid, moved, operations, serial=FILL_SECONDS + segment_chunks * seconds)


def _pull(problem: Problem, device: Device, segment_chunks: int) -> Candidate:
    """The launch of matrix/delta_rule/triton/segment_dstates.py."""
    pairs, K, V, segments = problem["B"] * problem["H"], problem["K"], problem["V"], _segments(problem, segment_chunks)
    grid = Grid(pairs * segments, 256, PULL_REGISTERS, PULL_SHARED)
    moved = 2 * pairs * problem["T"] * (K + V) + 4 * pairs * segments * K * V
    operations = 2 * pairs * problem["T"] * tile(K) * tile(V)
    serial = FILL_SECONDS + segment_chunks * PULL_SECONDS
    return Candidate.of(Plan("hopper"), device, grid, moved, operations, serial=serial)


def _scan(problem: Problem, device: Device, segments: int) -> Candidate:
    """The launch of matrix/delta_rule/triton/segment_scan.py."""
    pairs, K, V = problem["B"] * problem["H"], problem["K"], problem["V"]
    blocks = -(-V // COMPOSED)
    grid = Grid(pairs * blocks, 256, 255, 2**17)
    moved = 4 * pairs * segments * K * (2 * V + K)
    operations = 3 * 2 * pairs * blocks * segments * tile(K) ** 2 * COMPOSED
    return Candidate.of(Plan("hopper"), device, grid, moved, operations, serial=(segments - 1) * SCAN_SECONDS)
