"""What a vector decay does to a chunk on Hopper: eight warps turn its queries, keys and log decays into operands.

A warp has 16 tokens, in two rows of 8, and 32 channels of 64 at a time; a thread has a row in two channels. So products
of decays along tokens stay in registers, but for an exchange between rows. Tokens s < t of a chunk meet at one level of
1, 2, .. 32: in one block of twice as many tokens, s in its first half, t in its second. There the decay between them
splits at the middle into a factor of the key and one of the query, each a product of exp(g), so at most 1. A tile of a
level holds each token's query or key times its factor, and its product with itself has that level's scores.
"""
# ruff: noqa: RUF005 - Gluon does not compile starred expressions

from holdfast.kernels.common.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    mma_v2,
    reinterpret,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_gates import CHUNK
from .hopper_gla_tokens import BLOCKS, HALF, LOG2E, NEAR, around

# tokens of a thread; rows of as many, of which a warp has two
OWN = gl.constexpr(8)
ROWS = gl.constexpr(8)
# channels of a warp
_PART = gl.constexpr(32)
# Of 64 tokens and channels. A thread's tokens differ in bits 0, 1 and 3, and a warp's other lanes have bit 2 set: rows
# that lanes touch at once lie in different banks. The last warps have the other channels
_FLAT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [2, 0], [8, 0]],
        [[0, 2], [0, 4], [0, 8], [0, 16], [4, 0]],
        [[16, 0], [32, 0], [0, 32]],
        [],
        [64, 64],
    )
)
# of one token of each row
TOKENS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1]], [[0, 2], [0, 4], [0, 8], [0, 16], [1, 0]], [[2, 0], [4, 0], [0, 32]], [], [8, 64]
    )
)
# as mma.sync's first operand
_ROWS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 16]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 32]],
        [],
        [64, 64],
    )
)
_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))
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
PARTS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def across(x):
    """[8, channels]: of each row what the other row of its warp has."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 16, 0x1f, 0xffffffff;", "=r,r", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _tokens_of(x):
    """[64, channels] -> the 8 tokens of every row, each [8, channels]."""
    width: gl.constexpr = x.shape[1]
    parts = (gl.permute(gl.reshape(x, [BLOCKS, 2, 2, 2, 2, width]), (0, 2, 5, 4, 3, 1)),)
    for level in gl.static_range(3):
        finer = ()
        for i in gl.static_range(1 << level):
            first, second = gl.split(parts[i])
            finer = finer + (first, second)
        parts = finer
    found = ()
    for i in gl.static_range(OWN):
        found = found + (gl.convert_layout(gl.reshape(parts[i], [ROWS, width]), TOKENS, assert_trivial=True),)
    return found


@gluon.jit
def _tile_of(tokens):
    """The inverse of _tokens_of."""
    width: gl.constexpr = tokens[0].shape[1]
    parts = ()
    for i in gl.static_range(OWN):
        parts = parts + (gl.reshape(tokens[i], [BLOCKS, 2, width]),)
    for level in gl.static_range(3):
        wider = ()
        for i in gl.static_range(4 >> level):
            wider = wider + (gl.join(parts[2 * i], parts[2 * i + 1]),)
        parts = wider
    whole = gl.reshape(gl.permute(parts[0], (0, 5, 1, 4, 3, 2)), [CHUNK, width])
    return gl.convert_layout(whole, _FLAT, assert_trivial=True)


@gluon.jit
def _operands(x):
    """x [64, 64], as both operands of products of every warp's 16 tokens with one another: [8, 16, 32], [8, 32, 16]."""
    parts = gl.permute(gl.reshape(x, [BLOCKS, NEAR, 2, _PART]), (2, 0, 1, 3))
    parts = gl.reshape(parts, [2 * BLOCKS, NEAR, _PART])
    a = gl.convert_layout(parts, gl.DotOperandLayout(0, _MMA, 2), assert_trivial=True)
    b = gl.convert_layout(gl.permute(parts, (0, 2, 1)), gl.DotOperandLayout(1, _MMA, 2), assert_trivial=True)
    return a, b


@gluon.jit
def _decays_of(g_tile):
    """exp of the tokens' log decays; those of -inf give 0."""
    g = _tokens_of(g_tile.reshape([CHUNK, HALF]).load(_FLAT))
    found = ()
    for i in gl.static_range(OWN):
        found = found + (gl.exp2(g[i] * LOG2E),)
    return found


