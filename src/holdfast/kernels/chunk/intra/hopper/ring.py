"""What the intra-chunk kernels share on Hopper: a ring of slots that TMA fills, sums of log decays, the output gate."""

from typing import NamedTuple

from holdfast.kernels.lib.gluon.compat import gl, gluon, mbarrier, reinterpret, tma_load

# exp(-1e4) is 0 in float32; -inf would turn differences into NaN
LEAST = gl.constexpr(-1e4)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def add(x, y):
    return x + y


class Ring(NamedTuple):
    """Slots that items take by turns, [slots, 1, steps, 1, columns], and a barrier for each."""

    tiles: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor


class ProgramCoords(NamedTuple):
    """A program's number among those of a chunk and head, the head, the chunk and the batch."""

    program: gl.tensor
    head: gl.tensor
    chunk: gl.tensor
    batch: gl.tensor


class Activation(NamedTuple):
    """The activation of the output gate, and its derivative."""

    value: gl.tensor
    derivative: gl.tensor


@gluon.jit
def program_coords(PROGRAMS: gl.constexpr, HEADS: gl.constexpr, chunks):
    """Return this program's coordinates, of PROGRAMS a chunk and head.

    Heads lie next to one another in memory, and so do their programs.
    """
    program = gl.program_id(0)
    both = program // (PROGRAMS * HEADS)
    batch = both // chunks
    return ProgramCoords(
        program=program % PROGRAMS, head=program // PROGRAMS % HEADS, chunk=both - batch * chunks, batch=batch
    )


@gluon.jit
def slot_tile(ring, slot, desc):
    """Return a slot as a tile of the descriptor's block."""
    return reinterpret(ring.tiles.index(slot), desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def load_item(item, desc, at, ring):
    """Issue the TMA load of an item into its slot."""
    slot = item % ring.tiles.shape[0]
    mbarrier.expect(ring.ready.index(slot), desc.block_type.nbytes)
    tma_load(desc, at, ring.ready.index(slot), slot_tile(ring, slot, desc))


@gluon.jit
def wait_item(item, desc, ring, TAKEN: gl.constexpr):
    """Wait for an item and return it. Something else had the first TAKEN slots of the ring in the first round."""
    slot = item % ring.tiles.shape[0]
    iteration = item // ring.tiles.shape[0]
    if TAKEN > 0:
        iteration -= 1 if slot < TAKEN else 0
    mbarrier.wait(ring.ready.index(slot), iteration & 1)
    return slot_tile(ring, slot, desc).reshape([desc.block_type.shape[1], desc.block_type.shape[3]])


@gluon.jit
def load_log_decays(g, start, size, head, heads, chunk: gl.constexpr):
    """Load the log decays of a chunk to base 2, 0 behind its last step."""
    line: gl.constexpr = gl.BlockedLayout([max(chunk // (32 * gl.num_warps()), 1)], [32], [gl.num_warps()], [0])
    i = gl.arange(0, chunk, line)
    log = gl.load(g + (start + i) * heads + head, mask=i < size, other=0.0).to(gl.float32)
    return (gl.maximum(log, LEAST) * LOG2E).to(gl.float64)


@gluon.jit
def store_decay_sums(sums, log, end, chunk: gl.constexpr):
    """Store the sums of log decays from the chunk's start, less that of the first `end` steps (None: of no step), as
    high and low float32 numbers. Return 2 to the power of what was taken off."""
    line: gl.constexpr = gl.BlockedLayout([max(chunk // (32 * gl.num_warps()), 1)], [32], [gl.num_warps()], [0])
    total = gl.associative_scan(log, 0, add)
    before = 1.0
    if end is not None:
        past = gl.sum(gl.where(gl.arange(0, chunk, line) < end, log, 0.0), 0)
        total -= past
        before = gl.exp2(past.to(gl.float32))
    high = total.to(gl.float32)
    sums.index(0).store(high)
    sums.index(1).store((total - high.to(gl.float64)).to(gl.float32))
    return before


@gluon.jit
def sums_by_tile(sums, steps: gl.constexpr):
    """Return the sums, high and low, in tiles of `steps` steps."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles: gl.constexpr = sums.shape[1] // steps
    return (
        reinterpret(sums.index(0), gl.float32, [tiles, steps], plain),
        reinterpret(sums.index(1), gl.float32, [tiles, steps], plain),
    )


@gluon.jit
def tile_decay(tile_sums, tile, layout: gl.constexpr, sign: gl.constexpr):
    """Return 2 to the power of the sums of a tile, or of their opposites where sign is -1."""
    high, low = tile_sums
    return gl.exp2(sign * high.index(tile).load(layout) + sign * low.index(tile).load(layout))


@gluon.jit
def pair_decay(row_sums, row_tile, column_sums, column_tile, layout: gl.constexpr, sign: gl.constexpr):
    """Return 2 to the power of the row's sum less the column's, or the other way round where sign is -1."""
    high, low = row_sums
    high_across, low_across = column_sums
    down: gl.constexpr = gl.SliceLayout(1, layout)
    across: gl.constexpr = gl.SliceLayout(0, layout)
    log_decay = high.index(row_tile).load(down)[:, None] - high_across.index(column_tile).load(across)[None, :]
    log_decay += low.index(row_tile).load(down)[:, None] - low_across.index(column_tile).load(across)[None, :]
    return gl.exp2(sign * log_decay)


@gluon.jit
def reciprocal(x):
    """Return 1 / x for x from 1 on, to the last bit but one; a division would scale x first."""
    TEXT: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(TEXT, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def activate(gate, SIGMOID: gl.constexpr):
    """Return the activation of the output gate, sigmoid or SiLU, and its derivative."""
    sigmoid = reciprocal(1.0 + gl.exp2(-LOG2E * gate))
    if SIGMOID:
        value = sigmoid
        derivative = sigmoid * (1.0 - sigmoid)
    else:
        value = gate * sigmoid
        derivative = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return Activation(value=value, derivative=derivative)
