"""Vector decay's forward kernel on Hopper: the additive recurrence with one decay a key channel, state in registers.

    S = diag(exp(g_t)) S + beta_t k_t v_t^T;  o_t = scale S^T q_t.

A block owns a (batch, head) and goes through its chunks of 64 tokens. Eight warps (`decay_partition`) turn each chunk's
q, k and log decays into operands (intra_operands.py), a chunk ahead of the warps that multiply (forward_mma.py).
Whoever has read a tile issues the TMA load of the chunk that takes its place (forward_loads.py). Products are
transposed:
    O^T = S^T Q^T + V^T P^T;  S^T = S^T decays + V^T K.
Backward in time, with do for v, and with q and k exchanged, the same kernel computes the gradient of the state, and dv.

A packed sequence has chunks of its own, counted as in lib/gluon/sequence.py. Where the last one ends in another
sequence, `decay_partition` zeroes the rows of that one that would have an effect: of what is written to the state, of v
and of the log decays.
"""

from typing import NamedTuple

from holdfast.kernels.lib.gluon.compat import barrier, fence_async_shared, gl, gluon, mbarrier
from holdfast.kernels.lib.gluon.decay import CHUNK
from holdfast.kernels.lib.gluon.sequence import packed_sequence
from holdfast.kernels.lib.gluon.tails import zero_tail_rows

from .forward_loads import QK_STAGES, V_STAGES, ChunkOrder, QKLoads, VLoads, chunk_token, load_qk, load_v
from .forward_mma import Constants, Memory, mma_partition
from .intra_operands import (
    INTRA_BLOCK_SHARED,
    ChunkCoords,
    ChunkTiles,
    DecayLoads,
    OperandBarriers,
    Operands,
    load_log_decays,
    make_intra_operands,
)
from .token_layout import HALF


class Tiles(NamedTuple):
    """Tiles that TMA fills, or the barriers that say that it has: q and k, g [K / 64, ..], v."""

    qk: gl.shared_memory_descriptor
    g: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor


class DecaySources(NamedTuple):
    """Where the log decays and betas of a head come from: g's descriptor, beta [B, T, H] or None, sizes."""

    g_desc: gl.tensor
    beta_ptr: gl.tensor | None
    T: gl.tensor
    H: gl.tensor
    g_group: gl.tensor  # heads of v that share a head of g


