"""A chunk's log decays and betas: loads, sums, and the decays that they come to.

A stage of a chunk has VECTORS vectors of CHUNK numbers in shared memory, filled by publish_decays.
"""

from .compat import barrier, gl, gluon, mbarrier
from .reduce import add

CHUNK = gl.constexpr(64)
# vectors of a stage: log decay cumsum; what the state is multiplied with where a token reads it, and what its write is
# multiplied with; beta
LOG_DECAY_CUMSUM, READ_DECAY, WRITE_DECAY, BETA = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
VECTORS = gl.constexpr(4)
_LOG2E = gl.constexpr(1.4426950408889634)
# exp(-120) is 0 in float32 already, and sums of 64 such numbers still differ exactly enough from one another
_LOG_DECAY_FLOOR = gl.constexpr(-120.0)


@gluon.jit
def clamp_log2_decay(g):
    """Return a natural-log decay to base 2, no less than where the decay is 0 in float32."""
    # a maximum would hide a NaN
    return gl.where(g < _LOG_DECAY_FLOOR, _LOG_DECAY_FLOOR, g) * _LOG2E


@gluon.jit
def load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, chunk, is_inside, T, TOKENS: gl.constexpr = 64):
    """Load a chunk's log decays to base 2 and betas; nothing is loaded where is_inside is false."""
    g, beta = prefetch_decay_beta(g_ptr, beta_ptr, g_t, beta_t, chunk, is_inside, T, TOKENS)
    return clamp_log2_decay(g.to(gl.float32)), beta.to(gl.float32)


@gluon.jit
def prefetch_decay_beta(g_ptr, beta_ptr, g_t, beta_t, chunk, is_inside, T, TOKENS: gl.constexpr = 64):
    """Load a chunk's g and beta as they are in memory: until something is done with them, nothing waits for them."""
    layout: gl.constexpr = gl.BlockedLayout([TOKENS // 32], [32], [gl.num_warps()], [0])
    tokens = chunk * TOKENS + gl.arange(0, TOKENS, layout)
    inside = (tokens < T) & is_inside
    if g_ptr is None:
        g = gl.zeros([TOKENS], gl.float32, layout)
    else:
        g = gl.load(g_ptr + tokens.to(gl.int64) * g_t, mask=inside, other=0.0)
    if beta_ptr is None:
        beta = gl.full([TOKENS], 1.0, gl.float32, layout)
    else:
        beta = gl.load(beta_ptr + tokens.to(gl.int64) * beta_t, mask=inside, other=0.0)
    return g, beta


@gluon.jit
def publish_decays(gates, decays, gated, stage, g, beta, scale, REVERSE: gl.constexpr):
    """Fill a stage's vectors and its chunk decay, and arrive at its barrier.

    Forward in time READ_DECAY is the decay from the chunk's start times scale, WRITE_DECAY that to its end times beta.
    Backward in time (REVERSE) READ_DECAY is the decay to the end, WRITE_DECAY that from the start times scale.
    """
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    total = gl.associative_scan(g, 0, add)
    whole = gl.sum(g, 0)
    to_here = gl.exp2(total)
    to_end = gl.exp2(whole - total)
    gates.index(stage * VECTORS + LOG_DECAY_CUMSUM).store(total)
    if REVERSE:
        gates.index(stage * VECTORS + READ_DECAY).store(to_end)
        gates.index(stage * VECTORS + WRITE_DECAY).store(to_here * scale)
        gates.index(stage * VECTORS + BETA).store(beta)
    else:
        gates.index(stage * VECTORS + READ_DECAY).store(to_here * scale)
        gates.index(stage * VECTORS + WRITE_DECAY).store(to_end * beta)
        gates.index(stage * VECTORS + BETA).store(beta * scale)
    decays.index(stage).store(gl.full([1], 1.0, gl.float32, layout) * gl.exp2(whole))
    barrier()
    mbarrier.arrive(gated.index(stage), count=1)


@gluon.jit
def publish_decays_in_parts(gates, factors, decays, gated, stage, g, beta, scale):
    """Do what publish_decays does forward in time, of sums exact to 1e-8, and fill factors' stage.

    A token's factor is for all that it reads of the chunk and of the state, after the sum. In one part the sums err by
    1e-5 where one of the log decays is -100; multiples of 2^-9 are summed exactly. The rest of a source's is in BETA.
    """
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    high = gl.floor(g * 512) * (1.0 / 512)
    low = g - high
    total = gl.associative_scan(high, 0, add)
    fine = gl.associative_scan(low, 0, add)
    whole, fine_whole = gl.sum(high, 0), gl.sum(low, 0)
    gates.index(stage * VECTORS + LOG_DECAY_CUMSUM).store(total)
    gates.index(stage * VECTORS + READ_DECAY).store(gl.exp2(total) * scale)
    gates.index(stage * VECTORS + WRITE_DECAY).store(gl.exp2(whole - total + (fine_whole - fine)) * beta)
    gates.index(stage * VECTORS + BETA).store(beta * scale * gl.exp2(-fine))
    factors.index(stage).store(gl.exp2(fine))
    decays.index(stage).store(gl.full([1], 1.0, gl.float32, layout) * gl.exp2(whole + fine_whole))
    barrier()
    mbarrier.arrive(gated.index(stage), count=1)


@gluon.jit
def causal_decay(gates, stage, layout: gl.constexpr, REVERSE: gl.constexpr):
    """Return the decay between two tokens of a chunk, [earlier, later], or [later, earlier] if REVERSE; 0 elsewhere."""
    columns = gates.index(stage * VECTORS + LOG_DECAY_CUMSUM).load(gl.SliceLayout(0, layout))
    rows = gates.index(stage * VECTORS + LOG_DECAY_CUMSUM).load(gl.SliceLayout(1, layout))
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    if REVERSE:
        log = rows[:, None] - columns[None, :]
        seen = row[:, None] >= column[None, :]
    else:
        log = columns[None, :] - rows[:, None]
        seen = row[:, None] <= column[None, :]
    return gl.exp2(gl.where(seen, log, float("-inf")))
