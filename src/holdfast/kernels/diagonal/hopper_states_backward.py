"""Device code of the gradients of the scan of states with a low rank on Hopper, in Gluon; see hopper_states.py.

Threads hold states as in the forward pass. Sums over rows are within threads but for two exchanges; sums over columns,
of which a warp has 8, meet in shared memory once a chunk.
"""

from holdfast.kernels.common.gluon import async_copy, gl, gluon

from .hopper_states import copy_columns, copy_line, load_decay, turn_over
from .triton_states import span

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
def within_warps(x):
    """Sums over the 8 columns of each warp: [rows, columns] -> [rows, warps]."""
    return gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), 2)


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
    """triton_states.backward."""
    layout: gl.constexpr = gl.BlockedLayout([keys // 4, 1], [4, 8], [1, gl.num_warps()], [1, 0])
    size: gl.constexpr = keys * values
    WARPS: gl.constexpr = BLOCK_V // 8
    stacked: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    tile, head, sequence, start, stop = span(bounds, chunks, heads, gl.cdiv(values, BLOCK_V))
    first = tile * BLOCK_V
    k = gl.arange(0, keys, gl.SliceLayout(1, layout))
    v = first + gl.arange(0, BLOCK_V, gl.SliceLayout(0, layout))
    here = (k >= 0)[:, None] & (v < values)[None, :]
    element = k[:, None] * values + v[None, :]
    own = (sequence * heads + head) * size + element
    row = gl.arange(0, keys, gl.SliceLayout(0, stacked))
    part = tile.to(gl.int64)
    carried = gl.zeros([keys, BLOCK_V], gl.float32, layout)
    if grad_final is not None:
        carried = gl.load(grad_final + own, mask=here, other=0.0)
    entry = gl.zeros([keys, BLOCK_V], gl.float32, layout)
    if initial is not None:
        entry = gl.load(initial + own, mask=here, other=0.0)
    befores = gl.allocate_shared_memory(gl.float32, [STAGES, keys, BLOCK_V], _PLAIN)
    if grad_o is not None:
        grads = gl.allocate_shared_memory(grad_o.dtype.element_ty, [STAGES, keys, BLOCK_V], _PLAIN)
    else:
        grads: gl.constexpr = None
    lefts = gl.allocate_shared_memory(W.dtype.element_ty, [STAGES, keys * RANK], _LINE)
    rights = gl.allocate_shared_memory(Y.dtype.element_ty, [STAGES, keys * RANK], _LINE)
    left = gl.allocate_shared_memory(gl.float32, [RANK, keys], _PLAIN)
    right = gl.allocate_shared_memory(gl.float32, [RANK, keys], _PLAIN)
    # of W, of Y, and of the decay's rows
    sums = gl.allocate_shared_memory(gl.float32, [2 * RANK + 1, WARPS, keys], _PLAIN)
    tiles, sources = (befores, grads, lefts, rights), (history, grad_o, W, Y)
    count = (stop - start).to(gl.int32)
    place = (stop - 1) * heads + head
    for stage in gl.static_range(STAGES - 1):
        live, earlier = stage < count, stage + 1 < count
        copy_back(tiles, sources, place - stage * heads, stage, heads, keys, values, RANK, first, live, earlier)
    following = load_decay(decay, place, k, count > 0, keys, SCALAR)
    slot = 0
    for turn in range(count):
        async_copy.wait_group(STAGES - 2)
        free = slot - 1 if slot > 0 else STAGES - 1
        live, earlier = turn + STAGES - 1 < count, turn + STAGES < count
        copy_back(tiles, sources, place - (STAGES - 1) * heads, free, heads, keys, values, RANK, first, live, earlier)
        scale = gl.exp(following)
        following = load_decay(decay, place - heads, k, turn + 1 < count, keys, SCALAR)
        turn_over(rights.index(slot), right, keys, RANK)
        turn_over(lefts.index(slot), left, keys, RANK)
        before = befores.index(slot).load(layout)
        before = gl.where(turn + 1 < count, before, entry)
        dh = carried
        if grad_o is not None:
            dh += grads.index(slot).load(layout).to(gl.float32)
        gl.store(grad_states + place * size + element, dh.to(grad_states.dtype.element_ty), mask=here)
        carried = (scale if SCALAR else scale[:, None]) * dh
        kept = before
        returned = gl.zeros([keys, BLOCK_V], gl.float32, layout)
        for i in gl.static_range(RANK):
            w = left.slice(i, 1).permute((1, 0)).load(layout)
            y = right.slice(i, 1).permute((1, 0)).load(layout)
            read = gl.sum(y * before, 0)
            written = gl.sum(w * carried, 0)
            kept -= w * read[None, :]
            returned += y * written[None, :]
            sums.index(2 * i).permute((1, 0)).store(within_warps(carried * read[None, :]))
            sums.index(2 * i + 1).permute((1, 0)).store(within_warps(before * written[None, :]))
        sums.index(2 * RANK).permute((1, 0)).store(within_warps(carried * kept))
        carried -= returned
        for i in gl.static_range(RANK):
            at = ((part * places + place) * keys + row) * RANK + i
            gl.store(grad_W + at, -gl.sum(sums.index(2 * i).load(stacked), 0))
            gl.store(grad_Y + at, -gl.sum(sums.index(2 * i + 1).load(stacked), 0))
        change = gl.sum(sums.index(2 * RANK).load(stacked), 0)
        if SCALAR:
            gl.store(grad_decay + part * places + place, gl.sum(change, 0))
        else:
            gl.store(grad_decay + (part * places + place) * keys + row, change)
        place -= heads
        slot = slot + 1 if slot + 1 < STAGES else 0
    gl.store(grad_initial + own, carried, mask=here)
