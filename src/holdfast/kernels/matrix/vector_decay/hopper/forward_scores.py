"""A chunk's scores on Hopper, from the operands that the decay partition has made (intra_operands.py)."""

from holdfast.kernels.lib.gluon.compat import gl, gluon, reinterpret, warpgroup_mma, warpgroup_mma_wait
from holdfast.kernels.lib.gluon.decay import CHUNK

from .token_layout import BLOCK_TOKENS, BLOCKS

# of a wgmma accumulator [64, 64] of eight warps or of four, its columns in blocks of 16
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
def _level_tile(level_tiles, level: gl.constexpr, place):
    """Return a tile of 64 columns: of an array for each level, or of one that has both levels of each 64 columns."""
    if len(level_tiles) == 2:
        return level_tiles[level].index(place)
    else:
        return level_tiles[0].index(2 * place + level)


@gluon.jit
def store_scores(operands, first, stage, scale, p_tile):
    """Store a chunk's scores [t, s], times scale and the beta of s, in p_tile, which the caller has to fence.

    operands: Operands, or what has its level_tiles, in one array or two, intra_block and betas.
    first: 0, which the compiler does not know: it finds where tiles are each time and does not keep it from the start.
    stage: row of operands.betas, which may be None.
    """
    warps: gl.constexpr = gl.num_warps()
    wgmma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 4 * CHUNK // warps, 16])
    by_block: gl.constexpr = _BY_BLOCK if warps == 8 else _BY_BLOCK_4
    level_16 = gl.zeros([CHUNK, CHUNK], gl.float32, wgmma)
    level_32 = gl.zeros([CHUNK, CHUNK], gl.float32, wgmma)
    k_halves: gl.constexpr = operands.level_tiles[0].shape[0] * len(operands.level_tiles) // 2
    for half in gl.static_range(k_halves):
        low = _level_tile(operands.level_tiles, 0, first + half)
        high = _level_tile(operands.level_tiles, 1, first + half)
        level_16 = warpgroup_mma(low, low.permute((1, 0)), level_16, use_acc=half > 0, is_async=True)
        level_32 = warpgroup_mma(high, high.permute((1, 0)), level_32, use_acc=half > 0, is_async=True)
    # of warps with half of the channels each
    parts = reinterpret(operands.intra_block, gl.float32, [2, CHUNK, BLOCK_TOKENS], _PLAIN)
    intra_block = parts.index(0).load(gl.SliceLayout(1, by_block)) + parts.index(1).load(gl.SliceLayout(1, by_block))
    level_16, level_32 = warpgroup_mma_wait(0, deps=(level_16, level_32))
    t = gl.arange(0, CHUNK, gl.SliceLayout(1, wgmma))[:, None]
    s = gl.arange(0, CHUNK, gl.SliceLayout(0, wgmma))[None, :]
    level = (t ^ s) >> 4
    inter_block = gl.where(t > s, gl.where(level == 1, level_16, level_32), 0.0)
    inter_block = gl.reshape(inter_block, [CHUNK, BLOCKS, BLOCK_TOKENS])
    inter_block = gl.convert_layout(inter_block, by_block, assert_trivial=True)
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, gl.SliceLayout(2, by_block)))[:, None, None]
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, by_block)))[None, :, None]
    scores = gl.where(block == row // BLOCK_TOKENS, intra_block[:, None, :], inter_block) * scale
    if operands.betas is not None:
        betas = reinterpret(operands.betas, gl.float32, [operands.betas.shape[0], BLOCKS, BLOCK_TOKENS], _PLAIN)
        scores = scores * betas.index(stage).load(gl.SliceLayout(0, by_block))[None, :, :]
    scores = gl.reshape(scores.to(p_tile.dtype), [CHUNK, CHUNK])
    p_tile.store(gl.convert_layout(scores, wgmma, assert_trivial=True))
