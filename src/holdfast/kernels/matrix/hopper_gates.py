"""The gate warp of the Hopper kernels: a chunk's log decays and strengths become the weights of its products.

It runs ahead of the warps that multiply by as many chunks as there are stages, and loads one chunk further. Where a
sweep sums over rows, the warps that multiply leave their parts behind, and it adds them when a stage comes back.
"""

from holdfast.kernels.common.gluon import barrier, gl, gluon, mbarrier

CHUNK = gl.constexpr(64)
# vectors of a stage: cumulative log decay, weight of the state on reading and on writing, strength
TOTAL, READ, WRITE, STRENGTH = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
VECTORS = gl.constexpr(4)
_LOG2E = gl.constexpr(1.4426950408889634)
# exp(-120) is 0 in float32 already, and sums of 64 such numbers still differ exactly enough from one another
_LOG_FLOOR = gl.constexpr(-120.0)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def of_head(H, b, h):
    """Where this block's batch and head begin, from their strides."""
    return (gl.program_id(0) // H).to(gl.int64) * b + (gl.program_id(0) % H).to(gl.int64) * h


@gluon.jit
def of_segment(H, axis: gl.constexpr):
    """This block's place in [B, segments, H], segments being that axis of the grid."""
    batch = (gl.program_id(0) // H).to(gl.int64)
    return (batch * gl.num_programs(axis) + gl.program_id(axis)) * H + gl.program_id(0) % H


@gluon.jit
def load_gates(g_ptr, beta_ptr, g_t, beta_t, chunk, is_inside, T):
    """Log decay to base 2 and strength of a chunk's tokens; nothing is loaded where is_inside is false."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    tokens = chunk * CHUNK + gl.arange(0, CHUNK, layout)
    inside = (tokens < T) & is_inside
    if g_ptr is None:
        g = gl.zeros([CHUNK], gl.float32, layout)
    else:
        g = gl.load(g_ptr + tokens.to(gl.int64) * g_t, mask=inside, other=0.0).to(gl.float32)
        # a maximum would hide a NaN
        g = gl.where(g < _LOG_FLOOR, _LOG_FLOOR, g) * _LOG2E
    if beta_ptr is None:
        beta = gl.full([CHUNK], 1.0, gl.float32, layout)
    else:
        beta = gl.load(beta_ptr + tokens.to(gl.int64) * beta_t, mask=inside, other=0.0).to(gl.float32)
    return g, beta


@gluon.jit
def weigh(gates, decays, gated, stage, g, beta, scale, REVERSE: gl.constexpr):
    """Fills a stage's vectors and announces it.

    Forward in time the state is read with its decay to each token and scale, and written with the decay to the chunk's
    end and beta; backward in time it is read with the decay from the end, written with that from the start and scale.
    """
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    total = gl.associative_scan(g, 0, add)
    whole = gl.sum(g, 0)
    to_here = gl.exp2(total)
    to_end = gl.exp2(whole - total)
    gates.index(stage * VECTORS + TOTAL).store(total)
    if REVERSE:
        gates.index(stage * VECTORS + READ).store(to_end)
        gates.index(stage * VECTORS + WRITE).store(to_here * scale)
        gates.index(stage * VECTORS + STRENGTH).store(beta)
    else:
        gates.index(stage * VECTORS + READ).store(to_here * scale)
        gates.index(stage * VECTORS + WRITE).store(to_end * beta)
        gates.index(stage * VECTORS + STRENGTH).store(beta * scale)
    decays.index(stage).store(gl.full([1], 1.0, gl.float32, layout) * gl.exp2(whole))
    barrier()
    mbarrier.arrive(gated.index(stage), count=1)


@gluon.jit
def gather(parts, stage):
    """The sum over warps of what each left of a chunk's row sums, [CHUNK]."""
    warps: gl.constexpr = parts.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([warps, 2], [1, 32], [1, 1], [1, 0])
    whole = gl.sum(parts.index(stage).load(layout), 0)
    return gl.convert_layout(whole, gl.BlockedLayout([2], [32], [1], [0]))


@gluon.jit
def within(gates, stage, layout: gl.constexpr, REVERSE: gl.constexpr):
    """The decay between two tokens of a chunk, [earlier, later], or [later, earlier] if REVERSE; 0 the other way."""
    columns = gates.index(stage * VECTORS + TOTAL).load(gl.SliceLayout(0, layout))
    rows = gates.index(stage * VECTORS + TOTAL).load(gl.SliceLayout(1, layout))
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    if REVERSE:
        log = rows[:, None] - columns[None, :]
        seen = row[:, None] >= column[None, :]
    else:
        log = columns[None, :] - rows[:, None]
        seen = row[:, None] <= column[None, :]
    return gl.exp2(gl.where(seen, log, float("-inf")))


@gluon.jit
def parts_of_columns(x, WARPS: gl.constexpr):
    """Of an accumulator [rows, columns] with its rows spread over WARPS: the sum over each warp's, [WARPS, columns]."""
    rows: gl.constexpr = x.shape[0] // WARPS
    return gl.sum(gl.reshape(x, [WARPS, rows, x.shape[1]]), 1)
