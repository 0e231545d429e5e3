"""mLSTM's forward kernel on Hopper: scalar decay's, with the normaliser beside it and the division at its end.

    S = exp(g_t) S + beta_t k_t v_t^T;  n = exp(g_t) n + beta_t k_t;  norm_t = scale n . q_t
    o_t = scale S^T q_t / (max(|norm_t|, exp(-m_t)) + eps).

A block owns a (batch, head) and goes over chunks of 64 tokens. The mma partition leaves the sums of a chunk's scores
over earlier tokens in shared memory; the normaliser partition (normalizer.py) adds what comes from earlier chunks, and
has the quotient ready when the chunk's output is.
"""

from typing import NamedTuple

from holdfast.kernels.lib.gluon.compat import fence_async_shared, gl, gluon, mbarrier, tma_load
from holdfast.kernels.lib.gluon.decay import CHUNK, VECTORS, load_decay_beta, publish_decays, publish_decays_in_parts
from holdfast.kernels.lib.gluon.sequence import head_offset

from .buffers import Heads
from .forward_mma import Division, Sizes, Stages, StateIO, Tiles, mma_partition
from .normalizer import NormBuffers, NormChunks, NormPointers, NormSizes, normalizer_partition


class DecayStages(NamedTuple):
    """What of Stages the decay partition fills and waits for."""

    decay_vectors: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    chunk_decays: gl.shared_memory_descriptor
    decay_ready: gl.shared_memory_descriptor
    stage_empty: gl.shared_memory_descriptor


