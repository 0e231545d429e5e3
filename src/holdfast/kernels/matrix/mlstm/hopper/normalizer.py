"""The normaliser n of mLSTM beside Hopper's sweep: four warps of their own, off the path of those that multiply.

    n = exp(g_t) n + beta_t k_t;  norm_t = scale n . q_t;  o_t = scale S^T q_t / (max(|norm_t|, exp(-m_t)) + eps).

A chunk's norm is q . n of the n before it, here, and the sums over its scores' earlier tokens, which the warps that
multiply leave in shared memory; both products are wgmma of 8 columns, in which n and the tokens' weights stand as the
sum of two numbers of the inputs' dtype, so that neither is rounded to one.
"""

from holdfast.kernels.lib.gluon.compat import (
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

# its exponential is the largest floor: past it the quotient is 0 to rounding, and inf would spoil its gradient
_LARGEST = gl.constexpr(88.7228 - 1.0)


@gluon.jit
def floor_of(m):
    """exp(-m), the least that an output is divided by."""
    # a maximum would hide a NaN
    return gl.exp(gl.where(-m > _LARGEST, _LARGEST, -m))


@gluon.jit
def to_half(x, dtype: gl.constexpr):
    """x in bfloat16 or float16, converted where it stands.

    A cast's numbers are put together where a product takes them, and ptxas moves all that leads to them there, after
    the products that it was to run beside.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, False, 2)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, False, 2)


@gluon.jit
def _halves(x, layout: gl.constexpr, dtype: gl.constexpr):
    """A vector as 8 columns: what of it fits dtype in the even ones, the rest in the odd ones."""
    wide = x[:, None] + gl.zeros([x.shape[0], 8], gl.float32, layout)
    high = wide.to(dtype)
    rest = (wide - high.to(gl.float32)).to(dtype)
    even = gl.arange(0, 8, gl.SliceLayout(0, layout)) % 2 == 0
    return gl.where(even[None, :], high, rest)


@gluon.jit
def normalize(
    chunks,
    norms,
    pointers,
    m_t,
    H,
    T,
    count,
    eps,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    ADDS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Each chunk's 1 / (max(|norm|, exp(-m)) + eps) for the warps that multiply; norm and its part of earlier chunks.

    ADDS: norm is a part of the whole, of which pointers has the rest.
    """
    q_tiles, k_tiles, gates, decays, loaded, gated = chunks
    pairs, n_tile, w_tile, across, quotients, summed, divided = norms
    start_ptr, end_ptr, m_ptr, norm_ptr, earlier_ptr, before_ptr = pointers
    K: gl.constexpr = k_tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    of_row: gl.constexpr = gl.SliceLayout(1, mma)
    sums: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [1, 4], [1, 0])
    each: gl.constexpr = gl.SliceLayout(0, sums)

    key = gl.arange(0, K, of_row)
    at = segment_index(H, 1) * (KEYS * (VALUES + 1)) + key * (VALUES + 1) + VALUES
    if start_ptr is None:
        n = gl.zeros([K], gl.float32, of_row)
    else:
        n = gl.load(start_ptr + at, mask=key < KEYS, other=0.0)
    stage = 0
    phase = 0
    for i in range(count):
        token = i * CHUNK + gl.arange(0, CHUNK, each)
        floor = floor_of(gl.load(m_ptr + token.to(gl.int64) * m_t, mask=token < T, other=0.0))
        if ADDS:
            before = gl.load(before_ptr + token, mask=token < T, other=0.0)
        n_tile.permute((1, 0)).store(_halves(n, mma, dtype))
        mbarrier.wait(gated.index(stage), phase)
        w_tile.permute((1, 0)).store(_halves(gates.index(stage * VECTORS + WRITE_DECAY).load(of_row), mma, dtype))
        fence_async_shared()
        mbarrier.wait(loaded.index(stage), phase)
        barrier()
        q = q_tiles.index(stage).reshape([CHUNK, K])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        norm = gl.zeros([CHUNK, 8], gl.float32, mma)
        norm = warpgroup_mma(q, n_tile.permute((1, 0)), norm, use_acc=False, is_async=True)
        written = gl.zeros([K, 8], gl.float32, mma)
        written = warpgroup_mma(k.permute((1, 0)), w_tile.permute((1, 0)), written, use_acc=False, is_async=True)
        norm, written = warpgroup_mma_wait(0, deps=(norm, written))
        # each half stands in four columns
        n = n * decays.index(stage).load(of_row) + gl.sum(written, 1) * 0.25
        across.store(gl.sum(norm, 1) * 0.25)
        barrier()
        earlier = across.load(each) * gates.index(stage * VECTORS + READ_DECAY).load(each)
        mbarrier.wait(summed, i & 1)
        total = gl.sum(pairs.load(sums), 0) + earlier
        if ADDS:
            total += before
        quotients.store(1.0 / (gl.maximum(gl.abs(total), floor) + eps))
        barrier()
        mbarrier.arrive(divided, count=1)
        gl.store(norm_ptr + token, total, mask=token < T)
        gl.store(earlier_ptr + token, earlier, mask=token < T)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    gl.store(end_ptr + at, n, mask=key < KEYS)
