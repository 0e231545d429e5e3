"""Hopper's sweeps: one persistent block a (sequence, head, slice of values), the state in wgmma accumulators."""

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.constrint import Variable, lookup
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned
from holdfast.planner.models.matrix.segments import cut_in_segments
from holdfast.planner.models.matrix.tiles import CHUNK, WIDEST, registers_left, registers_of, tile

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
# most chunks' tiles in flight of both sweeps backward; and forward, by the tiles' columns of q and k, then of v, where
# more have been slower
STAGES = 3
FORWARD_STAGES = {64: {64: 5, 128: 4}, 128: {64: 4, 128: 3}}
FORWARD_PLAN = ("columns", "stages", "segment_chunks", "resident")
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
    if direction == "backward":
        return planned(problem, device, direction, Kernel(backward_model, _backward))
    return planned(problem, device, direction, Kernel(resident_model, _resident), Kernel(forward_model, _forward))


def resident_model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """onchip/kernel.py's launch, whose blocks wait for one another."""
    model, tokens = KernelModel(device), RESIDENT_CHUNKS * CHUNK
    wide, columns = tile(problem["K"]), tile(problem["V"])
    segments = model.let("segments", max(1, -(-problem["T"] // tokens)))
    blocks = model.let("blocks", problem["B"] * problem["H"] * segments)
    model.require(not problem.varlen, "sequences are of equal length")
    model.require("key_slices" not in problem.traits, "outputs are added to no others")
    model.require(problem["V"] <= WIDEST, "values are of one tile")
    model.add(blocks <= device.processors, "blocks at once, one a processor")
    for name, value in (("columns", columns), ("stages", 1), ("segment_chunks", RESIDENT_CHUNKS), ("resident", 1)):
        model.let(name, value)
    warps = model.let("warps", columns // 16 + OTHER_WARPS)
    shared = 2 * (tokens * (2 * wide + columns) + 4 * CHUNK * CHUNK) + 4 * (2 * tokens + RESIDENT_CHUNKS) + SCRATCH
    model.block(warps, registers_left(warps), shared)
    return model


def _resident(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    pairs, K, V = problem["B"] * problem["H"], problem["K"], problem["V"]
    tokens, segments, wide, columns = RESIDENT_CHUNKS * CHUNK, values["segments"], tile(K), values["columns"]
    grid = values.grid(pairs * segments)
    states = 2 * 4 * pairs * segments * wide * columns
    moved = int(pairs * problem["T"] * 4 * (K * problem["Hq"] / problem["H"] + V)) + states + 8 * pairs * K * V
    operations = grid.blocks * 2 * tokens * (tokens * 3 // 4 * (wide + columns) + 2 * wide * columns)
    plan = values.plan("hopper", *FORWARD_PLAN)
    serial = RESIDENT_SECONDS + segments * RESIDENT_SEGMENT_SECONDS
    return Candidate.of(plan, device, grid, moved, operations, serial=serial)


def _segments(model: KernelModel, problem: Problem) -> None:
    segments, segment_chunks = cut_in_segments(model, problem)
    if problem["V"] > WIDEST or problem.varlen:
        model.add(segments == 1, "wide values and packed sequences are not cut")
    model.let("segment_chunks", segment_chunks)


def forward_model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    model, key, value = KernelModel(device), tile(problem["K"]), tile(problem["V"])
    _segments(model, problem)
    columns = model.variable("columns", (64, 128), "largest")
    model.add(columns <= value, "columns, of a tile")
    stages = model.variable("stages", range(2, 6), "largest", greedy=True)
    model.add(stages <= lookup(columns, FORWARD_STAGES[key]), "stages that are not slower")
    model.let("resident", 0)
    _sweep_block(model, key, columns, stages, False)
    return model


def backward_model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """The sweep for dq, and backward.py's for dk and dv."""
    model, key, value = KernelModel(device), tile(problem["K"]), tile(problem["V"])
    _segments(model, problem)
    columns = model.variable("columns", (64, 128), "largest")
    model.add(columns <= key, "columns, of a tile")
    stages = model.variable("stages", range(2, STAGES + 1), "largest", greedy=True)
    _sweep_block(model, value, columns, stages, "decay=scalar" in problem.traits)
    adjoint_stages = model.variable("adjoint_stages", range(2, STAGES + 1), "largest", greedy=True)
    save = model.let("save", chunks_between_states(problem, RARELY))
    wide, narrow = max(key, value), min(key, value)
    elements = CHUNK * (2 * adjoint_stages + 1) * (wide + narrow) + 2 * CHUNK * CHUNK + wide * narrow
    sums = 4 + (8 if "beta" in problem.traits else 4) + wide // 16 + wide // 64
    shared = 2 * elements + adjoint_stages * 4 * (CHUNK * sums + 2 * wide) + 4 * (save - 1) * (CHUNK + 2) + SCRATCH
    warps = wide // 16 + OTHER_WARPS
    model.block(warps, registers_of(warps), shared, "adjoint")
    return model


def _sweep_block(model: KernelModel, wide: int, columns: Variable, stages: Variable, summing: bool) -> None:
    """A block of forward.py. wide: tile of q and k. summing: row sums are taken as well."""
    sums = columns // 16 if summing else 0
    warps = model.let("warps of sweep", columns // 16 + SCORING_WARPS + OTHER_WARPS)
    # scores of two chunks; outputs of two, but for those that take the place of what they are summed with
    elements = CHUNK * (stages * (2 * wide + (1 + summing) * columns) + (0 if summing else 2 * columns) + 2 * CHUNK)
    # sums of rows have barriers of their own
    shared = 2 * elements + stages * 4 * CHUNK * (4 + sums) + SCRATCH + 128 * summing
    model.block(warps, registers_left(warps), shared, "sweep")


def _forward(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    plan = values.plan("hopper", *FORWARD_PLAN)
    found = _sweep(problem, device, plan, values, (problem["K"], problem["V"]), False)
    composition = _composition(problem, device, values["segment_chunks"], 1)
    return found if composition is None else found.after(composition)


def _backward(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    plan = values.plan("hopper", "columns", "stages", "segment_chunks", "adjoint_stages", "save")
    sums = "decay=scalar" in problem.traits
    sweep = _sweep(problem, device, plan, values, (problem["V"], problem["K"]), sums)
    found = _adjoint(problem, device, plan, values).after(sweep)
    composition = _composition(problem, device, values["segment_chunks"], 2)
    return found if composition is None else found.after(composition)


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


def _sweep(
    problem: Problem, device: Device, plan: Plan, found: Assignment, widths: tuple[int, int], summing: bool
) -> Candidate:
    """One launch of forward.py. widths: columns of q and k, and of v. summing: row sums are taken as well."""
    keys, values = widths
    columns, wide = found["columns"], tile(keys)
    pairs = problem["B"] * problem["H"]
    chunks, segment_chunks = -(-problem["T"] // CHUNK), found["segment_chunks"]
    slices, segments = -(-values // columns), max(1, -(-chunks // segment_chunks))
    grid = found.grid(pairs * slices * segments, "sweep")
    share = problem["Hq"] / problem["H"]
    # of q, k and v, those that come from the call's q and k are read once a group of heads
    forward = (2 * keys * share + 2 * values) if not summing else (2 * keys + values * (1 + 2 * share))
    states = 2 * 4 * pairs * problem["K"] * problem["V"]
    moved = int(pairs * problem["T"] * (2 * forward + 8 + 4 * summing)) + states
    moved += _kept(problem, plan) if summing else 0
    operations = pairs * slices * chunks * 2 * CHUNK * (CHUNK * (wide + columns) + 2 * wide * columns)
    seconds = (SUMMING_SWEEP_SECONDS if summing else SWEEP_SECONDS)[wide, columns]
    return Candidate.of(plan, device, grid, moved, operations, serial=_fill(segments) + segment_chunks * seconds)


def _adjoint(problem: Problem, device: Device, plan: Plan, found: Assignment) -> Candidate:
    """One launch of matrix/scalar_decay/hopper/backward.py."""
    wide, narrow = sorted((tile(problem["K"]), tile(problem["V"])), reverse=True)
    pairs = problem["B"] * problem["H"]
    chunks, segment_chunks = -(-problem["T"] // CHUNK), found["segment_chunks"]
    segments = max(1, -(-chunks // segment_chunks))
    grid = found.grid(pairs * segments, "adjoint")
    share = problem["Hq"] / problem["H"]
    moved = int(pairs * problem["T"] * (2 * (problem["K"] * (2 * share + 1) + 3 * problem["V"]) + 16))
    moved += _kept(problem, plan) if "decay=scalar" in problem.traits else 0
    operations = pairs * chunks * 2 * CHUNK * (2 * CHUNK * (wide + narrow) + 3 * wide * narrow)
    serial = _fill(segments) + segment_chunks * ADJOINT_SECONDS[wide]
    return Candidate.of(plan, device, grid, moved, operations, serial=serial)
