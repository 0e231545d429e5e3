"""A chunk of 64 tokens in registers on Hopper: each of four warps has 16 of them, a thread all 16 in two channels.

So what a vector decay does along tokens stays in a thread's registers.
"""
# ruff: noqa: RUF005 - Gluon does not compile starred expressions

from holdfast.kernels.lib.gluon.compat import gl, gluon, mma_v2
from holdfast.kernels.lib.gluon.decay import CHUNK

# tokens of a block, which is a warp's; blocks; channels at a time
BLOCK_TOKENS = gl.constexpr(16)
BLOCKS = gl.constexpr(4)
HALF = gl.constexpr(64)
LOG2E = gl.constexpr(1.4426950408889634)
CHUNK_LAYOUT = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0]))
# of one token of each warp
TOKEN_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
_MMA_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
MMA_BLOCK_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))


@gluon.jit
def split_tokens(x):
    """Split [64, channels] into the 16 tokens of every warp, each [4, channels]."""
    width: gl.constexpr = x.shape[1]
    parts = (gl.permute(gl.reshape(x, [BLOCKS, 2, 2, 2, 2, width]), (0, 5, 4, 3, 2, 1)),)
    for level in gl.static_range(4):
        finer = ()
        for i in gl.static_range(1 << level):
            first, second = gl.split(parts[i])
            finer = finer + (first, second)
        parts = finer
    found = ()
    for i in gl.static_range(BLOCK_TOKENS):
        found = found + (gl.convert_layout(parts[i], TOKEN_LAYOUT, assert_trivial=True),)
    return found


@gluon.jit
def join_tokens(tokens):
    """Invert split_tokens."""
    width: gl.constexpr = tokens[0].shape[1]
    parts = tokens
    for level in gl.static_range(4):
        wider = ()
        for i in gl.static_range(8 >> level):
            wider = wider + (gl.join(parts[2 * i], parts[2 * i + 1]),)
        parts = wider
    return gl.reshape(gl.permute(parts[0], (0, 5, 4, 3, 2, 1)), [CHUNK, width])


@gluon.jit
def intra_block_product(left, right):
    """Multiply each warp's 16 rows of two tiles [64, channels] in shared memory: [4, 16, 16]."""
    width: gl.constexpr = left.shape[1]
    a_layout: gl.constexpr = gl.DotOperandLayout(0, MMA_BLOCK_LAYOUT, 2)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, MMA_BLOCK_LAYOUT, 2)
    a = gl.reshape(left.load(gl.DotOperandLayout(0, _MMA_LAYOUT, 2)), [BLOCKS, BLOCK_TOKENS, width])
    b = gl.permute(
        gl.reshape(right.load(gl.DotOperandLayout(0, _MMA_LAYOUT, 2)), [BLOCKS, BLOCK_TOKENS, width]), (0, 2, 1)
    )
    a, b = gl.convert_layout(a, a_layout), gl.convert_layout(b, b_layout)
    return mma_v2(a, b, gl.zeros([BLOCKS, BLOCK_TOKENS, BLOCK_TOKENS], gl.float32, MMA_BLOCK_LAYOUT))


@gluon.jit
def decays_of(g):
    """Return exp of the 16 tokens' log decays; -inf gives 0."""
    found = ()
    for i in gl.static_range(BLOCK_TOKENS):
        found = found + (gl.exp2(g[i] * LOG2E),)
    return found


@gluon.jit
def load_block_decays(block_decays):
    """Return the decays of the four warps' blocks of 16 tokens, [1, channels] each, that they have stored."""
    t0 = block_decays.slice(0, 1, 0).load(TOKEN_LAYOUT)
    t1 = block_decays.slice(1, 1, 0).load(TOKEN_LAYOUT)
    t2 = block_decays.slice(2, 1, 0).load(TOKEN_LAYOUT)
    t3 = block_decays.slice(3, 1, 0).load(TOKEN_LAYOUT)
    return t0, t1, t2, t3


@gluon.jit
def decays_around_block(block, t0, t1, t2, t3):
    """Return the decay of the chunk's tokens before a block, of those after it, and of those between it and the middle.

    t0 .. t3: the decays of the four blocks.
    """
    before = gl.where(block == 0, 1.0, gl.where(block == 1, t0, gl.where(block == 2, t0 * t1, t0 * t1 * t2)))
    after = gl.where(block == 3, 1.0, gl.where(block == 2, t3, gl.where(block == 1, t2 * t3, t1 * t2 * t3)))
    inward = gl.where(block == 0, t1, gl.where(block == 3, t2, 1.0))
    return before, after, inward
