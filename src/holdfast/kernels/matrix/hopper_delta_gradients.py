"""The delta rule's gradients of q, k, v, g and beta on Hopper, all chunks side by side.

What hopper_delta_states.py and hopper_delta_reverse.py kept of a chunk leaves nothing to be solved in it: with S the
state that enters, dS' the gradient of the one that leaves, what the tokens wrote U, and Yb, Y times beta,
    F = scale causal(D * dO U^T);  E = - strictly lower(D * Yb U^T);
    dQ = scale exp(G) (dO S^T) + F K;  dK = (e U) dS'^T - exp(G) (Yb S^T) + F^T Q + (E + E^T) K;  dV = Yb.
See docs/delta-rule.md. Two blocks share a multiprocessor, so that one's copies run while the other multiplies: each has
room for S or dS', not both, and F and E take the place of tiles of dO and Yb.
"""

# ruff: noqa: RUF005 - Gluon does not compile starred expressions
from holdfast.kernels.common.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_delta_reverse import WEAK
from .hopper_gates import CHUNK, add, load_gates, of_head

_HALF = gl.constexpr(64)
# below this log decay, to base 2, the decay is 0 in float32, and so is its gradient
_LOG_ZERO = gl.constexpr(-149.9)


@gluon.jit
def _matrix(tile):
    return tile.reshape([tile.shape[1], tile.shape[3]])


@gluon.jit
def _turned(tile):
    return _matrix(tile).permute((1, 0))


@gluon.jit
def _load_state(tiles, low_desc, high_desc, batch, row, head, loaded, HALVES: gl.constexpr):
    """Copies a chunk's state, or its gradient, into tiles of 64 of v's columns."""
    mbarrier.expect(loaded, HALVES * low_desc.block_type.nbytes)
    tma_load(low_desc, [batch, row, head, 0], loaded, tiles[0])
    if HALVES == 2:
        tma_load(high_desc, [batch, row, head, 0], loaded, tiles[1])


@gluon.jit
def _store(ptr, x, stride, rows, KEYS: gl.constexpr, layout: gl.constexpr):
    """Writes a chunk's rows in float32, one every `stride` elements."""
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    inside = (row < rows)[:, None] & (column < KEYS)[None, :]
    gl.store(ptr + (row[:, None] * stride + column[None, :]), x, mask=inside)


@gluon.jit
def _states(low_ptr, high_ptr, stride, KEYS: gl.constexpr, K: gl.constexpr, HALVES: gl.constexpr, layout: gl.constexpr):
    """A kept state's rows, 64 at a time, in registers."""
    rows = gl.arange(0, _HALF, gl.SliceLayout(1, layout))
    keys = gl.arange(0, K, gl.SliceLayout(0, layout))
    at = rows[:, None] * stride + keys[None, :]
    if KEYS == K:
        found = (gl.load(low_ptr + at),)
        if HALVES == 2:
            found = found + (gl.load(high_ptr + at),)
    else:
        found = (gl.load(low_ptr + at, mask=(keys < KEYS)[None, :], other=0.0),)
        if HALVES == 2:
            found = found + (gl.load(high_ptr + at, mask=(keys < KEYS)[None, :], other=0.0),)
    return found


@gluon.jit
def _product(tiles, others, layout: gl.constexpr):
    """Sums over rows of the product of tiles and what is in registers, added."""
    total = gl.sum(_matrix(tiles[0]).load(layout).to(gl.float32) * others[0].to(gl.float32), 1)
    halves: gl.constexpr = len(others)
    if halves == 2:
        total += gl.sum(_matrix(tiles[1]).load(layout).to(gl.float32) * others[1].to(gl.float32), 1)
    return total


@gluon.jit
def _weigh(tiles, ptr, stride, rows, weights, VALUES: gl.constexpr, layout: gl.constexpr):
    """Writes the first rows of tiles of 64 columns, weighed, one every `stride` elements."""
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    halves: gl.constexpr = len(tiles)
    for half in gl.static_range(halves):
        columns = half * _HALF + gl.arange(0, _HALF, gl.SliceLayout(0, layout))
        x = _matrix(tiles[half]).load(layout)
        x = (x.to(gl.float32) * weights[:, None]).to(x.dtype)
        inside = (row < rows)[:, None] & (columns < VALUES)[None, :]
        gl.store(ptr + (row[:, None] * stride + columns[None, :]), x, mask=inside)


