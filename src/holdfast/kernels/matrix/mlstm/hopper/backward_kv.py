"""The dk and dv kernel of mLSTM on Hopper, last token first: gradients of k, v, g and beta.

It is the kernel of scalar_decay/hopper/backward.py with n as one more column of S, which makes dn one more of dS,
carried in registers beside it:
    dS = exp(g_{t+1}) dS + scale y_t q_t do_t^T;  dn = exp(g_{t+1}) dn + scale z_t q_t
    dk_t = beta_t (dS v_t + dn);  dv_t = beta_t dS^T k_t,
with y_t = 1 / (max(|norm_t|, exp(-m_t)) + eps) and z_t the gradient of norm_t. backward_kv_mma.py multiplies; dg is
summed as lib/gluon/decay_grad.py tells.
"""

from holdfast.kernels.lib.gluon.compat import fence_async_shared, gl, gluon, mbarrier, tma_load
from holdfast.kernels.lib.gluon.decay import CHUNK, VECTORS
from holdfast.kernels.lib.gluon.decay_grad import (
    DecayGradBuffers,
    DecayGradSizes,
    DecayGradTensors,
    RowSums,
    SmoothingWindow,
    decay_grad_partition,
)
from holdfast.kernels.lib.gluon.sequence import head_offset

from .backward_kv_mma import Operands, Outputs, Sizes, StatePointers, mma_partition
from .buffers import Heads, Stages
from .decay import KV_VECTORS, NormGradSources, decay_partition_kv


