"""mLSTM's adjoint sweep on Hopper: from the last token to the first, the gradients of k, v, g and beta.

The sweep of scalar_decay/hopper/backward.py with n as one more column of S, which makes dn one more of dS, carried in
registers beside it:
    dS = exp(g_{t+1}) dS + scale y_t q_t u_t^T;  dn = exp(g_{t+1}) dn + scale z_t q_t
    dk_t = beta_t (dS v_t + dn);  dv_t = beta_t dS^T k_t,
u the gradient of o, y_t = 1 / (max(|norm_t|, exp(-m_t)) + eps) and z_t the gradient of norm_t.
backward_kv_mma.py multiplies. dg is summed as scalar_decay/hopper/backward_decay.py tells.
"""

from holdfast.kernels.lib.gluon.compat import fence_async_shared, gl, gluon, mbarrier, tma_load
from holdfast.kernels.lib.gluon.decay import CHUNK, VECTORS
from holdfast.kernels.lib.gluon.sequence import head_offset
from holdfast.kernels.matrix.scalar_decay.hopper.backward_decay import sum_up

from .backward_kv_mma import multiply
from .decay import ADJOINT_COLUMNS, gate_adjoint


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
        "passing_ptr",
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
    passing_ptr,
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
    FROM: gl.constexpr,
    ROUNDING: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H,).

    q, k: [B, T, H / k_group, KEYS]; v: [B, T, H / v_group, VALUES]; u, dk, dv: [B, T, H, *], by descriptors of blocks
    [1, 64, 1, columns], those of VALUES no wider than those of KEYS. inverse, slope: y and z [B, H, T].
    start, end: dS and dn after the last and before the first token, float32 [B, H, KEYS, VALUES + 1], or None.
    dg, dbeta: [B, H, T]. row [B, H, T], saved (by a descriptor of blocks [1, 1, *, *]) and saved_n: what
    backward_q.py left. passing [B, H]: <S, dS> + <n, dn>, S and n before the last chunk, None for 0. FROM,
    ROUNDING: as in scalar_decay/hopper/backward.py.
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
    # itself, of what comes from later chunks, and of the products of states, with the gradient as it is and rounded
    later_parts = gl.allocate_shared_memory(gl.float32, [STAGES, warps // 4, CHUNK], rows_of)
    earlier_parts = gl.allocate_shared_memory(gl.float32, [STAGES, 4, CHUNK], rows_of)
    own_parts = gl.allocate_shared_memory(gl.float32, [STAGES, warps // 4, CHUNK], rows_of)
    cross_parts = gl.allocate_shared_memory(gl.float32, [STAGES, warps, CHUNK], rows_of)
    state_parts = gl.allocate_shared_memory(gl.float32, [STAGES * 2, K], plain)
    # of the chunks since the last saved state: dg, and two numbers that correct it
    waiting = gl.allocate_shared_memory(gl.float32, [SAVE - 1, CHUNK], plain)
    strays = gl.allocate_shared_memory(gl.float32, [SAVE * 2 - 2, 1], plain)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    restored = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(restored, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        # by weights that are there, and sums that have been read
        mbarrier.init(gated.index(i), count=2)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()

    g_ptr += head_offset(H, g_b, g_h)
    beta_ptr += head_offset(H, beta_b, beta_h)
    of_rows = gl.program_id(0).to(gl.int64) * T
    dg_ptr += of_rows
    dbeta_ptr += of_rows
    inverse_ptr += of_rows
    slope_ptr += of_rows
    row_ptr += of_rows
    count = gl.cdiv(T, CHUNK)
    saved_n_ptr += gl.program_id(0).to(gl.int64) * gl.cdiv(count, SAVE) * KEYS
    tiles = (q_tiles, k_tiles, u_tiles, v_tiles)
    sources = (q_desc, k_desc, u_desc, v_desc)
    places = (gates, columns, decays, loaded, gated, free)
    parts = (later_parts, earlier_parts, own_parts, cross_parts, state_parts)
    gl.warp_specialize(
        [
            (
                multiply,
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
                    KEYS,
                    VALUES,
                    SAVE,
                    FROM,
                    STAGES,
                ),
            ),
            (_copy, (tiles, sources, loaded, free, H, k_group, v_group, count, STAGES)),
            (
                gate_adjoint,
                (
                    places,
                    (g_ptr, beta_ptr, inverse_ptr, slope_ptr),
                    g_t,
                    beta_t,
                    T,
                    count,
                    scale,
                    STAGES,
                ),
            ),
            (
                sum_up,
                (
                    (gated, free),
                    parts,
                    (waiting, strays),
                    g_ptr,
                    beta_ptr,
                    g_t,
                    beta_t,
                    row_ptr,
                    passing_ptr,
                    dg_ptr,
                    dbeta_ptr,
                    T,
                    T,
                    H,
                    1,
                    1,
                    0,
                    count,
                    True,
                    SAVE,
                    FROM,
                    ROUNDING,
                    STAGES,
                ),
            ),
        ],
        [1, 1, 1],
        [others, others, others],
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