@gluon.jit(do_not_specialize=["T", "H", "qk_group", "g_group", "v_group"])
def gla_fwd(
    k_desc,
    q_desc,
    g_desc,
    v_desc,
    o_desc,
    saved_desc,
    beta_ptr,
    initial_ptr,
    final_ptr,
    cu_ptr,
    o_ptr,
    sums_ptr,
    T,
    H,
    qk_group,
    g_group,
    v_group,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    REVERSE: gl.constexpr,
    ADDS: gl.constexpr,
    LEAVES: gl.constexpr,
):
    """Grid (B * H,), or (N * H,) for packed sequences. Read by TMA in blocks [1, 64, 1, columns]:

    q, k   [B, T, H / qk_group, KEYS]
    g      [B, T, H / g_group, KEYS], float32, 64 columns a block
    v      [B, T, H / v_group, VALUES]

    beta   [B, T, H], float32, or None for 1
    initial, final  [B, H, KEYS, VALUES], float32, or None: S before and after all chunks
    cu     [N + 1], where packed sequences begin and end, or None

    Written, by TMA in such blocks:

    o      [B, T, H, VALUES]; beside cu also its pointer, for chunks that end in another sequence
    saved  [B, 64 chunks, H, K V / 64] in blocks of 64 columns, or None: S as each chunk reads it, rounded. K and V are
           the widths of tiles; columns are [K / 64, V / 64, 64], and a row holds one of each 64 values.

    Beside cu, N takes the place of B in states, and saved has T // 64 + N chunks, sequence n's from begin // 64 + n on.
    sums, ADDS, LEAVES: of a state in slices of K, as in scalar_decay/hopper/forward.py.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # k and q of a chunk, side by side: when they have been read, a state that is saved takes their place
    qk_tiles = gl.allocate_shared_memory(dtype, [2 * QK_STAGES, 1, CHUNK, 1, K], k_desc.layout)
    g_tiles = gl.allocate_shared_memory(gl.float32, [K // HALF, 1, CHUNK, 1, HALF], g_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [V_STAGES, 1, CHUNK, 1, V], v_desc.layout)
    p_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], flat)
    intra_block = gl.allocate_shared_memory(gl.float32, [8, 16, 16], INTRA_BLOCK_SHARED)
    # each by itself: between stores into parts of one the compiler has all warps wait for each other
    level_tiles = (
        gl.allocate_shared_memory(dtype, [K // HALF, CHUNK, HALF], flat),
        gl.allocate_shared_memory(dtype, [K // HALF, CHUNK, HALF], flat),
    )
    block_decays = gl.allocate_shared_memory(gl.float32, [4, HALF], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    # a chunk's operands are made when the chunk before the last has been multiplied
    chunk_decays = gl.allocate_shared_memory(
        gl.float32, [V_STAGES * K // HALF, HALF], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    if beta_ptr is None:
        betas: gl.constexpr = None
    else:
        betas = gl.allocate_shared_memory(gl.float32, [V_STAGES, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    qk_ready = gl.allocate_shared_memory(gl.int64, [QK_STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    g_ready = gl.allocate_shared_memory(gl.int64, [K // HALF, 1], mbarrier.MBarrierLayout())
    operands_ready = gl.allocate_shared_memory(gl.int64, [QK_STAGES, 1], mbarrier.MBarrierLayout())
    scores_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(scores_empty, count=1)
    for i in gl.static_range(QK_STAGES):
        mbarrier.init(qk_ready.index(i), count=1)
        mbarrier.init(operands_ready.index(i), count=1)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(v_ready.index(i), count=1)
    for i in gl.static_range(K // HALF):
        mbarrier.init(g_ready.index(i), count=1)
    fence_async_shared()
    barrier()

    # what mma_partition leaves to decay_partition
    registers: gl.constexpr = 160 if V == HALF else 136 if K == HALF else 112
    if cu_ptr is None:
        chunks = gl.cdiv(T, CHUNK)
        batch = gl.program_id(0) // H
        order = ChunkOrder(batch=batch, chunks=chunks, first=None, shift=None, end=None)
    else:
        chunk0, shift, end = packed_sequence(cu_ptr, gl.program_id(0) // H, T)
        chunks = gl.cdiv(end, CHUNK) - chunk0
        batch = gl.program_id(0) * 0
        order = ChunkOrder(batch=batch, chunks=chunks, first=chunk0 * CHUNK + shift, shift=shift, end=end + shift)
    head = gl.program_id(0) % H
    qk = QKLoads(q_desc=q_desc, k_desc=k_desc, tiles=qk_tiles, ready=qk_ready, head=head // qk_group)
    v = VLoads(desc=v_desc, tiles=v_tiles, ready=v_ready, head=head // v_group)
    decays = DecayLoads(desc=g_desc, tiles=g_tiles, ready=g_ready)
    for half in gl.static_range(K // HALF):
        mbarrier.expect(g_ready.index(half), g_desc.block_type.nbytes, pred=chunks > 0)
        start = ChunkCoords(batch=batch, token=chunk_token(0, order, REVERSE), head=head // g_group, exists=chunks > 0)
        load_log_decays(decays, half, start)
    for i in gl.static_range(QK_STAGES - 1):
        mbarrier.expect(qk_ready.index(i), 2 * k_desc.block_type.nbytes, pred=i < chunks)
        load_qk(qk, order, i, i, REVERSE)
    mbarrier.expect(v_ready.index(0), v_desc.block_type.nbytes, pred=chunks > 0)
    load_v(v, order, 0, 0, REVERSE)
    tiles = Tiles(qk=qk_tiles, g=g_tiles, v=v_tiles)
    tiles_ready = Tiles(qk=qk_ready, g=g_ready, v=v_ready)
    operands = Operands(
        level_tiles=level_tiles,
        intra_block=intra_block,
        block_decays=block_decays,
        chunk_decays=chunk_decays,
        betas=betas,
    )
    barriers = OperandBarriers(ready=operands_ready, scores_empty=scores_empty)
    sources = DecaySources(g_desc=g_desc, beta_ptr=beta_ptr, T=T, H=H, g_group=g_group)
    memory = Memory(
        o_desc=o_desc,
        o_ptr=o_ptr,
        cu_ptr=cu_ptr,
        sums_ptr=sums_ptr,
        initial_ptr=initial_ptr,
        final_ptr=final_ptr,
        saved_desc=saved_desc,
        T=T,
        H=H,
        scale=scale,
    )
    constants = Constants(KEYS, VALUES, REVERSE, ADDS, LEAVES)
    gl.warp_specialize(
        [
            (mma_partition, (qk, v, operands, barriers, p_tile, memory, order, constants)),
            (decay_partition, (tiles, operands, tiles_ready, barriers, sources, order, scale, REVERSE)),
        ],
        [8],
        [registers],
    )


@gluon.jit
def decay_partition(tiles, operands, tiles_ready, barriers, sources, order, scale, REVERSE: gl.constexpr):
    """Turn each chunk's tiles into operands once they are there."""
    K: gl.constexpr = tiles.qk.shape[4]
    batch = gl.program_id(0) // sources.H if order.first is None else gl.program_id(0) * 0
    head = gl.program_id(0) % sources.H
    stage = 0
    phase = 0
    for i in range(order.chunks):
        next_chunk = ChunkCoords(
            batch=batch,
            token=chunk_token(i + 1, order, REVERSE),
            head=head // sources.g_group,
            exists=i + 1 < order.chunks,
        )
        if sources.beta_ptr is None:
            beta: gl.constexpr = None
            beta_tile: gl.constexpr = None
        else:
            token = chunk_token(i, order, REVERSE)
            offset = (batch * sources.T).to(gl.int64)
            beta = _load_betas(sources, offset, head, token, sources.T if order.first is None else order.end)
            beta_tile = operands.betas.index(i % V_STAGES)
        mbarrier.wait(tiles_ready.qk.index(stage), phase)
        if order.first is not None:
            rows = order.end - chunk_token(i, order, REVERSE)
            if rows < CHUNK:
                zero_tail_rows(tiles.qk.index(2 * stage + (1 if REVERSE else 0)), rows)
                for half in gl.static_range(K // HALF):
                    mbarrier.wait(tiles_ready.g.index(half), i % 2)
                    zero_tail_rows(tiles.g.index(half), rows)
                # until then mma_partition may still wait for the values that were there two chunks ago
                mbarrier.wait(barriers.scores_empty, (i + 1) % 2)
                mbarrier.wait(tiles_ready.v.index(i % V_STAGES), (i // V_STAGES) % 2)
                zero_tail_rows(tiles.v.index(i % V_STAGES), rows)
                fence_async_shared()
                barrier()
        k = tiles.qk.index(2 * stage).reshape([CHUNK, K])
        q = tiles.qk.index(2 * stage + 1).reshape([CHUNK, K])
        chunk = ChunkTiles(q=q, k=k, beta=beta, beta_tile=beta_tile, phase=i % 2)
        loads = DecayLoads(desc=sources.g_desc, tiles=tiles.g, ready=tiles_ready.g)
        make_intra_operands(chunk, loads, operands, barriers.scores_empty, scale, next_chunk)
        mbarrier.arrive(barriers.ready.index(stage), count=1)
        stage += 1
        if stage == QK_STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _load_betas(sources, offset, head, token, end):
    """Load the betas of a chunk's tokens, [64], 0 from `end` on. offset: of the batch's first token."""
    tokens = token + gl.arange(0, CHUNK, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.load(sources.beta_ptr + ((offset + tokens) * sources.H + head), mask=tokens < end, other=0.0)