@gluon.jit
def _widened(to_here, to_end, totals, bit: gl.constexpr):
    """Decays from blocks' starts to tokens, from tokens to blocks' ends, and of blocks: of blocks of twice as many.

    bit: of the place in a thread which tells a block's halves apart. At 0 the first and the last are a token's own
    decay, and the second is 1, whatever to_end.
    """
    here = ()
    end = ()
    for i in gl.static_range(OWN):
        if (i >> bit) % 2 == 1:
            here = here + (to_here[i] * totals[(i >> bit) ^ 1],)
            if bit == 0:
                end = end + (gl.full(to_here[i].shape, 1.0, gl.float32, TOKENS),)
            else:
                end = end + (to_end[i],)
        elif bit == 0:
            here = here + (to_here[i],)
            end = end + (totals[(i >> bit) ^ 1],)
        else:
            here = here + (to_here[i],)
            end = end + (to_end[i] * totals[(i >> bit) ^ 1],)
    whole = ()
    for j in gl.static_range(OWN >> (bit + 1)):
        whole = whole + (totals[2 * j] * totals[2 * j + 1],)
    return here, end, whole


@gluon.jit
def _widened_across(to_here, to_end, totals, late):
    """_widened, where the halves of 8 tokens are of the two rows of a warp. late: whether a row has the second."""
    here = ()
    end = ()
    whole = ()
    for j in gl.static_range(2):
        other = across(totals[j])
        before = gl.where(late, other, 1.0)
        after = gl.where(late, 1.0, other)
        for i in gl.static_range(4):
            here = here + (to_here[4 * j + i] * before,)
            end = end + (to_end[4 * j + i] * after,)
        whole = whole + (totals[j] * other,)
    return here, end, whole


@gluon.jit
def _met(q, k, to_here, to_end, bit: gl.constexpr):
    """Each token's query or key times its factor at a level; bit, of the place in a thread, tells its halves apart."""
    found = ()
    for i in gl.static_range(OWN):
        if (i >> bit) % 2 == 1:
            x = (q[i].to(gl.float32) * to_here[i]).to(q[i].dtype)
        elif bit == 0:
            x = k[i]
        else:
            x = (k[i].to(gl.float32) * to_end[i]).to(q[i].dtype)
        found = found + (x,)
    return found


@gluon.jit
def _met_across(q, k, to_here, to_end, late):
    """_met at the level whose halves are of the two rows of a warp."""
    found = ()
    for i in gl.static_range(OWN):
        x = gl.where(late, q[i].to(gl.float32), k[i].to(gl.float32)) * gl.where(late, to_here[i], to_end[i])
        found = found + (x.to(q[i].dtype),)
    return found


@gluon.jit
def _near_places():
    row = gl.arange(0, NEAR, gl.SliceLayout(0, gl.SliceLayout(2, _MMA)))
    column = gl.arange(0, NEAR, gl.SliceLayout(0, gl.SliceLayout(1, _MMA)))
    return row[None, :, None], column[None, None, :]


@gluon.jit
def _add_met(scores, tokens, level: gl.constexpr):
    """Adds a tile's product with itself where tokens meet at a level."""
    a, b = _operands(gl.convert_layout(_tile_of(tokens), _ROWS))
    row, column = _near_places()
    return gl.where(((row ^ column) >> level == 1) & (row > column), mma_v2(a, b, scores), scores)


@gluon.jit
def _as_they_are(tokens):
    """The same, which the compiler takes for others: it would keep what it has once made of them, at twice the size."""
    found = ()
    for i in gl.static_range(OWN):
        same = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tokens[i]], tokens[i].dtype, is_pure=False, pack=2)
        found = found + (same,)
    return found


@gluon.jit
def _meet_near(q, k, to_here, late, scores):
    """Scores of each warp's tokens: q and k [64, 64] in shared memory, to_here the tokens' own decays.

    Also the tokens themselves, and their decays as of _widened in blocks of 16.
    """
    qa, _ = _operands(q.load(_ROWS))
    _, kb = _operands(k.load(_ROWS))
    row, column = _near_places()
    scores = gl.where(row == column, mma_v2(qa, kb, scores), scores)
    qs = _tokens_of(q.load(_FLAT))
    ks = _tokens_of(k.load(_FLAT))
    scores = _add_met(scores, _met(qs, ks, to_here, to_here, 0), 0)
    to_here, to_end, total = _widened(to_here, to_here, to_here, 0)
    qs, ks = _as_they_are(qs), _as_they_are(ks)
    scores = _add_met(scores, _met(qs, ks, to_here, to_end, 1), 1)
    to_here, to_end, total = _widened(to_here, to_end, total, 1)
    qs, ks = _as_they_are(qs), _as_they_are(ks)
    scores = _add_met(scores, _met_across(qs, ks, to_here, to_end, late), 2)
    to_here, to_end, total = _widened_across(to_here, to_end, total, late)
    qs, ks = _as_they_are(qs), _as_they_are(ks)
    scores = _add_met(scores, _met(qs, ks, to_here, to_end, 2), 3)
    to_here, to_end, total = _widened(to_here, to_end, total, 2)
    return scores, _as_they_are(qs), _as_they_are(ks), to_here, to_end, total[0]


