"""mLSTM's forward pass on Hopper: scalar decay's, with the normaliser beside it and the division at its end.

    S = exp(g_t) S + beta_t k_t v_t^T;  n = exp(g_t) n + beta_t k_t;  norm_t = scale n . q_t
    o_t = scale S^T q_t / (max(|norm_t|, exp(-m_t)) + eps).

A block owns a (batch, head) and walks over chunks of 64 tokens. The warps that multiply leave the sums of a chunk's
scores over earlier tokens in shared memory; four others (normalizer.py) add what comes from earlier chunks, and
have the quotient ready when the chunk's output is.
"""

from holdfast.kernels.lib.gluon.compat import (
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
from holdfast.kernels.lib.gluon.decay import (
    BETA,
    CHUNK,
    READ_DECAY,
    VECTORS,
    WRITE_DECAY,
    causal_decay,
    load_decay_beta,
    publish_decays,
)
from holdfast.kernels.lib.gluon.reduce import warp_column_sums
from holdfast.kernels.lib.gluon.sequence import head_offset, segment_index
from holdfast.kernels.lib.gluon.slice_sums import slice_sums_index, slice_sums_offset, slice_sums_stride
from holdfast.kernels.lib.gluon.split import opaque

from .normalizer import normalize, to_half


@gluon.jit(
    do_not_specialize=[
        "T",
        "H",
        "qk_group",
        "v_group",
        "g_b",
        "g_t",
        "g_h",
        "beta_b",
        "beta_t",
        "beta_h",
        "m_b",
        "m_t",
        "m_h",
    ],
    do_not_specialize_on_alignment=[
        "g_ptr",
        "beta_ptr",
        "m_ptr",
        "norm_ptr",
        "earlier_ptr",
        "before_ptr",
        "start_ptr",
        "end_ptr",
    ],
)
def normalized_sweep(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    g_ptr,
    beta_ptr,
    m_ptr,
    norm_ptr,
    earlier_ptr,
    before_ptr,
    sums_ptr,
    start_ptr,
    end_ptr,
    T,
    H,
    qk_group,
    v_group,
    g_b,
    g_t,
    g_h,
    beta_b,
    beta_t,
    beta_h,
    m_b,
    m_t,
    m_h,
    scale,
    eps,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    ADDS: gl.constexpr,
    LEAVES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H,).

    q, k: [B, T, H / qk_group, KEYS]; v, o: [B, T, H / v_group or H, VALUES], by descriptors of blocks
    [1, 64, 1, columns]. norm, earlier: [B, H, T], norm and its part of earlier chunks.
    sums, ADDS, LEAVES: of a state in slices of K, as in scalar_decay/hopper/forward.py; before, with ADDS: the norm of
    the slices before this one, [B, H, T]; norm is then of all so far, earlier of this slice alone.
    start, end: S and n before and after, float32 [B, H, KEYS, VALUES + 1]; start may be None.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], v_desc.layout)
    o_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, V], o_desc.layout)
    gates = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], plain)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1], plain)
    pairs = gl.allocate_shared_memory(gl.float32, [4, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    n_tile = gl.allocate_shared_memory(dtype, [8, K], gl.NVMMASharedLayout(128, 16, 2))
    w_tile = gl.allocate_shared_memory(dtype, [8, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    across = gl.allocate_shared_memory(gl.float32, [CHUNK], plain)
    quotients = gl.allocate_shared_memory(gl.float32, [CHUNK], plain)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    divided = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    mbarrier.init(summed, count=1)
    mbarrier.init(divided, count=1)
    fence_async_shared()

    g_ptr += head_offset(H, g_b, g_h)
    beta_ptr += head_offset(H, beta_b, beta_h)
    m_ptr += head_offset(H, m_b, m_h)
    of_tokens = gl.program_id(0).to(gl.int64) * T
    norm_ptr += of_tokens
    earlier_ptr += of_tokens
    if ADDS:
        before_ptr += of_tokens
    count = gl.cdiv(T, CHUNK)
    tiles = (q_tiles, k_tiles, v_tiles)
    sources = (q_desc, k_desc, v_desc)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    tiles,
                    o_tile,
                    (gates, decays, loaded, gated, free),
                    (pairs, quotients, summed, divided),
                    o_desc,
                    start_ptr,
                    end_ptr,
                    sums_ptr,
                    T,
                    H,
                    count,
                    KEYS,
                    VALUES,
                    ADDS,
                    LEAVES,
                    STAGES,
                ),
            ),
            # first, since wgmma wants its four warps at a multiple of four
            (
                normalize,
                (
                    (q_tiles, k_tiles, gates, decays, loaded, gated),
                    (pairs, n_tile, w_tile, across, quotients, summed, divided),
                    (start_ptr, end_ptr, m_ptr, norm_ptr, earlier_ptr, before_ptr),
                    m_t,
                    H,
                    T,
                    count,
                    eps,
                    KEYS,
                    VALUES,
                    ADDS,
                    STAGES,
                ),
            ),
            (_copy, (tiles, sources, loaded, free, H, qk_group, v_group, count, STAGES)),
            (
                _gate,
                ((gates, decays, gated, free), g_ptr, beta_ptr, g_t, beta_t, T, count, scale, STAGES),
            ),
        ],
        [4, 1, 1],
        [40, 40, 40],
    )


