"""Device code of the scan of states with a low rank on Hopper, in Gluon: h_g = exp(decay_g) (h - W_g Y_g^T h) + u_g.

A warp owns 8 columns of one head's state, and a thread every eighth row of two of them, in float32 registers: sums over
rows are within threads but for three exchanges, and take no tensor core. What the next chunks need is on its way into
shared memory, from where a thread reads its rows of W and Y as they lie in memory. States leave through shared memory,
whole rows of a block's columns at a time.

Sizes are compiled in.
"""

from typing import NamedTuple

from holdfast.kernels.chunk.inter.triton.states import sequence_bounds
from holdfast.kernels.lib.gluon.compat import (
    aggregate,
    async_copy,
    barrier,
    copy_to_shared,
    gl,
    gluon,
    reinterpret,
)

_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


class Tiles(NamedTuple):
    """Stages in shared memory of what a chunk adds and erases: [stages, K, columns], and twice [stages, K RANK]."""

    states: gl.shared_memory_descriptor
    W: gl.shared_memory_descriptor
    Y: gl.shared_memory_descriptor


class Sources(NamedTuple):
    """Pointers of the same."""

    states: gl.tensor
    W: gl.tensor
    Y: gl.tensor


@aggregate
class Shape:
    """Sizes of a state and of its factors."""

    keys: gl.constexpr
    values: gl.constexpr
    RANK: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, keys, values, RANK):
        self.keys = gl.constexpr(keys)
        self.values = gl.constexpr(values)
        self.RANK = gl.constexpr(RANK)


@gluon.constexpr_function
def swizzled(dtype, columns):
    """Return a layout in which 8 rows of a tile, read 16 bytes each, lie in banks of their own."""
    each = 128 // dtype.primitive_bitwidth
    across = columns // each
    return gl.SwizzledSharedLayout(each, max(1, 8 // across), min(8, across), [1, 0])


@gluon.jit
def copy_line(line, source, live):
    """Start the copy of consecutive elements."""
    EACH: gl.constexpr = 128 // line.dtype.primitive_bitwidth
    i = gl.arange(0, line.shape[0], gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0]))
    copy_to_shared(line, source + i, mask=(i >= 0) & live)


@gluon.jit
def copy_columns(tile, source, values: gl.constexpr, first, live):
    """Start the copy of some columns of a matrix."""
    EACH: gl.constexpr = 128 // tile.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = tile.shape[1] // EACH
    layout: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    k = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    v = first + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    here = (k >= 0)[:, None] & (v < values)[None, :] & live
    copy_to_shared(tile, source + (k[:, None] * values + v[None, :]), mask=here)


@gluon.jit
def copy_chunk(tiles, sources, place, slot, shape, first, live):
    """Start the copies of what the chunk and head `place` adds and erases, as one group. first: the first column."""
    copy_columns(
        tiles.states.index(slot), sources.states + place * (shape.keys * shape.values), shape.values, first, live
    )
    copy_line(tiles.W.index(slot), sources.W + place * (shape.keys * shape.RANK), live)
    copy_line(tiles.Y.index(slot), sources.Y + place * (shape.keys * shape.RANK), live)
    async_copy.commit_group()


@gluon.jit
def column(x, layout: gl.constexpr):
    """Return [keys] as [keys, 1] in float32, as `layout` has rows."""
    return gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True).to(gl.float32)[:, None]


@gluon.jit
def two_columns(x, layout: gl.constexpr):
    """Return both columns of [keys, 2], or of words [keys] of two bfloat16 each."""
    if x.dtype == gl.int32:
        low, high = (x << 16).to(gl.float32, bitcast=True), (x & -65536).to(gl.float32, bitcast=True)
    else:
        low, high = gl.split(x)
    return column(low, layout), column(high, layout)