@gluon.jit
def _of_warps(total, late):
    """[8, channels], both rows of a warp alike, -> [4, channels]."""
    return gl.sum(gl.reshape(gl.where(late, 0.0, total), [BLOCKS, 2, total.shape[1]]), 1)


@gluon.jit
def _of_blocks(totals):
    """The decays of the chunk's four blocks of 16 tokens, [1, channels] each, of what warps left."""
    t0 = totals.slice(0, 1, 0).load(TOKENS)
    t1 = totals.slice(1, 1, 0).load(TOKENS)
    t2 = totals.slice(2, 1, 0).load(TOKENS)
    t3 = totals.slice(3, 1, 0).load(TOKENS)
    return t0, t1, t2, t3


@gluon.jit
def fetch_decays(g_desc, g_tiles, come, half: gl.constexpr, chunk):
    """Has 64 columns of a chunk's log decays copied in. chunk: its batch, first token, head, and whether it exists."""
    batch, token, head, exists = chunk
    mbarrier.expect(come.index(half), g_desc.block_type.nbytes, pred=exists)
    tma_load(g_desc, [batch, token, head, half * HALF], come.index(half), g_tiles.index(half), pred=exists)


@gluon.jit
def weigh(q, k, g_tiles, g_come, phase, met_tiles, near_tile, totals, decays, read, scale, g_desc, following):
    """Of a chunk: q decayed from its start, times scale; k decayed to its end; both in place. And scores' parts.

    q, k: [64, K] in shared memory. g: float32 [1, 64, 1, 64], of each 64 columns, whose place those of the `following`
    chunk take. met_tiles: two of [64, 64] for each 64 columns, of levels 16 and 32. near_tile: float32 [8, 16, 16], the
    scores of each warp. totals: [4, 64] in float32, of use here only. decays: [K], of the chunk. phase: of g_come.
    read: the barrier of whoever reads met_tiles and near_tile.
    """
    halves: gl.constexpr = q.shape[1] // HALF
    row = gl.arange(0, ROWS, gl.SliceLayout(1, TOKENS))[:, None]
    block = row // 2
    late = row % 2 == 1
    near = gl.zeros([2 * BLOCKS, NEAR, NEAR], gl.float32, _MMA)
    for half in gl.static_range(halves):
        q_half = q.slice(half * HALF, HALF, 1)
        k_half = k.slice(half * HALF, HALF, 1)
        mbarrier.wait(g_come.index(half), phase)
        own = _decays_of(g_tiles.index(half))
        near, qs, ks, to_here, to_end, total = _meet_near(q_half, k_half, own, late, near)
        totals.store(_of_warps(total, late))
        barrier()
        fetch_decays(g_desc, g_tiles, g_come, half, following)
        t0, t1, t2, t3 = _of_blocks(totals)
        before, after, inward = around(block, t0, t1, t2, t3)
        reading = ()
        write = ()
        sixteen = ()
        thirty_two = ()
        for i in gl.static_range(OWN):
            query = qs[i].to(gl.float32) * to_here[i]
            key = ks[i].to(gl.float32) * to_end[i]
            reading = reading + ((query * (before * scale)).to(q.dtype),)
            write = write + ((key * after).to(q.dtype),)
            sixteen = sixteen + (gl.where(block % 2 == 1, query, key).to(q.dtype),)
            thirty_two = thirty_two + ((gl.where(block >= 2, query, key) * inward).to(q.dtype),)
        q_half.store(_tile_of(reading))
        k_half.store(_tile_of(write))
        if half == 0:
            mbarrier.wait(read, phase ^ 1)
        met_tiles[2 * half].store(_tile_of(sixteen))
        met_tiles[2 * half + 1].store(_tile_of(thirty_two))
        decays.slice(half * HALF, HALF, 0).store(gl.reshape(t0 * t1 * t2 * t3, [HALF]))
    fence_async_shared()
    near_tile.store(near)
    barrier()


@gluon.jit
def scores_of(met_tiles, near_tile, scale, p_tile):
    """Puts the scores of what `weigh` has left, [t, s], times scale, into p_tile, which is to be fenced."""
    warps: gl.constexpr = gl.num_warps()
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 4 * CHUNK // warps, 16])
    by_block: gl.constexpr = _BY_BLOCK if warps == 8 else _BY_BLOCK_4
    sixteen = gl.zeros([CHUNK, CHUNK], gl.float32, whole)
    thirty_two = gl.zeros([CHUNK, CHUNK], gl.float32, whole)
    for half in gl.static_range(len(met_tiles) // 2):
        low = met_tiles[2 * half]
        high = met_tiles[2 * half + 1]
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
    scores = gl.reshape(scores.to(p_tile.dtype), [CHUNK, CHUNK])
    p_tile.store(gl.convert_layout(scores, whole, assert_trivial=True))