@gluon.jit
def _copy(tiles, sources, loaded, free, H, qk_group, v_group, count, STAGES: gl.constexpr):
    """Keeps STAGES chunks of q, k and v on their way into shared memory."""
    q_tiles, k_tiles, v_tiles = tiles
    q_desc, k_desc, v_desc = sources
    width: gl.constexpr = 2 * q_desc.block_type.nbytes + v_desc.block_type.nbytes
    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    stage = 0
    phase = 1
    for i in range(count):
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(loaded.index(stage), width)
        tma_load(k_desc, [batch, i * CHUNK, head // qk_group, 0], loaded.index(stage), k_tiles.index(stage))
        tma_load(q_desc, [batch, i * CHUNK, head // qk_group, 0], loaded.index(stage), q_tiles.index(stage))
        tma_load(v_desc, [batch, i * CHUNK, head // v_group, 0], loaded.index(stage), v_tiles.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _gate(places, g_ptr, beta_ptr, g_t, beta_t, T, count, scale, STAGES: gl.constexpr):
    """Weighs each chunk when its stage is free."""
    gates, decays, gated, free = places
    stage = 0
    phase = 1
    g, beta = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, 0, count > 0, T)
    # two chunks ahead: a load takes as long as a chunk
    g_next, beta_next = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, 1, count > 1, T)
    for i in range(count):
        g_later, beta_later = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, i + 2, i + 2 < count, T)
        mbarrier.wait(free.index(stage), phase)
        publish_decays(gates, decays, gated, stage, g, beta, scale, False)
        g, beta = g_next, beta_next
        g_next, beta_next = g_later, beta_later
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _multiply(
    tiles,
    o_tile,
    places,
    norms,
    o_desc,
    start_ptr,
    end_ptr,
    sums_ptr,
    T,
    H,
    count,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    ADDS: gl.constexpr,
    LEAVES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The products of every chunk, and the state from the first to the last."""
    q_tiles, k_tiles, v_tiles = tiles
    gates, decays, loaded, gated, free = places
    pairs, quotients, summed, divided = norms
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = q_tiles.dtype
    warps: gl.constexpr = gl.num_warps()
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, K, 16])
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, CHUNK // (warps // 4), 16])
    read_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    p_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))

    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    rows = gl.arange(0, V, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, K, gl.SliceLayout(0, s_layout))
    if KEYS == K and VALUES == V:
        inside: gl.constexpr = None
        outside: gl.constexpr = None
    else:
        inside = (rows < VALUES)[:, None] & (columns < KEYS)[None, :]
        outside: gl.constexpr = 0.0
    corner = segment_index(H, 1) * (KEYS * (VALUES + 1))
    if start_ptr is None:
        state = gl.zeros([V, K], gl.float32, s_layout)
    else:
        at = columns[None, :] * (VALUES + 1) + rows[:, None]
        state = gl.load(start_ptr + corner + at, mask=inside, other=outside)
    if ADDS or LEAVES:
        sums_ptr += slice_sums_offset((batch, 0, T), H, V, False)
        chunk_of_sums = slice_sums_stride(H, V)

    stage = 0
    phase = 0
    last = 0
    for i in range(count):
        mbarrier.wait(loaded.index(stage), phase)
        q = q_tiles.index(stage).reshape([CHUNK, K])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        v = v_tiles.index(stage).reshape([CHUNK, V])
        held = gl.convert_layout(state.to(dtype), read_layout)
        # rounded here, while no product runs: the compiler would move it past the next one and then wait for each
        held = warpgroup_mma_wait(0, deps=(held,))
        p = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        p = warpgroup_mma(k, q.permute((1, 0)), p, use_acc=False, is_async=True)
        o = gl.zeros([V, CHUNK], gl.float32, o_layout)
        o = warpgroup_mma(held, q.permute((1, 0)), o, use_acc=False, is_async=True)

        mbarrier.wait(gated.index(stage), phase)
        write = gates.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, read_layout))
        decay = decays.index(stage).load(gl.SliceLayout(1, s_layout))
        weight = causal_decay(gates, stage, p_layout, False)
        weight *= gates.index(stage * VECTORS + BETA).load(gl.SliceLayout(1, p_layout))[:, None]
        vt = v.permute((1, 0)).load(read_layout)
        written = gl.convert_layout(to_half(vt.to(gl.float32) * write[None, :], dtype), write_layout)

        p = warpgroup_mma_wait(1, deps=(p,))
        p = p * weight
        p_tile.store(p.to(dtype))
        pairs.store(warp_column_sums(p, 4))
        # one barrier for three: p is there, the last output has left its tile, the last chunk's tiles are read
        fence_async_shared()
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(summed, count=1)
        mbarrier.arrive(free.index(last), count=1, pred=i > 0)
        last = stage
        read = gates.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, o_layout))
        state = state * decay[:, None]
        if ADDS:
            earlier = gl.load(sums_ptr + i * chunk_of_sums + slice_sums_index(V, o_layout))
        o, held = warpgroup_mma_wait(0, deps=(o, held))
        o = o * read[None, :]
        if ADDS:
            o = o + earlier
        o, state, vt, written = warpgroup_mma_wait(0, deps=(o, state, vt, written))
        o = warpgroup_mma(vt, p_tile, o, is_async=True)
        state = warpgroup_mma(written, k, state, is_async=True)
        mbarrier.wait(divided, i & 1)
        quotient = quotients.load(gl.SliceLayout(0, o_layout))
        o, vt = warpgroup_mma_wait(1, deps=(o, vt))
        if LEAVES:
            gl.store(sums_ptr + i * chunk_of_sums + slice_sums_index(V, o_layout), o)
        else:
            o_tile.reshape([CHUNK, V]).permute((1, 0)).store((o * quotient[None, :]).to(dtype))
        fence_async_shared()
        barrier()
        if not LEAVES:
            tma_store(o_desc, [batch, i * CHUNK, head, 0], o_tile)
        state, written = warpgroup_mma_wait(0, deps=(state, written))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    barrier()
    mbarrier.arrive(free.index(last), count=1, pred=count > 0)
    # addresses computed again: kept from the start, they would take as many registers as the state
    rows = opaque(rows)
    at = columns[None, :] * (VALUES + 1) + rows[:, None]
    gl.store(end_ptr + corner + at, state, mask=inside)
    tma_store_wait(0)
