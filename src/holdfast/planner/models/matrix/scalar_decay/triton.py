"""One program a (sequence or segment, head, block of columns), the state in registers from first token to last."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

from holdfast.planner import Candidate, Device, Direction, Grid, Plan, Problem
from holdfast.planner.models import fastest

from .saved_states import chunks_between_states

# wider states leave no registers for anything else
WIDEST = 256
# of the state, in float32 a thread
STATE_REGISTERS = 64
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


def padded(width: int) -> int:
    """The power of two, at least 16, that a tile of so many columns takes."""
    return max(16, 1 << (width - 1).bit_length())


def _shared(chunk: int, width: int, columns: int, warps: int, stages: int, size: int, extra: int) -> int:
    """Bytes of a block, mostly an upper bound of what Triton 3.6 allots; 15% short of it at K = 16.

    Tiles in flight, a chunk's products of q and k, and what changes hands between warps where a warp does not keep its
    rows of the state: with more warps than 16 rows each, in float32, and without a pipeline.
    """
    tiles = chunk * (2 * width + (1 + extra) * columns) * size
    keeps_rows = size == 2 and 16 * warps <= columns and stages > 1
    exchanged = 0 if keeps_rows else columns * (2 * size * width + 4 * chunk)
    return stages * tiles + size * chunk * chunk + exchanged + 2048


class Tiles(NamedTuple):
    """What a block holds: tokens of a chunk, columns of K's and of V's, stages of loads in flight, bytes in all."""

    chunk: int
    key_columns: int
    value_columns: int
    warps: int
    stages: int
    shared: int


def _tiles(problem: Problem, device: Device, direction: Direction) -> Iterator[Tiles]:
    """Those that fit.

    Chunks are as large as the sequence and the shared memory allow, 64 at most: 128 leaves no registers.
    """
    K, V = padded(problem["K"]), padded(problem["V"])
    size = 4 if problem.dtype == "float32" else 2
    backward = direction == "backward"
    widest = max(K if backward else V, V)
    found = False
    for chunk in (64, 32, 16):
        too_long = chunk > 16 and chunk >= 2 * problem["T"]
        if found or too_long or (size == 4 and chunk == 64):
            continue
        for limit in (block for block in (128, 64, 32, 16) if block < 2 * widest):
            key_block, value_block = min(limit, K), min(limit, V)
            sweeps = [(K, value_block, 0)] + ([(V, key_block, 1)] if backward else [])
            held = max(width * block for width, block, _ in sweeps)
            for warps in (warps for warps in (4, 8) if held <= STATE_REGISTERS * 32 * warps):
                for stages in (3, 2, 1):
                    shared = max(
                        _shared(chunk, width, block, warps, stages, size, extra) for width, block, extra in sweeps
                    )
                    if device.shared_per_block is not None and shared <= device.shared_per_block:
                        found = True
                        yield Tiles(chunk, key_block, value_block, warps, stages, shared)


def candidates(problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
    """Plans, the fastest first.

    values: chunk; columns, the block of V's columns (backward: key_columns, value_columns of K's and V's); warps;
    stages of loads in flight; segments that each sequence is cut into; keep (backward), in chunks.
    """
    return fastest(_ways(problem, device, direction))


def _ways(problem: Problem, device: Device, direction: Direction) -> Iterator[tuple[float, Callable[[], Candidate]]]:
    """Of each plan, seconds that it takes at least (of its sweeps, their chains), and what makes its candidate."""
    names = ["o"] if direction == "forward" else ["dv", "dk", "dq"]
    if direction == "backward" and "normalizer" in problem.traits:
        names.append("o")
    composition_of = cache(partial(_composition, problem, device))
    for tiles in _tiles(problem, device, direction):
        sweeps = [Sweep(problem, device, tiles, name) for name in names]
        for segments in _cuts(problem, device, tiles.chunk):
            between: list[Candidate] = []
            if segments > 1:
                composition = composition_of(tiles.chunk, tiles.stages, segments)
                if composition is None:
                    break
                between = [composition] * (1 if direction == "forward" else 2)
            least = sum([sweep.waves(segments) * sweep.chain(segments) for sweep in sweeps])
            least += sum([each.seconds for each in between])
            yield least, partial(_candidate, problem, direction, tiles, sweeps, segments, between)


def _cuts(problem: Problem, device: Device, chunk: int) -> Iterator[int]:
    """Segments that each sequence is cut into; programs beyond twice what the device holds gain nothing."""
    pairs, segments = problem["B"] * problem["H"], 1
    most = 1 if problem.varlen else min(128, -(-problem["T"] // chunk) // 2)
    yield segments
    while 2 * segments <= most and segments * pairs <= 4 * device.processors:
        segments *= 2
        yield segments


def _candidate(
    problem: Problem,
    direction: Direction,
    tiles: Tiles,
    sweeps: Sequence["Sweep"],
    segments: int,
    between: Sequence[Candidate],
) -> Candidate:
    """All launches, one after another. between: those that find the states between segments."""
    common = (("warps", tiles.warps), ("stages", tiles.stages), ("segments", segments))
    if direction == "forward":
        plan = Plan("triton", (("chunk", tiles.chunk), ("columns", tiles.value_columns), *common))
    else:
        blocks = (("key_columns", tiles.key_columns), ("value_columns", tiles.value_columns))
        plan = Plan("triton", (("chunk", tiles.chunk), *blocks, *common, ("keep", chunks_between_states(problem))))
    found, *others = (sweep.candidate(plan, segments) for sweep in sweeps)
    for other in [*others, *between]:
        found = found.after(other)
    return found


class Sweep:
    """One launch over all tokens. It knows what does not depend on the segments, so that this is computed once.

    name: of the pass, by what it computes.
    """

    def __init__(self, problem: Problem, device: Device, tiles: Tiles, name: str) -> None:
        # columns of q and k, of v, and a block of v's, in whose place the gradients by keys have q's and k's
        width, columns, block = problem["K"], problem["V"], tiles.value_columns
        if name in ("dk", "dq"):
            width, columns, block = columns, width, tiles.key_columns
        chunk, warps = tiles.chunk, tiles.warps
        size, pairs, wide = 4 if problem.dtype == "float32" else 2, problem["B"] * problem["H"], padded(width)
        self.device, self.sms, self.chunks = device, device.processors, -(-problem["T"] // chunk)
        # of one segment
        self.grid = Grid(pairs * -(-padded(columns) // block), 32 * warps, 255 if warps == 4 else 232, tiles.shared)
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
        self.alone_factor = self.factor * (STAGE_FACTORS[tiles.stages] * (1.0 if name == "o" else ALONE_FACTOR))
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


def _composition(problem: Problem, device: Device, chunk: int, stages: int, segments: int) -> Candidate | None:
    """The local states of the segments and the scan over them; None where their blocks do not fit."""
    size = 4 if problem.dtype == "float32" else 2
    K, V, pairs = problem["K"], problem["V"], problem["B"] * problem["H"]
    plan, block = Plan("triton"), min(ADVANCE_COLUMNS, padded(K))
    steps = -(-problem["T"] // chunk // segments)
    shared = stages * chunk * (padded(V) + block) * size + 1024
    grid = Grid(pairs * segments * -(-padded(K) // block), 128, 200, shared)
    if not grid.fits(device):
        return None
    states, operations = pairs * segments * K * V * 4, 2 * chunk * padded(V) * block
    moved = pairs * problem["T"] * (K + V) * size + states
    serial = ADVANCE_FILL_SECONDS + steps * (CHUNK_SECONDS / 2 + operations / (4 * WARP_RATE))
    local = Candidate.of(plan, device, grid, moved, grid.blocks * steps * operations, serial=serial)
    # its blocks of 512 cells wait for memory once a segment
    scan = Grid(pairs * -(-K * V // 512), 128, 64)
    waits = segments * 3e-7
    return Candidate.of(plan, device, scan, 2 * states, states // 2, tensor_cores=False, serial=waits).after(local)
