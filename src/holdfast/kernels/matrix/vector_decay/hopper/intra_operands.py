"""The operands that vector decay's forward kernel makes of a chunk on Hopper: eight warps, from q, k and log decays.

A warp has 16 tokens, in two rows of 8, and 32 channels of 64 at a time; a thread has a row in two channels. So products
of decays along tokens stay in registers, but for an exchange between rows. Tokens s < t of a chunk meet at one level of
1, 2, .. 32: in one block of twice as many tokens, s in its first half, t in its second. There the decay between them
splits at the middle into a factor of the key and one of the query, each a product of exp(g), so at most 1. A tile of a
level holds each token's query or key times its factor, and its product with itself has that level's scores.
"""
# ruff: noqa: RUF005 - Gluon does not compile starred expressions

from typing import NamedTuple

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

from .token_layout import BLOCK_TOKENS, BLOCKS, HALF, LOG2E, decays_around_block

# tokens of a thread; rows of as many, of which a warp has two
THREAD_TOKENS = gl.constexpr(8)
ROWS = gl.constexpr(8)
# channels of a warp
_WARP_CHANNELS = gl.constexpr(32)
# Of 64 tokens and channels. A thread's tokens differ in bits 0, 1 and 3, and a warp's other lanes have bit 2 set: rows
# that lanes touch at once lie in different banks. The last warps have the other channels
_CHUNK_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [2, 0], [8, 0]],
        [[0, 2], [0, 4], [0, 8], [0, 16], [4, 0]],
        [[16, 0], [32, 0], [0, 32]],
        [],
        [64, 64],
    )
)
# of one token of each row
TOKEN_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1]], [[0, 2], [0, 4], [0, 8], [0, 16], [1, 0]], [[2, 0], [4, 0], [0, 32]], [], [8, 64]
    )
)
# of the first operand of mma.sync
_MMA_ROWS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 16]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [0, 32]],
        [],
        [64, 64],
    )
)
INTRA_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))
INTRA_BLOCK_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


class DecayLoads(NamedTuple):
    """Log decays: their descriptor, tiles [K / 64, 1, 64, 1, 64], a barrier for each tile."""

    desc: gl.tensor
    tiles: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor


class ChunkCoords(NamedTuple):
    """Where TMA finds a chunk, and whether there is one."""

    batch: gl.tensor
    token: gl.tensor
    head: gl.tensor
    exists: gl.tensor


class ChunkTiles(NamedTuple):
    """A chunk whose operands are made."""

    # [64, K] each, in shared memory
    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    # [64]: as loaded, and the place in shared memory where they are left; None for 1
    beta: gl.tensor | None
    beta_tile: gl.shared_memory_descriptor | None
    # of the log decays' barriers; it also tells which half of chunk_decays is this chunk's
    phase: gl.tensor


class Operands(NamedTuple):
    """What the mma partition takes of a chunk beside q and k, in shared memory."""

    level_tiles: tuple  # of levels 16 and 32, [K / 64, 64, 64] each
    intra_block: gl.shared_memory_descriptor  # [8, 16, 16] float32: the scores of each warp's tokens with one another
    block_decays: gl.shared_memory_descriptor  # [4, 64] float32: of blocks of 16 tokens; read by those alone who write
    chunk_decays: gl.shared_memory_descriptor  # [2 K / 64, 64] float32: of two chunks
    betas: gl.shared_memory_descriptor | None  # [2, 64] float32, of two chunks


class OperandBarriers(NamedTuple):
    """ready: one for each stage of q and k. scores_empty: level_tiles and intra_block have been read."""

    ready: gl.shared_memory_descriptor
    scores_empty: gl.shared_memory_descriptor


class MmaOperands(NamedTuple):
    """Both operands of products of each warp's 16 tokens with one another, [8, 16, 32] and [8, 32, 16]."""

    a: gl.tensor
    b: gl.tensor


