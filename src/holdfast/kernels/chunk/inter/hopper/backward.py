"""Device code of the gradients of the scan of states with a low rank on Hopper, in Gluon; see forward.py.

Threads hold states as in the forward pass. Sums over rows are within threads but for three exchanges; those over
columns are within a thread, then over the threads of a row, which leave theirs in shared memory.
"""

from typing import NamedTuple

from holdfast.kernels.chunk.inter.triton.states import sequence_bounds
from holdfast.kernels.lib.gluon.compat import async_copy, gl, gluon

from .forward import Shape, columns, copy_columns, copy_line, load_decays, store_columns, swizzled

_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


class Tiles(NamedTuple):
    """Stages in shared memory: the state before each chunk, do, which may be None, W and Y."""

    history: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor | None
    W: gl.shared_memory_descriptor
    Y: gl.shared_memory_descriptor


class Sources(NamedTuple):
    """Pointers of the same."""

    history: gl.tensor
    do: gl.tensor | None
    W: gl.tensor
    Y: gl.tensor


class Live(NamedTuple):
    """Whether a chunk exists, and one before it in its sequence."""

    chunk: gl.tensor
    before: gl.tensor


@gluon.jit
def copy_chunk_backward(tiles, sources, place, slot, heads, shape, first, live):
    """Start the copies of what the chunk and head `place` needs, as one group; the state before it only if live.before.

    first: the first column.
    """
    size: gl.constexpr = shape.keys * shape.values
    before = tiles.history.index(slot)
    copy_columns(before, sources.history + (place - heads) * size, shape.values, first, live.chunk & live.before)
    if sources.do is not None:
        copy_columns(tiles.do.index(slot), sources.do + place * size, shape.values, first, live.chunk)
    copy_line(tiles.W.index(slot), sources.W + place * (shape.keys * shape.RANK), live.chunk)
    copy_line(tiles.Y.index(slot), sources.Y + place * (shape.keys * shape.RANK), live.chunk)
    async_copy.commit_group()


