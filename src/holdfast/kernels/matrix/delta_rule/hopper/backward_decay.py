"""The log decays g and betas in backward.py, and g's gradient: what partitions share of them, their loads, dg's store.

With D the decay between two tokens, dg of a chunk's token i is a sum of four parts (docs/delta-rule.md#gradient):
    pairs of a token at or after i with one before i: backward_grads.py's sums over rows and columns of their products;
    reads of S by i and later tokens: q_t . dq_t and k_t . dk_t through S, backward_grads.py;
    writes before i that reach S': k_t . dk_t through dS', backward_grads.py;
    S on its way to S': exp(G_C) <S, dS'>, which the warps that carry dS find by `matrix_dot`.
The warp here sums log decays before a chunk and their gradients after it.
"""

from typing import Any, NamedTuple

from holdfast.kernels.lib.gluon.compat import barrier, gl, gluon, mbarrier
from holdfast.kernels.lib.gluon.decay import CHUNK, load_decay_beta
from holdfast.kernels.lib.gluon.reduce import add

from .backward_loads import STAGES

# betas up to it say little or nothing of Y when multiplied with it
BETA_EPS = gl.constexpr(0.01)
# Vectors of a chunk: its cumulative log decay, beta, and dg's share of the earlier tokens of pairs, which is taken off.
# Once the chunk's gradients are there, the first two hold dg's shares instead: of writes, and of pairs and reads.
LOG_DECAY_CUMSUM, BETA, DG_EARLIER = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
VECTORS = gl.constexpr(3)
# below this log decay, to base 2, the decay is 0 in float32, and so is its gradient
LOG_ZERO = gl.constexpr(-149.9)


class DecayPointers(NamedTuple):
    """Pointers to this block's head of g and beta, or None, with their strides of tokens; dg's, or None."""

    g: Any
    beta: Any
    g_t: Any
    beta_t: Any
    dg: Any


@gluon.jit
def matrix_dot(x, y, layout: gl.constexpr):
    """Return <x, y>, the sum of the products of two matrices' elements."""
    rows: gl.constexpr = x.shape[0]
    total = gl.zeros([32], gl.float32, gl.SliceLayout(1, layout))
    for part in gl.static_range(rows // 32):
        left = x.slice(part * 32, 32).load(layout).to(gl.float32)
        total += gl.sum(left * y.slice(part * 32, 32).load(layout).to(gl.float32), 1)
    return gl.sum(total, 0)


@gluon.jit
def unrounded_dot(x_ptr, y_ptr, SIZE: gl.constexpr, layout: gl.constexpr):
    """Return <x, y> of two float32 matrices of SIZE numbers in memory."""
    BLOCK: gl.constexpr = 1024
    total = gl.zeros([BLOCK], gl.float32, layout)
    for first in range(0, SIZE, BLOCK):
        at = first + gl.arange(0, BLOCK, layout)
        x = gl.load(x_ptr + at, mask=at < SIZE, other=0.0)
        total += x * gl.load(y_ptr + at, mask=at < SIZE, other=0.0)
    return gl.sum(total, 0)


@gluon.jit
def decay_partition(stages, pointers, chunks):
    """Publish a chunk's cumulative log decay and beta when its stage is empty, and store dg when it comes back."""
    T, H, count = chunks.T, chunks.H, chunks.count
    g_ptr, beta_ptr, g_t, beta_t = pointers.g, pointers.beta, pointers.g_t, pointers.beta_t
    dg_ptr = pointers.dg
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    stage = 0
    phase = 1
    last = chunks.first + count - 1
    if dg_ptr is not None:
        dg_ptr += chunks.origin * H + gl.program_id(0) % H
    g, beta = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, last, count > 0, T)
    for i in range(count + STAGES):
        g_next, beta_next = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, last - 1 - i, i + 1 < count, T)
        mbarrier.wait(stages.stage_empty.index(stage), phase)
        cumsum = stages.decays.index(stage * VECTORS + LOG_DECAY_CUMSUM)
        betas = stages.decays.index(stage * VECTORS + BETA)
        if dg_ptr is not None:  # noqa: SIM102 - known while compiling
            if i >= STAGES:
                done = last + STAGES - i
                log = load_decay_beta(g_ptr, None, g_t, 0, done, True, T)[0]
                # what grad_partition left in their place
                later, writes = betas, cumsum
                dg = later.load(layout) - stages.decays.index(stage * VECTORS + DG_EARLIER).load(layout)
                written = writes.load(layout)
                dg = gl.associative_scan(dg, 0, add, reverse=True) + gl.associative_scan(written, 0, add) - written
                dg += stages.state_grad_dot.index(stage).load(layout)
                tokens = done * CHUNK + gl.arange(0, CHUNK, layout)
                dg = gl.where(log < LOG_ZERO, 0.0, dg)
                gl.store(dg_ptr + tokens.to(gl.int64) * H, dg, mask=tokens < T)
                barrier()
        if i < count:
            cumsum.store(gl.associative_scan(g, 0, add))
            betas.store(beta)
            is_small = gl.where((beta <= BETA_EPS) & (beta >= -BETA_EPS), 1, 0)
            stages.small_betas.index(stage).store(gl.full([1], 1, gl.int32, layout) * gl.sum(is_small, 0))
            barrier()
            mbarrier.arrive(stages.decays_ready.index(stage), count=1)
        g = g_next
        beta = beta_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
