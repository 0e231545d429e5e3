"""The gradient of mLSTM's queries on Hopper: the states and normalisers anew, in registers, from the first token on.

With u the gradient of o, y_t = 1 / (max(|norm_t|, exp(-m_t)) + eps) and z_t the gradient of norm_t,
    S = exp(g_t) S + beta_t k_t v_t^T;  n = exp(g_t) n + beta_t k_t;  dq_t = scale (y_t S u_t + z_t n).

The output need not be known for z: u_t . o_t = q_t . (scale y_t S u_t), and S is at hand. The sweep of
scalar_decay/hopper/forward.py with roles exchanged, and with n as one more column of S that u has z for and v has ones.
A block owns a (batch, head) and walks over chunks of 64 tokens, with [earlier, later]:
    R = (S U^T) * read * y;  P = (V U^T) * within;  S = decay S + (K^T * write) V;
    z = -y (sum over keys of Q^T * R + y sum over earlier of P * (K Q^T)), where |norm| is above exp(-m), by its sign;
    dQ^T = R + (n z^T) * read + K^T (P * y + within * z).
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
from holdfast.kernels.lib.gluon.decay import BETA, CHUNK, READ_DECAY, VECTORS, WRITE_DECAY, causal_decay
from holdfast.kernels.lib.gluon.reduce import warp_column_sums
from holdfast.kernels.lib.gluon.sequence import head_offset, segment_index
from holdfast.kernels.lib.gluon.split import opaque
from holdfast.kernels.lib.gluon.state import save_state

from .decay import COLUMNS, EARLIER, INVERSE, OF_EPS, OF_NORM, OF_STABILIZER, ROW, SLOPE, gate_queries
from .normalizer import to_half


@gluon.jit(
    do_not_specialize=[
        "T",
        "H",
        "k_group",
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
        "inner_ptr",
        "start_ptr",
        "before_ptr",
        "left_ptr",
    ],
)
def normalized_queries(
    u_desc,
    v_desc,
    k_desc,
    dq_desc,
    q_desc,
    g_ptr,
    beta_ptr,
    m_ptr,
    norm_ptr,
    inner_ptr,
    start_ptr,
    before_ptr,
    saved_ptr,
    saved_n_ptr,
    left_ptr,
    T,
    H,
    k_group,
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
    SAVE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H,).

    q, k: [B, T, H / k_group, KEYS]; v: [B, T, H / v_group, VALUES]; u, dq: [B, T, H, *], by descriptors of blocks
    [1, 64, 1, columns]. norm: [2, B, H, T], whole and of earlier chunks. inner: u . o, [B, H, T], or None: then the
    sweep finds it, unless q and k are but a slice of K. left [4, B, H, T]: INVERSE, SLOPE, OF_STABILIZER and ROW.
    start, before: S and n before the first and the last chunk, float32 [B, H, KEYS, VALUES + 1], or None.
    saved [B, H, ceil(chunks / SAVE), KEYS, VALUES], rounded, and saved_n [.., KEYS]: S and n before every SAVE-th
    chunk, but for a first of 0.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows_of: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    u_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], u_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], v_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
    gates = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], plain)
    columns = gl.allocate_shared_memory(gl.float32, [STAGES * COLUMNS, CHUNK], plain)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1], plain)
    # sums that each warp leaves: of q . R over keys, of pairs in the chunk over the earlier token
    parts = gl.allocate_shared_memory(gl.float32, [gl.num_warps(), CHUNK], rows_of)
    pairs = gl.allocate_shared_memory(gl.float32, [4, CHUNK], rows_of)
    slopes = gl.allocate_shared_memory(gl.float32, [CHUNK], plain)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()

    g_ptr += head_offset(H, g_b, g_h)
    beta_ptr += head_offset(H, beta_b, beta_h)
    of_tokens = gl.program_id(0).to(gl.int64) * T
    m_ptr += head_offset(H, m_b, m_h)
    norm_ptr += of_tokens
    if inner_ptr is not None:
        inner_ptr += of_tokens
    left_ptr += of_tokens
    count = gl.cdiv(T, CHUNK)
    entry = gl.program_id(0).to(gl.int64) * gl.cdiv(count, SAVE)
    saved_ptr += entry * (KEYS * VALUES)
    saved_n_ptr += entry * KEYS
    tiles = (u_tiles, v_tiles, k_tiles, q_tiles)
    sources = (u_desc, v_desc, k_desc, q_desc)
    places = (gates, columns, decays, loaded, gated, free)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    tiles,
                    places,
                    (parts, pairs, slopes),
                    dq_desc,
                    inner_ptr,
                    left_ptr,
                    start_ptr,
                    before_ptr,
                    saved_ptr,
                    saved_n_ptr,
                    T,
                    H,
                    count,
                    KEYS,
                    VALUES,
                    SAVE,
                    STAGES,
                ),
            ),
            (_copy, (tiles, sources, loaded, free, H, k_group, v_group, count, STAGES)),
            (
                gate_queries,
                (
                    places,
                    (g_ptr, beta_ptr, m_ptr, norm_ptr),
                    (g_t, beta_t, m_t),
                    T,
                    count,
                    scale,
                    eps,
                    STAGES,
                ),
            ),
        ],
        [1, 1],
        [40, 40],
    )


@gluon.jit
def _copy(tiles, sources, loaded, free, H, k_group, v_group, count, STAGES: gl.constexpr):
    """Keeps STAGES chunks of u, v, k and q on their way into shared memory."""
    u_tiles, v_tiles, k_tiles, q_tiles = tiles
    u_desc, v_desc, k_desc, q_desc = sources
    width: gl.constexpr = 2 * (u_desc.block_type.nbytes + k_desc.block_type.nbytes)
    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    stage = 0
    phase = 1
    for i in range(count):
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(loaded.index(stage), width)
        tma_load(v_desc, [batch, i * CHUNK, head // v_group, 0], loaded.index(stage), v_tiles.index(stage))
        tma_load(u_desc, [batch, i * CHUNK, head, 0], loaded.index(stage), u_tiles.index(stage))
        tma_load(k_desc, [batch, i * CHUNK, head // k_group, 0], loaded.index(stage), k_tiles.index(stage))
        tma_load(q_desc, [batch, i * CHUNK, head // k_group, 0], loaded.index(stage), q_tiles.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _multiply(
    tiles,
    places,
    sums,
    dq_desc,
    inner_ptr,
    left_ptr,
    start_ptr,
    before_ptr,
    saved_ptr,
    saved_n_ptr,
    T,
    H,
    count,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    SAVE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The products of every chunk, and the state from the first to the last."""
    u_tiles, v_tiles, k_tiles, q_tiles = tiles
    gates, columns, decays, loaded, gated, free = places
    parts, pairs, slopes = sums
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = q_tiles.dtype
    warps: gl.constexpr = gl.num_warps()
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, V, 16])
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, CHUNK // (warps // 4), 16])
    read_layout: gl.constexpr = gl.DotOperandLayout(0, q_layout, 2)
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    token: gl.constexpr = gl.SliceLayout(0, q_layout)
    later: gl.constexpr = gl.SliceLayout(0, p_layout)
    of_warps: gl.constexpr = gl.BlockedLayout([warps, 1], [1, 32], [1, warps], [1, 0])
    of_four: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [1, warps], [1, 0])
    each: gl.constexpr = gl.SliceLayout(0, of_warps)
    # a first state of 0 need not be saved
    FROM: gl.constexpr = 1 if start_ptr is None else 0
    p_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))

    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    key = gl.arange(0, K, gl.SliceLayout(1, s_layout))
    value = gl.arange(0, V, gl.SliceLayout(0, s_layout))
    n_key = gl.arange(0, K, gl.SliceLayout(1, q_layout))
    if KEYS == K and VALUES == V:
        inside: gl.constexpr = None
        outside: gl.constexpr = None
    else:
        inside = (key < KEYS)[:, None] & (value < VALUES)[None, :]
        outside: gl.constexpr = 0.0
    corner = segment_index(H, 1) * (KEYS * (VALUES + 1))
    if start_ptr is None:
        state = gl.zeros([K, V], gl.float32, s_layout)
        n = gl.zeros([K], gl.float32, gl.SliceLayout(1, q_layout))
    else:
        at = key[:, None] * (VALUES + 1) + value[None, :]
        state = gl.load(start_ptr + corner + at, mask=inside, other=outside)
        n = gl.load(start_ptr + corner + n_key * (VALUES + 1) + VALUES, mask=n_key < KEYS, other=0.0)

    stage = 0
    phase = 0
    last = 0
    for i in range(count):
        if (i % SAVE == 0) & (i >= FROM):
            entry = i // SAVE * KEYS
            save_state(saved_ptr + entry * VALUES, state.to(dtype), 0, VALUES, KEYS, False, s_layout)
            gl.store(saved_n_ptr + entry + n_key, n, mask=n_key < KEYS)
        if before_ptr is not None:  # noqa: SIM102 - known while compiling
            if i == count - 1:
                # addresses computed anew: kept, they would take as many registers as the state
                at = opaque(key)[:, None] * (VALUES + 1) + value[None, :]
                gl.store(before_ptr + corner + at, state, mask=inside)
                gl.store(before_ptr + corner + n_key * (VALUES + 1) + VALUES, n, mask=n_key < KEYS)
        mbarrier.wait(loaded.index(stage), phase)
        u = u_tiles.index(stage).reshape([CHUNK, V])
        v = v_tiles.index(stage).reshape([CHUNK, V])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        q = q_tiles.index(stage).reshape([CHUNK, K])
        held = gl.convert_layout(state.to(dtype), read_layout)
        # rounded here, while no product runs: the compiler would move it past the next one and then wait for each
        held = warpgroup_mma_wait(0, deps=(held,))
        p = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        p = warpgroup_mma(v, u.permute((1, 0)), p, use_acc=False, is_async=True)
        kq = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        if inner_ptr is None:
            kq = warpgroup_mma(k, q.permute((1, 0)), kq, use_acc=False, is_async=True)
        else:
            tokens = i * CHUNK + gl.arange(0, CHUNK, each)
            across = gl.load(inner_ptr + tokens, mask=tokens < T, other=0.0)
        dq = gl.zeros([K, CHUNK], gl.float32, q_layout)
        dq = warpgroup_mma(held, u.permute((1, 0)), dq, use_acc=False, is_async=True)

        mbarrier.wait(gated.index(stage), phase)
        write = gates.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, read_layout))
        decay = decays.index(stage).load(gl.SliceLayout(1, s_layout))
        weight = causal_decay(gates, stage, p_layout, False)
        weight *= gates.index(stage * VECTORS + BETA).load(gl.SliceLayout(1, p_layout))[:, None]
        kt = k.permute((1, 0)).load(read_layout)
        weighted = kt.to(gl.float32) * write[None, :]
        written = gl.convert_layout(to_half(weighted, dtype), write_layout)
        added = gl.convert_layout(gl.sum(weighted, 1), gl.SliceLayout(1, q_layout))

        p, kq = warpgroup_mma_wait(1, deps=(p, kq))
        p = p * weight
        if inner_ptr is None:
            pairs.store(warp_column_sums(p * kq, 4))
        state = state * decay[:, None]
        dq, held = warpgroup_mma_wait(0, deps=(dq, held))
        read = gates.index(stage * VECTORS + READ_DECAY).load(token)
        read *= columns.index(stage * COLUMNS + INVERSE).load(token)
        dq = dq * read[None, :]
        qt = q.permute((1, 0)).load(q_layout)
        parts.store(warp_column_sums(dq * qt.to(gl.float32), warps))
        barrier()
        row = gl.sum(parts.load(of_warps), 0)
        inverse = columns.index(stage * COLUMNS + INVERSE).load(each)
        if inner_ptr is None:
            across = row + gl.convert_layout(gl.sum(pairs.load(of_four), 0), each) * inverse
        slope = across * columns.index(stage * COLUMNS + OF_NORM).load(each)
        slopes.store(slope)
        barrier()
        p = p * columns.index(stage * COLUMNS + INVERSE).load(later)[None, :]
        p_tile.store((p + weight * slopes.load(later)[None, :]).to(dtype))
        # one barrier for three: p is there, the last output has left its tile, the last chunk's tiles are read
        fence_async_shared()
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(free.index(last), count=1, pred=i > 0)
        last = stage
        read = gates.index(stage * VECTORS + READ_DECAY).load(token) * slopes.load(token)
        dq += n[:, None] * read[None, :]
        n = n * decays.index(stage).load(gl.SliceLayout(1, q_layout)) + added
        dq, state, kt, written = warpgroup_mma_wait(0, deps=(dq, state, kt, written))
        dq = warpgroup_mma(kt, p_tile, dq, is_async=True)
        state = warpgroup_mma(written, v, state, is_async=True)
        dq, kt = warpgroup_mma_wait(1, deps=(dq, kt))
        # where q was, which all have read
        q_tile = q_tiles.index(stage)
        q_tile.reshape([CHUNK, K]).permute((1, 0)).store(dq.to(dtype))
        fence_async_shared()
        barrier()
        tma_store(dq_desc, [batch, i * CHUNK, head, 0], q_tile)
        row += slope * columns.index(stage * COLUMNS + EARLIER).load(each)
        dm = across * columns.index(stage * COLUMNS + OF_EPS).load(each)
        tokens = i * CHUNK + gl.arange(0, CHUNK, each)
        rows = gl.num_programs(0).to(gl.int64) * T
        gl.store(left_ptr + INVERSE * rows + tokens, inverse, mask=tokens < T)
        gl.store(left_ptr + SLOPE * rows + tokens, slope, mask=tokens < T)
        gl.store(left_ptr + OF_STABILIZER * rows + tokens, dm, mask=tokens < T)
        gl.store(left_ptr + ROW * rows + tokens, row, mask=tokens < T)
        state, written = warpgroup_mma_wait(0, deps=(state, written))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    barrier()
    mbarrier.arrive(free.index(last), count=1, pred=count > 0)
    tma_store_wait(0)