@gluon.jit
def sum_own_columns(x, LANES: gl.constexpr):
    """Sum over each thread's own columns: [rows, columns] to [rows, LANES]."""
    return gl.sum(gl.reshape(x, [x.shape[0], LANES, x.shape[1] // LANES]), 2)


@gluon.jit
def interleave(parts, rows: gl.constexpr, LANES: gl.constexpr):
    """Interleave 1, 2 or 4 tensors [rows, LANES] to [rows, LANES * number], the number fastest."""
    NUMBER: gl.constexpr = len(parts)
    if NUMBER == 1:
        return parts[0]
    elif NUMBER == 2:
        return gl.reshape(gl.join(parts[0], parts[1]), [rows, LANES * 2])
    else:
        even, odd = gl.join(parts[0], parts[2]), gl.join(parts[1], parts[3])
        return gl.reshape(gl.join(even, odd), [rows, LANES * 4])


@gluon.jit
def store_row_sums(
    sums, target, keys: gl.constexpr, RANK: gl.constexpr, first: gl.constexpr, WIDTH: gl.constexpr, flat: gl.constexpr
):
    """Add what the threads of a row have stored in sums [keys, lanes * WIDTH], and store it, negated, in target.

    target: [keys, RANK], of which WIDTH columns from `first` on are written.
    """
    whole = gl.reshape(sums.load(flat), [keys, sums.shape[1] // WIDTH, WIDTH])
    total = gl.sum(whole, 1)
    narrow: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32, 1], [gl.num_warps(), 1], [1, 0])
    total = gl.convert_layout(total, narrow, assert_trivial=True)
    k = gl.arange(0, keys, gl.SliceLayout(1, narrow))
    i = first + gl.arange(0, WIDTH, gl.SliceLayout(0, narrow))
    gl.store(target + (k[:, None] * RANK + i[None, :]), -total)


@gluon.jit(do_not_specialize=["chunks", "heads", "places"])
def inter_chunk_low_rank_bwd_async(
    decay,
    W,
    Y,
    history,
    do,
    initial,
    dfinal,
    dstates,
    ddecay,
    dW,
    dY,
    dinitial,
    bounds,
    chunks,
    heads,
    keys: gl.constexpr,
    values: gl.constexpr,
    places,
    SCALAR: gl.constexpr,
    RANK: gl.constexpr,
    BLOCK_V: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Do what `inter_chunk_bwd` of chunk/inter/triton/states.py does. Grid (ceil(V / BLOCK_V) * H * N,)."""
    LANES: gl.constexpr = 4 * gl.num_warps()
    WIDTH: gl.constexpr = min(RANK, 4)
    layout: gl.constexpr = gl.BlockedLayout([1, BLOCK_V // LANES], [8, 4], [1, gl.num_warps()], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, LANES * WIDTH], [32, 1], [gl.num_warps(), 1], [1, 0])
    PARTS: gl.constexpr = swizzled(gl.float32, LANES * WIDTH) if WIDTH == 4 else _PLAIN
    size: gl.constexpr = keys * values
    tile, head, sequence, start, stop = sequence_bounds(bounds, chunks, heads, gl.cdiv(values, BLOCK_V))
    first = tile * BLOCK_V
    k = gl.arange(0, keys, gl.SliceLayout(1, layout))
    v = first + gl.arange(0, BLOCK_V, gl.SliceLayout(0, layout))
    here = (k >= 0)[:, None] & (v < values)[None, :]
    element = k[:, None] * values + v[None, :]
    own = (sequence * heads + head) * size + element
    part = tile.to(gl.int64)
    carried = gl.zeros([keys, BLOCK_V], gl.float32, layout)
    if dfinal is not None:
        carried = gl.load(dfinal + own, mask=here, other=0.0)
    entry = gl.zeros([keys, BLOCK_V], gl.float32, layout)
    if initial is not None:
        entry = gl.load(initial + own, mask=here, other=0.0)
    kind: gl.constexpr = dstates.dtype.element_ty
    result = gl.allocate_shared_memory(kind, [keys, BLOCK_V], swizzled(kind, BLOCK_V))
    befores = gl.allocate_shared_memory(gl.float32, [STAGES, keys, BLOCK_V], swizzled(gl.float32, BLOCK_V))
    if do is not None:
        grads = gl.allocate_shared_memory(
            do.dtype.element_ty, [STAGES, keys, BLOCK_V], swizzled(do.dtype.element_ty, BLOCK_V)
        )
    else:
        grads: gl.constexpr = None
    W_tiles = gl.allocate_shared_memory(W.dtype.element_ty, [STAGES, keys * RANK], _LINE)
    Y_tiles = gl.allocate_shared_memory(Y.dtype.element_ty, [STAGES, keys * RANK], _LINE)
    sums_W = gl.allocate_shared_memory(gl.float32, [keys, LANES * WIDTH], PARTS)
    sums_Y = gl.allocate_shared_memory(gl.float32, [keys, LANES * WIDTH], PARTS)
    tiles = Tiles(history=befores, do=grads, W=W_tiles, Y=Y_tiles)
    sources = Sources(history=history, do=do, W=W, Y=Y)
    shape = Shape(keys, values, RANK)
    count = (stop - start).to(gl.int32)
    place = (stop - 1) * heads + head
    for stage in gl.static_range(STAGES):
        live = Live(chunk=stage < count, before=stage + 1 < count)
        copy_chunk_backward(tiles, sources, place - stage * heads, stage, heads, shape, first, live)
    WINDOW: gl.constexpr = 64 if SCALAR else 16
    decays = gl.allocate_shared_memory(gl.float32, [WINDOW, 1 if SCALAR else keys], _LINE)
    slot = 0
    for iteration in range(count):
        async_copy.wait_group(STAGES - 1)
        if iteration % WINDOW == 0:
            load_decays(decays, decay, place, -heads, count - iteration)
        before = befores.index(slot).load(layout)
        before = gl.where(iteration + 1 < count, before, entry)
        dh = carried
        if do is not None:
            dh += grads.index(slot).load(layout).to(gl.float32)
        result.store(dh.to(dstates.dtype.element_ty))
        carried = decays.index(iteration % WINDOW).load(gl.SliceLayout(1, layout))[:, None] * dh
        projected = before
        returned = gl.zeros([keys, BLOCK_V], gl.float32, layout)
        for j in gl.static_range(0, RANK, WIDTH):
            of_W, of_Y = (), ()
            y = columns(Y_tiles.index(slot), j, WIDTH, keys, RANK, layout)
            w = columns(W_tiles.index(slot), j, WIDTH, keys, RANK, layout)
            for i in gl.static_range(WIDTH):
                read = gl.sum(y[i] * before, 0)[None, :]
                written = gl.sum(w[i] * carried, 0)[None, :]
                projected -= w[i] * read
                returned += y[i] * written
                of_W += (sum_own_columns(carried * read, LANES),)
                of_Y += (sum_own_columns(before * written, LANES),)
            sums_W.store(interleave(of_W, keys, LANES))
            sums_Y.store(interleave(of_Y, keys, LANES))
            at = (part * places + place) * (keys * RANK)
            if j == 0:
                store_columns(result, dstates + place * size, values, first)
            store_row_sums(sums_W, dW + at, keys, RANK, j, WIDTH, flat)
            store_row_sums(sums_Y, dY + at, keys, RANK, j, WIDTH, flat)
        if SCALAR:
            gl.store(ddecay + part * places + place, gl.sum(gl.sum(carried * projected, 0), 0))
        else:
            gl.store(ddecay + (part * places + place) * keys + k, gl.sum(carried * projected, 1))
        carried -= returned
        live = Live(chunk=iteration + STAGES < count, before=iteration + STAGES + 1 < count)
        copy_chunk_backward(tiles, sources, place - STAGES * heads, slot, heads, shape, first, live)
        place -= heads
        slot = slot + 1 if slot + 1 < STAGES else 0
    gl.store(dinitial + own, carried, mask=here)
