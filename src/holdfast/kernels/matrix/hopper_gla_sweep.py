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
from .hopper_gla_weigh import PARTS, fetch_decays, scores_of, weigh

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
    by descriptors of blocks [1, 64, 1, columns], of g 64 columns.
    kept: S as each chunk reads it, rounded, [B, 64 chunks, H, K V / 64] of blocks [1, 64, 1, 64], or None, K and V the
    widths of tiles. Its columns are [K / 64, V / 64, 64], and a row is that of one of each 64 values.
    start, end: S before and after the sweep, float32 [B, H, KEYS, VALUES], or None.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # keys and queries of a chunk, side by side: when they have been read, a state that is kept takes their place
    qk_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, CHUNK, 1, K], k_desc.layout)
    g_tiles = gl.allocate_shared_memory(gl.float32, [K // HALF, 1, CHUNK, 1, HALF], g_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [PAIR, 1, CHUNK, 1, V], v_desc.layout)
    p_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], flat)
    near_tile = gl.allocate_shared_memory(gl.float32, [8, 16, 16], PARTS)
    # each by itself: between stores into parts of one the compiler has all warps wait for each other
    met_tiles = ()
    for _ in gl.static_range(2 * (K // HALF)):
        met_tiles = met_tiles + (gl.allocate_shared_memory(dtype, [CHUNK, HALF], flat),)
    totals = gl.allocate_shared_memory(gl.float32, [4, HALF], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    # a chunk is weighed when the one before the last has been multiplied
    decays = gl.allocate_shared_memory(gl.float32, [PAIR, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    qk_come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_come = gl.allocate_shared_memory(gl.int64, [PAIR, 1], mbarrier.MBarrierLayout())
    g_come = gl.allocate_shared_memory(gl.int64, [K // HALF, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    met_read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
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
    keys = (q_desc, k_desc, qk_tiles, qk_come, batch, head // qk_group, count)
    values = (v_desc, v_tiles, v_come, batch, head // v_group, count)
    for half in gl.static_range(K // HALF):
        fetch_decays(g_desc, g_tiles, g_come, half, (batch, _token(0, count, REVERSE), head, count > 0))
    for i in gl.static_range(STAGES - 1):
        _fetch_keys(keys, i, i, REVERSE)
    _fetch_values(values, 0, 0, REVERSE)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    keys,
                    values,
                    met_tiles,
                    p_tile,
                    near_tile,
                    decays,
                    weighed,
                    met_read,
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
                    qk_tiles,
                    g_tiles,
                    met_tiles,
                    near_tile,
                    totals,
                    decays,
                    qk_come,
                    g_come,
                    weighed,
                    met_read,
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
    q_desc, k_desc, tiles, come, batch, head, count = keys
    token = _token(i, count, REVERSE)
    mbarrier.expect(come.index(stage), 2 * k_desc.block_type.nbytes, pred=i < count)
    tma_load(q_desc, [batch, token, head, 0], come.index(stage), tiles.index(2 * stage + 1), pred=i < count)
    tma_load(k_desc, [batch, token, head, 0], come.index(stage), tiles.index(2 * stage), pred=i < count)


@gluon.jit
def _fetch_values(values, i, turn, REVERSE: gl.constexpr):
    v_desc, v_tiles, come, batch, head, count = values
    token = _token(i, count, REVERSE)
    mbarrier.expect(come.index(turn), v_desc.block_type.nbytes, pred=i < count)
    tma_load(v_desc, [batch, token, head, 0], come.index(turn), v_tiles.index(turn), pred=i < count)


@gluon.jit
def _weigh(
    qk_tiles,
    g_tiles,
    met_tiles,
    near_tile,
    totals,
    decays,
    qk_come,
    g_come,
    weighed,
    met_read,
    g_desc,
    H,
    count,
    scale,
    REVERSE: gl.constexpr,
):
    """Turns each chunk that has come into operands."""
    K: gl.constexpr = qk_tiles.shape[4]
    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    stage = 0
    phase = 0
    for i in range(count):
        following = (batch, _token(i + 1, count, REVERSE), head, i + 1 < count)
        mbarrier.wait(qk_come.index(stage), phase)
        k = qk_tiles.index(2 * stage).reshape([CHUNK, K])
        q = qk_tiles.index(2 * stage + 1).reshape([CHUNK, K])
        decay = decays.index(i % PAIR)
        weigh(q, k, g_tiles, g_come, i % 2, met_tiles, near_tile, totals, decay, met_read, scale, g_desc, following)
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
def _multiply(
    keys,
    values,
    met_tiles,
    p_tile,
    near_tile,
    decays,
    weighed,
    met_read,
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
    _, _, qk_tiles, _, batch, _, count = keys
    _, v_tiles, v_come, _, _, _ = values
    K: gl.constexpr = qk_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = qk_tiles.dtype
    HALVES: gl.constexpr = K // HALF
    SLABS: gl.constexpr = V // HALF
    # of 64 x 64 values in those of a chunk's queries and keys
    PLACES: gl.constexpr = 2 * HALVES
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
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
        # where queries and keys have been read
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        if kept_desc is not None:
            states = reinterpret(qk_tiles, dtype, [STAGES * PLACES // SLABS, V, HALF], flat)
            for half in gl.static_range(HALVES):
                states.index(free * (PLACES // SLABS) + half).store(_half_of(state, half).to(dtype))
            fence_async_shared()
            barrier()
            slabs = reinterpret(qk_tiles, dtype, [STAGES * PLACES, 1, CHUNK, 1, HALF], kept_desc.layout)
            for slab in gl.static_range(HALVES * SLABS):
                tma_store(kept_desc, [batch, token, head, slab * HALF], slabs.index(free * PLACES + slab))
            # the compiler would keep what is rounded for the product below
            state = warpgroup_mma_wait(0, deps=(state,))
        # half of the state at a time, for want of registers, and rounded while no product runs: the compiler would move
        # that past the next one and then wait for each
        held = gl.convert_layout(_half_of(state, 0).to(dtype), read_layout)
        held = warpgroup_mma_wait(0, deps=(held,))
        mbarrier.wait(weighed.index(stage), phase)
        k = qk_tiles.index(2 * stage).reshape([CHUNK, K])
        q = qk_tiles.index(2 * stage + 1).reshape([CHUNK, K])
        scores_of(met_tiles, near_tile, scale, p_tile)
        # what was sent to memory has left its place
        tma_store_wait(0)
        fence_async_shared()
        barrier()
        mbarrier.arrive(met_read, count=1)
        _fetch_keys(keys, i + STAGES - 1, free, REVERSE)
        _fetch_values(values, i + 1, turn ^ 1, REVERSE)
        o = gl.zeros([V, CHUNK], gl.float32, o_layout)
        for half in gl.static_range(HALVES):
            if half > 0:
                held = gl.convert_layout(_half_of(state, half).to(dtype), read_layout)
            o, held = warpgroup_mma_wait(0, deps=(o, held))
            read = (k if REVERSE else q).slice(half * HALF, HALF, 1)
            o = warpgroup_mma(held, read.permute((1, 0)), o, use_acc=half > 0, is_async=True)
        mbarrier.wait(v_come.index(turn), (i // PAIR) % 2)
        o, held = warpgroup_mma_wait(0, deps=(o, held))
        v = v_tiles.index(turn)
        vt = v.reshape([CHUNK, V]).permute((1, 0)).load(v_layout)
        written = gl.convert_layout(vt, read_layout)
        decay = decays.index(i % PAIR).load(gl.SliceLayout(0, s_layout))[None, :]
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
        if kept_desc is not None:
            # the next state takes the place of what all have read
            barrier()
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    if end_ptr is not None:
        # addresses computed again: kept from the start, they would take as many registers as the state
        rows = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [rows], gl.int32, is_pure=False, pack=1)
        gl.store(end_ptr + corner + columns[None, :] * VALUES + rows[:, None], state, mask=inside)
    tma_store_wait(0)
