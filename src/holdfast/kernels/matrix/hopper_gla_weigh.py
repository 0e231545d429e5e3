"""What a vector decay does to a chunk on Hopper: four warps turn its queries, keys and log decays into operands.

A warp has 16 tokens, a thread all of them in two channels, so that products of decays along tokens stay in registers.
Tokens s < t of a chunk meet at one level of 1, 2, .. 32: in one block of twice as many tokens, s in its first half, t
in its second. There the decay between them splits at the middle into a factor of the key and one of the query, each a
product of exp(g), so at most 1. A tile of a level holds each token's query or key times its factor, and its product
with itself has that level's scores.
"""
# ruff: noqa: RUF005 - Gluon does not compile starred expressions

from holdfast.kernels.common.gluon import barrier, fence_async_shared, gl, gluon, mbarrier, mma_v2, reinterpret

from .hopper_gates import CHUNK

# tokens of a warp; warps; channels at a time
NEAR = gl.constexpr(16)
BLOCKS = gl.constexpr(4)
HALF = gl.constexpr(64)
_LOG2E = gl.constexpr(1.4426950408889634)
FLAT = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0]))
# of one token of each warp
TOKENS = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
MMA_BLOCKS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
_MMA_HALVES = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8]))


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
        found = found + (gl.exp2(g[i] * _LOG2E),)
    return found


@gluon.jit
def _met(q, k, to_here, to_end, level: gl.constexpr):
    """Each token's query or key times its factor at a level."""
    found = ()
    for i in gl.static_range(NEAR):
        if (i >> level) % 2 == 1:
            x = (q[i].to(gl.float32) * to_here[i]).to(q[i].dtype)
        elif level == 0:
            x = k[i]
        else:
            x = (k[i].to(gl.float32) * to_end[i]).to(q[i].dtype)
        found = found + (x,)
    return tile_of(found)


@gluon.jit
def widened(to_here, to_end, totals, level: gl.constexpr):
    """Decays from blocks' starts to tokens, from tokens to blocks' ends, and of blocks: of 2^level -> 2^(level + 1).

    At level 0 the first and the last are a token's own decay, and the second is 1, whatever to_end.
    """
    here = ()
    end = ()
    for i in gl.static_range(NEAR):
        if (i >> level) % 2 == 1:
            here = here + (to_here[i] * totals[(i >> level) ^ 1],)
            if level == 0:
                end = end + (gl.full(to_here[i].shape, 1.0, gl.float32, TOKENS),)
            else:
                end = end + (to_end[i],)
        elif level == 0:
            here = here + (to_here[i],)
            end = end + (totals[(i >> level) ^ 1],)
        else:
            here = here + (to_here[i],)
            end = end + (to_end[i] * totals[(i >> level) ^ 1],)
    whole = ()
    for j in gl.static_range(NEAR >> (level + 1)):
        whole = whole + (totals[2 * j] * totals[2 * j + 1],)
    return here, end, whole


@gluon.jit
def _add_met(scores, tile, level: gl.constexpr):
    """Adds a tile's product with itself where tokens meet at a level."""
    row, column = _near_places()
    return gl.where(((row ^ column) >> level == 1) & (row > column), scores + near_product(tile, tile), scores)


@gluon.jit
def _near_places():
    row = gl.arange(0, NEAR, gl.SliceLayout(0, gl.SliceLayout(2, MMA_BLOCKS)))
    column = gl.arange(0, NEAR, gl.SliceLayout(0, gl.SliceLayout(1, MMA_BLOCKS)))
    return row[None, :, None], column[None, None, :]


@gluon.jit
def _product(left, right, sum_, layout: gl.constexpr):
    """sum_ + left right^T, of rows of tiles in shared memory."""
    a = left.load(gl.DotOperandLayout(0, layout, 2))
    b = right.permute((1, 0)).load(gl.DotOperandLayout(1, layout, 2))
    return mma_v2(a, b, sum_)


@gluon.jit
def _spread(near):
    """[4, 16, 16] on the diagonal of [64, 64], 0 elsewhere."""
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, MMA_BLOCKS)))[:, None, None]
    low = gl.join(gl.where(block == 0, near, 0.0), gl.where(block == 1, near, 0.0))
    high = gl.join(gl.where(block == 2, near, 0.0), gl.where(block == 3, near, 0.0))
    whole = gl.permute(gl.join(low, high), (0, 1, 4, 3, 2))
    return gl.reshape(whole, [CHUNK, CHUNK])


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


