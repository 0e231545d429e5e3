"""Device code of the gradients of the scan of states with a low rank on Hopper, in Gluon; see forward.py.

Threads hold states as in the forward pass. Sums over rows are within threads but for three exchanges; those over
columns are within a thread, then over the threads of a row, which leave theirs in shared memory.
"""

from holdfast.kernels.chunk.inter.triton.states import span
from holdfast.kernels.lib.gluon.compat import async_copy, gl, gluon

from .forward import columns, copy_columns, copy_line, load_gains, store_columns, swizzled

_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def copy_back(
    tiles,
    sources,
    place,
    slot,
    heads,
    keys: gl.constexpr,
    values: gl.constexpr,
    RANK: gl.constexpr,
    first,
    live,
    earlier,
):
    """Starts the copies of what the chunk and head `place` needs, as one group: the state before it only if earlier."""
    history, grad_o, W, Y = sources
    size: gl.constexpr = keys * values
    copy_columns(tiles[0].index(slot), history + (place - heads) * size, values, first, live & earlier)
    if grad_o is not None:
        copy_columns(tiles[1].index(slot), grad_o + place * size, values, first, live)
    copy_line(tiles[2].index(slot), W + place * (keys * RANK), live)
    copy_line(tiles[3].index(slot), Y + place * (keys * RANK), live)
    async_copy.commit_group()


