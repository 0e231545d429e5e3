"""The gate warps of mLSTM's backward sweeps: they weigh chunks and divide."""

from holdfast.kernels.lib.gluon.compat import gl, gluon, mbarrier
from holdfast.kernels.lib.gluon.decay import CHUNK, load_decay_beta, publish_decays
from holdfast.kernels.lib.gluon.reduce import add

from .normalizer import denominator_floor

# vectors of a stage of the adjoint sweep: y = 1 / (max(|norm|, exp(-m)) + eps) and z, the gradient of norm, both times
# scale; the state's gradient's weight on reading, times the strength of what is read, and on writing, times y and z
INVERSE, SLOPE, READ_STRENGTH = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
WRITE_INVERSE, WRITE_SLOPE = gl.constexpr(3), gl.constexpr(4)
ADJOINT_COLUMNS = gl.constexpr(5)
# what the sweep for dq leaves in memory beside y and z: the gradient of m, and q . dq of earlier chunks
OF_STABILIZER, ROW = gl.constexpr(2), gl.constexpr(3)
# its vectors beside y: what makes the gradients of norm and of m of u . o, and norm's part of earlier chunks
OF_NORM, OF_EPS, EARLIER = gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
COLUMNS = gl.constexpr(4)


@gluon.jit
def _load_norms(m_ptr, norm_ptr, m_t, chunk, T):
    """A chunk's exp(-m), norms and what earlier chunks have of these."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    tokens = chunk * CHUNK + gl.arange(0, CHUNK, layout)
    inside = tokens < T
    floor = denominator_floor(gl.load(m_ptr + tokens.to(gl.int64) * m_t, mask=inside, other=0.0))
    norm_ptr += tokens
    norm = gl.load(norm_ptr, mask=inside, other=0.0)
    return floor, norm, gl.load(norm_ptr + gl.num_programs(0).to(gl.int64) * T, mask=inside, other=0.0)


@gluon.jit
def gate_queries(places, pointers, steps, T, count, scale, eps, STAGES: gl.constexpr):
    """Weighs each chunk when its stage is free, and divides."""
    gates, columns, decays, _, gated, free = places
    g_ptr, beta_ptr, m_ptr, norm_ptr = pointers
    g_t, beta_t, m_t = steps
    stage = 0
    phase = 1
    g, beta = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, 0, count > 0, T)
    for i in range(count):
        g_next, beta_next = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, i + 1, i + 1 < count, T)
        floor, norm, earlier = _load_norms(m_ptr, norm_ptr, m_t, i, T)
        size = gl.abs(norm)
        inverse = 1.0 / (gl.maximum(size, floor) + eps)
        # equal arguments of the maximum share its gradient, as in PyTorch
        share = gl.where(size > floor, 1.0, gl.where(size == floor, 0.5, 0.0))
        sign = gl.where(norm > 0, 1.0, gl.where(norm < 0, -1.0, 0.0))
        mbarrier.wait(free.index(stage), phase)
        columns.index(stage * COLUMNS + INVERSE).store(inverse)
        columns.index(stage * COLUMNS + OF_NORM).store(-inverse * share * sign)
        columns.index(stage * COLUMNS + OF_EPS).store(-inverse * eps)
        columns.index(stage * COLUMNS + EARLIER).store(earlier)
        publish_decays(gates, decays, gated, stage, g, beta, scale, False)
        g, beta = g_next, beta_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _load_columns(inverse_ptr, slope_ptr, chunk, is_inside, T):
    """A chunk's INVERSE and SLOPE; nothing is loaded where is_inside is false."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    tokens = chunk * CHUNK + gl.arange(0, CHUNK, layout)
    inside = (tokens < T) & is_inside
    return gl.load(inverse_ptr + tokens, mask=inside, other=0.0), gl.load(slope_ptr + tokens, mask=inside, other=0.0)


@gluon.jit
def gate_adjoint(places, pointers, g_t, beta_t, T, count, scale, STAGES: gl.constexpr):
    """Weighs each chunk when its stage is free."""
    gates, columns, decays, _, gated, free = places
    g_ptr, beta_ptr, inverse_ptr, slope_ptr = pointers
    stage = 0
    phase = 1
    g, beta = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, count - 1, count > 0, T)
    inverse, slope = _load_columns(inverse_ptr, slope_ptr, count - 1, count > 0, T)
    for i in range(count):
        g_next, beta_next = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, count - 2 - i, i + 1 < count, T)
        inverse_next, slope_next = _load_columns(inverse_ptr, slope_ptr, count - 2 - i, i + 1 < count, T)
        mbarrier.wait(free.index(stage), phase)
        inverse *= scale
        slope *= scale
        total = gl.associative_scan(g, 0, add)
        columns.index(stage * ADJOINT_COLUMNS + INVERSE).store(inverse)
        columns.index(stage * ADJOINT_COLUMNS + SLOPE).store(slope)
        columns.index(stage * ADJOINT_COLUMNS + READ_STRENGTH).store(gl.exp2(gl.sum(g, 0) - total) * beta)
        columns.index(stage * ADJOINT_COLUMNS + WRITE_INVERSE).store(gl.exp2(total) * inverse)
        columns.index(stage * ADJOINT_COLUMNS + WRITE_SLOPE).store(gl.exp2(total) * slope)
        publish_decays(gates, decays, gated, stage, g, beta, 1.0, True)
        g, beta, inverse, slope = g_next, beta_next, inverse_next, slope_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