@gluon.jit
def other_row(x):
    """Return [8, channels] with the two rows of each warp exchanged."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 16, 0x1f, 0xffffffff;", "=r,r", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def to_float32(x):
    """Widen half-precision numbers, anew each time: the compiler would keep them, at twice the size."""
    if x.dtype == gl.bfloat16:
        # the compiler takes one instruction more for every second number
        text: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    else:
        text: gl.constexpr = "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}"
    return gl.inline_asm_elementwise(text, "=r,=r,r", [x], gl.float32, is_pure=False, pack=2)


@gluon.jit
def select_bits(x, y, first):
    """Return x where first is -1, y where it is 0.

    Predicates, of which a thread has seven, would be moved to and fro.
    """
    pack: gl.constexpr = 32 // x.dtype.primitive_bitwidth
    constraints: gl.constexpr = "=r,r,r,r" if pack == 1 else "=r,r,r,r,r"
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xe4;", constraints, [x, y, first], x.dtype, is_pure=True, pack=pack
    )


@gluon.jit
def _split_tokens(x):
    """Split [64, channels] into the 8 tokens of every row, each [8, channels]."""
    width: gl.constexpr = x.shape[1]
    parts = (gl.permute(gl.reshape(x, [BLOCKS, 2, 2, 2, 2, width]), (0, 2, 5, 4, 3, 1)),)
    for level in gl.static_range(3):
        finer = ()
        for i in gl.static_range(1 << level):
            first, second = gl.split(parts[i])
            finer = finer + (first, second)
        parts = finer
    found = ()
    for i in gl.static_range(THREAD_TOKENS):
        found = found + (gl.convert_layout(gl.reshape(parts[i], [ROWS, width]), TOKEN_LAYOUT, assert_trivial=True),)
    return found


@gluon.jit
def join_tokens(tokens):
    """Invert _split_tokens."""
    width: gl.constexpr = tokens[0].shape[1]
    parts = ()
    for i in gl.static_range(THREAD_TOKENS):
        parts = parts + (gl.reshape(tokens[i], [BLOCKS, 2, width]),)
    for level in gl.static_range(3):
        wider = ()
        for i in gl.static_range(4 >> level):
            wider = wider + (gl.join(parts[2 * i], parts[2 * i + 1]),)
        parts = wider
    tile = gl.reshape(gl.permute(parts[0], (0, 5, 1, 4, 3, 2)), [CHUNK, width])
    return gl.convert_layout(tile, _CHUNK_LAYOUT, assert_trivial=True)


@gluon.jit
def _mma_operands(x):
    """Return x [64, 64] as MmaOperands."""
    parts = gl.permute(gl.reshape(x, [BLOCKS, BLOCK_TOKENS, 2, _WARP_CHANNELS]), (2, 0, 1, 3))
    parts = gl.reshape(parts, [2 * BLOCKS, BLOCK_TOKENS, _WARP_CHANNELS])
    a = gl.convert_layout(parts, gl.DotOperandLayout(0, INTRA_MMA, 2), assert_trivial=True)
    b = gl.convert_layout(gl.permute(parts, (0, 2, 1)), gl.DotOperandLayout(1, INTRA_MMA, 2), assert_trivial=True)
    return MmaOperands(a=a, b=b)


@gluon.jit
def load_decays(g_tile):
    """Return exp of the tokens' log decays; -inf gives 0."""
    g = _split_tokens(g_tile.reshape([CHUNK, HALF]).load(_CHUNK_LAYOUT))
    found = ()
    for i in gl.static_range(THREAD_TOKENS):
        found = found + (gl.exp2(g[i] * LOG2E),)
    return found