@gluon.jit
def partial(x, LANES: gl.constexpr):
    """Sums over a thread's own columns: [rows, columns] -> [rows, LANES]."""
    return gl.sum(gl.reshape(x, [x.shape[0], LANES, x.shape[1] // LANES]), 2)


@gluon.jit
def side_by_side(parts, rows: gl.constexpr, LANES: gl.constexpr):
    """1, 2 or 4 tensors [rows, LANES] -> [rows, LANES * number], the number fastest."""
    NUMBER: gl.constexpr = len(parts)
    if NUMBER == 1:
        return parts[0]
    elif NUMBER == 2:
        return gl.reshape(gl.join(parts[0], parts[1]), [rows, LANES * 2])
    else:
        even, odd = gl.join(parts[0], parts[2]), gl.join(parts[1], parts[3])
        return gl.reshape(gl.join(even, odd), [rows, LANES * 4])


@gluon.jit
def finish(
    sums, target, keys: gl.constexpr, RANK: gl.constexpr, first: gl.constexpr, WIDTH: gl.constexpr, flat: gl.constexpr
):
    """Adds what the threads of a row left in sums [keys, lanes * WIDTH], and writes it to WIDTH columns of target."""
    whole = gl.reshape(sums.load(flat), [keys, sums.shape[1] // WIDTH, WIDTH])
    total = gl.sum(whole, 1)
    narrow: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32, 1], [gl.num_warps(), 1], [1, 0])
    total = gl.convert_layout(total, narrow, assert_trivial=True)
    k = gl.arange(0, keys, gl.SliceLayout(1, narrow))
    i = first + gl.arange(0, WIDTH, gl.SliceLayout(0, narrow))
    gl.store(target + (k[:, None] * RANK + i[None, :]), -total)


@gluon.jit(do_not_specialize=["chunks", "heads", "places"])
def low_rank_backward(
    decay,
    W,
    Y,
    history,
    grad_o,
    initial,
    grad_final,
    grad_states,
    grad_decay,
    grad_W,
    grad_Y,
    grad_initial,
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
    """As `backward` of chunk/inter/triton/states.py."""
    LANES: gl.constexpr = 4 * gl.num_warps()
    WIDTH: gl.constexpr = min(RANK, 4)
    layout: gl.constexpr = gl.BlockedLayout([1, BLOCK_V // LANES], [8, 4], [1, gl.num_warps()], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, LANES * WIDTH], [32, 1], [gl.num_warps(), 1], [1, 0])
    PARTS: gl.constexpr = swizzled(gl.float32, LANES * WIDTH) if WIDTH == 4 else _PLAIN
    size: gl.constexpr = keys * values
    tile, head, sequence, start, stop = span(bounds, chunks, heads, gl.cdiv(values, BLOCK_V))
    first = tile * BLOCK_V
    k = gl.arange(0, keys, gl.SliceLayout(1, layout))
    v = first + gl.arange(0, BLOCK_V, gl.SliceLayout(0, layout))
    here = (k >= 0)[:, None] & (v < values)[None, :]
    element = k[:, None] * values + v[None, :]
    own = (sequence * heads + head) * size + element
    part = tile.to(gl.int64)
    carried = gl.zeros([keys, BLOCK_V], gl.float32, layout)
    if grad_final is not None:
        carried = gl.load(grad_final + own, mask=here, other=0.0)
    entry = gl.zeros([keys, BLOCK_V], gl.float32, layout)
    if initial is not None:
        entry = gl.load(initial + own, mask=here, other=0.0)
    kind: gl.constexpr = grad_states.dtype.element_ty
    result = gl.allocate_shared_memory(kind, [keys, BLOCK_V], swizzled(kind, BLOCK_V))
    befores = gl.allocate_shared_memory(gl.float32, [STAGES, keys, BLOCK_V], swizzled(gl.float32, BLOCK_V))
    if grad_o is not None:
        grads = gl.allocate_shared_memory(
            grad_o.dtype.element_ty, [STAGES, keys, BLOCK_V], swizzled(grad_o.dtype.element_ty, BLOCK_V)
        )
    else:
        grads: gl.constexpr = None
    lefts = gl.allocate_shared_memory(W.dtype.element_ty, [STAGES, keys * RANK], _LINE)
    rights = gl.allocate_shared_memory(Y.dtype.element_ty, [STAGES, keys * RANK], _LINE)
    sums_W = gl.allocate_shared_memory(gl.float32, [keys, LANES * WIDTH], PARTS)
    sums_Y = gl.allocate_shared_memory(gl.float32, [keys, LANES * WIDTH], PARTS)
    tiles, sources = (befores, grads, lefts, rights), (history, grad_o, W, Y)
    count = (stop - start).to(gl.int32)
    place = (stop - 1) * heads + head
    for stage in gl.static_range(STAGES):
        live, earlier = stage < count, stage + 1 < count
        copy_back(tiles, sources, place - stage * heads, stage, heads, keys, values, RANK, first, live, earlier)
    WINDOW: gl.constexpr = 64 if SCALAR else 16
    gains = gl.allocate_shared_memory(gl.float32, [WINDOW, 1 if SCALAR else keys], _LINE)
    slot = 0
    for turn in range(count):
        async_copy.wait_group(STAGES - 1)
        if turn % WINDOW == 0:
            load_gains(gains, decay, place, -heads, count - turn)
        before = befores.index(slot).load(layout)
        before = gl.where(turn + 1 < count, before, entry)
        dh = carried
        if grad_o is not None:
            dh += grads.index(slot).load(layout).to(gl.float32)
        result.store(dh.to(grad_states.dtype.element_ty))
        carried = gains.index(turn % WINDOW).load(gl.SliceLayout(1, layout))[:, None] * dh
        kept = before
        returned = gl.zeros([keys, BLOCK_V], gl.float32, layout)
        for j in gl.static_range(0, RANK, WIDTH):
            of_W, of_Y = (), ()
            right = columns(rights.index(slot), j, WIDTH, keys, RANK, layout)
            left = columns(lefts.index(slot), j, WIDTH, keys, RANK, layout)
            for i in gl.static_range(WIDTH):
                read = gl.sum(right[i] * before, 0)[None, :]
                written = gl.sum(left[i] * carried, 0)[None, :]
                kept -= left[i] * read
                returned += right[i] * written
                of_W += (partial(carried * read, LANES),)
                of_Y += (partial(before * written, LANES),)
            sums_W.store(side_by_side(of_W, keys, LANES))
            sums_Y.store(side_by_side(of_Y, keys, LANES))
            at = (part * places + place) * (keys * RANK)
            if j == 0:
                store_columns(result, grad_states + place * size, values, first)
            finish(sums_W, grad_W + at, keys, RANK, j, WIDTH, flat)
            finish(sums_Y, grad_Y + at, keys, RANK, j, WIDTH, flat)
        if SCALAR:
            gl.store(grad_decay + part * places + place, gl.sum(gl.sum(carried * kept, 0), 0))
        else:
            gl.store(grad_decay + (part * places + place) * keys + k, gl.sum(carried * kept, 1))
        carried -= returned
        live, earlier = turn + STAGES < count, turn + STAGES + 1 < count
        copy_back(tiles, sources, place - STAGES * heads, slot, heads, keys, values, RANK, first, live, earlier)
        place -= heads
        slot = slot + 1 if slot + 1 < STAGES else 0
    gl.store(grad_initial + own, carried, mask=here)
