"""Vector log decays inside a chunk: products and sums from block boundaries, by doubling blocks.

Tokens s < t meet at exactly one level h = 1, 2, 4, .. 32: the one whose blocks of 2h tokens hold both, s in the first
half and t in the second. There the decay between them splits at the middle into a factor of each. So at each level a
token has one factor, at most 1: the decay from the middle to it, or from it to the middle.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
CHUNK = tl.constexpr(64)
LEVELS = tl.constexpr(6)
# tokens of one such block meet in products of that block alone, [CHUNK / 16, 16, 16]
BLOCK_TOKENS = tl.constexpr(16)


@triton.jit
def chunk_offsets(columns, stride, PARTS: tl.constexpr):
    """Return the offsets [PARTS, CHUNK / PARTS, columns] of a chunk's elements.

    Triton gives columns to lanes and parts to warps. With as many parts as warps a thread holds all tokens of a part,
    and products along them take no exchange.
    """
    part: tl.constexpr = CHUNK // PARTS
    token = tl.arange(0, PARTS)[:, None] * part + tl.arange(0, part)[None, :]
    # two columns a thread, whatever the dtype, so that tiles have one layout
    return tl.max_contiguous(token[:, :, None] * stride + columns[None, None, :], [1, 1, 2])


@triton.jit
def chunk_mask(columns, count, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Return which of `chunk_offsets` are of the chunk's first `count` tokens and of WIDTH columns."""
    part: tl.constexpr = CHUNK // PARTS
    token = tl.arange(0, PARTS)[:, None] * part + tl.arange(0, part)[None, :]
    return (token < count)[:, :, None] & (columns < WIDTH)[None, None, :]


@triton.jit
def load_chunk(base, at, mask):
    """Load [CHUNK, columns], zero where masked."""
    return tl.reshape(tl.load(base + at, mask=mask, other=0.0), [CHUNK, at.shape[2]])


@triton.jit
def store_chunk(base, at, x, mask):
    """Store x [CHUNK, columns] at `chunk_offsets`."""
    tl.store(base + at, tl.reshape(x.to(base.dtype.element_ty), at.shape), mask=mask)


@triton.jit
def split_blocks(x):
    """Reshape [CHUNK, columns] to [CHUNK / BLOCK_TOKENS, BLOCK_TOKENS, columns]."""
    return tl.reshape(x, [CHUNK // BLOCK_TOKENS, BLOCK_TOKENS, x.shape[1]])


@triton.jit
def decay_of(g, WIDE: tl.constexpr):
    """Return exp(g), also of -inf. WIDE: rounded from float64, as the GPU's exponential is 2 units off in float32."""
    if WIDE:
        return tl.exp(g.to(tl.float64)).to(tl.float32)
    return tl.exp2(g.to(tl.float32) * LOG2E)


@triton.jit
def is_later(token, level):
    """Return [CHUNK, 1]: which tokens are in the second half of their block of 2^(level + 1)."""
    return ((token >> level) % 2 == 1)[:, None]


@triton.jit
def meet(token, level):
    """Return [tokens, tokens]: which pairs meet at a level, in either order."""
    return (token[:, None] ^ token[None, :]) >> level == 1


@triton.jit
def crosses(token, level, BEFORE_DECAY: tl.constexpr):
    """Return [r, t]: whether a log decay at token r is between t and the middle of the block where t meets others.

    BEFORE_DECAY: a token that reads does so before its own decay.
    """
    r = token[:, None]
    t = token[None, :]
    together = r >> level == t >> level
    reads = (t >> level) % 2 == 1
    if BEFORE_DECAY:
        behind = r < t
    else:
        behind = r <= t
    return together & tl.where(reads, behind, r > t)


@triton.jit
def split_pairs(total, level: tl.constexpr):
    """Split total [CHUNK >> level, columns], a row for each block of 2^level, into the left and the right of pairs."""
    side = tl.arange(0, 2)[None, :, None, None]
    pair = tl.reshape(total, [CHUNK >> (level + 1), 2, 1, total.shape[1]])
    left = tl.sum(tl.where(side == 0, pair, 0.0), 1, keep_dims=True)
    right = tl.sum(tl.where(side == 1, pair, 0.0), 1, keep_dims=True)
    return left, right


@triton.jit
def double_blocks(to_here, to_end, total, level: tl.constexpr):
    """Pass on from blocks of 2^level to blocks of 2^(level + 1) tokens: the decays from a block's start to its tokens,
    from its tokens to its end, and of the whole block.

    They begin as each token's own decay, 1, and its own.
    """
    columns: tl.constexpr = to_here.shape[1]
    side = tl.arange(0, 2)[None, :, None, None]
    left, right = split_pairs(total, level)
    here = tl.reshape(to_here, [CHUNK >> (level + 1), 2, 1 << level, columns])
    end = tl.reshape(to_end, [CHUNK >> (level + 1), 2, 1 << level, columns])
    here *= tl.where(side == 1, left, 1.0)
    end *= tl.where(side == 0, right, 1.0)
    total = tl.reshape(left * right, [CHUNK >> (level + 1), columns])
    return tl.reshape(here, [CHUNK, columns]), tl.reshape(end, [CHUNK, columns]), total
