"""The normaliser n of mLSTM beside Hopper's sweep: two warps of their own, off the path of those that multiply.

    n = exp(g_t) n + beta_t k_t;  norm_t = scale n . q_t;  o_t = scale S^T q_t / (max(|norm_t|, floor_t) + eps).

A chunk's norm is q . n of the n before it, here, and the sums over its scores' earlier tokens, which the warps that
multiply leave in shared memory; both products are mma of 8 columns, in which n and the tokens' weights stand as the sum
of two numbers of the inputs' dtype, so that neither is rounded to one.
"""

from holdfast.kernels.common.gluon import barrier, fence_async_shared, gl, gluon, mbarrier, mma_v2

from .hopper_gates import CHUNK, READ, VECTORS, WRITE, of_segment

# vectors of a stage where the gradient of norm rides along: 1 / (max(|norm|, floor) + eps), and that gradient
INVERSE, SLOPE = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def load_columns(inverse_ptr, slope_ptr, chunk, is_inside, T):
    """A chunk's INVERSE and SLOPE; nothing is loaded where is_inside is false."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    tokens = chunk * CHUNK + gl.arange(0, CHUNK, layout)
    inside = (tokens < T) & is_inside
    return gl.load(inverse_ptr + tokens, mask=inside, other=0.0), gl.load(slope_ptr + tokens, mask=inside, other=0.0)


@gluon.jit
def _halves(x, right: gl.constexpr, dtype: gl.constexpr):
    """A vector as 8 columns: what of it fits dtype in the even ones, the rest in the odd ones."""
    wide = x[:, None] + gl.zeros([x.shape[0], 8], gl.float32, right)
    high = wide.to(dtype)
    rest = (wide - high.to(gl.float32)).to(dtype)
    even = gl.arange(0, 8, gl.SliceLayout(0, right)) % 2 == 0
    return gl.where(even[None, :], high, rest)


@gluon.jit
def normalize(
    chunks,
    norms,
    pointers,
    floor_t,
    H,
    T,
    count,
    eps,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Each chunk's 1 / (max(|norm|, floor) + eps) for the warps that multiply, and norm [B, H, T]."""
    q_tiles, k_tiles, gates, decays, loaded, gated = chunks
    pairs, n_tile, across, quotients, summed, divided = norms
    start_ptr, end_ptr, floor_ptr, norm_ptr = pointers
    K: gl.constexpr = k_tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    warps: gl.constexpr = gl.num_warps()
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    sums: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [1, warps], [1, 0])
    each: gl.constexpr = gl.SliceLayout(0, sums)
    rows: gl.constexpr = 16 * warps

    key = gl.arange(0, K, gl.SliceLayout(1, mma))
    at = of_segment(H, 1) * (KEYS * (VALUES + 1)) + key * (VALUES + 1) + VALUES
    if start_ptr is None:
        n = gl.zeros([K], gl.float32, gl.SliceLayout(1, mma))
    else:
        n = gl.load(start_ptr + at, mask=key < KEYS, other=0.0)
    stage = 0
    phase = 0
    for i in range(count):
        token = i * CHUNK + gl.arange(0, CHUNK, each)
        floor = gl.load(floor_ptr + token.to(gl.int64) * floor_t, mask=token < T, other=1.0)
        n_tile.store(n)
        mbarrier.wait(loaded.index(stage), phase)
        mbarrier.wait(gated.index(stage), phase)
        barrier()
        q = q_tiles.index(stage).reshape([CHUNK, K])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        held = _halves(n_tile.load(gl.SliceLayout(1, right)), right, dtype)
        for part in gl.static_range(CHUNK // rows):
            product = gl.zeros([rows, 8], gl.float32, mma)
            product = mma_v2(q.slice(part * rows, rows).load(left), held, product)
            # each half stands in four columns
            across.slice(part * rows, rows).store(gl.sum(product, 1) * 0.25)
        written = gl.zeros([K, 8], gl.float32, mma)
        write = gates.index(stage * VECTORS + WRITE)
        for part in gl.static_range(CHUNK // 16):
            weight = _halves(write.slice(part * 16, 16).load(gl.SliceLayout(1, right)), right, dtype)
            written = mma_v2(k.slice(part * 16, 16).permute((1, 0)).load(left), weight, written)
        n = n * decays.index(stage).load(gl.SliceLayout(1, mma)) + gl.sum(written, 1) * 0.25
        mbarrier.wait(summed, i & 1)
        barrier()
        read = gates.index(stage * VECTORS + READ).load(each)
        norm = gl.sum(pairs.load(sums), 0) + across.load(each) * read
        quotients.store(1.0 / (gl.maximum(gl.abs(norm), floor) + eps))
        # the warps that wait for this release the stage of tiles that were read here
        fence_async_shared()
        barrier()
        mbarrier.arrive(divided, count=1)
        gl.store(norm_ptr + token, norm, mask=token < T)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    gl.store(end_ptr + at, n, mask=key < KEYS)
