"""What the passes of triton/delta/states.py take of each chunk, but for its inverse: for all chunks at once.

A block has a chunk of one head, and 64 columns of q, k and the log decays at a time. Eight warps make operands of them
as intra_operands.py says; beside each level's tile of queries and keys there is one of keys alone, whose product with
itself is that of keys with earlier keys. Two blocks share an SM, so what is written takes the place of what has been
read: q decayed that of q, keys decayed to the end that of k, a level's tiles of queries and keys that of log decays.
"""
# ruff: noqa: RUF005 - Gluon does not compile starred expressions

from typing import NamedTuple

from holdfast.kernels.lib.gluon.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
)
from holdfast.kernels.lib.gluon.decay import CHUNK
from holdfast.kernels.lib.gluon.sequence import packed_chunk
from holdfast.kernels.lib.gluon.split import opaque
from holdfast.kernels.lib.gluon.tails import store_tail, zero_tail_rows
from holdfast.kernels.matrix.vector_decay.hopper.forward_scores import store_scores
from holdfast.kernels.matrix.vector_decay.hopper.intra_operands import (
    INTRA_BLOCK_SHARED,
    INTRA_MMA,
    ROWS,
    THREAD_TOKENS,
    TOKEN_LAYOUT,
    add_intra_block_scores,
    join_tokens,
    load_block_decays,
    load_decays,
    per_block,
    select_bits,
    to_float32,
)
from holdfast.kernels.matrix.vector_decay.hopper.token_layout import (
    BLOCK_TOKENS,
    BLOCKS,
    HALF,
    decays_around_block,
)


class ScoreOperands(NamedTuple):
    """What a chunk's scores are made of, for `store_scores`."""

    level_tiles: tuple  # [2 K / 64, 64, 64]: of each 64 columns levels 16 and 32
    intra_block: gl.shared_memory_descriptor  # [8, 16, 16] float32: the scores of each warp's tokens with one another
    betas: gl.shared_memory_descriptor | None


class Chunk(NamedTuple):
    """Where a block's chunk is, for what it stores."""

    batch: gl.tensor
    token: gl.tensor  # its first one
    head: gl.tensor
    rows: gl.tensor | None  # of a packed sequence that are left there, else None


@gluon.jit
def _store_tile(tile, desc, ptr, chunk, first, COLUMNS: gl.constexpr, H: gl.constexpr):
    """Store a tile [1, 64, 1, 64] in [B, T, H, COLUMNS], from column `first` on; warps have been made to wait for it.

    Of a packed sequence's last chunk only its own rows, by their addresses.
    """
    if chunk.rows is None:  # noqa: SIM114 - known while compiling
        tma_store(desc, [chunk.batch, chunk.token, chunk.head, first], tile)
    elif chunk.rows >= CHUNK:
        tma_store(desc, [chunk.batch, chunk.token, chunk.head, first], tile)
    else:
        corner = ptr + (chunk.token.to(gl.int64) * H + chunk.head) * COLUMNS + first
        store_tail(tile, corner, H * COLUMNS, chunk.rows, COLUMNS - first)


