"""One program a (sequence or segment, head, block of columns), the state in registers from first token to last."""

from dataclasses import replace
from functools import reduce

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.constrint import Expression, ceil_div, lookup, maximum, minimum, truth
from holdfast.planner.kernel_model import Assignment, Kernel, KernelModel, planned, powers_of_two
from holdfast.planner.models.matrix.tiles import padded

from .saved_states import chunks_between_states

# wider states leave no registers for anything else
WIDEST = 256
# of the state, in float32 a thread
STATE_REGISTERS = 64
# of a thread at most, by warps
REGISTERS = {4: 255, 8: 232}
# A chunk's products wait for one another: so long whatever their size, and a rate for each warp. Fitted to an H200's
# forward pass at B4 T4096 H32 D128, 0.226 ms with 8 warps and 0.244 with 4; see
# docs/notes/scalar-decay-forward.md#portable-triton.
CHUNK_SECONDS = 1.2e-6
WARP_RATE = 3.6e11
# Of a forward sweep, with the same tiles: dq 7.3 and dk 10.7 us a chunk against 3.8, dv 4.0; no decay and no strength,
# no gradients of them. A normaliser's by its instructions, not timed.
PASS_FACTORS = {"o": 1.0, "dq": 1.95, "dk": 2.85, "dv": 1.1}
NORMALIZER_FACTOR = 1.6
# of a block alone on its SM with so many stages in flight; another block hides the wait: 0.226, 0.290 ms forward
STAGE_FACTORS = {3: 1.0, 2: 1.28, 1: 1.45}
# of a backward sweep alone, which waits longer: 1.46 ms with 8 warps, 1.43 with twice 4
ALONE_FACTOR = 1.15
# of K's columns, in a block of the launch for the segments' local states
ADVANCE_COLUMNS = 64
# of that launch beside its chunks: with segments B1 T4096 H8 D128 took 0.0427 ms forward, 0.030 without this
ADVANCE_FILL_SECONDS = 1.1e-5


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans, the fastest first.

    values: chunk; columns, the block of V's columns (backward: key_columns, value_columns of K's and V's); warps;
    stages of loads in flight; segments that each sequence is cut into; keep (backward), in chunks.
    """
    return planned(problem, device, direction, Kernel(model, candidate, _least))


def model(problem: Problem, device: Device, direction: Direction) -> KernelModel:
    """Chunks are as large as the sequence and the shared memory allow, 64 at most: 128 leaves no registers."""
    model, K, V, size = KernelModel(device), padded(problem["K"]), padded(problem["V"]), _size(problem)
    is_forward, pairs = direction == "forward", problem["B"] * problem["H"]
    chunk = model.variable("chunk", powers_of_two(16, 32 if size == 4 else 64), "largest", greedy=True)
    model.add(chunk <= max(16, 2 * problem["T"] - 1), "tokens of a chunk, of a sequence")
    block = model.variable("block", powers_of_two(16, 128), "largest")
    model.add(block < 2 * (V if is_forward else max(K, V)), "columns, of the wider side")
    warps, stages = model.variable("warps", (4, 8)), model.variable("stages", (1, 2, 3), "largest")
    key_columns, value_columns = minimum(block, K), minimum(block, V)
    if is_forward:
        value_columns = model.let("columns", value_columns)
        held, shared = K * value_columns, _shared(chunk, K, value_columns, warps, stages, size, 0)
    else:
        key_columns, value_columns = model.let("key_columns", key_columns), model.let("value_columns", value_columns)
        model.let("keep", chunks_between_states(problem))
        held = maximum(K * value_columns, V * key_columns)
        sweeps = (K, value_columns, 0), (V, key_columns, 1)
        shared = maximum(*(_shared(chunk, width, own, warps, stages, size, extra) for width, own, extra in sweeps))
    model.add(held <= STATE_REGISTERS * 32 * warps, "numbers of a state, of those in registers")
    model.block(warps, lookup(warps, REGISTERS), shared)
    segments = model.variable("segments", powers_of_two(1, 128))
    model.add(2 * segments * truth(segments > 1) <= ceil_div(problem["T"], chunk), "two chunks a segment")
    model.add(segments <= (1 if problem.varlen else 128), "packed sequences are not cut")
    # programs beyond twice what the device holds gain nothing
    model.add(segments // 2 * pairs <= 4 * device.processors, "programs with half as many segments")
    composed = truth(segments > 1) * (stages * chunk * (V + min(ADVANCE_COLUMNS, K)) * size + 1024)
    model.block(4, 200, composed, "local states")
    return model


def _size(problem: Problem) -> int:
    return 4 if problem.dtype == "float32" else 2


def _shared(
    chunk: Expression, width: int, columns: Expression, warps: Expression, stages: Expression, size: int, extra: int
) -> Expression:
    """Bytes of a block, mostly an upper bound of what Triton 3.6 allots; 15% short of it at K = 16.

    Tiles in flight, a chunk's products of q and k, and what changes hands between warps where a warp does not keep its
    rows of the state: with more warps than 16 rows each, in float32, and without a pipeline.
    """
    tiles = chunk * (2 * width + (1 + extra) * columns) * size
    keeps_rows = truth(16 * warps <= columns) * truth(stages > 1) if size == 2 else 0
    exchanged = (1 - keeps_rows) * columns * (2 * size * width + 4 * chunk)
    return stages * tiles + size * chunk * chunk + exchanged + 2048


def _least(problem: Problem, device: Device, direction: Direction, values: Assignment) -> float:
    """Seconds of the sweeps' chains alone, and of what finds the states between segments."""
    segments = values["segments"]
    chains = sum([each.waves(segments) * each.chain(segments) for each in _sweeps(problem, device, direction, values)])
    return chains + sum([each.seconds for each in _between(problem, device, direction, values)])


