"""The gate warps of mLSTM's backward sweeps: they weigh chunks, divide, and turn row sums into dg and dbeta."""

from holdfast.kernels.common.gluon import gl, gluon, mbarrier

from .hopper_gates import CHUNK, READ, VECTORS, add, gather, load_gates, weigh

# vectors of a stage of the adjoint sweep: y = 1 / (max(|norm|, floor) + eps) and z, the gradient of norm, both times
# scale; the state's gradient's weight on reading, times the strength of what is read, and on writing, times y and z
INVERSE, SLOPE, READ_STRENGTH = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
WRITE_INVERSE, WRITE_SLOPE = gl.constexpr(3), gl.constexpr(4)
ADJOINT_COLUMNS = gl.constexpr(5)
# what the sweep for dq leaves in memory beside y and z: the floor's gradient, and q . dq of earlier chunks
FLOOR, ROW = gl.constexpr(2), gl.constexpr(3)
# its vectors beside y: what makes the gradients of norm and of its floor of u . o, and norm's part of earlier chunks
OF_NORM, OF_FLOOR, EARLIER = gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
COLUMNS = gl.constexpr(4)
# below this log decay, to base 2, the decay is 0 in float32, and so is its gradient
_LOG_ZERO = gl.constexpr(-149.9)
# below this one, what is left of a state is less than the rounding of a product with it
_LOG_FORGOTTEN = gl.constexpr(-12.0)


@gluon.jit
def _load_norms(floor_ptr, norm_ptr, floor_t, chunk, T):
    """A chunk's floors, norms and what earlier chunks have of these."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    tokens = chunk * CHUNK + gl.arange(0, CHUNK, layout)
    inside = tokens < T
    floor = gl.load(floor_ptr + tokens.to(gl.int64) * floor_t, mask=inside, other=1.0)
    norm_ptr += tokens
    norm = gl.load(norm_ptr, mask=inside, other=0.0)
    return floor, norm, gl.load(norm_ptr + gl.num_programs(0).to(gl.int64) * T, mask=inside, other=0.0)


@gluon.jit
def gate_queries(places, pointers, steps, T, count, scale, eps, STAGES: gl.constexpr):
    """Weighs each chunk when its stage is free, and divides."""
    gates, columns, decays, _, gated, free = places
    g_ptr, beta_ptr, floor_ptr, norm_ptr = pointers
    g_t, beta_t, floor_t = steps
    stage = 0
    phase = 1
    g, beta = load_gates(g_ptr, beta_ptr, g_t, beta_t, 0, count > 0, T)
    for i in range(count):
        g_next, beta_next = load_gates(g_ptr, beta_ptr, g_t, beta_t, i + 1, i + 1 < count, T)
        floor, norm, earlier = _load_norms(floor_ptr, norm_ptr, floor_t, i, T)
        size = gl.abs(norm)
        inverse = 1.0 / (gl.maximum(size, floor) + eps)
        # equal arguments of the maximum share its gradient, as in PyTorch
        share = gl.where(size > floor, 1.0, gl.where(size == floor, 0.5, 0.0))
        sign = gl.where(norm > 0, 1.0, gl.where(norm < 0, -1.0, 0.0))
        mbarrier.wait(free.index(stage), phase)
        columns.index(stage * COLUMNS + INVERSE).store(inverse)
        columns.index(stage * COLUMNS + OF_NORM).store(-inverse * share * sign)
        columns.index(stage * COLUMNS + OF_FLOOR).store(-inverse * (1.0 - share))
        columns.index(stage * COLUMNS + EARLIER).store(earlier)
        weigh(gates, decays, gated, stage, g, beta, scale, False)
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
def gate_adjoint(places, parts, pointers, g_t, beta_t, T, count, scale, SAVE: gl.constexpr, STAGES: gl.constexpr):
    """Weighs each chunk when its stage is free, and turns the row sums of the chunk that left it into dg and dbeta."""
    gates, columns, decays, _, gated, free = places
    later_parts, earlier_parts, own_parts, cross_parts, state_parts = parts
    g_ptr, beta_ptr, inverse_ptr, slope_ptr, row_ptr, last_ptr, dg_ptr, dbeta_ptr = pointers
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    carry = 0.0
    if last_ptr is not None:
        carry += gl.load(last_ptr + gl.program_id(0))
    stage = 0
    phase = 1
    g, beta = load_gates(g_ptr, beta_ptr, g_t, beta_t, count - 1, count > 0, T)
    inverse, slope = _load_columns(inverse_ptr, slope_ptr, count - 1, count > 0, T)
    for i in range(count + STAGES):
        g_next, beta_next = load_gates(g_ptr, beta_ptr, g_t, beta_t, count - 2 - i, i + 1 < count, T)
        inverse_next, slope_next = _load_columns(inverse_ptr, slope_ptr, count - 2 - i, i + 1 < count, T)
        # of the chunk that leaves: loaded before the wait
        chunk = count - 1 - i + STAGES
        tokens = chunk * CHUNK + gl.arange(0, CHUNK, layout)
        inside = (tokens < T) & (i >= STAGES)
        gain = gl.load(row_ptr + tokens, mask=inside, other=0.0)
        own_g, own_beta = load_gates(g_ptr, beta_ptr, g_t, beta_t, chunk, i >= STAGES, T)
        mbarrier.wait(free.index(stage), phase)
        if i >= STAGES:
            within_chunk = gather(earlier_parts, stage)
            cross = gather(cross_parts, stage) * gates.index(stage * VECTORS + READ).load(layout)
            dbeta = within_chunk + cross + gather(own_parts, stage)
            gl.store(dbeta_ptr + tokens, dbeta, mask=inside)
            pairs = gather(later_parts, stage) - within_chunk * own_beta
            to_end = gl.associative_scan(own_g, 0, add, reverse=True)
            taken = gl.associative_scan(cross * own_beta, 0, add, reverse=True)
            remaining = gl.where(to_end < _LOG_FORGOTTEN, 0.0, carry - taken)
            dg = gl.associative_scan(gain + pairs, 0, add, reverse=True) + remaining
            dg = gl.where(own_g < _LOG_ZERO, 0.0, dg)
            gl.store(dg_ptr + tokens, dg, mask=inside)
            forgotten = gl.sum(own_g, 0) < _LOG_FORGOTTEN
            carry = gl.sum(gain, 0) + gl.where(forgotten, 0.0, carry - gl.sum(cross * own_beta, 0))
            if SAVE > 0:  # noqa: SIM102 - known while compiling
                if chunk % SAVE == 0:
                    rows: gl.constexpr = gl.BlockedLayout([state_parts.shape[1] // 32], [32], [1], [0])
                    carry = gl.sum(state_parts.index(stage).load(rows), 0)
        if i < count:
            inverse *= scale
            slope *= scale
            total = gl.associative_scan(g, 0, add)
            columns.index(stage * ADJOINT_COLUMNS + INVERSE).store(inverse)
            columns.index(stage * ADJOINT_COLUMNS + SLOPE).store(slope)
            columns.index(stage * ADJOINT_COLUMNS + READ_STRENGTH).store(gl.exp2(gl.sum(g, 0) - total) * beta)
            columns.index(stage * ADJOINT_COLUMNS + WRITE_INVERSE).store(gl.exp2(total) * inverse)
            columns.index(stage * ADJOINT_COLUMNS + WRITE_SLOPE).store(gl.exp2(total) * slope)
            weigh(gates, decays, gated, stage, g, beta, 1.0, True)
        g, beta, inverse, slope = g_next, beta_next, inverse_next, slope_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
