"""The backward pass on Hopper: from the last token to the first, the gradients of k, v, g and beta.

With do the gradient of o, and dS the gradient of the state, carried backward in time in registers:
    dS = exp(g_{t+1}) dS + scale q_t do_t^T;  dk_t = beta_t dS v_t;  dv_t = beta_t dS^T k_t.

A block owns a (batch, head) and goes over chunks of 64 tokens, as in forward.py. Its partitions: load copies tiles in
by TMA, decay publishes decays (backward_decay.py), mma multiplies (backward_mma.py), decay_grad turns the row sums that
mma leaves into dg and dbeta (lib/gluon/decay_grad.py).
"""

from typing import NamedTuple

from holdfast.kernels.lib.gluon.compat import fence_async_shared, gl, gluon, mbarrier, tma_load
from holdfast.kernels.lib.gluon.decay import CHUNK, VECTORS
from holdfast.kernels.lib.gluon.decay_grad import (
    DecayGradBuffers,
    DecayGradSizes,
    DecayGradTensors,
    RowSums,
    SmoothingWindow,
    decay_grad_partition,
)
from holdfast.kernels.lib.gluon.pdl import launch_dependents
from holdfast.kernels.lib.gluon.sequence import sequence_bounds, token_offset

from .backward_decay import decay_partition
from .backward_mma import Options, mma_partition


class Operands(NamedTuple):
    """Of q, k, do and v each: descriptors, or their stages in shared memory."""

    q: gl.tensor
    k: gl.tensor
    do: gl.tensor
    v: gl.tensor


class StageBuffers(NamedTuple):
    """Per stage: decays [VECTORS, CHUNK] and the chunk's decay, and three barriers.

    tiles_ready: load -> mma. decays_ready: decay and decay_grad -> mma. empty: mma -> load, decay and decay_grad.
    """

    decays: gl.shared_memory_descriptor
    chunk_decay: gl.shared_memory_descriptor
    tiles_ready: gl.shared_memory_descriptor
    decays_ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class MmaBuffers(NamedTuple):
    """Shared memory of the mma partition; saved_ready: a saved state has come."""

    tiles: Operands
    dk_tile: gl.shared_memory_descriptor
    dv_tile: gl.shared_memory_descriptor
    stages: StageBuffers
    sums: RowSums
    saved_ready: gl.shared_memory_descriptor


class MmaTensors(NamedTuple):
    """What the mma partition reads and writes in memory."""

    dk_desc: gl.tensor
    dv_desc: gl.tensor
    saved_desc: gl.tensor
    start: gl.tensor
    end: gl.tensor
    dk: gl.tensor
    dv: gl.tensor


class Heads(NamedTuple):
    """Heads of v, and how many of them share one of q and k, and one of v."""

    H: gl.tensor
    q_group: gl.tensor
    v_group: gl.tensor


class Segment(NamedTuple):
    """A block's chunks: the first, how many a whole segment has, and how many there are."""

    first: gl.tensor
    chunks: gl.tensor
    count: gl.tensor


class Chunks(NamedTuple):
    """A block's chunks: the first, and how many there are."""

    first: gl.tensor
    count: gl.tensor


