"""mLSTM's adjoint sweep on Hopper: from the last token to the first, the gradients of k, v, g and beta.

hopper_adjoint.py's sweep with n as one more column of S, which makes dn one more of dS, carried in registers beside it:
    dS = exp(g_{t+1}) dS + scale y_t q_t u_t^T;  dn = exp(g_{t+1}) dn + scale z_t q_t
    dk_t = beta_t (dS v_t + dn);  dv_t = beta_t dS^T k_t,
u the gradient of o, y_t = 1 / (max(|norm_t|, floor_t) + eps) and z_t the gradient of norm_t. With [later, earlier]:
    dK^T = (dS V^T + dn) * read + Q^T (((U V^T) * y + z) * within * beta)
    dV^T = (dS^T K^T) * read + U^T ((Q K^T) * y * within * beta)
    dS = decay dS + (Q^T * y * write) U,
read with beta in it.
How dg is summed, and where that sum starts anew, is told in hopper_adjoint.py.
"""

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

from .hopper_gates import (
    CHUNK,
    STRENGTH,
    VECTORS,
    WRITE,
    of_head,
    of_segment,
    parts_of_columns,
    within,
)
from .hopper_mlstm_gates import ADJOINT_COLUMNS, INVERSE, READ_STRENGTH, SLOPE, gate_adjoint


@gluon.jit(
    do_not_specialize=["T", "H", "k_group", "v_group", "g_b", "g_t", "g_h", "beta_b", "beta_t", "beta_h"],
    do_not_specialize_on_alignment=[
        "g_ptr",
        "beta_ptr",
        "inverse_ptr",
        "slope_ptr",
        "start_ptr",
        "end_ptr",
        "saved_n_ptr",
        "row_ptr",
        "last_ptr",
        "dg_ptr",
        "dbeta_ptr",
    ],
)
def normalized_adjoint(
    q_desc,
    k_desc,
    u_desc,
    v_desc,
    dk_desc,
    dv_desc,
    saved_desc,
    g_ptr,
    beta_ptr,
    inverse_ptr,
    slope_ptr,
    start_ptr,
    end_ptr,
    saved_n_ptr,
    row_ptr,
    last_ptr,
    dg_ptr,
    dbeta_ptr,
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
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    SAVE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H,).

    q, k: [B, T, H / k_group, KEYS]; v: [B, T, H / v_group, VALUES]; u, dk, dv: [B, T, H, *], by descriptors of blocks
    [1, 64, 1, columns], those of VALUES no wider than those of KEYS. inverse, slope: y and z [B, H, T].
    start, end: dS and dn after the last and before the first token, float32 [B, H, KEYS, VALUES + 1], or None.
    dg, dbeta: [B, H, T]. row [B, H, T], saved (by a descriptor of blocks [1, 1, *, *]), saved_n: what
    hopper_mlstm_queries.py left; saved and saved_n are None if SAVE is 0. last [B, H]: <S, dS> + <n, dn> after the last
    token, None for 0.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    warps: gl.constexpr = gl.num_warps()
    # registers of the warps that do not multiply: what the others leave
    others: gl.constexpr = 40 if warps == 8 else 72
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows_of: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    u_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], u_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], v_desc.layout)
    dk_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, K], dk_desc.layout)
    dv_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, V], dv_desc.layout)
    gates = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], plain)
    columns = gl.allocate_shared_memory(gl.float32, [STAGES * ADJOINT_COLUMNS, CHUNK], plain)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1], plain)
    # row sums that each warp leaves: of pairs in the chunk over the earlier and over the later token, of a token with
    # itself, of what comes from later chunks, and of the product of states
    later_parts = gl.allocate_shared_memory(gl.float32, [STAGES, warps // 4, CHUNK], rows_of)
    earlier_parts = gl.allocate_shared_memory(gl.float32, [STAGES, 4, CHUNK], rows_of)
    own_parts = gl.allocate_shared_memory(gl.float32, [STAGES, 4, CHUNK], rows_of)
    cross_parts = gl.allocate_shared_memory(gl.float32, [STAGES, warps, CHUNK], rows_of)
    state_parts = gl.allocate_shared_memory(gl.float32, [STAGES, K], plain)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    restored = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(restored, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()

    g_ptr += of_head(H, g_b, g_h)
    beta_ptr += of_head(H, beta_b, beta_h)
    of_rows = gl.program_id(0).to(gl.int64) * T
    dg_ptr += of_rows
    dbeta_ptr += of_rows
    inverse_ptr += of_rows
    slope_ptr += of_rows
    row_ptr += of_rows
    count = gl.cdiv(T, CHUNK)
    if SAVE > 0:
        saved_n_ptr += gl.program_id(0).to(gl.int64) * gl.cdiv(count, SAVE) * KEYS
    tiles = (q_tiles, k_tiles, u_tiles, v_tiles)
    sources = (q_desc, k_desc, u_desc, v_desc)
    places = (gates, columns, decays, loaded, gated, free)
    parts = (later_parts, earlier_parts, own_parts, cross_parts, state_parts)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    tiles,
                    (dk_tile, dv_tile),
                    places,
                    parts,
                    restored,
                    (dk_desc, dv_desc, saved_desc),
                    start_ptr,
                    end_ptr,
                    saved_n_ptr,
                    H,
                    count,
                    scale,
                    KEYS,
                    VALUES,
                    SAVE,
                    STAGES,
                ),
            ),
            (_copy, (tiles, sources, loaded, free, H, k_group, v_group, count, STAGES)),
            (
                gate_adjoint,
                (
                    places,
                    parts,
                    (g_ptr, beta_ptr, inverse_ptr, slope_ptr, row_ptr, last_ptr, dg_ptr, dbeta_ptr),
                    g_t,
                    beta_t,
                    T,
                    count,
                    scale,
                    SAVE,
                    STAGES,
                ),
            ),
        ],
        [1, 1],
        [others, others],
    )