def candidate(problem: Problem, device: Device, direction: Direction, values: Assignment) -> Candidate:
    """All launches, one after another."""
    columns = ("columns",) if direction == "forward" else ("key_columns", "value_columns")
    keep = () if direction == "forward" else ("keep",)
    plan = values.plan("triton", "chunk", *columns, "warps", "stages", "segments", *keep)
    found, *others = [each.candidate(plan, values["segments"]) for each in _sweeps(problem, device, direction, values)]
    return reduce(Candidate.after, [*others, *_between(problem, device, direction, values)], found)


def _sweeps(problem: Problem, device: Device, direction: Direction, values: Assignment) -> "list[Sweep]":
    """The launches over all tokens; they are the same for any number of segments."""
    of = tuple([values[name] for name in ("block", "chunk", "warps", "stages")])
    return values.once(of, lambda: _sweeps_of(problem, device, direction, values))


def _sweeps_of(problem: Problem, device: Device, direction: Direction, values: Assignment) -> "list[Sweep]":
    names = ["o"] if direction == "forward" else ["dv", "dk", "dq"]
    if direction == "backward" and "normalizer" in problem.traits:
        names.append("o")
    block, chunk, stages, one = values["block"], values["chunk"], values["stages"], values.grid(1)
    return [Sweep(problem, device, one, name, block, chunk, stages) for name in names]


def _between(problem: Problem, device: Device, direction: Direction, values: Assignment) -> list[Candidate]:
    """The launches that find the states between segments, backward their gradients too."""
    if values["segments"] == 1:
        return []
    of = (values["chunk"], values["stages"], values["segments"])
    found = values.once(of, lambda: _composition(problem, device, *of))
    return [found] * (1 if direction == "forward" else 2)