@gluon.jit(
    do_not_specialize=[
        "T",
        "H",
        "q_group",
        "v_group",
        "beta_b",
        "beta_t",
        "beta_h",
        "slices",
        "segment_chunks",
    ],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "row_ptr", "passing_ptr", "dg_ptr", "dbeta_ptr", "cu_ptr"],
)
def scalar_decay_bwd(
    q_desc,
    k_desc,
    do_desc,
    v_desc,
    dk_desc,
    dv_desc,
    saved_desc,
    g_ptr,
    beta_ptr,
    start_ptr,
    end_ptr,
    row_ptr,
    passing_ptr,
    dg_ptr,
    dbeta_ptr,
    cu_ptr,
    dk_ptr,
    dv_ptr,
    T,
    H,
    q_group,
    v_group,
    beta_b,
    beta_t,
    beta_h,
    slices,
    segment_chunks,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    SAVE: gl.constexpr,
    FROM: gl.constexpr,
    ROUNDING: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, segments of `segment_chunks`), or (N * H, 1) of packed sequences.

    The two sides (q, k, dk) and (do, v, dv) may change places; the first must be the wider.

    read by load, through descriptors of blocks [1, 64, 1, columns]:
        q, k    [B, T, H / q_group, KEYS]
        do, v   [B, T, H / v_group, VALUES]
    read by mma:
        start   float32 [B, segments, H, KEYS, VALUES], or [..., VALUES, KEYS] if TRANSPOSED: dS after each segment's
                last token; or None for 0
        saved   [B, H, segments * ceil(segment_chunks / SAVE), KEYS, VALUES], through a descriptor of blocks
                [1, 1, *, *]: the states that forward.py saved, before every SAVE-th chunk of each segment from chunk
                FROM on, which is 1 where the first state is 0; or None without dg
    read by decay and decay_grad:
        g       float32 [B, H, T]: log chunk_decay to base 2, as forward.py left them; or None
        beta    [B, T, H], strides beta_b, beta_t, beta_h; or None
        row     float32 [slices, B, H, T]: what forward.py summed; or None without dg
        passing float32 [slices, B, segments, H]: parts of <S, dS>, S before and dS after each segment's last chunk; or
                None for 0
    written by mma:
        dk, dv  [B, T, H, KEYS], [B, T, H, VALUES], by descriptors as above, and by pointers, for chunks that end in
                another sequence, with cu
        end     as start: dS before each segment's first token; or None
    written by decay_grad:
        dg      [B, T, H], contiguous, or None
        dbeta   [B, T, H], contiguous, or None
    cu: [N + 1], where packed sequences begin and end, or None.
    ROUNDING: the variance of one number's rounding, relative to its square.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    warps: gl.constexpr = gl.num_warps()
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], do_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], v_desc.layout)
    dk_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, K], dk_desc.layout)
    dv_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, V], dv_desc.layout)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    chunk_decay = gl.allocate_shared_memory(gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # row sums that each warp leaves: of pairs in the chunk over the earlier and over the later token, of a token with
    # itself, of what comes from later chunks, and of the products of states, with the gradient as it is and rounded
    later_sums = gl.allocate_shared_memory(gl.float32, [STAGES, warps // 4, CHUNK], plain)
    earlier_sums = gl.allocate_shared_memory(gl.float32, [STAGES, 4, CHUNK], plain)
    if dbeta_ptr is None:
        own_sums: gl.constexpr = None
    else:
        own_sums = gl.allocate_shared_memory(gl.float32, [STAGES, 4, CHUNK], plain)
    cross_sums = gl.allocate_shared_memory(gl.float32, [STAGES, warps, CHUNK], plain)
    state_sums = gl.allocate_shared_memory(gl.float32, [STAGES * 2, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # of the chunks since the last saved state: dg, and two numbers that correct it
    if SAVE > 0:
        window_dg = gl.allocate_shared_memory(gl.float32, [SAVE - 1, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        window_gains = gl.allocate_shared_memory(gl.float32, [SAVE * 2 - 2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    else:
        window_dg: gl.constexpr = None
        window_gains: gl.constexpr = None
    tiles_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    decays_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    saved_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(saved_ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(tiles_ready.index(i), count=1)
        # by weights that are there, and sums that have been read
        mbarrier.init(decays_ready.index(i), count=2)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()

    launch_dependents()
    tokens = sequence_bounds(cu_ptr, T, H)
    if g_ptr is not None:
        g_ptr += (tokens.batch * H + gl.program_id(0) % H).to(gl.int64) * T + tokens.first
    if beta_ptr is not None:
        beta_ptr += token_offset(H, tokens.batch, tokens.first, beta_b, beta_t, beta_h)
    head = gl.program_id(0) % H
    row = (tokens.batch.to(gl.int64) * T + tokens.first) * H + head
    if dg_ptr is not None:
        dg_ptr += row
    if dbeta_ptr is not None:
        dbeta_ptr += row
    if row_ptr is not None:
        row_ptr += (tokens.batch * H + head).to(gl.int64) * T + tokens.first
    if dk_ptr is not None:
        dk_ptr += row * KEYS
        dv_ptr += row * VALUES
    first = gl.program_id(1) * segment_chunks
    count = gl.minimum(segment_chunks, gl.cdiv(tokens.length, CHUNK) - first)
    tiles = Operands(q=q_tiles, k=k_tiles, do=do_tiles, v=v_tiles)
    descs = Operands(q=q_desc, k=k_desc, do=do_desc, v=v_desc)
    stages = StageBuffers(
        decays=decays, chunk_decay=chunk_decay, tiles_ready=tiles_ready, decays_ready=decays_ready, empty=empty
    )
    sums = RowSums(later=later_sums, earlier=earlier_sums, own=own_sums, cross=cross_sums, state=state_sums)
    gl.warp_specialize(
        [
            (
                mma_partition,
                (
                    MmaBuffers(
                        tiles=tiles, dk_tile=dk_tile, dv_tile=dv_tile, stages=stages, sums=sums, saved_ready=saved_ready
                    ),
                    MmaTensors(
                        dk_desc=dk_desc,
                        dv_desc=dv_desc,
                        saved_desc=saved_desc,
                        start=start_ptr,
                        end=end_ptr,
                        dk=dk_ptr,
                        dv=dv_ptr,
                    ),
                    tokens,
                    H,
                    Segment(first=first, chunks=segment_chunks, count=count),
                    scale,
                    Options(dg_ptr is not None, beta_ptr is not None, KEYS, VALUES, TRANSPOSED, SAVE, FROM),
                ),
            ),
            (
                _load_partition,
                (
                    tiles,
                    descs,
                    tiles_ready,
                    empty,
                    tokens,
                    Heads(H=H, q_group=q_group, v_group=v_group),
                    Chunks(first=first, count=count),
                ),
            ),
            (
                decay_partition,
                (stages, g_ptr, beta_ptr, beta_t, tokens.length, Chunks(first=first, count=count), scale),
            ),
            (
                decay_grad_partition,
                (
                    DecayGradBuffers(
                        decays_ready=decays_ready,
                        empty=empty,
                        sums=sums,
                        window=SmoothingWindow(dg=window_dg, gains=window_gains),
                    ),
                    DecayGradTensors(
                        g=g_ptr,
                        beta=beta_ptr,
                        g_t=None,
                        beta_t=beta_t,
                        entered=row_ptr,
                        passing=passing_ptr,
                        dg=dg_ptr,
                        dbeta=dbeta_ptr,
                        final_product=None,
                    ),
                    DecayGradSizes(
                        length=tokens.length,
                        part_size=(gl.num_programs(0) if cu_ptr is None else H).to(gl.int64) * T,
                        H=H,
                        grad_t=H,
                        parts=slices,
                        first=first,
                        count=count,
                    ),
                    TRANSPOSED,
                    SAVE,
                    FROM,
                    ROUNDING,
                    False,
                ),
            ),
        ],
        [1, 1, 1],
        # a number that a thread that multiplies has to spill in its loop costs 10 us, since no L1 cache is left for it
        [40, 40, 40],
    )


@gluon.jit
def _load_partition(tiles, descs, ready, empty, tokens, heads, chunks):
    """Keep a stage's worth of chunks of q, k, do and v on their way into shared memory, from the last to the first."""
    STAGES: gl.constexpr = tiles.q.shape[0]
    width: gl.constexpr = 2 * (descs.q.block_type.nbytes + descs.v.block_type.nbytes)
    batch = tokens.batch
    head = gl.program_id(0) % heads.H
    stage = 0
    phase = 1
    for i in range(chunks.count):
        mbarrier.wait(empty.index(stage), phase)
        token = tokens.first + (chunks.first + chunks.count - 1 - i) * CHUNK
        mbarrier.expect(ready.index(stage), width)
        tma_load(descs.q, [batch, token, head // heads.q_group, 0], ready.index(stage), tiles.q.index(stage))
        tma_load(descs.k, [batch, token, head // heads.q_group, 0], ready.index(stage), tiles.k.index(stage))
        tma_load(descs.do, [batch, token, head // heads.v_group, 0], ready.index(stage), tiles.do.index(stage))
        tma_load(descs.v, [batch, token, head // heads.v_group, 0], ready.index(stage), tiles.v.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