@gluon.jit
def _double_blocks(to_here, to_end, totals, bit: gl.constexpr):
    """Pass on to blocks of twice as many tokens: the decays from a block's start to its tokens, from its tokens to its
    end, and of the whole block.

    bit: of a token's place in its thread, tells a block's halves apart. At 0 the first and the last are a token's own
    decay, and the second is 1, whatever to_end is.
    """
    here = ()
    end = ()
    for i in gl.static_range(THREAD_TOKENS):
        if (i >> bit) % 2 == 1:
            here = here + (to_here[i] * totals[(i >> bit) ^ 1],)
            if bit == 0:
                end = end + (gl.full(to_here[i].shape, 1.0, gl.float32, TOKEN_LAYOUT),)
            else:
                end = end + (to_end[i],)
        elif bit == 0:
            here = here + (to_here[i],)
            end = end + (totals[(i >> bit) ^ 1],)
        else:
            here = here + (to_here[i],)
            end = end + (to_end[i] * totals[(i >> bit) ^ 1],)
    doubled = ()
    for j in gl.static_range(THREAD_TOKENS >> (bit + 1)):
        doubled = doubled + (totals[2 * j] * totals[2 * j + 1],)
    return here, end, doubled


@gluon.jit
def _double_blocks_across_rows(to_here, to_end, totals, late):
    """Do what _double_blocks does where the halves of 8 tokens are in the two rows of a warp. late: whether a row has
    the second."""
    here = ()
    end = ()
    doubled = ()
    for j in gl.static_range(2):
        other = other_row(totals[j])
        before = gl.where(late, other, 1.0)
        after = gl.where(late, 1.0, other)
        for i in gl.static_range(4):
            here = here + (to_here[4 * j + i] * before,)
            end = end + (to_end[4 * j + i] * after,)
        doubled = doubled + (totals[j] * other,)
    return here, end, doubled


@gluon.jit
def _level_tokens(q, k, to_here, to_end, bit: gl.constexpr):
    """Return each token's query or key times its factor at a level; bit, of its place in its thread, tells which."""
    found = ()
    for i in gl.static_range(THREAD_TOKENS):
        if (i >> bit) % 2 == 1:
            x = (to_float32(q[i]) * to_here[i]).to(q[i].dtype)
        elif bit == 0:
            x = k[i]
        else:
            x = (to_float32(k[i]) * to_end[i]).to(q[i].dtype)
        found = found + (x,)
    return found


@gluon.jit
def _level_tokens_across_rows(q, k, to_here, to_end, late):
    """Do what _level_tokens does at the level whose halves are in the two rows of a warp."""
    found = ()
    for i in gl.static_range(THREAD_TOKENS):
        x = to_float32(select_bits(q[i], k[i], gl.where(late, -1, 0))) * gl.where(late, to_here[i], to_end[i])
        found = found + (x.to(q[i].dtype),)
    return found


@gluon.jit
def _intra_block_coords():
    """Return the row and the column of each score of a warp's tokens with one another."""
    row = gl.arange(0, BLOCK_TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, INTRA_MMA)))
    column = gl.arange(0, BLOCK_TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, INTRA_MMA)))
    return row[None, :, None], column[None, None, :]