@gluon.jit
def columns(
    line, first: gl.constexpr, WIDTH: gl.constexpr, keys: gl.constexpr, RANK: gl.constexpr, layout: gl.constexpr
):
    """Load 1, 2 or 4 columns of a factor [keys, RANK] in shared memory.

    Each is [keys, 1] in float32, as `layout` has rows.
    """
    # of bfloat16 two in a word, which takes two instructions to part instead of three
    PAIRED: gl.constexpr = line.dtype == gl.bfloat16 and WIDTH > 1
    EACH: gl.constexpr = 2 if PAIRED else 1
    rows: gl.constexpr = gl.BlockedLayout([1, WIDTH // EACH], [8, 4], [1, gl.num_warps()], [1, 0])
    factor = reinterpret(line, gl.int32 if PAIRED else line.dtype, [keys, RANK // EACH], _PLAIN)
    some = factor.slice(first // EACH, WIDTH // EACH, dim=1).load(rows)
    if WIDTH == 1:
        return (column(gl.reshape(some, [keys]), layout),)
    elif WIDTH == 2:
        return two_columns(gl.reshape(some, [keys]) if PAIRED else some, layout)
    elif PAIRED:
        first_two, last_two = gl.split(some)
        return two_columns(first_two, layout) + two_columns(last_two, layout)
    else:
        even, odd = gl.split(gl.reshape(some, [keys, 2, 2]))
        one, three = two_columns(even, layout)
        two, four = two_columns(odd, layout)
        return one, two, three, four


@gluon.jit
def store_columns(tile, target, values: gl.constexpr, first):
    """Store a tile in shared memory to some columns of a matrix, 16 bytes a thread."""
    EACH: gl.constexpr = 128 // tile.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = tile.shape[1] // EACH
    rows: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    k = gl.arange(0, tile.shape[0], gl.SliceLayout(1, rows))
    v = first + gl.arange(0, tile.shape[1], gl.SliceLayout(0, rows))
    here = (k >= 0)[:, None] & (v < values)[None, :]
    gl.store(target + (k[:, None] * values + v[None, :]), tile.load(rows), mask=here)


@gluon.jit
def load_decays(decays, decay, place, step, live):
    """Store exp of the log decays, one or one a row, of as many chunks as decays [chunks, rows] holds; `live` exist."""
    WINDOW: gl.constexpr = decays.shape[0]
    ROWS: gl.constexpr = decays.shape[1]
    ACROSS: gl.constexpr = min(ROWS, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    chunk = gl.arange(0, WINDOW, gl.SliceLayout(1, layout))
    k = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    at = ((place + chunk * step) * ROWS)[:, None] + k[None, :]
    log = gl.load(decay + at, mask=(chunk < live)[:, None] & (k >= 0)[None, :], other=0.0)
    reinterpret(decays, gl.float32, [WINDOW, ROWS], _PLAIN).store(gl.exp(log.to(gl.float32)))
    barrier()


@gluon.jit(do_not_specialize=["chunks", "heads"])
def inter_chunk_low_rank_fwd_async(
    states,
    decay,
    W,
    Y,
    o,
    initial,
    final,
    bounds,
    chunks,
    heads,
    keys: gl.constexpr,
    values: gl.constexpr,
    SCALAR: gl.constexpr,
    RANK: gl.constexpr,
    BLOCK_V: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Do what `inter_chunk_low_rank_fwd` of chunk/inter/triton/states.py does. Grid (ceil(V / BLOCK_V) * H * N,)."""
    layout: gl.constexpr = gl.BlockedLayout([1, BLOCK_V // (4 * gl.num_warps())], [8, 4], [1, gl.num_warps()], [1, 0])
    WIDTH: gl.constexpr = min(RANK, 4)
    size: gl.constexpr = keys * values
    tile, head, sequence, start, stop = sequence_bounds(bounds, chunks, heads, gl.cdiv(values, BLOCK_V))
    first = tile * BLOCK_V
    k = gl.arange(0, keys, gl.SliceLayout(1, layout))
    v = first + gl.arange(0, BLOCK_V, gl.SliceLayout(0, layout))
    here = (k >= 0)[:, None] & (v < values)[None, :]
    element = k[:, None] * values + v[None, :]
    own = (sequence * heads + head) * size + element
    h = gl.zeros([keys, BLOCK_V], gl.float32, layout)
    if initial is not None:
        h = gl.load(initial + own, mask=here, other=0.0)
    additions = gl.allocate_shared_memory(
        states.dtype.element_ty, [STAGES, keys, BLOCK_V], swizzled(states.dtype.element_ty, BLOCK_V)
    )
    result = gl.allocate_shared_memory(o.dtype.element_ty, [keys, BLOCK_V], swizzled(o.dtype.element_ty, BLOCK_V))
    W_tiles = gl.allocate_shared_memory(W.dtype.element_ty, [STAGES, keys * RANK], _LINE)
    Y_tiles = gl.allocate_shared_memory(Y.dtype.element_ty, [STAGES, keys * RANK], _LINE)
    tiles = Tiles(states=additions, W=W_tiles, Y=Y_tiles)
    sources = Sources(states=states, W=W, Y=Y)
    shape = Shape(keys, values, RANK)
    count = (stop - start).to(gl.int32)
    place = start * heads + head
    for stage in gl.static_range(STAGES):
        copy_chunk(tiles, sources, place + stage * heads, stage, shape, first, stage < count)
    WINDOW: gl.constexpr = 64 if SCALAR else 16
    decays = gl.allocate_shared_memory(gl.float32, [WINDOW, 1 if SCALAR else keys], _LINE)
    slot = 0
    for g in range(count):
        async_copy.wait_group(STAGES - 1)
        # a decay that was loaded for one chunk would be as late as memory is
        if g % WINDOW == 0:
            load_decays(decays, decay, place, heads, count - g)
        reads = ()
        for j in gl.static_range(0, RANK, WIDTH):
            y = columns(Y_tiles.index(slot), j, WIDTH, keys, RANK, layout)
            for i in gl.static_range(WIDTH):
                reads += (gl.sum(y[i] * h, 0),)
        for j in gl.static_range(0, RANK, WIDTH):
            w = columns(W_tiles.index(slot), j, WIDTH, keys, RANK, layout)
            for i in gl.static_range(WIDTH):
                h -= w[i] * reads[j + i][None, :]
        addition = additions.index(slot).load(layout).to(gl.float32)
        h = decays.index(g % WINDOW).load(gl.SliceLayout(1, layout))[:, None] * h + addition
        result.store(h.to(o.dtype.element_ty))
        # behind the barrier that what follows has to wait for, every thread has read its part of the slot
        store_columns(result, o + place * size, values, first)
        copy_chunk(tiles, sources, place + STAGES * heads, slot, shape, first, g + STAGES < count)
        place += heads
        slot = slot + 1 if slot + 1 < STAGES else 0
    if final is not None:
        gl.store(final + own, h, mask=here)