@gluon.jit
def weigh(q, k, g_tiles, turn, totals, decays, p_tile, p_free, p_phase, scale):
    """Of a chunk: q decayed from its start, times scale; k decayed to its end; both in place. p: the scores, [t, s].

    q, k: [64, K] in shared memory. g: float32 [1, 64, 1, 64] at turn * K / 64 and after; tiles of levels take its
    place. totals: [K / 64, 4, 64] in float32, of use here only. decays: [K], of the chunk. p_free: the barrier of
    whoever reads p.
    """
    K: gl.constexpr = q.shape[1]
    near = gl.zeros([BLOCKS, NEAR, NEAR], gl.float32, MMA_BLOCKS)
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, TOKENS))[:, None]
    for half in gl.static_range(K // HALF):
        q_half = q.slice(half * HALF, HALF, 1)
        k_half = k.slice(half * HALF, HALF, 1)
        g_tile = g_tiles.index(turn * (K // HALF) + half)
        to_here = decays_of(tokens_of(g_tile.reshape([CHUNK, HALF]).load(FLAT)))
        qs = tokens_of(q_half.load(FLAT))
        ks = tokens_of(k_half.load(FLAT))
        tiles = reinterpret(g_tile, q.dtype, [2, CHUNK, HALF], gl.NVMMASharedLayout(128, 16, 2))
        low = tiles.index(0)
        high = tiles.index(1)
        row, column = _near_places()
        near = gl.where(row == column, near + near_product(q_half, k_half), near)
        # g has been read
        barrier()
        low.store(_met(qs, ks, to_here, to_here, 0))
        to_here, to_end, total = widened(to_here, to_here, to_here, 0)
        high.store(_met(qs, ks, to_here, to_end, 1))
        to_here, to_end, total = widened(to_here, to_end, total, 1)
        barrier()
        near = _add_met(near, low, 0)
        near = _add_met(near, high, 1)
        barrier()
        # loaded again, here and below: the compiler would keep all of them in float32
        qs = tokens_of(q_half.load(FLAT))
        ks = tokens_of(k_half.load(FLAT))
        low.store(_met(qs, ks, to_here, to_end, 2))
        to_here, to_end, total = widened(to_here, to_end, total, 2)
        high.store(_met(qs, ks, to_here, to_end, 3))
        to_here, to_end, total = widened(to_here, to_end, total, 3)
        totals.index(half).store(total[0])
        barrier()
        near = _add_met(near, low, 2)
        near = _add_met(near, high, 3)
        t0, t1, t2, t3 = of_blocks(totals.index(half))
        before, after, inward = around(block, t0, t1, t2, t3)
        barrier()
        qs = tokens_of(q_half.load(FLAT))
        ks = tokens_of(k_half.load(FLAT))
        read = ()
        write = ()
        sixteen = ()
        thirty_two = ()
        for i in gl.static_range(NEAR):
            query = qs[i].to(gl.float32) * to_here[i]
            key = ks[i].to(gl.float32) * to_end[i]
            read = read + ((query * (before * scale)).to(q.dtype),)
            write = write + ((key * after).to(q.dtype),)
            sixteen = sixteen + (gl.where(block % 2 == 1, query, key).to(q.dtype),)
            thirty_two = thirty_two + ((gl.where(block >= 2, query, key) * inward).to(q.dtype),)
        barrier()
        low.store(tile_of(sixteen))
        high.store(tile_of(thirty_two))
        q_half.store(tile_of(read))
        k_half.store(tile_of(write))
        decays.slice(half * HALF, HALF, 0).store(gl.reshape(t0 * t1 * t2 * t3, [HALF]))
    barrier()
    # not before: their sums would take registers from the tokens
    first = gl.zeros([NEAR, NEAR], gl.float32, _MMA)
    second = gl.zeros([NEAR, NEAR], gl.float32, _MMA)
    far = gl.zeros([CHUNK // 2, CHUNK // 2], gl.float32, _MMA_HALVES)
    for half in gl.static_range(K // HALF):
        g_tile = g_tiles.index(turn * (K // HALF) + half)
        tiles = reinterpret(g_tile, q.dtype, [2, CHUNK, HALF], gl.NVMMASharedLayout(128, 16, 2))
        low = tiles.index(0)
        high = tiles.index(1)
        first = _product(low.slice(NEAR, NEAR, 0), low.slice(0, NEAR, 0), first, _MMA)
        second = _product(low.slice(3 * NEAR, NEAR, 0), low.slice(2 * NEAR, NEAR, 0), second, _MMA)
        far = _product(high.slice(2 * NEAR, 2 * NEAR, 0), high.slice(0, 2 * NEAR, 0), far, _MMA_HALVES)
    mbarrier.wait(p_free, p_phase)
    p_tile.store((_spread(near) * scale).to(q.dtype))
    barrier()
    p_tile.slice(NEAR, NEAR, 0).slice(0, NEAR, 1).store((first * scale).to(q.dtype))
    p_tile.slice(3 * NEAR, NEAR, 0).slice(2 * NEAR, NEAR, 1).store((second * scale).to(q.dtype))
    p_tile.slice(2 * NEAR, 2 * NEAR, 0).slice(0, 2 * NEAR, 1).store((far * scale).to(q.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def weigh_keys(k, g_tiles, turn, totals, decays):
    """Of a chunk: k decayed to its end, in place, and decays; as weigh, without queries."""
    K: gl.constexpr = k.shape[1]
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, TOKENS))[:, None]
    for half in gl.static_range(K // HALF):
        k_half = k.slice(half * HALF, HALF, 1)
        g_tile = g_tiles.index(turn * (K // HALF) + half)
        own = decays_of(tokens_of(g_tile.reshape([CHUNK, HALF]).load(FLAT)))
        ks = tokens_of(k_half.load(FLAT))
        to_end = (gl.full(own[0].shape, 1.0, gl.float32, TOKENS),)
        for i in gl.static_range(1, NEAR):
            to_end = (to_end[0] * own[NEAR - i],) + to_end
        totals.index(half).store(to_end[0] * own[0])
        barrier()
        t0, t1, t2, t3 = of_blocks(totals.index(half))
        _, after, _ = around(block, t0, t1, t2, t3)
        write = ()
        for i in gl.static_range(NEAR):
            write = write + ((ks[i].to(gl.float32) * (to_end[i] * after)).to(k.dtype),)
        k_half.store(tile_of(write))
        decays.slice(half * HALF, HALF, 0).store(gl.reshape(t0 * t1 * t2 * t3, [HALF]))
    fence_async_shared()
    barrier()
