"""The delta rule's backward pass on Hopper: inverses, states, then window by window a sweep back and the gradients."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce

from holdfast.planner import Candidate, Device, Grid, Plan, Problem

from .matrix_hopper import CHUNK, WIDEST, tile

# columns of v whose state four warps hold
COLUMNS = 64
# of the tiles that the sweeps have in flight
STAGES, REVERSE_STAGES = 3, 2
# beside the warps of the sweeps: four multiply keys with queries, one copies, one has the gates, two fill up the four
SCORE_WARPS, OTHER_WARPS = 4, 4
# barriers, and what the compiler aligns
SCRATCH = 1024
# registers of a thread of the gradients' launch, by its warps: two blocks on a multiprocessor either way
REGISTERS = {4: 255, 8: 128}
# Seconds, H200, docs/lab-notes.md: of a chunk of the sweep that keeps states and of that back, by columns of v a block,
# and what a block on every multiprocessor adds, of them; of either before its first and after its last chunk; of a wave
# of blocks that find gradients, by their warps. Four warps were timed at K = V = 128 alone.
STATES_SECONDS = {64: 1.45e-6, 128: 2.25e-6}
REVERSE_SECONDS = {64: 1.9e-6, 128: 2.9e-6}
CROWDED = 0.4
FILL_SECONDS = 1.2e-5
GRADIENT_SECONDS = {4: 1.75e-5, 8: 1.95e-5}
# of what is kept of a part of the sequence between the sweep back and the gradients: 96 MiB at B4 T4096 H32 D128
KEPT_BYTES = 96 << 20


def in_turn(launches: Sequence[Candidate]) -> Candidate:
    """One launch after another."""
    return reduce(lambda before, after: after.after(before), launches)


def candidates(
    problem: Problem, device: Device, entered: Candidate, span: int, state_columns: int, scan: Candidate | None
) -> Iterator[Candidate]:
    """Plans, in no order; none where no block fits.

    entered: the launches until the states that enter the segments of `span` chunks are there, found by blocks of
    state_columns; scan: of them that over segments, or None with one segment. values: columns of v a block, stages and
    reverse_stages of tiles in flight of the two sweeps; windows, the parts of the sequence that the sweep back and the
    gradients take one after another; grad_warps of the latter; span and state_columns.
    """
    windows = min(_windows(problem), -(-_chunks(problem) // span)) if scan else _windows(problem)
    gradients = _gradients(problem, device, windows)
    for columns in (2 * COLUMNS, COLUMNS) if problem["V"] > COLUMNS else (COLUMNS,):
        launches = [entered]
        if scan:
            launches += [_walk(problem, device, state_columns, True, span, 1, False), scan]
        launches.append(_walk(problem, device, columns, False, span, 1, True))
        launches += [_walk(problem, device, columns, True, span, windows, True), gradients]
        if None in launches:
            continue
        values = (
            ("columns", columns),
            ("state_columns", state_columns),
            ("stages", STAGES),
            ("reverse_stages", REVERSE_STAGES),
            ("span", span),
            ("windows", windows),
            ("grad_warps", gradients.plan["grad_warps"]),
        )
        yield replace(in_turn(launches), plan=Plan("hopper", values))


def _chunks(problem: Problem) -> int:
    return max(1, -(-problem["T"] // CHUNK))


def _states(problem: Problem) -> int:
    """Bytes of the rounded states of all chunks."""
    return 2 * problem["B"] * problem["H"] * _chunks(problem) * problem["K"] * tile(problem["V"])


def _windows(problem: Problem) -> int:
    """Parts of the sequence, so that what is kept of one stays within KEPT_BYTES, or within one chunk."""
    kept = _states(problem) + 2 * problem["B"] * problem["H"] * _chunks(problem) * CHUNK * problem["V"]
    return min(_chunks(problem), max(1, -(-kept // KEPT_BYTES)))


def _walk(
    problem: Problem, device: Device, columns: int, back: bool, span: int, windows: int, keeps: bool
) -> Candidate | None:
    """The sweep that keeps states, or that back, over segments of `span` chunks; or what each segment adds to dS."""
    wide, pairs, chunks = tile(problem["K"]), problem["B"] * problem["H"], _chunks(problem)
    segments = -(-chunks // span)
    stages = REVERSE_STAGES if back else STAGES
    staged = columns + CHUNK + wide + (wide + CHUNK if back else 0)
    shared = 2 * (stages * CHUNK * staged + keeps * columns * (wide + CHUNK)) + stages * 5 * CHUNK * 4 + SCRATCH
    warps = 4 * (columns // COLUMNS) + OTHER_WARPS + back * SCORE_WARPS
    slices = pairs * -(-problem["V"] // columns)
    # side by side: a window's segments
    blocks = slices * -(-segments // windows) if keeps else slices * (segments - 1)
    grid = Grid(blocks, 32 * warps, min(240, 65536 // (32 * warps) // 8 * 8), shared)
    if not grid.fits(device):
        return None
    keys = (1 + back) * problem["K"] * problem["Hq"] / problem["H"]
    moved = int(2 * pairs * problem["T"] * (keys + (1 + keeps) * problem["V"] + CHUNK)) + keeps * _states(problem)
    moved += 4 * pairs * segments * problem["K"] * problem["V"] * (segments > 1)
    products = columns * ((3 if back else 2) * wide + (2 if back else 1) * CHUNK) + back * CHUNK * wide
    operations = slices * chunks * 2 * CHUNK * products
    crowd = 1 + CROWDED * min(1.0, blocks / (device.sms or 1))
    seconds = (REVERSE_SECONDS if back else STATES_SECONDS)[columns] * crowd
    serial = windows * (FILL_SECONDS + min(span, -(-chunks // windows)) * seconds)
    return Candidate.of(Plan("hopper"), device, grid, moved, operations, serial=serial)


def _gradients(problem: Problem, device: Device, windows: int) -> Candidate | None:
    """The launches over all chunks of a window, all windows'."""
    wide, V, pairs, chunks = tile(problem["K"]), tile(problem["V"]), problem["B"] * problem["H"], _chunks(problem)
    warps = 4 if wide == V == WIDEST else 8
    shared = 2 * CHUNK * (2 * wide + 3 * V) + 2 * wide * V + SCRATCH // 2
    grid = Grid(pairs * -(-chunks // windows), 32 * warps, REGISTERS[warps], shared)
    if not grid.fits(device):
        return None
    keys = problem["K"] * problem["Hq"] / problem["H"]
    moved = int(2 * pairs * problem["T"] * (2 * keys + 2 * problem["K"] + 4 * problem["V"])) + 2 * _states(problem)
    operations = 2 * pairs * chunks * CHUNK * (3 * wide * V + CHUNK * (6 * wide + 2 * V))
    plan = Plan("hopper", (("grad_warps", warps),))
    found = Candidate.of(plan, device, grid, moved, operations, serial=windows * GRADIENT_SECONDS[warps])
    # each window is two launches more
    for _ in range(2 * (windows - 1)):
        found = found.after(Candidate.of(plan, device, Grid(1, 32), 0, 0))
    return found