@gluon.jit
def _copy(tiles, sources, loaded, free, H, k_group, v_group, count, STAGES: gl.constexpr):
    """Keeps STAGES chunks of q, k, u and v on their way into shared memory."""
    q_tiles, k_tiles, u_tiles, v_tiles = tiles
    q_desc, k_desc, u_desc, v_desc = sources
    width: gl.constexpr = 2 * (q_desc.block_type.nbytes + v_desc.block_type.nbytes)
    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    stage = 0
    phase = 1
    for i in range(count):
        mbarrier.wait(free.index(stage), phase)
        token = (count - 1 - i) * CHUNK
        mbarrier.expect(loaded.index(stage), width)
        tma_load(q_desc, [batch, token, head // k_group, 0], loaded.index(stage), q_tiles.index(stage))
        tma_load(k_desc, [batch, token, head // k_group, 0], loaded.index(stage), k_tiles.index(stage))
        tma_load(u_desc, [batch, token, head, 0], loaded.index(stage), u_tiles.index(stage))
        tma_load(v_desc, [batch, token, head // v_group, 0], loaded.index(stage), v_tiles.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _multiply(
    tiles,
    out_tiles,
    places,
    parts,
    restored,
    targets,
    start_ptr,
    end_ptr,
    saved_n_ptr,
    H,
    count,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    SAVE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The products of every chunk, and the gradient of the state from the last to the first."""
    q_tiles, k_tiles, u_tiles, v_tiles = tiles
    dk_tile, dv_tile = out_tiles
    dk_desc, dv_desc, saved_desc = targets
    gates, columns, decays, loaded, gated, free = places
    later_parts, earlier_parts, own_parts, cross_parts, state_parts = parts
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = q_tiles.dtype
    warps: gl.constexpr = gl.num_warps()
    pairs: gl.constexpr = warps // 4
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, V, 16])
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, pairs], [16, CHUNK // pairs, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    v_layout: gl.constexpr = k_layout if V == K else p_layout
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    of_key: gl.constexpr = gl.SliceLayout(1, k_layout)
    later: gl.constexpr = gl.SliceLayout(1, p_layout)
    qk_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    uv_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    s_tile = gl.allocate_shared_memory(dtype, [1, 1, K, V], gl.NVMMASharedLayout(128, 16, 4))

    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    key = gl.arange(0, K, gl.SliceLayout(1, s_layout))
    value = gl.arange(0, V, gl.SliceLayout(0, s_layout))
    n_key = gl.arange(0, K, of_key)
    if KEYS == K and VALUES == V:
        inside: gl.constexpr = None
        outside: gl.constexpr = None
    else:
        inside = (key < KEYS)[:, None] & (value < VALUES)[None, :]
        outside: gl.constexpr = 0.0
    corner = of_segment(H, 1) * (KEYS * (VALUES + 1))
    if start_ptr is None:
        state = gl.zeros([K, V], gl.float32, s_layout)
        dn = gl.zeros([K], gl.float32, of_key)
    else:
        at = key[:, None] * (VALUES + 1) + value[None, :]
        state = gl.load(start_ptr + corner + at, mask=inside, other=outside)
        dn = gl.load(start_ptr + corner + n_key * (VALUES + 1) + VALUES, mask=n_key < KEYS, other=0.0)

    stage = 0
    phase = 0
    last = 0
    turns = 0
    s = s_tile.reshape([K, V])
    for i in range(count):
        chunk = count - 1 - i
        mbarrier.wait(loaded.index(stage), phase)
        q = q_tiles.index(stage).reshape([CHUNK, K])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        u = u_tiles.index(stage).reshape([CHUNK, V])
        v = v_tiles.index(stage).reshape([CHUNK, V])
        # rounded here, while no product runs: the compiler would move it past the next one and then wait for each
        held = warpgroup_mma_wait(0, deps=(state.to(dtype),))
        qk = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        qk = warpgroup_mma(q, k.permute((1, 0)), qk, use_acc=False, is_async=True)
        uv = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        uv = warpgroup_mma(u, v.permute((1, 0)), uv, use_acc=False, is_async=True)
        s.store(held)
        # one barrier for three: the state is there, the last outputs have left their tiles, the last tiles are read
        fence_async_shared()
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(free.index(last), count=1, pred=i > 0)
        last = stage
        dk = gl.zeros([K, CHUNK], gl.float32, k_layout)
        dk = warpgroup_mma(s, v.permute((1, 0)), dk, use_acc=False, is_async=True)
        dv = gl.zeros([V, CHUNK], gl.float32, v_layout)
        dv = warpgroup_mma(s.permute((1, 0)), k.permute((1, 0)), dv, use_acc=False, is_async=True)

        mbarrier.wait(gated.index(stage), phase)
        weight = within(gates, stage, p_layout, True) * scale
        inverse = columns.index(stage * ADJOINT_COLUMNS + INVERSE).load(later)[:, None]
        slope = columns.index(stage * ADJOINT_COLUMNS + SLOPE).load(later)[:, None]
        state = state * decays.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
        qk, uv = warpgroup_mma_wait(2, deps=(qk, uv))
        qk = qk * weight
        uv = uv * inverse + slope
        strength = gates.index(stage * VECTORS + STRENGTH).load(gl.SliceLayout(0, p_layout))[None, :]
        qk_tile.store((qk * inverse * strength).to(dtype))
        uv_tile.store((uv * weight * strength).to(dtype))
        fence_async_shared()
        barrier()
        both = qk * uv
        itself = gl.arange(0, CHUNK, later)[:, None] == gl.arange(0, CHUNK, gl.SliceLayout(0, p_layout))[None, :]
        apart = gl.where(itself, 0.0, both)
        earlier_parts.index(stage).store(parts_of_columns(apart, 4))
        own_parts.index(stage).store(parts_of_columns(gl.where(itself, both, 0.0), 4))
        apart *= strength
        over = gl.sum(gl.reshape(apart, [CHUNK, pairs, CHUNK // pairs]), 2)
        later_parts.index(stage).permute((1, 0)).store(over)
        qt = q.permute((1, 0)).load(write_layout).to(gl.float32)
        write = gates.index(stage * VECTORS + WRITE).load(gl.SliceLayout(0, write_layout))
        added = (
            qt * (write * columns.index(stage * ADJOINT_COLUMNS + SLOPE).load(gl.SliceLayout(0, write_layout)))[None, :]
        )
        added = gl.convert_layout(gl.sum(added, 1), of_key)
        write *= columns.index(stage * ADJOINT_COLUMNS + INVERSE).load(gl.SliceLayout(0, write_layout))
        written = (qt * write[None, :]).to(dtype)
        read_k = columns.index(stage * ADJOINT_COLUMNS + READ_STRENGTH).load(gl.SliceLayout(0, k_layout))
        read_v = columns.index(stage * ADJOINT_COLUMNS + READ_STRENGTH).load(gl.SliceLayout(0, v_layout))
        kt = k.permute((1, 0)).load(k_layout)
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        dk = dk + dn[:, None]
        cross = dk * kt.to(gl.float32)
        dk = dk * read_k[None, :]
        dv = dv * read_v[None, :]
        dn = dn * decays.index(stage).load(of_key) + added
        dk, dv, state, written = warpgroup_mma_wait(0, deps=(dk, dv, state, written))
        dk = warpgroup_mma(q.permute((1, 0)), uv_tile, dk, is_async=True)
        dv = warpgroup_mma(u.permute((1, 0)), qk_tile, dv, is_async=True)
        state = warpgroup_mma(written, u, state, is_async=True)
        dk, dv = warpgroup_mma_wait(1, deps=(dk, dv))
        cross_parts.index(stage).store(parts_of_columns(cross, warps))
        dk_tile.reshape([CHUNK, K]).permute((1, 0)).store(dk.to(dtype))
        dv_tile.reshape([CHUNK, V]).permute((1, 0)).store(dv.to(dtype))
        fence_async_shared()
        barrier()
        tma_store(dk_desc, [batch, chunk * CHUNK, head, 0], dk_tile)
        tma_store(dv_desc, [batch, chunk * CHUNK, head, 0], dv_tile)
        if SAVE > 0:  # noqa: SIM102 - known while compiling
            if chunk % SAVE == 0:
                # every warp is past the products with the state's tile
                mbarrier.expect(restored, saved_desc.block_type.nbytes)
                tma_load(saved_desc, [gl.program_id(0), chunk // SAVE, 0, 0], restored, s_tile)
        state, written = warpgroup_mma_wait(0, deps=(state, written))
        if SAVE > 0:  # noqa: SIM102 - known while compiling
            if chunk % SAVE == 0:
                n = gl.load(saved_n_ptr + chunk // SAVE * KEYS + n_key, mask=n_key < KEYS, other=0.0)
                own = gl.convert_layout(n * dn, gl.SliceLayout(1, s_layout))
                mbarrier.wait(restored, turns & 1)
                turns += 1
                kept = s.load(s_layout).to(gl.float32)
                state_parts.index(stage).store(gl.sum(state.to(dtype).to(gl.float32) * kept, 1) + own)
                # read by all before the next chunk's state takes its place
                barrier()
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    barrier()
    mbarrier.arrive(free.index(last), count=1, pred=count > 0)
    if end_ptr is not None:
        # addresses computed again: kept from the start, they would take as many registers as the state
        key = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [key], gl.int32, is_pure=False, pack=1)
        at = key[:, None] * (VALUES + 1) + value[None, :]
        gl.store(end_ptr + corner + at, state, mask=inside)
        gl.store(end_ptr + corner + n_key * (VALUES + 1) + VALUES, dn, mask=n_key < KEYS)
    tma_store_wait(0)
