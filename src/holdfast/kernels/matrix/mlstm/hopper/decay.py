"""The decay partitions of mLSTM's backward kernels: they publish each chunk's decays and what the division comes to."""

from typing import NamedTuple

from holdfast.kernels.lib.gluon.compat import gl, gluon, mbarrier
from holdfast.kernels.lib.gluon.decay import CHUNK, load_decay_beta, publish_decays
from holdfast.kernels.lib.gluon.reduce import add

from .normalizer import norm_floor

# vectors of a stage of the dk and dv kernel: y = 1 / (max(|norm|, exp(-m)) + eps) and z, the gradient of norm, both
# times scale; the weight with which dS is read, times the beta of what is read; and the one with which it is written,
# times y and times z
INV_NORM, D_NORM, READ_BETA = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
WRITE_INV_NORM, WRITE_D_NORM = gl.constexpr(3), gl.constexpr(4)
KV_VECTORS = gl.constexpr(5)
# what the dq kernel leaves in memory beside y and z: the gradient of m, and q . dq of earlier chunks
D_STABILIZER, Q_DQ = gl.constexpr(2), gl.constexpr(3)
# vectors of a stage of the dq kernel beside y: the factors that turn do . o into the gradients of norm and of m, and
# the part of norm that comes from earlier chunks
NORM_FACTOR, STABILIZER_FACTOR, INTER_NORM = gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
Q_VECTORS = gl.constexpr(4)


class NormSources(NamedTuple):
    """Where the dq kernel reads a head's log decays, betas, stabilisers and norms."""

    g: gl.tensor
    beta: gl.tensor
    m: gl.tensor
    norm: gl.tensor


class TokenStrides(NamedTuple):
    """From one token to the next, in elements."""

    g: gl.tensor
    beta: gl.tensor
    m: gl.tensor


class NormGradSources(NamedTuple):
    """Where the dk and dv kernel reads a head's log decays, betas, y and z."""

    g: gl.tensor
    beta: gl.tensor
    inv_norm: gl.tensor
    d_norm: gl.tensor


@gluon.jit
def _load_norms(m_ptr, norm_ptr, m_t, chunk, T):
    """Load a chunk's exp(-m), its norms and their parts from earlier chunks."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    tokens = chunk * CHUNK + gl.arange(0, CHUNK, layout)
    inside = tokens < T
    floor = norm_floor(gl.load(m_ptr + tokens.to(gl.int64) * m_t, mask=inside, other=0.0))
    norm_ptr += tokens
    norm = gl.load(norm_ptr, mask=inside, other=0.0)
    return floor, norm, gl.load(norm_ptr + gl.num_programs(0).to(gl.int64) * T, mask=inside, other=0.0)


@gluon.jit
def decay_partition_q(stages, sources, strides, T, count, scale, eps):
    """Publish each chunk's decays, y and the gradients' factors when its stage is empty. For the dq kernel."""
    decay_vectors, token_vectors = stages.decay_vectors, stages.token_vectors
    chunk_decays, decay_ready, stage_empty = stages.chunk_decays, stages.decay_ready, stages.stage_empty
    g_ptr, beta_ptr, m_ptr, norm_ptr = sources
    g_t, beta_t, m_t = strides
    STAGES: gl.constexpr = chunk_decays.shape[0]
    stage = 0
    phase = 1
    g, beta = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, 0, count > 0, T)
    for i in range(count):
        g_next, beta_next = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, i + 1, i + 1 < count, T)
        floor, norm, inter_norm = _load_norms(m_ptr, norm_ptr, m_t, i, T)
        size = gl.abs(norm)
        inv_norm = 1.0 / (gl.maximum(size, floor) + eps)
        # equal arguments of the maximum share its gradient, as in PyTorch
        share = gl.where(size > floor, 1.0, gl.where(size == floor, 0.5, 0.0))
        sign = gl.where(norm > 0, 1.0, gl.where(norm < 0, -1.0, 0.0))
        mbarrier.wait(stage_empty.index(stage), phase)
        token_vectors.index(stage * Q_VECTORS + INV_NORM).store(inv_norm)
        token_vectors.index(stage * Q_VECTORS + NORM_FACTOR).store(-inv_norm * share * sign)
        token_vectors.index(stage * Q_VECTORS + STABILIZER_FACTOR).store(-inv_norm * eps)
        token_vectors.index(stage * Q_VECTORS + INTER_NORM).store(inter_norm)
        publish_decays(decay_vectors, chunk_decays, decay_ready, stage, g, beta, scale, False)
        g, beta = g_next, beta_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _load_norm_grads(inv_norm_ptr, d_norm_ptr, chunk, is_inside, T):
    """Load a chunk's INV_NORM and D_NORM; nothing is loaded where is_inside is false."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    tokens = chunk * CHUNK + gl.arange(0, CHUNK, layout)
    inside = (tokens < T) & is_inside
    return gl.load(inv_norm_ptr + tokens, mask=inside, other=0.0), gl.load(d_norm_ptr + tokens, mask=inside, other=0.0)


@gluon.jit
def decay_partition_kv(stages, sources, g_t, beta_t, T, count, scale):
    """Publish each chunk's decays, y and z when its stage is empty. For the dk and dv kernel, last chunk first."""
    decay_vectors, token_vectors = stages.decay_vectors, stages.token_vectors
    chunk_decays, decay_ready, stage_empty = stages.chunk_decays, stages.decay_ready, stages.stage_empty
    g_ptr, beta_ptr, inv_norm_ptr, d_norm_ptr = sources
    STAGES: gl.constexpr = chunk_decays.shape[0]
    stage = 0
    phase = 1
    g, beta = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, count - 1, count > 0, T)
    inv_norm, d_norm = _load_norm_grads(inv_norm_ptr, d_norm_ptr, count - 1, count > 0, T)
    for i in range(count):
        g_next, beta_next = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, count - 2 - i, i + 1 < count, T)
        inv_norm_next, d_norm_next = _load_norm_grads(inv_norm_ptr, d_norm_ptr, count - 2 - i, i + 1 < count, T)
        mbarrier.wait(stage_empty.index(stage), phase)
        inv_norm *= scale
        d_norm *= scale
        total = gl.associative_scan(g, 0, add)
        token_vectors.index(stage * KV_VECTORS + INV_NORM).store(inv_norm)
        token_vectors.index(stage * KV_VECTORS + D_NORM).store(d_norm)
        token_vectors.index(stage * KV_VECTORS + READ_BETA).store(gl.exp2(gl.sum(g, 0) - total) * beta)
        token_vectors.index(stage * KV_VECTORS + WRITE_INV_NORM).store(gl.exp2(total) * inv_norm)
        token_vectors.index(stage * KV_VECTORS + WRITE_D_NORM).store(gl.exp2(total) * d_norm)
        publish_decays(decay_vectors, chunk_decays, decay_ready, stage, g, beta, 1.0, True)
        g, beta, inv_norm, d_norm = g_next, beta_next, inv_norm_next, d_norm_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
