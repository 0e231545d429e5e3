"""A chunk's scores on Hopper, of what the warps that weigh have left (intra_operands.py)."""

from holdfast.kernels.lib.gluon.compat import gl, gluon, reinterpret, warpgroup_mma, warpgroup_mma_wait
from holdfast.kernels.lib.gluon.decay import CHUNK

from .token_layout import BLOCKS, NEAR

# a wgmma's [64, 64] over eight warps or four, its columns by 16
_BY_BLOCK = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 1, 0]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0], [0, 2, 0]],
        [],
        [64, 4, 16],
    )
)
_BY_BLOCK_4 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 1, 0], [0, 2, 0]],
        [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 16],
    )
)
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def scores_of(met_tiles, first, near_tile, strengths, turn, scale, p_tile):
    """Puts the scores of what `weigh` has left, [t, s], times scale, into p_tile, which is to be fenced.

    first: 0, of which the compiler does not know it: where tiles are is found each time, not kept from the start.
    strengths: of s, row `turn` of [2, 64], or None.
    """
    warps: gl.constexpr = gl.num_warps()
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 4 * CHUNK // warps, 16])
    by_block: gl.constexpr = _BY_BLOCK if warps == 8 else _BY_BLOCK_4
    sixteen = gl.zeros([CHUNK, CHUNK], gl.float32, whole)
    thirty_two = gl.zeros([CHUNK, CHUNK], gl.float32, whole)
    halves: gl.constexpr = met_tiles[0].shape[0]
    for half in gl.static_range(halves):
        low = met_tiles[0].index(first + half)
        high = met_tiles[1].index(first + half)
        sixteen = warpgroup_mma(low, low.permute((1, 0)), sixteen, use_acc=half > 0, is_async=True)
        thirty_two = warpgroup_mma(high, high.permute((1, 0)), thirty_two, use_acc=half > 0, is_async=True)
    parts = reinterpret(near_tile, gl.float32, [2, CHUNK, NEAR], _PLAIN)
    near = parts.index(0).load(gl.SliceLayout(1, by_block)) + parts.index(1).load(gl.SliceLayout(1, by_block))
    sixteen, thirty_two = warpgroup_mma_wait(0, deps=(sixteen, thirty_two))
    t = gl.arange(0, CHUNK, gl.SliceLayout(1, whole))[:, None]
    s = gl.arange(0, CHUNK, gl.SliceLayout(0, whole))[None, :]
    level = (t ^ s) >> 4
    far = gl.where(t > s, gl.where(level == 1, sixteen, thirty_two), 0.0)
    far = gl.convert_layout(gl.reshape(far, [CHUNK, BLOCKS, NEAR]), by_block, assert_trivial=True)
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, gl.SliceLayout(2, by_block)))[:, None, None]
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, by_block)))[None, :, None]
    scores = gl.where(block == row // NEAR, near[:, None, :], far) * scale
    if strengths is not None:
        by_key = reinterpret(strengths, gl.float32, [strengths.shape[0], BLOCKS, NEAR], _PLAIN).index(turn)
        scores = scores * by_key.load(gl.SliceLayout(0, by_block))[None, :, :]
    scores = gl.reshape(scores.to(p_tile.dtype), [CHUNK, CHUNK])
    p_tile.store(gl.convert_layout(scores, whole, assert_trivial=True))
