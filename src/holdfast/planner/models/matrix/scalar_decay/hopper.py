"""Hopper's sweeps: one persistent block a (sequence, head, slice of values), the state in wgmma accumulators."""

from collections.abc import Callable, Iterator

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import ranked
from holdfast.planner.models.matrix.tiles import CHUNK, WIDEST, registers_of, tile

from .saved_states import chunks_between_states

# beside the warps that multiply: one that copies, one for the gates, two that fill up the group of four
OTHER_WARPS = 4
# of the sweep forward and of that for dq, those that score
SCORING_WARPS = 4
# barriers, and what the compiler aligns
SCRATCH = 512
# chunks of a segment from which two are added to its state at once; and tiles in flight of the launch that does it
LONG_SEGMENT = 16
ADVANCE_STAGES = 3
# chunks from one saved state to the next, where decays are a token's own
RARELY = 24
# most chunks' tiles in flight of both sweeps backward; and forward, by the tiles' columns of q and k, and of v, where
# more have been slower
STAGES = 3
FORWARD_STAGES = {(64, 64): 5, (128, 64): 4, (64, 128): 4, (128, 128): 3}
# seconds of a chunk's dependent products, by the same. H200, 128 blocks at once:
# docs/notes/scalar-decay-forward.md#seconds-a-chunk. Where memory binds so many, 13% more than 8 blocks took, as where
# it does not. Summing with 128 and 64 columns was not measured.
SWEEP_SECONDS = {(64, 64): 0.82e-6, (128, 64): 1.03e-6, (64, 128): 1.4e-6, (128, 128): 1.7e-6}
SUMMING_SWEEP_SECONDS = {(64, 64): 1.5e-6, (128, 64): 2.2e-6, (64, 128): 1.95e-6, (128, 128): 2.7e-6}
# of the adjoint sweep, by its wider side
ADJOINT_SECONDS = {64: 2.1e-6, 128: 3.7e-6}
# of a block before its first and after its last chunk
FILL_SECONDS = 5e-7
# of one that starts from a segment's state: for this and for a launch that waits for another
SEGMENT_SECONDS = 8e-6
# the launch that keeps a segment's tiles on chip: chunks of a segment; its time, and what each segment of a head adds
RESIDENT_CHUNKS = 4
RESIDENT_SECONDS = 2.1e-5
RESIDENT_SEGMENT_SECONDS = 1e-7
# the sweep without outputs, a chunk, and before and after them, where it writes its state; and the scan over segments
ADVANCE_SECONDS = 1.0e-6
ADVANCE_FILL_SECONDS = 7.5e-6
SCAN_SECONDS = 4.2e-6


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans, the fastest first.

    values: columns of the output a block; stages of tiles in flight; segment_chunks, which a block walks over: with
    fewer than the sequence has, its segments' states are found first. resident: 1 where a block keeps its chunks'
    tiles, and one launch does it all. Backward, of the sweep for dq; and adjoint_stages of the sweep for dk and dv, and
    save, chunks from one saved state to the next.
    """
    return ranked(_candidates(problem, device, direction))


def _segment_chunks(problem: Problem, device: Device) -> Iterator[int]:
    """The whole sequence, and segments of it as long as blocks are too few for the device."""
    chunks = max(1, -(-problem["T"] // CHUNK))
    pairs, segments = problem["B"] * problem["H"], 1
    yield chunks
    if problem["V"] > WIDEST or problem.varlen:
        return
    while 2 * segments <= chunks and pairs * segments < device.processors:
        segments *= 2
        yield -(-chunks // segments)


def _candidates(problem: Problem, device: Device, direction: Direction) -> Iterator[Candidate]:
    key, value = tile(problem["K"]), tile(problem["V"])
    gated = "decay=scalar" in problem.traits
    if direction == "forward" and (found := _resident(problem, device)) is not None:
        yield found
    for segment_chunks in _segment_chunks(problem, device):
        composition = _composition(problem, device, segment_chunks, 1 if direction == "forward" else 2)
        for columns in (columns for columns in (128, 64) if columns <= (value if direction == "forward" else key)):
            if direction == "forward":
                found = _most_stages(
                    lambda stages: _forward(problem, device, columns, segment_chunks, stages),  # noqa: B023
                    FORWARD_STAGES[key, columns],
                )
            else:
                found = _most_stages(lambda stages: _backward(problem, device, columns, segment_chunks, stages, gated))  # noqa: B023
            if found is not None and composition is not None:
                found = found.after(composition)
            if found is not None:
                yield found


def _most_stages(of_stages: Callable[[int], Candidate | None], most: int = STAGES) -> Candidate | None:
    return next((found for stages in range(most, 1, -1) if (found := of_stages(stages)) is not None), None)


def _forward(problem: Problem, device: Device, columns: int, segment_chunks: int, stages: int) -> Candidate | None:
    values = (("columns", columns), ("stages", stages), ("segment_chunks", segment_chunks), ("resident", 0))
    plan = Plan("hopper", values)
    return _sweep(problem, device, plan, (problem["K"], problem["V"]), False)


def _resident(problem: Problem, device: Device) -> Candidate | None:
    """onchip/kernel.py's launch; None where a device cannot run all its blocks at once, one a multiprocessor.

    Nor does it add its outputs to others.
    """
    pairs, K, V = problem["B"] * problem["H"], problem["K"], problem["V"]
    tokens = RESIDENT_CHUNKS * CHUNK
    segments = max(1, -(-problem["T"] // tokens))
    if problem.varlen or "key_slices" in problem.traits or V > WIDEST or pairs * segments > device.processors:
        return None
    wide, columns = tile(K), tile(V)
    warps = columns // 16 + OTHER_WARPS
    shared = 2 * (tokens * (2 * wide + columns) + 4 * CHUNK * CHUNK) + 4 * (2 * tokens + RESIDENT_CHUNKS) + SCRATCH
    grid = Grid(pairs * segments, 32 * warps, registers_of(warps), shared)
    if not grid.fits(device):
        return None
    states = 2 * 4 * pairs * segments * wide * columns
    moved = int(pairs * problem["T"] * 4 * (K * problem["Hq"] / problem["H"] + V)) + states + 8 * pairs * K * V
    operations = grid.blocks * 2 * tokens * (tokens * 3 // 4 * (wide + columns) + 2 * wide * columns)
    values = (("columns", columns), ("stages", 1), ("segment_chunks", RESIDENT_CHUNKS), ("resident", 1))
    serial = RESIDENT_SECONDS + segments * RESIDENT_SEGMENT_SECONDS
    return Candidate.of(Plan("hopper", values), device, grid, moved, operations, serial=serial)


def _backward(
    problem: Problem, device: Device, columns: int, segment_chunks: int, stages: int, gated: bool
) -> Candidate | None:
    def both(adjoint_stages: int) -> Candidate | None:
        values = (("columns", columns), ("stages", stages), ("segment_chunks", segment_chunks))
        save = chunks_between_states(problem, RARELY)
        plan = Plan("hopper", (*values, ("adjoint_stages", adjoint_stages), ("save", save)))
        sweep = _sweep(problem, device, plan, (problem["V"], problem["K"]), gated)
        adjoint = _adjoint(problem, device, plan)
        return None if sweep is None or adjoint is None else adjoint.after(sweep)

    return _most_stages(both)


def _composition(problem: Problem, device: Device, segment_chunks: int, passes: int) -> Candidate | None:
    """segment_states.py's launch and, backward, the scan over segments; None where there is but one segment.

    passes: 2 where gradients of states are found beside the states.
    """
    pairs, K, V = problem["B"] * problem["H"], problem["K"], problem["V"]
    segments = -(-problem["T"] // (segment_chunks * CHUNK))
    if segments <= 1:
        return None
    wide, narrow = tile(K), tile(V)
    warps = narrow // 16 + OTHER_WARPS
    tokens = 2 * CHUNK if segment_chunks >= LONG_SEGMENT and segment_chunks % 2 == 0 else CHUNK
    shared = ADVANCE_STAGES * (2 * tokens * (wide + narrow) + 4 * tokens) + SCRATCH
    # forward the last segment's is not needed, and states are rounded
    grid = Grid(pairs * (segments - 2 + passes), 32 * warps, registers_of(warps), shared)
    states = 2 * passes**2 * pairs * segments * K * V
    moved = int(2 * passes * pairs * problem["T"] * (K * problem["Hq"] / problem["H"] + V)) + states
    operations = grid.blocks * passes * segment_chunks * 2 * CHUNK * wide * narrow
    plan, serial = Plan("hopper"), ADVANCE_FILL_SECONDS + passes * segment_chunks * ADVANCE_SECONDS
    local = Candidate.of(plan, device, grid, moved, operations, serial=serial)
    if passes == 1:
        return local
    scan = Grid(-(-passes * pairs * segments * K * V // 2048), 128, 64)
    return Candidate.of(plan, device, scan, 2 * states, states // 2, False, SCAN_SECONDS).after(local)


def _fill(segments: int) -> float:
    return FILL_SECONDS + (SEGMENT_SECONDS if segments > 1 else 0.0)


def _kept(problem: Problem, plan: Plan) -> int:
    """Bytes of the states that the sweep for dq leaves to the adjoint sweep."""
    segment_chunks = plan["segment_chunks"]
    segments = max(1, -(-problem["T"] // (segment_chunks * CHUNK)))
    return 2 * problem["B"] * problem["H"] * segments * -(-segment_chunks // plan["save"]) * problem["K"] * problem["V"]


def _sweep(problem: Problem, device: Device, plan: Plan, widths: tuple[int, int], summing: bool) -> Candidate | None:
    """One launch of forward.py. widths: columns of q and k, and of v. summing: row sums are taken as well."""
    keys, values = widths
    columns, stages, wide = plan["columns"], plan["stages"], tile(keys)
    warps = columns // 16 + SCORING_WARPS + OTHER_WARPS
    # scores of two chunks; outputs of two, but for those that take the place of what they are summed with
    elements = CHUNK * (stages * (2 * wide + (1 + summing) * columns) + (0 if summing else 2 * columns) + 2 * CHUNK)
    # sums of rows have barriers of their own
    shared = 2 * elements + stages * 4 * CHUNK * (4 + summing * columns // 16) + SCRATCH + 128 * summing
    pairs = problem["B"] * problem["H"]
    chunks, segment_chunks = -(-problem["T"] // CHUNK), plan["segment_chunks"]
    slices, segments = -(-values // columns), max(1, -(-chunks // segment_chunks))
    grid = Grid(pairs * slices * segments, 32 * warps, registers_of(warps), shared)
    if not grid.fits(device):
        return None
    share = problem["Hq"] / problem["H"]
    # of q, k and v, those that come from the call's q and k are read once a group of heads
    forward = (2 * keys * share + 2 * values) if not summing else (2 * keys + values * (1 + 2 * share))
    states = 2 * 4 * pairs * problem["K"] * problem["V"]
    moved = int(pairs * problem["T"] * (2 * forward + 8 + 4 * summing)) + states
    moved += _kept(problem, plan) if summing else 0
    operations = pairs * slices * chunks * 2 * CHUNK * (CHUNK * (wide + columns) + 2 * wide * columns)
    seconds = (SUMMING_SWEEP_SECONDS if summing else SWEEP_SECONDS)[wide, columns]
    return Candidate.of(plan, device, grid, moved, operations, serial=_fill(segments) + segment_chunks * seconds)


def _adjoint(problem: Problem, device: Device, plan: Plan) -> Candidate | None:
    """One launch of matrix/scalar_decay/hopper/backward.py."""
    stages = plan["adjoint_stages"]
    wide, narrow = sorted((tile(problem["K"]), tile(problem["V"])), reverse=True)
    warps = wide // 16 + OTHER_WARPS
    elements = CHUNK * (2 * stages + 1) * (wide + narrow) + 2 * CHUNK * CHUNK + wide * narrow
    pairs = problem["B"] * problem["H"]
    sums = 4 + (8 if "beta" in problem.traits else 4) + wide // 16 + wide // 64
    shared = 2 * elements + stages * 4 * (CHUNK * sums + 2 * wide) + 4 * (plan["save"] - 1) * (CHUNK + 2) + SCRATCH
    chunks, segment_chunks = -(-problem["T"] // CHUNK), plan["segment_chunks"]
    segments = max(1, -(-chunks // segment_chunks))
    grid = Grid(pairs * segments, 32 * warps, registers_of(warps), shared)
    if not grid.fits(device):
        return None
    share = problem["Hq"] / problem["H"]
    moved = int(pairs * problem["T"] * (2 * (problem["K"] * (2 * share + 1) + 3 * problem["V"]) + 16))
    moved += _kept(problem, plan) if "decay=scalar" in problem.traits else 0
    operations = pairs * chunks * 2 * CHUNK * (2 * CHUNK * (wide + narrow) + 3 * wide * narrow)
    serial = _fill(segments) + segment_chunks * ADJOINT_SECONDS[wide]
    return Candidate.of(plan, device, grid, moved, operations, serial=serial)