class Sweep:
    """One launch over all tokens. It knows what does not depend on the segments, so that this is computed once.

    name: of the pass, by what it computes.
    """

    def __init__(
        self, problem: Problem, device: Device, one: Grid, name: str, limit: int, chunk: int, stages: int
    ) -> None:
        # columns of q and k, of v, and a block of v's, in whose place the gradients by keys have q's and k's
        width, columns = problem["K"], problem["V"]
        if name in ("dk", "dq"):
            width, columns = columns, width
        block, warps = min(limit, padded(columns)), one.threads // 32
        size, pairs, wide = _size(problem), problem["B"] * problem["H"], padded(width)
        self.device, self.sms, self.chunks = device, device.processors, -(-problem["T"] // chunk)
        # of one segment
        self.grid = replace(one, blocks=pairs * -(-padded(columns) // block))
        self.per_sm = self.grid.per_sm(device)
        # the states that enter and leave
        self.states = 8 * pairs * width * columns
        # q and k of a group of heads, and of the splits of a head, are read at the same time: once from memory
        share = problem["Hq"] / problem["H"]
        extra = columns * share if name in ("dq", "dk") else 0
        self.moved = int(pairs * problem["T"] * (size * (2 * width * share + 2 * columns + extra) + 12))
        self.operations = 2 * chunk * (chunk * (wide + block) + 2 * wide * block)
        # a warp takes 16 rows of the transposed state; more warps than that repeat each other's work
        working = min(warps, max(1, block // 16))
        self.chunk_seconds = CHUNK_SECONDS + self.operations / (working * WARP_RATE)
        self.factor = PASS_FACTORS[name] if problem.traits & {"decay=scalar", "beta"} else 1.0
        self.alone_factor = self.factor * (STAGE_FACTORS[stages] * (1.0 if name == "o" else ALONE_FACTOR))
        if "normalizer" in problem.traits and name != "dv":
            self.factor, self.alone_factor = NORMALIZER_FACTOR * self.factor, NORMALIZER_FACTOR * self.alone_factor

    def chain(self, segments: int) -> float:
        """Seconds of a block's chunks, one after another."""
        alone = min(self.per_sm, -(-segments * self.grid.blocks // self.sms)) < 2
        return (self.alone_factor if alone else self.factor) * -(-self.chunks // segments) * self.chunk_seconds

    def waves(self, segments: int) -> int:
        return -(-segments * self.grid.blocks // max(1, self.per_sm * self.sms))

    def candidate(self, plan: Plan, segments: int) -> Candidate:
        one = self.grid
        grid = Grid(segments * one.blocks, one.threads, one.registers, one.shared)
        operations = grid.blocks * -(-self.chunks // segments) * self.operations
        moved = self.moved + segments * self.states
        return Candidate.of(plan, self.device, grid, moved, operations, serial=self.chain(segments))


def _composition(problem: Problem, device: Device, chunk: int, stages: int, segments: int) -> Candidate:
    """The local states of the segments and the scan over them."""
    size, K, V, pairs = _size(problem), problem["K"], problem["V"], problem["B"] * problem["H"]
    plan, block = Plan("triton"), min(ADVANCE_COLUMNS, padded(K))
    steps = -(-problem["T"] // chunk // segments)
    shared = stages * chunk * (padded(V) + block) * size + 1024
    grid = Grid(pairs * segments * -(-padded(K) // block), 128, 200, shared)
    states, operations = pairs * segments * K * V * 4, 2 * chunk * padded(V) * block
    moved = pairs * problem["T"] * (K + V) * size + states
    serial = ADVANCE_FILL_SECONDS + steps * (CHUNK_SECONDS / 2 + operations / (4 * WARP_RATE))
    local = Candidate.of(plan, device, grid, moved, grid.blocks * steps * operations, serial=serial)
    # its blocks of 512 cells wait for memory once a segment
    scan = Grid(pairs * -(-K * V // 512), 128, 64)
    waits = segments * 3e-7
    return Candidate.of(plan, device, scan, 2 * states, states // 2, tensor_cores=False, serial=waits).after(local)
