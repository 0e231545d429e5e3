"""mLSTM's normaliser n in the forward kernel on Hopper: a partition of four warps, off the path of the mma partition.

    n = exp(g_t) n + beta_t k_t;  norm_t = scale n . q_t;  o_t = scale S^T q_t / (max(|norm_t|, exp(-m_t)) + eps).

A chunk's norm is q . n of the n before it, found here, and the sums of its scores over earlier tokens, which the mma
partition leaves in shared memory. Both products of this partition are wgmma of 8 columns, in which n and the tokens'
weights stand as the sum of two numbers of the inputs' dtype, so that neither is rounded to one.
"""

from typing import NamedTuple

from holdfast.kernels.lib.gluon.compat import (
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from holdfast.kernels.lib.gluon.decay import CHUNK, READ_DECAY, VECTORS, WRITE_DECAY
from holdfast.kernels.lib.gluon.sequence import segment_index

# largest -m whose exponential is taken: past it the quotient is 0 to rounding, and inf would spoil its gradient
_LARGEST = gl.constexpr(88.7228 - 1.0)


@gluon.jit
def norm_floor(m):
    """Return exp(-m), the least that an output is divided by."""
    # a maximum would hide a NaN
    return gl.exp(gl.where(-m > _LARGEST, _LARGEST, -m))


@gluon.jit
def to_half(x, dtype: gl.constexpr):
    """Convert x to bfloat16 or float16 where this stands.

    A cast's numbers are put together where a product takes them, and ptxas moves all that leads to them there, behind
    the products beside which it was to run.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, False, 2)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, False, 2)


@gluon.jit
def _hi_lo_columns(x, layout: gl.constexpr, dtype: gl.constexpr):
    """Spread a vector over 8 columns: its value rounded to dtype in the even ones, the remainder in the odd ones."""
    wide = x[:, None] + gl.zeros([x.shape[0], 8], gl.float32, layout)
    high = wide.to(dtype)
    rest = (wide - high.to(gl.float32)).to(dtype)
    even = gl.arange(0, 8, gl.SliceLayout(0, layout)) % 2 == 0
    return gl.where(even[None, :], high, rest)


class NormChunks(NamedTuple):
    """Tiles of q and k, their decays, and the barriers that say when they are there."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    decay_vectors: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    chunk_decays: gl.shared_memory_descriptor
    tiles_ready: gl.shared_memory_descriptor
    decay_ready: gl.shared_memory_descriptor


class NormBuffers(NamedTuple):
    """n_tile [8, K] and w_tile [8, 64]: operands; inter [64]: q . n; the rest is forward.py's Division."""

    score_sums: gl.shared_memory_descriptor
    n_tile: gl.shared_memory_descriptor
    w_tile: gl.shared_memory_descriptor
    inter: gl.shared_memory_descriptor
    inv_norms: gl.shared_memory_descriptor
    score_sums_ready: gl.shared_memory_descriptor
    inv_norms_ready: gl.shared_memory_descriptor


class NormPointers(NamedTuple):
    """The states, whose last column is n, and a head's m and norms."""

    initial: gl.tensor
    final: gl.tensor
    m: gl.tensor
    norm: gl.tensor
    inter_norm: gl.tensor
    slices_norm: gl.tensor


@aggregate
class NormSizes:
    """Heads, tokens, chunks; columns of k and v; whether slices_norm is added to norm; whether tokens have factors."""

    H: gl.tensor
    T: gl.tensor
    count: gl.tensor
    eps: gl.tensor
    KEYS: gl.constexpr
    VALUES: gl.constexpr
    ADDS: gl.constexpr
    IN_PARTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, H, T, count, eps, KEYS, VALUES, ADDS, IN_PARTS):
        self.H = H
        self.T = T
        self.count = count
        self.eps = eps
        self.KEYS = gl.constexpr(KEYS)
        self.VALUES = gl.constexpr(VALUES)
        self.ADDS = gl.constexpr(ADDS)
        self.IN_PARTS = gl.constexpr(IN_PARTS)