@gluon.jit
def _add_level_scores(scores, tokens, level: gl.constexpr):
    """Add a tile's product with itself where tokens meet at a level."""
    operands = _mma_operands(gl.convert_layout(join_tokens(tokens), _MMA_ROWS))
    row, column = _intra_block_coords()
    # said so that the compiler finds which do not depend on the thread, and which are the same
    if level == 3:
        meet = (row >= 8) & (column < 8)
    else:
        late, early = row % 8 >> level, column % 8 >> level
        meet = (row // 8 == column // 8) & (early % 2 == 0) & (late == early + 1)
    return gl.where(meet, mma_v2(operands.a, operands.b, scores), scores)


@gluon.jit
def _late_keys(tokens, k, to_here, bit: gl.constexpr):
    """Return _level_tokens with keys in the place of queries."""
    found = ()
    for i in gl.static_range(THREAD_TOKENS):
        if (i >> bit) % 2 == 1:
            x = (to_float32(k[i]) * to_here[i]).to(k[i].dtype)
        else:
            x = tokens[i]
        found = found + (x,)
    return found


@gluon.jit
def _add_level(sums, tokens, to_here, to_end, late, level: gl.constexpr):
    """Add what tokens that meet at a level score: queries and keys and, where sums has two, keys alone.

    tokens: q and k.
    """
    q, k = tokens
    if level == 2:
        mixed = _level_tokens_across_rows(q, k, to_here, to_end, late)
    else:
        bit: gl.constexpr = 2 if level == 3 else level
        mixed = _level_tokens(q, k, to_here, to_end, bit)
    found = (_add_level_scores(sums[0], mixed, level),)
    if len(sums) == 2:
        if level == 2:
            keys = _level_tokens_across_rows(k, k, to_here, to_end, late)
        else:
            keys = _late_keys(mixed, k, to_here, bit)
        found = found + (_add_level_scores(sums[1], keys, level),)
    return found


@gluon.jit
def add_intra_block_scores(q, k, to_here, late, sums):
    """Add the scores of each warp's tokens with one another. q, k: [64, 64] in shared memory; to_here: the tokens' own
    decays; sums: the scores, and a second one for those of keys with earlier keys.

    Also returns q and k by tokens, and the decays that _double_blocks has for blocks of 16.
    """
    q_operands = _mma_operands(q.load(_MMA_ROWS))
    k_operands = _mma_operands(k.load(_MMA_ROWS))
    row, column = _intra_block_coords()
    same = (row // 8 == column // 8) & (row % 8 == column % 8)
    sums = (gl.where(same, mma_v2(q_operands.a, k_operands.b, sums[0]), sums[0]),) + sums[1:]
    tokens = (_split_tokens(q.load(_CHUNK_LAYOUT)), _split_tokens(k.load(_CHUNK_LAYOUT)))
    sums = _add_level(sums, tokens, to_here, to_here, late, 0)
    to_here, to_end, total = _double_blocks(to_here, to_here, to_here, 0)
    sums = _add_level(sums, tokens, to_here, to_end, late, 1)
    to_here, to_end, total = _double_blocks(to_here, to_end, total, 1)
    sums = _add_level(sums, tokens, to_here, to_end, late, 2)
    to_here, to_end, total = _double_blocks_across_rows(to_here, to_end, total, late)
    sums = _add_level(sums, tokens, to_here, to_end, late, 3)
    to_here, to_end, total = _double_blocks(to_here, to_end, total, 2)
    return sums, tokens, to_here, to_end, total[0]


@gluon.jit
def per_block(total, late):
    """Return [4, channels] of [8, channels], whose two rows of a warp are alike."""
    return gl.sum(gl.reshape(gl.where(late, 0.0, total), [BLOCKS, 2, total.shape[1]]), 1)


@gluon.jit
def load_block_decays(block_decays):
    """Return the decays of the chunk's four blocks of 16 tokens, [1, channels] each, that warps have stored."""
    t0 = block_decays.slice(0, 1, 0).load(TOKEN_LAYOUT)
    t1 = block_decays.slice(1, 1, 0).load(TOKEN_LAYOUT)
    t2 = block_decays.slice(2, 1, 0).load(TOKEN_LAYOUT)
    t3 = block_decays.slice(3, 1, 0).load(TOKEN_LAYOUT)
    return t0, t1, t2, t3


@gluon.jit
def column_block(tile, half):
    """Return 64 columns of a tile [64, K] in shared memory, where they lie together."""
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return reinterpret(tile, tile.dtype, [tile.shape[1] // HALF, CHUNK, HALF], flat).index(half)


@gluon.jit
def load_log_decays(loads, half, chunk):
    """Issue the TMA load of 64 columns of a chunk's log decays. chunk: ChunkCoords.

    The caller has announced their bytes: the compiler puts a barrier between that and the load.
    """
    at = [chunk.batch, chunk.token, chunk.head, half * HALF]
    tma_load(loads.desc, at, loads.ready.index(half), loads.tiles.index(half), pred=chunk.exists)


@gluon.jit
def make_intra_operands(chunk, loads, operands, scores_empty, scale, next_chunk):
    """Make a chunk's operands, and issue the loads of the next one's log decays.

    chunk: ChunkTiles. In place, q becomes q decayed from the chunk's start, times scale, and k becomes k decayed to its
    end, times beta. loads: DecayLoads of the chunk, whose tiles next_chunk's log decays take. operands: what the rest
    goes to. scores_empty: arrives when level_tiles and intra_block have been read.
    """
    q = chunk.q
    k = chunk.k
    phase = chunk.phase
    k_halves: gl.constexpr = q.shape[1] // HALF
    row = gl.arange(0, ROWS, gl.SliceLayout(1, TOKEN_LAYOUT))[:, None]
    block = row // 2
    late = row % 2 == 1
    odd, high = gl.where(block % 2 == 1, -1, 0), gl.where(block >= 2, -1, 0)
    intra_block = gl.zeros([2 * BLOCKS, BLOCK_TOKENS, BLOCK_TOKENS], gl.float32, INTRA_MMA)
    # not unrolled: twice the code takes more registers
    for half in range(k_halves):
        q_half = column_block(q, half)
        k_half = column_block(k, half)
        mbarrier.wait(loads.ready.index(half), phase)
        own = load_decays(loads.tiles.index(half))
        sums, tokens, to_here, to_end, total = add_intra_block_scores(q_half, k_half, own, late, (intra_block,))
        intra_block = sums[0]
        qs, ks = tokens
        operands.block_decays.store(per_block(total, late))
        if chunk.beta is not None:
            # here they have been loaded; the same for both halves
            chunk.beta_tile.store(chunk.beta)
        # both before the barrier: behind it the compiler would put them before one more
        fence_async_shared()
        mbarrier.expect(loads.ready.index(half), loads.desc.block_type.nbytes, pred=next_chunk.exists)
        barrier()
        load_log_decays(loads, half, next_chunk)
        t0, t1, t2, t3 = load_block_decays(operands.block_decays)
        before, after, inward = decays_around_block(block, t0, t1, t2, t3)
        if chunk.beta is not None:
            betas = chunk.beta_tile.load(gl.SliceLayout(1, _CHUNK_LAYOUT))[:, None]
            betas = _split_tokens(betas + gl.zeros([CHUNK, HALF], gl.float32, _CHUNK_LAYOUT))
        q_decayed = ()
        k_decayed = ()
        level_16 = ()
        level_32 = ()
        for i in gl.static_range(THREAD_TOKENS):
            query = to_float32(qs[i]) * to_here[i]
            key = to_float32(ks[i]) * to_end[i]
            q_decayed = q_decayed + ((query * (before * scale)).to(q.dtype),)
            if chunk.beta is None:
                k_decayed = k_decayed + ((key * after).to(q.dtype),)
            else:
                k_decayed = k_decayed + ((key * (after * betas[i])).to(q.dtype),)
            level_16 = level_16 + (select_bits(query, key, odd).to(q.dtype),)
            level_32 = level_32 + ((select_bits(query, key, high) * inward).to(q.dtype),)
        k_half.store(join_tokens(k_decayed))
        q_half.store(join_tokens(q_decayed))
        mbarrier.wait(scores_empty, phase ^ 1)
        operands.level_tiles[0].index(half).store(join_tokens(level_16))
        operands.level_tiles[1].index(half).store(join_tokens(level_32))
        chunk_decay = operands.chunk_decays.index(phase * k_halves + half)
        chunk_decay.store(gl.reshape(t0 * t1 * t2 * t3, [HALF]))
    fence_async_shared()
    operands.intra_block.store(intra_block)
    barrier()
