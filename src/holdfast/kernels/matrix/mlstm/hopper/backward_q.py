"""The dq kernel of mLSTM on Hopper: states and normalisers computed again, in registers, from the first token on.

With y_t = 1 / (max(|norm_t|, exp(-m_t)) + eps) and z_t the gradient of norm_t,
    S = exp(g_t) S + beta_t k_t v_t^T;  n = exp(g_t) n + beta_t k_t;  dq_t = scale (y_t S do_t + z_t n).

z needs no output: do_t . o_t = q_t . (scale y_t S do_t), and S is at hand. This is the forward kernel of
scalar_decay/hopper/forward.py with roles exchanged, and with n as one more column of S, for which do has z and v has
ones. A block owns a (batch, head) and goes over chunks of 64 tokens. With scores as [earlier, later],
    R = (S dO^T) * read * y;  P = (V dO^T) * causal decay;  S = decay S + (K^T * write) V;
    z = -y (sum over keys of Q^T * R + y sum over earlier of P * (K Q^T)), where |norm| is above exp(-m), by its sign;
    dQ^T = R + (n z^T) * read + K^T (P * y + causal decay * z).

The first state is read in two parts of 16 bits. A few tokens may read nothing else, and then q . dq is next to nothing.
"""

from holdfast.kernels.lib.gluon.compat import fence_async_shared, gl, gluon, mbarrier, tma_load
from holdfast.kernels.lib.gluon.decay import CHUNK, VECTORS
from holdfast.kernels.lib.gluon.sequence import head_offset

from .backward_q_mma import Sizes, StatePointers, Sums, Tiles, TokenPointers, mma_partition
from .buffers import Heads, Stages
from .decay import Q_VECTORS, NormSources, TokenStrides, decay_partition_q


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
        "do_o_ptr",
        "initial_ptr",
        "last_entry_ptr",
        "token_ptr",
    ],
)
def mlstm_bwd_q(
    do_desc,
    v_desc,
    k_desc,
    dq_desc,
    q_desc,
    g_ptr,
    beta_ptr,
    m_ptr,
    norm_ptr,
    do_o_ptr,
    initial_ptr,
    last_entry_ptr,
    saved_ptr,
    saved_n_ptr,
    token_ptr,
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
    """Grid (B * H,). By descriptors of blocks [1, 64, 1, columns]:

    q, k [B, T, H / k_group, KEYS]
    v [B, T, H / v_group, VALUES]
    do [B, T, H, VALUES]
    dq [B, T, H, KEYS], written

    By pointers:

    g, beta, m [B, T, H]: log decay, beta and stabiliser, with strides
    norm [2, B, H, T] float32: whole, and the part that comes from earlier chunks
    do_o [B, H, T] float32: do . o, where q and k are a slice of K; None: the kernel finds it
    token [4, B, H, T] float32, written: INV_NORM, D_NORM, D_STABILIZER and Q_DQ
    initial, last_entry [B, H, KEYS, VALUES + 1] float32: S and n before the first and before the last chunk, which is
        written; either may be None
    saved [B, H, ceil(chunks / SAVE), KEYS, VALUES] in q's dtype, saved_n [B, H, ceil(chunks / SAVE), KEYS] float32,
        written: S and n before every SAVE-th chunk but the first
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows_of: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], do_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], v_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
    decay_vectors = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], plain)
    token_vectors = gl.allocate_shared_memory(gl.float32, [STAGES * Q_VECTORS, CHUNK], plain)
    chunk_decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1], plain)
    # sums that each warp leaves: of q . R over keys, of the scores over their earlier token
    q_dq_parts = gl.allocate_shared_memory(gl.float32, [gl.num_warps(), CHUNK], rows_of)
    score_sums = gl.allocate_shared_memory(gl.float32, [4, CHUNK], rows_of)
    d_norms = gl.allocate_shared_memory(gl.float32, [CHUNK], plain)
    tiles_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    decay_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(tiles_ready.index(i), count=1)
        mbarrier.init(decay_ready.index(i), count=1)
        mbarrier.init(stage_empty.index(i), count=1)
    fence_async_shared()

    g_ptr += head_offset(H, g_b, g_h)
    beta_ptr += head_offset(H, beta_b, beta_h)
    token_offset = gl.program_id(0).to(gl.int64) * T
    m_ptr += head_offset(H, m_b, m_h)
    norm_ptr += token_offset
    if do_o_ptr is not None:
        do_o_ptr += token_offset
    token_ptr += token_offset
    count = gl.cdiv(T, CHUNK)
    entry = gl.program_id(0).to(gl.int64) * gl.cdiv(count, SAVE)
    saved_ptr += entry * (KEYS * VALUES)
    saved_n_ptr += entry * KEYS
    tiles = Tiles(do=do_tiles, v=v_tiles, k=k_tiles, q=q_tiles)
    descs = Tiles(do=do_desc, v=v_desc, k=k_desc, q=q_desc)
    stages = Stages(
        decay_vectors=decay_vectors,
        token_vectors=token_vectors,
        chunk_decays=chunk_decays,
        tiles_ready=tiles_ready,
        decay_ready=decay_ready,
        stage_empty=stage_empty,
    )
    gl.warp_specialize(
        [
            (
                mma_partition,
                (
                    tiles,
                    stages,
                    Sums(q_dq_parts=q_dq_parts, score_sums=score_sums, d_norms=d_norms),
                    dq_desc,
                    TokenPointers(do_o=do_o_ptr, token=token_ptr),
                    StatePointers(initial=initial_ptr, last_entry=last_entry_ptr, saved=saved_ptr, saved_n=saved_n_ptr),
                    Sizes(T=T, H=H, count=count, KEYS=KEYS, VALUES=VALUES, SAVE=SAVE),
                ),
            ),
            (
                load_partition,
                (tiles, descs, tiles_ready, stage_empty, Heads(H=H, qk_group=k_group, v_group=v_group), count),
            ),
            (
                decay_partition_q,
                (
                    stages,
                    NormSources(g=g_ptr, beta=beta_ptr, m=m_ptr, norm=norm_ptr),
                    TokenStrides(g=g_t, beta=beta_t, m=m_t),
                    T,
                    count,
                    scale,
                    eps,
                ),
            ),
        ],
        [1, 1],
        [40, 40],
    )


@gluon.jit
def load_partition(tiles, descs, tiles_ready, stage_empty, heads, count):
    """Load do, v, k and q, as many chunks ahead as there are stages."""
    do_tiles, v_tiles, k_tiles, q_tiles = tiles
    do_desc, v_desc, k_desc, q_desc = descs
    H, k_group, v_group = heads
    STAGES: gl.constexpr = q_tiles.shape[0]
    width: gl.constexpr = 2 * (do_desc.block_type.nbytes + k_desc.block_type.nbytes)
    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    stage = 0
    phase = 1
    for i in range(count):
        mbarrier.wait(stage_empty.index(stage), phase)
        mbarrier.expect(tiles_ready.index(stage), width)
        tma_load(v_desc, [batch, i * CHUNK, head // v_group, 0], tiles_ready.index(stage), v_tiles.index(stage))
        tma_load(do_desc, [batch, i * CHUNK, head, 0], tiles_ready.index(stage), do_tiles.index(stage))
        tma_load(k_desc, [batch, i * CHUNK, head // k_group, 0], tiles_ready.index(stage), k_tiles.index(stage))
        tma_load(q_desc, [batch, i * CHUNK, head // k_group, 0], tiles_ready.index(stage), q_tiles.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