@gluon.jit
def _read(tiles, v_ptr, rows, live, VALUES: gl.constexpr, layout: gl.constexpr):
    """Y . V of the tokens that are live."""
    halves: gl.constexpr = len(tiles)
    total = gl.zeros([CHUNK], gl.float32, gl.SliceLayout(1, layout))
    for half in gl.static_range(halves):
        columns = half * _HALF + gl.arange(0, _HALF, gl.SliceLayout(0, layout))
        y = _matrix(tiles[half]).load(layout).to(gl.float32)
        inside = live[:, None] & (columns < VALUES)[None, :]
        v = gl.load(v_ptr + (rows[:, None] + columns[None, :]), mask=inside, other=0.0)
        total += gl.sum(y * v.to(gl.float32), 1)
    return total


@gluon.jit(
    do_not_specialize=[
        "T",
        "H",
        "qk_group",
        "g_b",
        "g_t",
        "g_h",
        "beta_b",
        "beta_t",
        "beta_h",
        "chunk0",
        "v_b",
        "v_t",
        "v_h",
        "window",
    ],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "dg_ptr", "dbeta_ptr"],
)
def delta_gradients(
    q_desc,
    k_desc,
    do_desc,
    u_desc,
    y_desc,
    low_desc,
    high_desc,
    after_low_desc,
    after_high_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    g_ptr,
    beta_ptr,
    v_ptr,
    after_low_ptr,
    after_high_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dg_ptr,
    dbeta_ptr,
    T,
    H,
    qk_group,
    g_b,
    g_t,
    g_h,
    beta_b,
    beta_t,
    beta_h,
    v_b,
    v_t,
    v_h,
    window,
    chunk0,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    HALVES: gl.constexpr,
):
    """Grid (B * H, chunks of a part of the sequence from chunk0 on).

    q, k: [B, T, H / qk_group, KEYS], dq, dk: [B, T, H, KEYS], do, u: [B, T, H, VALUES] by descriptors of blocks
    [1, 64, 1, columns], of do, u and y 64; dq and dk as contiguous float32 where the descriptors are None. low, high,
    after_low, after_high: S and dS' as they were kept, of the sequence and of its part; y: Yb of the part. v, dv:
    [B, T, H, VALUES], v's strides in units of 8, dv contiguous. dg, dbeta: [B, T, H], float32, or None.
    A chunk's rows of dv may be where its U is, and those of dq and dk where S is.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    warps: gl.constexpr = gl.num_warps()
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, CHUNK * 4 // warps, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, K * 4 // warps, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
    vector: gl.constexpr = gl.BlockedLayout([2], [32], [warps], [0])
    p_row: gl.constexpr = gl.SliceLayout(1, p_layout)
    k_row: gl.constexpr = gl.SliceLayout(1, k_layout)
    wide_row: gl.constexpr = gl.SliceLayout(1, wide)

    # apart from one another: a tile's copy need not wait for its neighbour's
    do_tiles = ()
    u_tiles = ()
    y_tiles = ()
    s_tiles = ()
    for _ in gl.static_range(HALVES):
        do_tiles = do_tiles + (gl.allocate_shared_memory(dtype, [1, CHUNK, 1, _HALF], do_desc.layout),)
        u_tiles = u_tiles + (gl.allocate_shared_memory(dtype, [1, CHUNK, 1, _HALF], u_desc.layout),)
        y_tiles = y_tiles + (gl.allocate_shared_memory(dtype, [1, CHUNK, 1, _HALF], y_desc.layout),)
        s_tiles = s_tiles + (gl.allocate_shared_memory(dtype, [1, _HALF, 1, K], low_desc.layout),)
    q_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, K], q_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, K], k_desc.layout)
    totals = gl.allocate_shared_memory(gl.float32, [CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    restored = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    mbarrier.init(restored, count=1)
    fence_async_shared()
    barrier()

    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    part = gl.program_id(1)
    token = (chunk0 + part) * CHUNK
    mbarrier.expect(loaded, 3 * HALVES * do_desc.block_type.nbytes + 2 * k_desc.block_type.nbytes)
    for half in gl.static_range(HALVES):
        tma_load(do_desc, [batch, token, head, half * _HALF], loaded, do_tiles[half])
        tma_load(u_desc, [batch, token, head, half * _HALF], loaded, u_tiles[half])
        tma_load(y_desc, [batch, part * CHUNK, head, half * _HALF], loaded, y_tiles[half])
    tma_load(q_desc, [batch, token, head // qk_group, 0], loaded, q_tile)
    tma_load(k_desc, [batch, token, head // qk_group, 0], loaded, k_tile)
    _load_state(s_tiles, low_desc, high_desc, batch, token, head, restored, HALVES)

    if g_ptr is not None:
        g_ptr += of_head(H, g_b, g_h)
    if beta_ptr is not None:
        beta_ptr += of_head(H, beta_b, beta_h)
    g, beta = load_gates(g_ptr, beta_ptr, g_t, beta_t, chunk0 + part, True, T)
    has_weak = gl.sum(gl.where((beta <= WEAK) & (beta >= -WEAK), 1, 0), 0) > 0
    totals.store(gl.associative_scan(g, 0, add))
    strength = gl.convert_layout(beta, p_row)
    is_weak = (strength <= WEAK) & (strength >= -WEAK)
    factor = gl.where(is_weak, strength, 1.0)

    # of a log decay: what crosses all of the chunk
    through = 0.0
    if dg_ptr is not None:
        after = ((batch.to(gl.int64) * window + part) * CHUNK * H + head) * KEYS
        ds = _states(after_low_ptr + after, after_high_ptr + after, H * KEYS, KEYS, K, HALVES, wide)
        mbarrier.wait(restored, 0)
        through += gl.sum(_product(s_tiles, ds, wide), 0)
    mbarrier.wait(loaded, 0)
    # dV is Yb, but where beta is weak
    dbeta = gl.zeros([CHUNK], gl.float32, p_row)
    if has_weak:
        rows = gl.arange(0, CHUNK, wide_row)
        dv_ptr += ((batch.to(gl.int64) * T + token) * H + head) * VALUES
        _weigh(y_tiles, dv_ptr, H * VALUES, T - token, gl.convert_layout(factor, wide_row), VALUES, wide)
        v_ptr += (batch.to(gl.int64) * v_b + token.to(gl.int64) * v_t + head.to(gl.int64) * v_h) * 8
        asks = (gl.convert_layout(is_weak.to(gl.int32), wide_row) == 1) & (token + rows < T)
        dbeta = gl.convert_layout(_read(y_tiles, v_ptr, rows.to(gl.int64) * v_t * 8, asks, VALUES, wide), p_row)
    else:
        for half in gl.static_range(HALVES):
            tma_store(dv_desc, [batch, token, head, half * _HALF], y_tiles[half])
    dp = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
    z = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
    qk = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
    kk = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
    for half in gl.static_range(HALVES):
        dp = warpgroup_mma(_matrix(do_tiles[half]), _turned(u_tiles[half]), dp, is_async=True)
        z = warpgroup_mma(_matrix(y_tiles[half]), _turned(u_tiles[half]), z, is_async=True)
    qk = warpgroup_mma(_matrix(q_tile), _turned(k_tile), qk, use_acc=False, is_async=True)
    kk = warpgroup_mma(_matrix(k_tile), _turned(k_tile), kk, use_acc=False, is_async=True)
    row = gl.arange(0, CHUNK, p_row)[:, None]
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, p_layout))[None, :]
    log = totals.load(p_row)[:, None] - totals.load(gl.SliceLayout(0, p_layout))[None, :]
    between = gl.exp2(gl.where(row >= column, log, float("-inf")))
    dp, z, qk, kk = warpgroup_mma_wait(0, deps=(dp, z, qk, kk))
    # Yb is Y itself where beta is weak
    own = gl.where(is_weak, 0.0, 1.0 / gl.where(is_weak, 1.0, strength * strength))
    itself = gl.where(row == column, z, 0.0) * own[:, None]
    z = gl.where(row == column, 0.0, z * between)
    seen = z * kk
    dbeta += gl.sum(itself - gl.where(is_weak, 1.0, 0.0)[:, None] * seen, 1)
    dp = dp * between * scale
    pairs = gl.where(row == column, 0.0, dp * qk) - seen * factor[:, None]
    dg = gl.sum(pairs, 1)
    # half the columns at a time: little shared memory is left for sums across warps
    first, second = gl.split(gl.permute(gl.reshape(pairs, [CHUNK, 4, 2, 8]), (0, 1, 3, 2)))
    earlier = gl.reshape(gl.permute(gl.join(gl.sum(first, 0), gl.sum(second, 0)), (0, 2, 1)), [CHUNK])
    f = dp.to(dtype)
    e = (z * -factor[:, None]).to(dtype)

    if dg_ptr is None:
        mbarrier.wait(restored, 0)
    dq = gl.zeros([CHUNK, K], gl.float32, k_layout)
    dk = gl.zeros([CHUNK, K], gl.float32, k_layout)
    for half in gl.static_range(HALVES):
        dq = warpgroup_mma(_matrix(do_tiles[half]), _matrix(s_tiles[half]), dq, is_async=True)
        dk = warpgroup_mma(_matrix(y_tiles[half]), _matrix(s_tiles[half]), dk, is_async=True)
    dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
    # every warp has read S, dO and Yb
    tma_store_wait(0)
    fence_async_shared()
    barrier()
    _load_state(s_tiles, after_low_desc, after_high_desc, batch, part * CHUNK, head, restored, HALVES)
    f_tile = _matrix(do_tiles[0])
    e_tile = _matrix(y_tiles[0])
    f_tile.store(f)
    e_tile.store(e)
    here = totals.load(k_row)
    reads = gl.exp2(here)
    keep = reads * gl.convert_layout(factor, k_row)
    known = gl.sum(_matrix(k_tile).load(k_layout).to(gl.float32) * dk, 1)
    asked = gl.sum(_matrix(q_tile).load(k_layout).to(gl.float32) * dq, 1)
    dq = dq * (reads * scale)[:, None]
    dk = dk * (-keep)[:, None]
    dg += gl.convert_layout(asked * (reads * scale) - known * keep, p_row)
    if dbeta_ptr is not None:
        dbeta -= gl.where(is_weak, gl.convert_layout(known * reads, p_row), 0.0)
        tokens = token + gl.arange(0, CHUNK, p_row)
        gl.store(dbeta_ptr + (batch.to(gl.int64) * T + tokens) * H + head, dbeta, mask=tokens < T)
    fence_async_shared()
    barrier()
    dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
    dq = warpgroup_mma(f_tile, _matrix(k_tile), dq, is_async=True)
    dk = warpgroup_mma(f_tile.permute((1, 0)), _matrix(q_tile), dk, is_async=True)
    dk = warpgroup_mma(e_tile, _matrix(k_tile), dk, is_async=True)
    dk = warpgroup_mma(e_tile.permute((1, 0)), _matrix(k_tile), dk, is_async=True)
    dq, dk = warpgroup_mma_wait(0, deps=(dq, dk))
    base = ((batch.to(gl.int64) * T + token) * H + head) * KEYS
    if dq_desc is None:
        _store(dq_ptr + base, dq, H * KEYS, T - token, KEYS, k_layout)
    else:
        # every warp has read q
        barrier()
        _matrix(q_tile).store(dq.to(dtype))
    mbarrier.wait(restored, 1)
    write = gl.zeros([CHUNK, K], gl.float32, k_layout)
    for half in gl.static_range(HALVES):
        write = warpgroup_mma(_matrix(u_tiles[half]), _matrix(s_tiles[half]), write, is_async=True)
    last = totals.slice(CHUNK - 1, 1).load(k_row)
    to_end = gl.exp2(last - totals.load(k_row))
    write = warpgroup_mma_wait(0, deps=(write,))
    write = write * to_end[:, None]
    written = gl.sum(_matrix(k_tile).load(k_layout).to(gl.float32) * write, 1)
    dk = dk + write
    if dk_desc is None:
        _store(dk_ptr + base, dk, H * KEYS, T - token, KEYS, k_layout)
    else:
        # every warp has read k
        barrier()
        _matrix(k_tile).store(dk.to(dtype))

    if dg_ptr is not None:
        # of each token's decay: what reads past it, and what is written before it and reaches the end
        written = gl.convert_layout(written, vector)
        dg = gl.convert_layout(dg, vector) - gl.convert_layout(earlier, vector)
        dg = gl.associative_scan(dg, 0, add, reverse=True) + gl.associative_scan(written, 0, add) - written
        dg += through * gl.exp2(gl.sum(g, 0))
        tokens = token + gl.arange(0, CHUNK, vector)
        out = (batch.to(gl.int64) * T + tokens) * H + head
        gl.store(dg_ptr + out, gl.where(g < _LOG_ZERO, 0.0, dg), mask=tokens < T)
    # last: the compiler takes a tile for its own after its last use, though the copy out of it may still run
    if dq_desc is not None:
        fence_async_shared()
        barrier()
        tma_store(dq_desc, [batch, token, head, 0], q_tile)
        tma_store(dk_desc, [batch, token, head, 0], k_tile)
        tma_store_wait(0)
