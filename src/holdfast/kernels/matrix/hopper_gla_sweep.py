"""One sweep over a sequence on Hopper: the additive recurrence with one decay a key channel, its state in registers.

    S = diag(exp(g_t)) S + k_t v_t^T;  o_t = scale S^T q_t.

A block owns a (batch, head) and walks over chunks of 64 tokens. Eight warps turn each chunk's queries, keys and log
decays into operands (hopper_gla_weigh.py), a chunk ahead of the eight that multiply. Who has read a tile has the chunk
that takes its place copied in by TMA. Products are transposed, so that the state S^T is a wgmma accumulator that is
rounded in registers to be the next one's operand:
    O^T = S^T Q^T + V^T P^T;  S^T = S^T decays + V^T K.
Backward in time, with do for v and queries and keys exchanged, the same is the gradient of the state, and that of v.
"""
# ruff: noqa: RUF005 - Gluon does not compile starred expressions

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
from .hopper_gla_tokens import HALF
from .hopper_gla_weigh import PARTS, fetch_decays, scores_of, weigh, weigh_keys

# chunks of queries and keys (one comes, one is weighed, one is multiplied), and of values
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
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    g_tiles = gl.allocate_shared_memory(gl.float32, [K // HALF, 1, CHUNK, 1, HALF], g_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [PAIR, 1, CHUNK, 1, V], v_desc.layout)
    met_tiles = ()
    if q_desc is None:
        q_tiles: gl.constexpr = None
        p_tile: gl.constexpr = None
    else:
        q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
        p_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], flat)
        # each by itself: between stores into parts of one the compiler has all warps wait for each other
        for _ in gl.static_range(2 * (K // HALF)):
            met_tiles = met_tiles + (gl.allocate_shared_memory(dtype, [CHUNK, HALF], flat),)
    if kept_desc is None:
        kept_tiles: gl.constexpr = None
    else:
        # of both halves of the columns only where there is room
        places: gl.constexpr = K // HALF if q_desc is None else 1
        kept_tiles = gl.allocate_shared_memory(dtype, [places, V, HALF], flat)
    totals = gl.allocate_shared_memory(gl.float32, [4, HALF], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    # with queries a chunk is weighed when the one before the last has been multiplied
    turns: gl.constexpr = STAGES if q_desc is None else PAIR
    decays = gl.allocate_shared_memory(gl.float32, [turns, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    qk_come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_come = gl.allocate_shared_memory(gl.int64, [PAIR, 1], mbarrier.MBarrierLayout())
    g_come = gl.allocate_shared_memory(gl.int64, [K // HALF, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    met_read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(p_read, count=1)
    mbarrier.init(met_read, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(qk_come.index(i), count=1)
        mbarrier.init(weighed.index(i), count=1)
    for i in gl.static_range(PAIR):
        mbarrier.init(v_come.index(i), count=1)
    for i in gl.static_range(K // HALF):
        mbarrier.init(g_come.index(i), count=1)
    fence_async_shared()
    barrier()

    # what those that multiply leave to those that weigh
    registers: gl.constexpr = 160 if V == HALF else 136 if K == HALF else 112
    count = gl.cdiv(T, CHUNK)
    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    keys = (q_desc, k_desc, q_tiles, k_tiles, qk_come, batch, head // qk_group, count)
    values = (v_desc, v_tiles, v_come, batch, head // v_group, count)
    for half in gl.static_range(K // HALF):
        fetch_decays(g_desc, g_tiles, g_come, half, (batch, _token(0, count, REVERSE), head, count > 0))
    for i in gl.static_range(STAGES):
        _fetch_keys(keys, i, i, REVERSE)
        if i < PAIR:
            _fetch_values(values, i, i, REVERSE)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    keys,
                    values,
                    met_tiles,
                    p_tile,
                    decays,
                    weighed,
                    met_read,
                    p_read,
                    kept_tiles,
                    o_desc,
                    kept_desc,
                    start_ptr,
                    end_ptr,
                    head,
                    scale,
                    KEYS,
                    VALUES,
                    REVERSE,
                ),
            ),
            (
                _weigh,
                (
                    q_tiles,
                    k_tiles,
                    g_tiles,
                    met_tiles,
                    p_tile,
                    totals,
                    decays,
                    qk_come,
                    g_come,
                    weighed,
                    met_read,
                    p_read,
                    g_desc,
                    H,
                    count,
                    scale,
                    REVERSE,
                ),
            ),
        ],
        [8],
        [registers],
    )


@gluon.jit
def _token(i, count, REVERSE: gl.constexpr):
    """The first token of the chunk that has turn i."""
    if REVERSE:
        return (count - 1 - i) * CHUNK
    else:
        return i * CHUNK


@gluon.jit
def _fetch_keys(keys, i, stage, REVERSE: gl.constexpr):
    """Has the queries and keys of turn i copied in, if there is one."""
    q_desc, k_desc, q_tiles, k_tiles, come, batch, head, count = keys
    width: gl.constexpr = k_desc.block_type.nbytes * (1 if q_desc is None else 2)
    token = _token(i, count, REVERSE)
    mbarrier.expect(come.index(stage), width, pred=i < count)
    if q_desc is not None:
        tma_load(q_desc, [batch, token, head, 0], come.index(stage), q_tiles.index(stage), pred=i < count)
    tma_load(k_desc, [batch, token, head, 0], come.index(stage), k_tiles.index(stage), pred=i < count)


@gluon.jit
def _fetch_values(values, i, turn, REVERSE: gl.constexpr):
    v_desc, v_tiles, come, batch, head, count = values
    token = _token(i, count, REVERSE)
    mbarrier.expect(come.index(turn), v_desc.block_type.nbytes, pred=i < count)
    tma_load(v_desc, [batch, token, head, 0], come.index(turn), v_tiles.index(turn), pred=i < count)


@gluon.jit
def _weigh(
    q_tiles,
    k_tiles,
    g_tiles,
    met_tiles,
    p_tile,
    totals,
    decays,
    qk_come,
    g_come,
    weighed,
    met_read,
    p_read,
    g_desc,
    H,
    count,
    scale,
    REVERSE: gl.constexpr,
):
    """Turns each chunk that has come into operands."""
    K: gl.constexpr = k_tiles.shape[4]
    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    stage = 0
    phase = 0
    for i in range(count):
        following = (batch, _token(i + 1, count, REVERSE), head, i + 1 < count)
        decay = decays.index(i % decays.shape[0])
        mbarrier.wait(qk_come.index(stage), phase)
        k = k_tiles.index(stage).reshape([CHUNK, K])
        if q_tiles is None:
            weigh_keys(k, g_tiles, g_come, i % 2, totals, decay, g_desc, following)
        else:
            q = q_tiles.index(stage).reshape([CHUNK, K])
            near = reinterpret(p_tile, gl.float32, [8, 16, 16], PARTS)
            read = (met_read, p_read)
            weigh(q, k, g_tiles, g_come, i % 2, met_tiles, near, totals, decay, read, scale, g_desc, following)
        mbarrier.arrive(weighed.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _half_of(state, half: gl.constexpr):
    """64 of its columns."""
    if state.shape[1] == HALF:
        return state
    else:
        first, second = gl.split(gl.permute(gl.reshape(state, [state.shape[0], 2, HALF]), (0, 2, 1)))
        return first if half == 0 else second


@gluon.jit
def _keep(state, half: gl.constexpr, tiles, desc, place: gl.constexpr, batch, token, head):
    """Sends 64 columns of the state [V, K], rounded, to memory by way of a place in shared memory."""
    SLABS: gl.constexpr = state.shape[0] // HALF
    tile = tiles.index(place)
    tile.store(_half_of(state, half).to(tiles.dtype))
    fence_async_shared()
    barrier()
    slabs = reinterpret(tile, tiles.dtype, [SLABS, 1, CHUNK, 1, HALF], desc.layout)
    for slab in gl.static_range(SLABS):
        tma_store(desc, [batch, token, head, (half * SLABS + slab) * HALF], slabs.index(slab))


@gluon.jit
def _multiply(
    keys,
    values,
    met_tiles,
    p_tile,
    decays,
    weighed,
    met_read,
    p_read,
    kept_tiles,
    o_desc,
    kept_desc,
    start_ptr,
    end_ptr,
    head,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    REVERSE: gl.constexpr,
):
    """The products of every chunk, and the state from the first to the last."""
    _, _, q_tiles, k_tiles, _, batch, _, count = keys
    _, v_tiles, v_come, _, _, _ = values
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    warps: gl.constexpr = gl.num_warps()
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, K, 16])
    v_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    read_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)

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
        token = _token(i, count, REVERSE)
        # what was sent to memory has left its place
        tma_store_wait(0)
        barrier()
        if q_tiles is not None and i > 0:
            # the values that come next take that of outputs
            _fetch_values(values, i + 1, turn ^ 1, REVERSE)
        if kept_desc is not None:
            _keep(state, 0, kept_tiles, kept_desc, 0, batch, token, head)
            if K > HALF and q_tiles is None:
                _keep(state, 1, kept_tiles, kept_desc, 1, batch, token, head)
        mbarrier.wait(weighed.index(stage), phase)
        k = k_tiles.index(stage).reshape([CHUNK, K])
        if q_tiles is not None:
            scores_of(met_tiles, p_tile, met_read, scale, p_tile)
            q = q_tiles.index(stage).reshape([CHUNK, K])
            o = gl.zeros([V, CHUNK], gl.float32, o_layout)
            # half of the state at a time, for want of registers
            for half in gl.static_range(K // HALF):
                held = gl.convert_layout(_half_of(state, half).to(dtype), read_layout)
                # rounded while no product runs: the compiler would move it past the next one and then wait for each
                o, held = warpgroup_mma_wait(0, deps=(o, held))
                read = (k if REVERSE else q).slice(half * HALF, HALF, 1)
                o = warpgroup_mma(held, read.permute((1, 0)), o, use_acc=half > 0, is_async=True)
        mbarrier.wait(v_come.index(turn), (i // PAIR) % 2)
        if q_tiles is not None:
            o, held = warpgroup_mma_wait(0, deps=(o, held))
            if kept_desc is not None and K > HALF:
                tma_store_wait(0)
                barrier()
                _keep(state, 1, kept_tiles, kept_desc, 0, batch, token, head)
        v = v_tiles.index(turn)
        vt = v.reshape([CHUNK, V]).permute((1, 0)).load(v_layout)
        written = gl.convert_layout(vt, read_layout)
        decay = decays.index(i % decays.shape[0]).load(gl.SliceLayout(0, s_layout))[None, :]
        if q_tiles is None:
            state, written = warpgroup_mma_wait(0, deps=(state * decay, written))
            state = warpgroup_mma(written, k, state, is_async=True)
        else:
            o, written = warpgroup_mma_wait(0, deps=(o, written))
            vt = gl.convert_layout(written, v_layout)
            o = warpgroup_mma(vt, p_tile if REVERSE else p_tile.permute((1, 0)), o, is_async=True)
            state = warpgroup_mma(written, q if REVERSE else k, state * decay, is_async=True)
            o = warpgroup_mma_wait(1, deps=(o,))
            # in the place of values that all have read
            barrier()
            v.reshape([CHUNK, V]).permute((1, 0)).store(o.to(dtype))
            fence_async_shared()
            barrier()
            tma_store(o_desc, [batch, token, head, 0], v)
        state, written = warpgroup_mma_wait(0, deps=(state, written))
        barrier()
        if q_tiles is None:
            _fetch_values(values, i + PAIR, turn, REVERSE)
        else:
            mbarrier.arrive(p_read, count=1)
        _fetch_keys(keys, i + STAGES, stage, REVERSE)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    if end_ptr is not None:
        # addresses computed again: kept from the start, they would take as many registers as the state
        rows = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [rows], gl.int32, is_pure=False, pack=1)
        gl.store(end_ptr + corner + columns[None, :] * VALUES + rows[:, None], state, mask=inside)
    tma_store_wait(0)
