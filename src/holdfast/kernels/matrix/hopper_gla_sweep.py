"""One sweep over a sequence on Hopper: the additive recurrence with one decay a key channel, its state in registers.

    S = diag(exp(g_t)) S + k_t v_t^T;  o_t = scale S^T q_t.

A block owns a (batch, head) and walks over chunks of 64 tokens. One warp copies tiles in by TMA; four turn each chunk's
queries, keys and log decays into operands (hopper_gla_weigh.py), a chunk ahead of the eight that multiply. Products are
transposed, so that the state S^T is a wgmma accumulator that is rounded in registers to be the next one's operand:
    O^T = S^T Q^T + V^T P^T;  S^T = S^T decays + V^T K.
Backward in time, with do for v and queries and keys exchanged, the same is the gradient of the state, and that of v.
"""

from holdfast.kernels.common.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_gates import CHUNK
from .hopper_gla_weigh import HALF, weigh, weigh_keys

# chunks in flight: of what is weighed (one comes, one is weighed, one is multiplied), and of what is not
STAGES = gl.constexpr(3)
PAIR = gl.constexpr(2)


@gluon.jit(do_not_specialize=["T", "H", "qk_group", "v_group"])
def gla_sweep(
    k_desc,
    q_desc,
    g_desc,
    v_desc,
    o_desc,
    kept_desc,
    start_ptr,
    end_ptr,
    T,
    H,
    qk_group,
    v_group,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    REVERSE: gl.constexpr,
):
    """Grid (B * H,).

    q, k: [B, T, H / qk_group, KEYS], g: float32 [B, T, H, KEYS], v: [B, T, H / v_group, VALUES], o: [B, T, H, VALUES],
    by descriptors of blocks [1, 64, 1, columns], of g 64 columns; q and o both None where only states are wanted.
    kept: S as each chunk reads it, rounded, [B, 64 chunks, H, K V / 64] of blocks [1, 64, 1, 64], or None, K and V the
    widths of tiles. Its columns are [K / 64, V / 64, 64], and a row is that of one of each 64 values.
    start, end: S before and after the sweep, float32 [B, H, KEYS, VALUES], or None.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    g_tiles = gl.allocate_shared_memory(gl.float32, [PAIR * (K // HALF), 1, CHUNK, 1, HALF], g_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [PAIR, 1, CHUNK, 1, V], v_desc.layout)
    if q_desc is None:
        q_tiles: gl.constexpr = None
        p_tile: gl.constexpr = None
    else:
        q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
        p_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    if q_desc is None or kept_desc is not None:
        o_tile: gl.constexpr = None
    else:
        o_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, V], o_desc.layout)
    if kept_desc is None:
        kept_tiles: gl.constexpr = None
    else:
        # of both halves of the columns only where there is room
        places: gl.constexpr = K // HALF if q_desc is None else 1
        kept_tiles = gl.allocate_shared_memory(dtype, [places, V, HALF], gl.NVMMASharedLayout(128, 16, 2))
    totals = gl.allocate_shared_memory(gl.float32, [K // 64, 4, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    qk_loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    g_loaded = gl.allocate_shared_memory(gl.int64, [PAIR, 1], mbarrier.MBarrierLayout())
    v_loaded = gl.allocate_shared_memory(gl.int64, [PAIR, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    qk_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    g_free = gl.allocate_shared_memory(gl.int64, [PAIR, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [PAIR, 1], mbarrier.MBarrierLayout())
    p_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(p_free, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(qk_loaded.index(i), count=1)
        mbarrier.init(qk_free.index(i), count=1)
        mbarrier.init(weighed.index(i), count=1)
    for i in gl.static_range(PAIR):
        mbarrier.init(g_loaded.index(i), count=1)
        mbarrier.init(v_loaded.index(i), count=1)
        mbarrier.init(g_free.index(i), count=1)
        mbarrier.init(v_free.index(i), count=1)
    fence_async_shared()

    tiles = (q_tiles, k_tiles, g_tiles, v_tiles)
    sources = (q_desc, k_desc, g_desc, v_desc)
    loaded = (qk_loaded, g_loaded, v_loaded, weighed)
    free = (qk_free, g_free, v_free, p_free)
    count = gl.cdiv(T, CHUNK)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    tiles,
                    p_tile,
                    decays,
                    loaded,
                    free,
                    o_tile,
                    kept_tiles,
                    o_desc,
                    kept_desc,
                    start_ptr,
                    end_ptr,
                    H,
                    count,
                    KEYS,
                    VALUES,
                    REVERSE,
                ),
            ),
            (_weigh, (tiles, p_tile, totals, decays, loaded, free, scale, count)),
            (_copy, (tiles, sources, loaded, free, H, qk_group, v_group, count, REVERSE)),
        ],
        [4, 1],
        [160, 24],
    )


@gluon.jit
def _copy(tiles, sources, loaded, free, H, qk_group, v_group, count, REVERSE: gl.constexpr):
    """Keeps the next chunks on their way into shared memory."""
    q_tiles, k_tiles, g_tiles, v_tiles = tiles
    q_desc, k_desc, g_desc, v_desc = sources
    qk_loaded, g_loaded, v_loaded, _ = loaded
    qk_free, g_free, v_free, _ = free
    halves: gl.constexpr = k_desc.block_type.shape[3] // HALF
    width: gl.constexpr = k_desc.block_type.nbytes * (1 if q_desc is None else 2)
    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    stage = 0
    phase = 1
    for i in range(count):
        if REVERSE:
            token = (count - 1 - i) * CHUNK
        else:
            token = i * CHUNK
        mbarrier.wait(qk_free.index(stage), phase)
        mbarrier.expect(qk_loaded.index(stage), width)
        if q_desc is not None:
            tma_load(q_desc, [batch, token, head // qk_group, 0], qk_loaded.index(stage), q_tiles.index(stage))
        tma_load(k_desc, [batch, token, head // qk_group, 0], qk_loaded.index(stage), k_tiles.index(stage))
        turn = i % PAIR
        before = (i // PAIR) % 2 ^ 1
        mbarrier.wait(g_free.index(turn), before)
        mbarrier.expect(g_loaded.index(turn), halves * g_desc.block_type.nbytes)
        for half in gl.static_range(halves):
            tile = g_tiles.index(turn * halves + half)
            tma_load(g_desc, [batch, token, head, half * HALF], g_loaded.index(turn), tile)
        if i > 0:
            _copy_values(v_desc, v_tiles, v_loaded, v_free, batch, head // v_group, i - 1, count, REVERSE)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if count > 0:
        _copy_values(v_desc, v_tiles, v_loaded, v_free, batch, head // v_group, count - 1, count, REVERSE)


@gluon.jit
def _copy_values(v_desc, v_tiles, loaded, free, batch, head, i, count, REVERSE: gl.constexpr):
    """A chunk later than the rest, which is weighed before: their place is the last that becomes free."""
    if REVERSE:
        token = (count - 1 - i) * CHUNK
    else:
        token = i * CHUNK
    turn = i % PAIR
    mbarrier.wait(free.index(turn), (i // PAIR) % 2 ^ 1)
    mbarrier.expect(loaded.index(turn), v_desc.block_type.nbytes)
    tma_load(v_desc, [batch, token, head, 0], loaded.index(turn), v_tiles.index(turn))


@gluon.jit
def _weigh(tiles, p_tile, totals, decays, loaded, free, scale, count):
    """Turns each chunk that has come into operands."""
    q_tiles, k_tiles, g_tiles, _ = tiles
    qk_loaded, g_loaded, _, weighed = loaded
    _, g_free, _, p_free = free
    K: gl.constexpr = k_tiles.shape[4]
    stage = 0
    phase = 0
    for i in range(count):
        turn = i % PAIR
        mbarrier.wait(qk_loaded.index(stage), phase)
        mbarrier.wait(g_loaded.index(turn), (i // PAIR) % 2)
        k = k_tiles.index(stage).reshape([CHUNK, K])
        if q_tiles is None:
            weigh_keys(k, g_tiles, turn, totals, decays.index(stage))
        else:
            q = q_tiles.index(stage).reshape([CHUNK, K])
            weigh(q, k, g_tiles, turn, totals, decays.index(stage), p_tile, p_free, i % 2 ^ 1, scale)
        mbarrier.arrive(weighed.index(stage), count=1)
        mbarrier.arrive(g_free.index(turn), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _keep(part, tiles, desc, place: gl.constexpr, batch, token, head, half: gl.constexpr):
    """Sends 64 columns of the rounded state [V, 64] to memory by way of a place in shared memory."""
    SLABS: gl.constexpr = part.shape[0] // HALF
    tile = tiles.index(place)
    tile.store(part)
    fence_async_shared()
    barrier()
    slabs = reinterpret(tile, part.dtype, [SLABS, 1, CHUNK, 1, HALF], desc.layout)
    for slab in gl.static_range(SLABS):
        tma_store(desc, [batch, token, head, (half * SLABS + slab) * HALF], slabs.index(slab))


@gluon.jit
def _multiply(
    tiles,
    p_tile,
    decays,
    loaded,
    free,
    o_tile,
    kept_tiles,
    o_desc,
    kept_desc,
    start_ptr,
    end_ptr,
    H,
    count,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    REVERSE: gl.constexpr,
):
    """The products of every chunk, and the state from the first to the last."""
    q_tiles, k_tiles, _, v_tiles = tiles
    _, _, v_loaded, weighed = loaded
    qk_free, _, v_free, p_free = free
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    warps: gl.constexpr = gl.num_warps()
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, K, 16])
    v_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    read_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)

    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    rows = gl.arange(0, V, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, K, gl.SliceLayout(0, s_layout))
    inside = (rows < VALUES)[:, None] & (columns < KEYS)[None, :]
    corner = gl.program_id(0).to(gl.int64) * (KEYS * VALUES)
    if start_ptr is None:
        state = gl.zeros([V, K], gl.float32, s_layout)
    else:
        state = gl.load(start_ptr + corner + columns[None, :] * VALUES + rows[:, None], mask=inside, other=0.0)

    stage = 0
    phase = 0
    for i in range(count):
        turn = i % PAIR
        if REVERSE:
            chunk = count - 1 - i
        else:
            chunk = i
        token = chunk * CHUNK
        rounded = state.to(dtype)
        if kept_desc is not None:
            # what was sent to memory has left its place
            tma_store_wait(0)
            barrier()
            if q_tiles is not None:
                mbarrier.arrive(v_free.index(turn ^ 1), count=1, pred=i > 0)
            if K == HALF:
                _keep(rounded, kept_tiles, kept_desc, 0, batch, token, head, 0)
            else:
                first, second = gl.split(gl.permute(gl.reshape(rounded, [V, 2, HALF]), (0, 2, 1)))
                _keep(first, kept_tiles, kept_desc, 0, batch, token, head, 0)
                if q_tiles is None:
                    _keep(second, kept_tiles, kept_desc, 1, batch, token, head, 1)
        if q_tiles is not None:
            held = gl.convert_layout(rounded, read_layout)
            # rounded here, while no product runs: the compiler would move it past the next one and then wait for each
            held = warpgroup_mma_wait(0, deps=(held,))
        mbarrier.wait(weighed.index(stage), phase)
        k = k_tiles.index(stage).reshape([CHUNK, K])
        if q_tiles is not None:
            q = q_tiles.index(stage).reshape([CHUNK, K])
            o = gl.zeros([V, CHUNK], gl.float32, o_layout)
            o = warpgroup_mma(held, (k if REVERSE else q).permute((1, 0)), o, use_acc=False, is_async=True)
        state = state * decays.index(stage).load(gl.SliceLayout(0, s_layout))[None, :]
        mbarrier.wait(v_loaded.index(turn), (i // PAIR) % 2)
        if q_tiles is not None:
            o, held = warpgroup_mma_wait(0, deps=(o, held))
            if kept_desc is not None and K > HALF:
                tma_store_wait(0)
                barrier()
                _keep(second, kept_tiles, kept_desc, 0, batch, token, head, 1)
        # loaded when the rounded state's registers are free
        v = v_tiles.index(turn)
        vt = v.reshape([CHUNK, V]).permute((1, 0)).load(v_layout)
        written = gl.convert_layout(vt, read_layout)
        if q_tiles is None:
            state, written = warpgroup_mma_wait(0, deps=(state, written))
            state = warpgroup_mma(written, k, state, is_async=True)
        else:
            o, state, vt = warpgroup_mma_wait(0, deps=(o, state, vt))
            o = warpgroup_mma(vt, p_tile if REVERSE else p_tile.permute((1, 0)), o, is_async=True)
            state = warpgroup_mma(gl.convert_layout(vt, read_layout), q if REVERSE else k, state, is_async=True)
            o = warpgroup_mma_wait(1, deps=(o,))
            if o_tile is None:
                # in the place of values that all have read
                barrier()
                v.reshape([CHUNK, V]).permute((1, 0)).store(o.to(dtype))
                fence_async_shared()
                barrier()
                tma_store(o_desc, [batch, token, head, 0], v)
            else:
                tma_store_wait(0)
                barrier()
                o_tile.reshape([CHUNK, V]).permute((1, 0)).store(o.to(dtype))
                fence_async_shared()
                barrier()
                tma_store(o_desc, [batch, token, head, 0], o_tile)
        state, written = warpgroup_mma_wait(0, deps=(state, written))
        barrier()
        mbarrier.arrive(qk_free.index(stage), count=1)
        if q_tiles is None or o_tile is not None:
            mbarrier.arrive(v_free.index(turn), count=1)
        if q_tiles is not None:
            mbarrier.arrive(p_free, count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    if end_ptr is not None:
        # addresses computed again: kept from the start, they would take as many registers as the state
        rows = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [rows], gl.int32, is_pure=False, pack=1)
        gl.store(end_ptr + corner + columns[None, :] * VALUES + rows[:, None], state, mask=inside)
    tma_store_wait(0)