@gluon.jit(
    do_not_specialize=["T", "H", "k_group", "v_group", "g_b", "g_t", "g_h", "beta_b", "beta_t", "beta_h"],
    do_not_specialize_on_alignment=[
        "g_ptr",
        "beta_ptr",
        "inv_norm_ptr",
        "d_norm_ptr",
        "initial_ptr",
        "dfinal_ptr",
        "dinitial_ptr",
        "saved_n_ptr",
        "q_dq_ptr",
        "state_grad_dot_ptr",
        "dg_ptr",
        "dbeta_ptr",
        "final_product_ptr",
    ],
)
def mlstm_bwd_kv(
    q_desc,
    k_desc,
    do_desc,
    v_desc,
    dk_desc,
    dv_desc,
    saved_desc,
    g_ptr,
    beta_ptr,
    inv_norm_ptr,
    d_norm_ptr,
    initial_ptr,
    dfinal_ptr,
    dinitial_ptr,
    saved_n_ptr,
    q_dq_ptr,
    state_grad_dot_ptr,
    dg_ptr,
    dbeta_ptr,
    final_product_ptr,
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
    ROUNDING: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H,). By descriptors of blocks [1, 64, 1, columns], those of VALUES no wider than those of KEYS:

    q, k [B, T, H / k_group, KEYS]
    v [B, T, H / v_group, VALUES]
    do [B, T, H, VALUES]
    dk [B, T, H, KEYS], written
    dv [B, T, H, VALUES], written
    saved [B * H, n, KEYS, VALUES], by blocks [1, 1, *, *]: states that the dq kernel saved

    By pointers:

    g, beta [B, T, H]: log decay and beta, with strides
    inv_norm, d_norm [B, H, T] float32: y and z
    initial [B, H, KEYS, VALUES + 1] float32: S and n before the first token; None for 0
    dfinal, dinitial [B, H, KEYS, VALUES + 1] float32: dS and dn after the last and before the first token, which is
        written; either may be None
    saved_n [B, H, n, KEYS] float32, q_dq [B, H, T] float32: what the dq kernel left
    state_grad_dot [B, H] float32: <S, dS> + <n, dn>, with S and n before the last chunk; None for 0
    dg, dbeta [B, H, T] float32, written
    final_product [B, H] float32, written: <S, dS> + <n, dn> after the last token, of the numbers that dg is a sum of;
        or None

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
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], do_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], v_desc.layout)
    dk_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, K], dk_desc.layout)
    dv_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, V], dv_desc.layout)
    decay_vectors = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], plain)
    token_vectors = gl.allocate_shared_memory(gl.float32, [STAGES * KV_VECTORS, CHUNK], plain)
    chunk_decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1], plain)
    # row sums that each warp leaves: of a chunk's pairs over the earlier and over the later token, of a token with
    # itself, of what comes from later chunks, and of the products of states, with the gradient as it is and rounded
    later_parts = gl.allocate_shared_memory(gl.float32, [STAGES, warps // 4, CHUNK], rows_of)
    earlier_parts = gl.allocate_shared_memory(gl.float32, [STAGES, 4, CHUNK], rows_of)
    own_parts = gl.allocate_shared_memory(gl.float32, [STAGES, warps // 4, CHUNK], rows_of)
    cross_parts = gl.allocate_shared_memory(gl.float32, [STAGES, warps, CHUNK], rows_of)
    state_parts = gl.allocate_shared_memory(gl.float32, [STAGES * 2, K], plain)
    # dg of the chunks since the last saved state, and two numbers a chunk that correct it
    pending_dg = gl.allocate_shared_memory(gl.float32, [SAVE - 1, CHUNK], plain)
    innovations = gl.allocate_shared_memory(gl.float32, [SAVE * 2 - 2, 1], plain)
    tiles_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    decay_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    saved_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(saved_ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(tiles_ready.index(i), count=1)
        # one arrival when the decays are there, one when the sums have been read
        mbarrier.init(decay_ready.index(i), count=2)
        mbarrier.init(stage_empty.index(i), count=1)
    fence_async_shared()

    g_ptr += head_offset(H, g_b, g_h)
    beta_ptr += head_offset(H, beta_b, beta_h)
    of_rows = gl.program_id(0).to(gl.int64) * T
    dg_ptr += of_rows
    dbeta_ptr += of_rows
    inv_norm_ptr += of_rows
    d_norm_ptr += of_rows
    q_dq_ptr += of_rows
    count = gl.cdiv(T, CHUNK)
    saved_n_ptr += gl.program_id(0).to(gl.int64) * gl.cdiv(count, SAVE) * KEYS
    tiles = Operands(q=q_tiles, k=k_tiles, do=do_tiles, v=v_tiles)
    descs = Operands(q=q_desc, k=k_desc, do=do_desc, v=v_desc)
    stages = Stages(
        decay_vectors=decay_vectors,
        token_vectors=token_vectors,
        chunk_decays=chunk_decays,
        tiles_ready=tiles_ready,
        decay_ready=decay_ready,
        stage_empty=stage_empty,
    )
    parts = RowSums(later=later_parts, earlier=earlier_parts, own=own_parts, cross=cross_parts, state=state_parts)
    gl.warp_specialize(
        [
            (
                mma_partition,
                (
                    tiles,
                    (dk_tile, dv_tile),
                    stages,
                    parts,
                    saved_ready,
                    Outputs(dk=dk_desc, dv=dv_desc, saved=saved_desc),
                    StatePointers(initial=initial_ptr, dfinal=dfinal_ptr, dinitial=dinitial_ptr, saved_n=saved_n_ptr),
                    Sizes(H=H, count=count, KEYS=KEYS, VALUES=VALUES, SAVE=SAVE),
                ),
            ),
            (
                load_partition,
                (tiles, descs, tiles_ready, stage_empty, Heads(H=H, qk_group=k_group, v_group=v_group), count),
            ),
            (
                decay_partition_kv,
                (
                    stages,
                    NormGradSources(g=g_ptr, beta=beta_ptr, inv_norm=inv_norm_ptr, d_norm=d_norm_ptr),
                    g_t,
                    beta_t,
                    T,
                    count,
                    scale,
                ),
            ),
            (
                decay_grad_partition,
                (
                    DecayGradBuffers(
                        decays_ready=decay_ready,
                        empty=stage_empty,
                        sums=parts,
                        window=SmoothingWindow(dg=pending_dg, gains=innovations),
                    ),
                    DecayGradTensors(
                        g=g_ptr,
                        beta=beta_ptr,
                        g_t=g_t,
                        beta_t=beta_t,
                        entered=q_dq_ptr,
                        passing=state_grad_dot_ptr,
                        dg=dg_ptr,
                        dbeta=dbeta_ptr,
                        final_product=final_product_ptr,
                    ),
                    DecayGradSizes(length=T, part_size=T, H=H, grad_t=1, parts=1, first=0, count=count),
                    True,
                    SAVE,
                    1 if initial_ptr is None else 0,
                    ROUNDING,
                    True,
                ),
            ),
        ],
        [1, 1, 1],
        [others, others, others],
    )


@gluon.jit
def load_partition(tiles, descs, tiles_ready, stage_empty, heads, count):
    """Load q, k, do and v, as many chunks ahead as there are stages, last chunk first."""
    q_tiles, k_tiles, do_tiles, v_tiles = tiles
    q_desc, k_desc, do_desc, v_desc = descs
    H, k_group, v_group = heads
    STAGES: gl.constexpr = q_tiles.shape[0]
    width: gl.constexpr = 2 * (q_desc.block_type.nbytes + v_desc.block_type.nbytes)
    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    stage = 0
    phase = 1
    for i in range(count):
        mbarrier.wait(stage_empty.index(stage), phase)
        token = (count - 1 - i) * CHUNK
        mbarrier.expect(tiles_ready.index(stage), width)
        tma_load(q_desc, [batch, token, head // k_group, 0], tiles_ready.index(stage), q_tiles.index(stage))
        tma_load(k_desc, [batch, token, head // k_group, 0], tiles_ready.index(stage), k_tiles.index(stage))
        tma_load(do_desc, [batch, token, head, 0], tiles_ready.index(stage), do_tiles.index(stage))
        tma_load(v_desc, [batch, token, head // v_group, 0], tiles_ready.index(stage), v_tiles.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