@gluon.jit
def normalizer_partition(chunks, buffers, pointers, m_t, sizes):
    """Find each chunk's 1 / (max(|norm|, exp(-m)) + eps) for the mma partition; store norm and its inter-chunk part."""
    q_tiles, k_tiles, decay_vectors, factors, chunk_decays, tiles_ready, decay_ready = chunks
    score_sums, n_tile, w_tile, inter, inv_norms, score_sums_ready, inv_norms_ready = buffers
    initial_ptr, final_ptr, m_ptr, norm_ptr, inter_norm_ptr, slices_norm_ptr = pointers
    H, T, count, eps = sizes.H, sizes.T, sizes.count, sizes.eps
    KEYS: gl.constexpr = sizes.KEYS
    VALUES: gl.constexpr = sizes.VALUES
    ADDS: gl.constexpr = sizes.ADDS
    STAGES: gl.constexpr = k_tiles.shape[0]
    K: gl.constexpr = k_tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    of_row: gl.constexpr = gl.SliceLayout(1, mma)
    sums: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [1, 4], [1, 0])
    each: gl.constexpr = gl.SliceLayout(0, sums)

    key = gl.arange(0, K, of_row)
    at = segment_index(H, 1) * (KEYS * (VALUES + 1)) + key * (VALUES + 1) + VALUES
    if initial_ptr is None:
        n = gl.zeros([K], gl.float32, of_row)
    else:
        n = gl.load(initial_ptr + at, mask=key < KEYS, other=0.0)
    stage = 0
    phase = 0
    for i in range(count):
        token = i * CHUNK + gl.arange(0, CHUNK, each)
        floor = norm_floor(gl.load(m_ptr + token.to(gl.int64) * m_t, mask=token < T, other=0.0))
        if ADDS:
            slices_norm = gl.load(slices_norm_ptr + token, mask=token < T, other=0.0)
        n_tile.permute((1, 0)).store(_hi_lo_columns(n, mma, dtype))
        mbarrier.wait(decay_ready.index(stage), phase)
        weights = w_tile.permute((1, 0))
        write = decay_vectors.index(stage * VECTORS + WRITE_DECAY).load(of_row)
        weights.store(_hi_lo_columns(write, mma, dtype))
        fence_async_shared()
        mbarrier.wait(tiles_ready.index(stage), phase)
        barrier()
        q = q_tiles.index(stage).reshape([CHUNK, K])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        norm = gl.zeros([CHUNK, 8], gl.float32, mma)
        norm = warpgroup_mma(q, n_tile.permute((1, 0)), norm, use_acc=False, is_async=True)
        written = gl.zeros([K, 8], gl.float32, mma)
        written = warpgroup_mma(k.permute((1, 0)), w_tile.permute((1, 0)), written, use_acc=False, is_async=True)
        norm, written = warpgroup_mma_wait(0, deps=(norm, written))
        # each half stands in four columns
        n = n * chunk_decays.index(stage).load(of_row) + gl.sum(written, 1) * 0.25
        inter.store(gl.sum(norm, 1) * 0.25)
        barrier()
        inter_norm = inter.load(each) * decay_vectors.index(stage * VECTORS + READ_DECAY).load(each)
        mbarrier.wait(score_sums_ready, i & 1)
        total = gl.sum(score_sums.load(sums), 0) + inter_norm
        if sizes.IN_PARTS:
            factor = factors.index(stage).load(each)
            inter_norm *= factor
            total *= factor
        if ADDS:
            total += slices_norm
        inv_norm = 1.0 / (gl.maximum(gl.abs(total), floor) + eps)
        if sizes.IN_PARTS:
            inv_norm *= factor
        inv_norms.store(inv_norm)
        barrier()
        mbarrier.arrive(inv_norms_ready, count=1)
        gl.store(norm_ptr + token, total, mask=token < T)
        gl.store(inter_norm_ptr + token, inter_norm, mask=token < T)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    gl.store(final_ptr + at, n, mask=key < KEYS)