@gluon.jit(do_not_specialize=["sequences", "T", "qk_group"])
def kda_chunk_prepare(
    q_desc,
    k_desc,
    g_desc,
    q_in_desc,
    k_in_desc,
    k_out_desc,
    scores_desc,
    pairs_desc,
    chunk_decay_ptr,
    q_in_ptr,
    k_in_ptr,
    k_out_ptr,
    scores_ptr,
    pairs_ptr,
    cu_ptr,
    sequences,
    T,
    qk_group,
    scale,
    H: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Grid (H, chunks, B), or (H * chunks,) for packed sequences. Read by TMA in blocks [1, 64, 1, 64]:

    q, k  [B, T, H / qk_group, KEYS]
    g     [B, T, H, KEYS], float32

    cu    [N + 1], where packed sequences begin and end, or None; chunks are then those of lib/gluon/sequence.py

    Written, by TMA in such blocks; beside cu also through their pointers, for chunks that end in another sequence:

    q_in         [B, T, H, KEYS]: scale * q, decayed from the chunk's start
    k_in, k_out  [B, T, H, KEYS]: k, decayed from the chunk's start, and to its end
    scores       [B, T, H, 64]: scale * q . k with the decay between, causal
    pairs        [B, T, H, 64], float32: k . k with the decay between, of each token with those before it; else 0
    chunk_decay  [chunks of all, H, KEYS], float32: the decay of the chunk
    """
    K_HALVES: gl.constexpr = (KEYS + HALF - 1) // HALF
    dtype: gl.constexpr = q_desc.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(dtype, [K_HALVES, 1, CHUNK, 1, HALF], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [K_HALVES, 1, CHUNK, 1, HALF], k_desc.layout)
    g_tiles = gl.allocate_shared_memory(gl.float32, [K_HALVES, 1, CHUNK, 1, HALF], g_desc.layout)
    k_in_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, HALF], k_in_desc.layout)
    key_tiles = gl.allocate_shared_memory(dtype, [2 * K_HALVES, CHUNK, HALF], flat)
    ready = gl.allocate_shared_memory(gl.int64, [K_HALVES, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(K_HALVES):
        mbarrier.init(ready.index(half), count=1)
    fence_async_shared()
    barrier()

    if cu_ptr is None:
        head = gl.program_id(0)
        place = gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)
        chunk = Chunk(batch=gl.program_id(2), token=gl.program_id(1) * CHUNK, head=head, rows=None)
    else:
        head = gl.program_id(0) % H
        place = gl.program_id(0) // H
        shift, end = packed_chunk(cu_ptr, place, sequences, T)
        rows = end - place * CHUNK
        if rows <= 0:
            return
        chunk = Chunk(batch=gl.program_id(0) * 0, token=place * CHUNK + shift, head=head, rows=rows)
    bytes_of_half: gl.constexpr = 2 * q_desc.block_type.nbytes + g_desc.block_type.nbytes
    for half in gl.static_range(K_HALVES):
        mbarrier.expect(ready.index(half), bytes_of_half)
    for half in gl.static_range(K_HALVES):
        tma_load(g_desc, [chunk.batch, chunk.token, head, half * HALF], ready.index(half), g_tiles.index(half))
        of_queries = [chunk.batch, chunk.token, head // qk_group, half * HALF]
        tma_load(k_desc, of_queries, ready.index(half), k_tiles.index(half))
        tma_load(q_desc, of_queries, ready.index(half), q_tiles.index(half))
    mixed_tiles = reinterpret(g_tiles, dtype, [2 * K_HALVES, CHUNK, HALF], flat)

    row = gl.arange(0, ROWS, gl.SliceLayout(1, TOKEN_LAYOUT))[:, None]
    block = row // 2
    late = row % 2 == 1
    odd, high = gl.where(block % 2 == 1, -1, 0), gl.where(block >= 2, -1, 0)
    scores = gl.zeros([2 * BLOCKS, BLOCK_TOKENS, BLOCK_TOKENS], gl.float32, INTRA_MMA)
    pairs = gl.zeros([2 * BLOCKS, BLOCK_TOKENS, BLOCK_TOKENS], gl.float32, INTRA_MMA)
    # not unrolled: twice the code takes more registers
    for half in range(K_HALVES):
        q_tile = q_tiles.index(half).reshape([CHUNK, HALF])
        k_tile = k_tiles.index(half).reshape([CHUNK, HALF])
        mbarrier.wait(ready.index(half), 0)
        if cu_ptr is not None:  # noqa: SIM102 - known while compiling
            if chunk.rows < CHUNK:
                # of another sequence's tokens only their decays have an effect
                zero_tail_rows(g_tiles.index(half), chunk.rows)
                barrier()
        own = load_decays(g_tiles.index(half))
        sums, tokens, to_here, to_end, total = add_intra_block_scores(q_tile, k_tile, own, late, (scores, pairs))
        scores, pairs = sums
        qs, ks = tokens
        # in the loop, so that the compiler puts it where it exchanges operands: two blocks have 113 KB each
        block_decays = gl.allocate_shared_memory(gl.float32, [BLOCKS, HALF], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        block_decays.store(per_block(total, late))
        # k_in of the columns before has left shared memory
        tma_store_wait(0)
        barrier()
        t0, t1, t2, t3 = load_block_decays(block_decays)
        before, after, inward = decays_around_block(block, t0, t1, t2, t3)
        q_in = ()
        k_in = ()
        k_out = ()
        mixed_16 = ()
        mixed_32 = ()
        keys_16 = ()
        keys_32 = ()
        for i in gl.static_range(THREAD_TOKENS):
            query = to_float32(qs[i]) * to_here[i]
            key = to_float32(ks[i])
            key_here = key * to_here[i]
            key_end = key * to_end[i]
            q_in = q_in + ((query * (before * scale)).to(dtype),)
            k_in = k_in + ((key_here * before).to(dtype),)
            k_out = k_out + ((key_end * after).to(dtype),)
            mixed_16 = mixed_16 + (select_bits(query, key_end, odd).to(dtype),)
            mixed_32 = mixed_32 + ((select_bits(query, key_end, high) * inward).to(dtype),)
            keys_16 = keys_16 + (select_bits(key_here, key_end, odd).to(dtype),)
            keys_32 = keys_32 + ((select_bits(key_here, key_end, high) * inward).to(dtype),)
        q_tile.store(join_tokens(q_in))
        k_in_tile.reshape([CHUNK, HALF]).store(join_tokens(k_in))
        k_tile.store(join_tokens(k_out))
        mixed_tiles.index(2 * half).store(join_tokens(mixed_16))
        mixed_tiles.index(2 * half + 1).store(join_tokens(mixed_32))
        key_tiles.index(2 * half).store(join_tokens(keys_16))
        key_tiles.index(2 * half + 1).store(join_tokens(keys_32))
        columns = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, TOKEN_LAYOUT))[None, :]
        # found again: kept from the start, the address would spill
        decays_at = (opaque(place).to(gl.int64) * H + head) * KEYS + columns
        gl.store(chunk_decay_ptr + decays_at, t0 * t1 * t2 * t3, mask=columns < KEYS)
        fence_async_shared()
        barrier()
        _store_tile(q_tiles.index(half), q_in_desc, q_in_ptr, chunk, half * HALF, KEYS, H)
        _store_tile(k_in_tile, k_in_desc, k_in_ptr, chunk, half * HALF, KEYS, H)
        _store_tile(k_tiles.index(half), k_out_desc, k_out_ptr, chunk, half * HALF, KEYS, H)

    # in the place of the first 64 columns of q and of k, which have left shared memory
    if K_HALVES == 1:
        tma_store_wait(0)
        barrier()
    intra_block = reinterpret(q_tiles, gl.float32, [2 * BLOCKS, BLOCK_TOKENS, BLOCK_TOKENS], INTRA_BLOCK_SHARED)
    scores_tile = k_tiles.index(0)
    intra_block.store(scores)
    barrier()
    of_scores = ScoreOperands(level_tiles=(mixed_tiles,), intra_block=intra_block, betas=None)
    store_scores(of_scores, 0, 0, scale, scores_tile.reshape([CHUNK, CHUNK]))
    fence_async_shared()
    barrier()
    _store_tile(scores_tile, scores_desc, scores_ptr, chunk, 0, CHUNK, H)
    intra_block.store(pairs)
    barrier()
    # in the place of tiles that have been multiplied
    pairs_tile = reinterpret(g_tiles, gl.float32, [1, CHUNK, 1, CHUNK], pairs_desc.layout)
    of_pairs = ScoreOperands(level_tiles=(key_tiles,), intra_block=intra_block, betas=None)
    store_scores(of_pairs, 0, 0, 1.0, pairs_tile.reshape([CHUNK, CHUNK]))
    fence_async_shared()
    barrier()
    _store_tile(pairs_tile, pairs_desc, pairs_ptr, chunk, 0, CHUNK, H)
    tma_store_wait(0)
