"""Device code of the scan of states with a low rank on Hopper, in Gluon: h_g = exp(decay_g) (h - W_g Y_g^T h) + u_g.

A warp owns 8 columns of one head's state, and a thread a quarter of the rows of one of them, in float32 registers: sums
over rows are mostly within a thread, with two exchanges, and take no tensor core. What the next chunks need is on its
way into shared memory; W and Y are turned over there, so that a thread reads four rows of a column at once.

Sizes are compiled in. Decays come one chunk ahead.
"""

from holdfast.kernels.common.gluon import async_copy, copy_to_shared, gl, gluon, reinterpret

from .triton_states import span

_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def copy_line(line, source, live):
    """Starts the copy of consecutive elements."""
    EACH: gl.constexpr = 128 // line.dtype.primitive_bitwidth
    i = gl.arange(0, line.shape[0], gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0]))
    copy_to_shared(line, source + i, mask=(i >= 0) & live)


@gluon.jit
def copy_columns(tile, source, values: gl.constexpr, first, live):
    """Starts the copy of some columns of a matrix."""
    EACH: gl.constexpr = 128 // tile.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = tile.shape[1] // EACH
    layout: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    k = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    v = first + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    here = (k >= 0)[:, None] & (v < values)[None, :] & live
    copy_to_shared(tile, source + (k[:, None] * values + v[None, :]), mask=here)


@gluon.jit
def copy_chunk(tiles, sources, place, slot, keys: gl.constexpr, values: gl.constexpr, RANK: gl.constexpr, first, live):
    """Starts the copies of what the chunk and head `place` adds and erases, as one group."""
    states, W, Y = sources
    copy_columns(tiles[0].index(slot), states + place * (keys * values), values, first, live)
    copy_line(tiles[1].index(slot), W + place * (keys * RANK), live)
    copy_line(tiles[2].index(slot), Y + place * (keys * RANK), live)
    async_copy.commit_group()


@gluon.jit
def turn_over(line, columns, keys: gl.constexpr, RANK: gl.constexpr):
    """A factor [keys, RANK] as it lies in memory -> its columns [RANK, keys] in float32."""
    rows: gl.constexpr = gl.BlockedLayout([1, RANK], [32, 1], [gl.num_warps(), 1], [1, 0])
    factor = reinterpret(line, line.dtype, [keys, RANK], _PLAIN)
    columns.permute((1, 0)).store(factor.load(rows).to(gl.float32))


@gluon.jit
def load_decay(decay, place, k, live, keys: gl.constexpr, SCALAR: gl.constexpr):
    """The log decay of the chunk and head `place`, one or one a row."""
    if SCALAR:
        return gl.load(decay + place, mask=live, other=0.0).to(gl.float32)
    else:
        return gl.load(decay + place * keys + k, mask=(k >= 0) & live, other=0.0).to(gl.float32)


@gluon.jit(do_not_specialize=["chunks", "heads"])
def low_rank_forward(
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
    """States o [B, G, H, K, V] after each chunk and the last of each sequence in final [N, H, K, V]."""
    layout: gl.constexpr = gl.BlockedLayout([keys // 4, 1], [4, 8], [1, gl.num_warps()], [1, 0])
    size: gl.constexpr = keys * values
    tile, head, sequence, start, stop = span(bounds, chunks, heads, gl.cdiv(values, BLOCK_V))
    first = tile * BLOCK_V
    k = gl.arange(0, keys, gl.SliceLayout(1, layout))
    v = first + gl.arange(0, BLOCK_V, gl.SliceLayout(0, layout))
    here = (k >= 0)[:, None] & (v < values)[None, :]
    element = k[:, None] * values + v[None, :]
    own = (sequence * heads + head) * size + element
    h = gl.zeros([keys, BLOCK_V], gl.float32, layout)
    if initial is not None:
        h = gl.load(initial + own, mask=here, other=0.0)
    additions = gl.allocate_shared_memory(states.dtype.element_ty, [STAGES, keys, BLOCK_V], _PLAIN)
    lefts = gl.allocate_shared_memory(W.dtype.element_ty, [STAGES, keys * RANK], _LINE)
    rights = gl.allocate_shared_memory(Y.dtype.element_ty, [STAGES, keys * RANK], _LINE)
    left = gl.allocate_shared_memory(gl.float32, [RANK, keys], _PLAIN)
    right = gl.allocate_shared_memory(gl.float32, [RANK, keys], _PLAIN)
    tiles, sources = (additions, lefts, rights), (states, W, Y)
    count = (stop - start).to(gl.int32)
    place = start * heads + head
    for stage in gl.static_range(STAGES - 1):
        copy_chunk(tiles, sources, place + stage * heads, stage, keys, values, RANK, first, stage < count)
    following = load_decay(decay, place, k, count > 0, keys, SCALAR)
    slot = 0
    for g in range(count):
        async_copy.wait_group(STAGES - 2)
        free = slot - 1 if slot > 0 else STAGES - 1
        later = place + (STAGES - 1) * heads
        copy_chunk(tiles, sources, later, free, keys, values, RANK, first, g + STAGES - 1 < count)
        scale = gl.exp(following)
        following = load_decay(decay, place + heads, k, g + 1 < count, keys, SCALAR)
        turn_over(rights.index(slot), right, keys, RANK)
        turn_over(lefts.index(slot), left, keys, RANK)
        reads = ()
        for i in gl.static_range(RANK):
            reads += (gl.sum(right.slice(i, 1).permute((1, 0)).load(layout) * h, 0),)
        for i in gl.static_range(RANK):
            h -= left.slice(i, 1).permute((1, 0)).load(layout) * reads[i][None, :]
        addition = additions.index(slot).load(layout).to(gl.float32)
        h = (scale if SCALAR else scale[:, None]) * h + addition
        gl.store(o + place * size + element, h.to(o.dtype.element_ty), mask=here)
        place += heads
        slot = slot + 1 if slot + 1 < STAGES else 0
    gl.store(final + own, h, mask=here)
