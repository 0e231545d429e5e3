"""A chunk of 64 tokens in registers on Hopper: of four warps each has 16 of them, a thread all 16 in two channels.

So what a vector decay does along tokens stays in a thread's registers.
"""
# ruff: noqa: RUF005 - Gluon does not compile starred expressions

from holdfast.kernels.lib.gluon.compat import gl, gluon, mma_v2
from holdfast.kernels.lib.gluon.decay import CHUNK

# tokens of a warp; warps; channels at a time
NEAR = gl.constexpr(16)
BLOCKS = gl.constexpr(4)
HALF = gl.constexpr(64)
LOG2E = gl.constexpr(1.4426950408889634)
FLAT = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0]))
# of one token of each warp
TOKENS = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
MMA_BLOCKS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))


@gluon.jit
def tokens_of(x):
    """[64, channels] -> the 16 tokens of every warp, each [4, channels]."""
    width: gl.constexpr = x.shape[1]
    whole = gl.permute(gl.reshape(x, [BLOCKS, 2, 2, 2, 2, width]), (0, 5, 4, 3, 2, 1))
    parts = (whole,)
    for level in gl.static_range(4):
        finer = ()
        for i in gl.static_range(1 << level):
            first, second = gl.split(parts[i])
            finer = finer + (first, second)
        parts = finer
    found = ()
    for i in gl.static_range(NEAR):
        found = found + (gl.convert_layout(parts[i], TOKENS, assert_trivial=True),)
    return found


@gluon.jit
def tile_of(tokens):
    """The inverse of tokens_of."""
    width: gl.constexpr = tokens[0].shape[1]
    parts = tokens
    for level in gl.static_range(4):
        wider = ()
        for i in gl.static_range(8 >> level):
            wider = wider + (gl.join(parts[2 * i], parts[2 * i + 1]),)
        parts = wider
    return gl.reshape(gl.permute(parts[0], (0, 5, 4, 3, 2, 1)), [CHUNK, width])


@gluon.jit
def near_product(left, right):
    """Products of every warp's 16 rows of two tiles [64, channels] in shared memory, [4, 16, 16]."""
    width: gl.constexpr = left.shape[1]
    a_layout: gl.constexpr = gl.DotOperandLayout(0, MMA_BLOCKS, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, MMA_BLOCKS, 2)
    a = gl.reshape(left.load(gl.DotOperandLayout(0, _MMA, 2)), [BLOCKS, NEAR, width])
    b = gl.permute(gl.reshape(right.load(gl.DotOperandLayout(0, _MMA, 2)), [BLOCKS, NEAR, width]), (0, 2, 1))
    a, b = gl.convert_layout(a, a_layout), gl.convert_layout(b, b_layout)
    return mma_v2(a, b, gl.zeros([BLOCKS, NEAR, NEAR], gl.float32, MMA_BLOCKS))


@gluon.jit
def decays_of(g):
    """exp of the 16 tokens' log decays; those of -inf give 0."""
    found = ()
    for i in gl.static_range(NEAR):
        found = found + (gl.exp2(g[i] * LOG2E),)
    return found


@gluon.jit
def of_blocks(totals):
    """The decays of the four warps' tokens, [1, channels] each, of what they left."""
    t0 = totals.slice(0, 1, 0).load(TOKENS)
    t1 = totals.slice(1, 1, 0).load(TOKENS)
    t2 = totals.slice(2, 1, 0).load(TOKENS)
    t3 = totals.slice(3, 1, 0).load(TOKENS)
    return t0, t1, t2, t3


@gluon.jit
def around(block, t0, t1, t2, t3):
    """Decays of a chunk's tokens before a warp's, of those after them, and of those between them and its middle."""
    before = gl.where(block == 0, 1.0, gl.where(block == 1, t0, gl.where(block == 2, t0 * t1, t0 * t1 * t2)))
    after = gl.where(block == 3, 1.0, gl.where(block == 2, t3, gl.where(block == 1, t2 * t3, t1 * t2 * t3)))
    inward = gl.where(block == 0, t1, gl.where(block == 3, t2, 1.0))
    return before, after, inward
