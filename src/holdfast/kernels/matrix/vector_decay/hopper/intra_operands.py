"""What a vector decay does to a chunk on Hopper: eight warps turn its queries, keys and log decays into operands.

A warp has 16 tokens, in two rows of 8, and 32 channels of 64 at a time; a thread has a row in two channels. So products
of decays along tokens stay in registers, but for an exchange between rows. Tokens s < t of a chunk meet at one level of
1, 2, .. 32: in one block of twice as many tokens, s in its first half, t in its second. There the decay between them
splits at the middle into a factor of the key and one of the query, each a product of exp(g), so at most 1. A tile of a
level holds each token's query or key times its factor, and its product with itself has that level's scores.
"""
# ruff: noqa: RUF005 - Gluon does not compile starred expressions

from holdfast.kernels.lib.gluon.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    mma_v2,
    reinterpret,
    tma_load,
)
from holdfast.kernels.lib.gluon.decay import CHUNK

from .token_layout import BLOCKS, HALF, LOG2E, NEAR, around

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
PARTS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.jit
def across(x):
    """[8, channels]: of each row what the other row of its warp has."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 16, 0x1f, 0xffffffff;", "=r,r", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def wide(x):
    """Half-precision numbers in float32, found anew each time: the compiler would keep them, at twice the size."""
    if x.dtype == gl.bfloat16:
        # it takes one instruction more for every second one
        text: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    else:
        text: gl.constexpr = "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}"
    return gl.inline_asm_elementwise(text, "=r,=r,r", [x], gl.float32, is_pure=False, pack=2)


@gluon.jit
def chosen(x, y, first):
    """x where first is -1, y where it is 0: predicates, of which a thread has seven, would be moved to and fro."""
    pack: gl.constexpr = 32 // x.dtype.primitive_bitwidth
    constraints: gl.constexpr = "=r,r,r,r" if pack == 1 else "=r,r,r,r,r"
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xe4;", constraints, [x, y, first], x.dtype, is_pure=True, pack=pack
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
            x = (wide(q[i]) * to_here[i]).to(q[i].dtype)
        elif bit == 0:
            x = k[i]
        else:
            x = (wide(k[i]) * to_end[i]).to(q[i].dtype)
        found = found + (x,)
    return found


@gluon.jit
def _met_across(q, k, to_here, to_end, late):
    """_met at the level whose halves are of the two rows of a warp."""
    found = ()
    for i in gl.static_range(OWN):
        x = wide(chosen(q[i], k[i], gl.where(late, -1, 0))) * gl.where(late, to_here[i], to_end[i])
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
    # said so that the compiler finds which do not depend on the thread, and which are the same
    if level == 3:
        meet = (row >= 8) & (column < 8)
    else:
        late, early = row % 8 >> level, column % 8 >> level
        meet = (row // 8 == column // 8) & (early % 2 == 0) & (late == early + 1)
    return gl.where(meet, mma_v2(a, b, scores), scores)


@gluon.jit
def _meet_near(q, k, to_here, late, scores):
    """Scores of each warp's tokens: q and k [64, 64] in shared memory, to_here the tokens' own decays.

    Also the tokens themselves, and their decays as of _widened in blocks of 16.
    """
    qa, _ = _operands(q.load(_ROWS))
    _, kb = _operands(k.load(_ROWS))
    row, column = _near_places()
    same = (row // 8 == column // 8) & (row % 8 == column % 8)
    scores = gl.where(same, mma_v2(qa, kb, scores), scores)
    qs = _tokens_of(q.load(_FLAT))
    ks = _tokens_of(k.load(_FLAT))
    scores = _add_met(scores, _met(qs, ks, to_here, to_here, 0), 0)
    to_here, to_end, total = _widened(to_here, to_here, to_here, 0)
    scores = _add_met(scores, _met(qs, ks, to_here, to_end, 1), 1)
    to_here, to_end, total = _widened(to_here, to_end, total, 1)
    scores = _add_met(scores, _met_across(qs, ks, to_here, to_end, late), 2)
    to_here, to_end, total = _widened_across(to_here, to_end, total, late)
    scores = _add_met(scores, _met(qs, ks, to_here, to_end, 2), 3)
    to_here, to_end, total = _widened(to_here, to_end, total, 2)
    return scores, qs, ks, to_here, to_end, total[0]


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
def panel(tile, half):
    """64 columns of a tile [64, K] in shared memory, which lie together there."""
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return reinterpret(tile, tile.dtype, [tile.shape[1] // HALF, CHUNK, HALF], flat).index(half)


@gluon.jit
def fetch_decays(g_desc, g_tiles, come, half, chunk):
    """Has 64 columns of a chunk's log decays copied in. chunk: its batch, first token, head, and whether it exists.

    Who waits for them has been told to expect them: the compiler puts a barrier between that and the copy.
    """
    batch, token, head, exists = chunk
    tma_load(g_desc, [batch, token, head, half * HALF], come.index(half), g_tiles.index(half), pred=exists)


@gluon.jit
def weigh(
    q, k, g_tiles, g_come, phase, met_tiles, near_tile, totals, decays, beta, strengths, read, scale, g_desc, following
):
    """Of a chunk: q decayed from its start, times scale; k decayed to its end; both in place. And scores' parts.

    q, k: [64, K] in shared memory. g: float32 [1, 64, 1, 64], of each 64 columns, whose place those of the `following`
    chunk take. met_tiles: of levels 16 and 32, [K / 64, 64, 64] each. near_tile: float32 [8, 16, 16], the scores of
    each warp. totals: [4, 64] in float32, of use here only. phase: of g_come; decays: [2 K / 64, 64], those of the
    chunk in the half that phase tells.
    beta: the chunk's strengths, which k to its end is weighed by and which are left in strengths, both [64] or None.
    read: the barrier of whoever reads met_tiles and near_tile.
    """
    halves: gl.constexpr = q.shape[1] // HALF
    row = gl.arange(0, ROWS, gl.SliceLayout(1, TOKENS))[:, None]
    block = row // 2
    late = row % 2 == 1
    odd, high = gl.where(block % 2 == 1, -1, 0), gl.where(block >= 2, -1, 0)
    near = gl.zeros([2 * BLOCKS, NEAR, NEAR], gl.float32, _MMA)
    # not unrolled: twice the code takes more registers
    for half in range(halves):
        q_half = panel(q, half)
        k_half = panel(k, half)
        mbarrier.wait(g_come.index(half), phase)
        own = _decays_of(g_tiles.index(half))
        near, qs, ks, to_here, to_end, total = _meet_near(q_half, k_half, own, late, near)
        totals.store(_of_warps(total, late))
        if beta is not None:
            # here they have come; of both halves the same
            strengths.store(beta)
        # both before the barrier: behind it the compiler would put them before one more
        fence_async_shared()
        mbarrier.expect(g_come.index(half), g_desc.block_type.nbytes, pred=following[3])
        barrier()
        fetch_decays(g_desc, g_tiles, g_come, half, following)
        t0, t1, t2, t3 = _of_blocks(totals)
        before, after, inward = around(block, t0, t1, t2, t3)
        if beta is not None:
            strong = strengths.load(gl.SliceLayout(1, _FLAT))[:, None]
            strong = _tokens_of(strong + gl.zeros([CHUNK, HALF], gl.float32, _FLAT))
        reading = ()
        write = ()
        sixteen = ()
        thirty_two = ()
        for i in gl.static_range(OWN):
            query = wide(qs[i]) * to_here[i]
            key = wide(ks[i]) * to_end[i]
            reading = reading + ((query * (before * scale)).to(q.dtype),)
            if beta is None:
                write = write + ((key * after).to(q.dtype),)
            else:
                write = write + ((key * (after * strong[i])).to(q.dtype),)
            sixteen = sixteen + (chosen(query, key, odd).to(q.dtype),)
            thirty_two = thirty_two + ((chosen(query, key, high) * inward).to(q.dtype),)
        k_half.store(_tile_of(write))
        q_half.store(_tile_of(reading))
        mbarrier.wait(read, phase ^ 1)
        met_tiles[0].index(half).store(_tile_of(sixteen))
        met_tiles[1].index(half).store(_tile_of(thirty_two))
        decays.index(phase * halves + half).store(gl.reshape(t0 * t1 * t2 * t3, [HALF]))
    fence_async_shared()
    near_tile.store(near)
    barrier()