class DecaySource(NamedTuple):
    """Where a head's log decays and betas are, and their strides from token to token."""

    g_ptr: gl.tensor
    beta_ptr: gl.tensor
    g_t: gl.tensor
    beta_t: gl.tensor


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
        "inter_norm_ptr",
        "slices_norm_ptr",
        "initial_ptr",
        "final_ptr",
    ],
)
def mlstm_fwd(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    g_ptr,
    beta_ptr,
    m_ptr,
    norm_ptr,
    inter_norm_ptr,
    slices_norm_ptr,
    sums_ptr,
    initial_ptr,
    final_ptr,
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
    """Grid (B * H,). By descriptors of blocks [1, 64, 1, columns]:

    q, k [B, T, H / qk_group, KEYS]
    v [B, T, H / v_group, VALUES]
    o [B, T, H, VALUES]

    By pointers:

    g, beta, m [B, T, H]: log decay, beta and stabiliser, with strides
    norm [B, H, T] float32, written: n . q, scaled
    inter_norm [B, H, T] float32, written: the part of norm that comes from earlier chunks
    slices_norm [B, H, T] float32, with ADDS: the norm of earlier slices of K. norm is then that of all slices so far,
        inter_norm that of this slice alone
    sums: outputs of a state in slices of K (ADDS, LEAVES), as in scalar_decay/hopper/forward.py
    initial, final [B, H, KEYS, VALUES + 1] float32: S and n before and after; initial may be None
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], v_desc.layout)
    o_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, V], o_desc.layout)
    decay_vectors = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], plain)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], plain)
    chunk_decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1], plain)
    score_sums = gl.allocate_shared_memory(gl.float32, [4, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    n_tile = gl.allocate_shared_memory(dtype, [8, K], gl.NVMMASharedLayout(128, 16, 2))
    w_tile = gl.allocate_shared_memory(dtype, [8, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    inter = gl.allocate_shared_memory(gl.float32, [CHUNK], plain)
    inv_norms = gl.allocate_shared_memory(gl.float32, [CHUNK], plain)
    tiles_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    decay_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    score_sums_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    inv_norms_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(tiles_ready.index(i), count=1)
        mbarrier.init(decay_ready.index(i), count=1)
        mbarrier.init(stage_empty.index(i), count=1)
    mbarrier.init(score_sums_ready, count=1)
    mbarrier.init(inv_norms_ready, count=1)
    fence_async_shared()

    g_ptr += head_offset(H, g_b, g_h)
    beta_ptr += head_offset(H, beta_b, beta_h)
    m_ptr += head_offset(H, m_b, m_h)
    token_offset = gl.program_id(0).to(gl.int64) * T
    norm_ptr += token_offset
    inter_norm_ptr += token_offset
    if ADDS:
        slices_norm_ptr += token_offset
    count = gl.cdiv(T, CHUNK)
    # norm may cancel to 1e-5 of its terms, which log decays summed in one part leave; with slices of K, sums of other
    # launches have no factor
    IN_PARTS: gl.constexpr = not (ADDS or LEAVES)
    tiles = Tiles(q=q_tiles, k=k_tiles, v=v_tiles)
    descs = Tiles(q=q_desc, k=k_desc, v=v_desc)
    gl.warp_specialize(
        [
            (
                mma_partition,
                (
                    tiles,
                    o_tile,
                    Stages(
                        decay_vectors=decay_vectors,
                        chunk_decays=chunk_decays,
                        tiles_ready=tiles_ready,
                        decay_ready=decay_ready,
                        stage_empty=stage_empty,
                    ),
                    Division(
                        score_sums=score_sums,
                        inv_norms=inv_norms,
                        score_sums_ready=score_sums_ready,
                        inv_norms_ready=inv_norms_ready,
                    ),
                    o_desc,
                    StateIO(initial=initial_ptr, final=final_ptr, sums=sums_ptr),
                    Sizes(T=T, H=H, count=count, KEYS=KEYS, VALUES=VALUES, ADDS=ADDS, LEAVES=LEAVES),
                ),
            ),
            # first, since wgmma wants its four warps at a multiple of four
            (
                normalizer_partition,
                (
                    NormChunks(
                        q=q_tiles,
                        k=k_tiles,
                        decay_vectors=decay_vectors,
                        factors=factors,
                        chunk_decays=chunk_decays,
                        tiles_ready=tiles_ready,
                        decay_ready=decay_ready,
                    ),
                    NormBuffers(
                        score_sums=score_sums,
                        n_tile=n_tile,
                        w_tile=w_tile,
                        inter=inter,
                        inv_norms=inv_norms,
                        score_sums_ready=score_sums_ready,
                        inv_norms_ready=inv_norms_ready,
                    ),
                    NormPointers(
                        initial=initial_ptr,
                        final=final_ptr,
                        m=m_ptr,
                        norm=norm_ptr,
                        inter_norm=inter_norm_ptr,
                        slices_norm=slices_norm_ptr,
                    ),
                    m_t,
                    NormSizes(H=H, T=T, count=count, eps=eps, KEYS=KEYS, VALUES=VALUES, ADDS=ADDS, IN_PARTS=IN_PARTS),
                ),
            ),
            (
                load_partition,
                (tiles, descs, tiles_ready, stage_empty, Heads(H=H, qk_group=qk_group, v_group=v_group), count),
            ),
            (
                decay_partition,
                (
                    DecayStages(
                        decay_vectors=decay_vectors,
                        factors=factors,
                        chunk_decays=chunk_decays,
                        decay_ready=decay_ready,
                        stage_empty=stage_empty,
                    ),
                    DecaySource(g_ptr=g_ptr, beta_ptr=beta_ptr, g_t=g_t, beta_t=beta_t),
                    T,
                    count,
                    scale,
                    IN_PARTS,
                ),
            ),
        ],
        [4, 1, 1],
        [40, 40, 40],
    )


@gluon.jit
def load_partition(tiles, descs, tiles_ready, stage_empty, heads, count):
    """Load q, k and v, as many chunks ahead as there are stages."""
    q_tiles, k_tiles, v_tiles = tiles
    q_desc, k_desc, v_desc = descs
    H, qk_group, v_group = heads
    STAGES: gl.constexpr = q_tiles.shape[0]
    width: gl.constexpr = 2 * q_desc.block_type.nbytes + v_desc.block_type.nbytes
    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    stage = 0
    phase = 1
    for i in range(count):
        mbarrier.wait(stage_empty.index(stage), phase)
        mbarrier.expect(tiles_ready.index(stage), width)
        tma_load(k_desc, [batch, i * CHUNK, head // qk_group, 0], tiles_ready.index(stage), k_tiles.index(stage))
        tma_load(q_desc, [batch, i * CHUNK, head // qk_group, 0], tiles_ready.index(stage), q_tiles.index(stage))
        tma_load(v_desc, [batch, i * CHUNK, head // v_group, 0], tiles_ready.index(stage), v_tiles.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def decay_partition(stages, source, T, count, scale, IN_PARTS: gl.constexpr):
    """Publish each chunk's decays when its stage is empty."""
    decay_vectors, factors, chunk_decays, decay_ready, stage_empty = stages
    g_ptr, beta_ptr, g_t, beta_t = source
    STAGES: gl.constexpr = chunk_decays.shape[0]
    stage = 0
    phase = 1
    g, beta = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, 0, count > 0, T)
    # two chunks ahead: a load takes as long as a chunk
    g_next, beta_next = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, 1, count > 1, T)
    for i in range(count):
        g_later, beta_later = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, i + 2, i + 2 < count, T)
        mbarrier.wait(stage_empty.index(stage), phase)
        if IN_PARTS:
            publish_decays_in_parts(decay_vectors, factors, chunk_decays, decay_ready, stage, g, beta, scale)
        else:
            publish_decays(decay_vectors, chunk_decays, decay_ready, stage, g, beta, scale, False)
        g, beta = g_next, beta_next
        g_next, beta_next = g_later, beta_later
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
