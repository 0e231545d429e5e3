"""The delta rule backward in time on Hopper: the gradient of the state, and all others chunk by chunk.

A block owns a (batch, head) and goes over chunks from the last to the first. Eight warps have dS in registers: with P
the scores times their causal decay, dS' the gradient of the state that leaves a chunk, r a token's decay from its
chunk's start and w that to its chunk's end, all transposed as in forward.py,
    dU^T = dO^T P + (dS'^T K^T) * w;  Y^T = dU^T + dU^T A;
    dS^T = decay dS'^T + (dO^T * scale r) Q - (Y^T * r beta) K.
They leave dS' and Y times beta, rounded, in shared memory, where the warps of backward_grads.py find the chunk's
gradients while these go on with the chunk before it. Where beta is so small (BETA_EPS) that the product says little or
nothing of Y, they leave Y itself.

| shared memory | filled by | read by |
| --- | --- | --- |
| q, k, do (stage_ready, stage_empty) | load | dstate, grad; grad then leaves dq and dk in q and k for load to store |
| decays (decays_ready, stage_empty) | decay | dstate, grad; grad then leaves shares of dg in them for decay |
| a | load | dstate |
| u, s | load | grad; s by dstate too, for <S, dS'> |
| y, ds | dstate | grad |
| state_grad_dot (dstate_ready) | dstate | decay |
| scores: P; F and E | dstate; grad | the same |
"""

from typing import Any, NamedTuple

from holdfast.kernels.lib.gluon.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from holdfast.kernels.lib.gluon.decay import CHUNK
from holdfast.kernels.lib.gluon.sequence import (
    PackedBounds,
    packed_segment,
    packed_sequence,
    segment_index,
    sequence_offset,
)
from holdfast.kernels.lib.gluon.split import opaque

from .backward_decay import (
    BETA,
    BETA_EPS,
    LOG_DECAY_CUMSUM,
    VECTORS,
    DecayPointers,
    decay_partition,
    matrix_dot,
    unrounded_dot,
)
from .backward_grads import Values, grad_partition
from .backward_loads import (
    A_TILE,
    DS_TILE,
    S_TILE,
    STAGES,
    TILES,
    Y_TILE,
    Chunks,
    Descs,
    Grads,
    Stages,
    Tiles,
    load_partition,
)

# a vector in which the numbers for a thread's columns of a product lie together: few addresses, four numbers a load
_COLUMNS = gl.constexpr(gl.SharedLinearLayout([[1], [8], [16], [32], [2], [4]]))
_MATRIX = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


class DStateIO(NamedTuple):
    """Pointers to gradients of states in memory, or None.

    start: dS after each segment. end: dS before the sequence. initial: S before each segment, if it may have one chunk.
    first: of segments of packed sequences, whose first one this is, or -1; else None.
    """

    start: Any
    end: Any
    initial: Any
    first: Any


@gluon.jit(
    do_not_specialize=[
        "sequences",
        "T",
        "H",
        "qk_group",
        "g_b",
        "g_t",
        "g_h",
        "beta_b",
        "beta_t",
        "beta_h",
        "v_b",
        "v_t",
        "v_h",
        "segment_chunks",
    ],
    do_not_specialize_on_alignment=[
        "g_ptr",
        "beta_ptr",
        "start_ptr",
        "end_ptr",
        "initial_ptr",
        "dg_ptr",
        "dbeta_ptr",
        "cu_ptr",
    ],
)
def delta_rule_bwd(
    q_desc,
    k_desc,
    do_desc,
    a_desc,
    u_desc,
    low_desc,
    high_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    g_ptr,
    beta_ptr,
    v_ptr,
    start_ptr,
    end_ptr,
    initial_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dg_ptr,
    dbeta_ptr,
    cu_ptr,
    sequences,
    T,
    H,
    qk_group,
    g_b,
    g_t,
    g_h,
    beta_b,
    beta_t,
    beta_h,
    v_b,
    v_t,
    v_h,
    segment_chunks,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
):
    """Grid (B * H, segments of segment_chunks), or (N * H, 1) of packed sequences.

    | tensor | shape | how |
    | --- | --- | --- |
    | q, k | [B, T, H / qk_group, KEYS] | descriptors, blocks [1, 64, 1, columns] |
    | do | [B, T, H, VALUES] | descriptor, blocks [1, 64, 1, columns] |
    | a | [B * H, chunks, 64, 64], of chunk_inverse.py | descriptor, blocks [1, 1, 64, 64] |
    | u | [B, T, H, VALUES], if packed [1, chunks * 64, H, VALUES] | descriptor, blocks [1, 64, 1, columns] |
    | low, high | states as backward_states.py saves them | descriptors, blocks [1, 64, 1, 64] |
    | dq, dk | [B, T, H, KEYS] | descriptors as q's; if these are None pointers, contiguous, float32 |
    | dv | [B, T, H, VALUES] | descriptor as do's, and pointer, contiguous |
    | g, beta | [B, T, H], or None for 0 and 1 | pointer, strides |
    | v | [B, T, H, VALUES] | pointer, strides in units of 8 |
    | start | [B, segments, H, KEYS, VALUES], or None for 0 | pointer, float32 |
    | end | [B, H, KEYS, VALUES], or None | pointer, float32 |
    | initial | as start, or None | pointer, float32 |
    | dg, dbeta | [B, T, H], or None | pointer, float32 |
    | cu | [N + 1], or None | pointer |

    start: dS after each segment. end: dS before the sequence. initial: S before each segment, where start is given too
    and segments may have one chunk, for <S, dS'> of these: it may be all of their dg, and cancel. A chunk's rows of dv
    may be where its U is, and those of dq and dk where S is; but not those of packed sequences, which begin and end
    where cu says, and whose start, end and initial are [N, H, KEYS, VALUES]. sequences: N if they are cut into
    segments, else None; the grid is then (places * H, 1), and start and initial have places, as lib/gluon/sequence.py
    counts them.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = do_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], do_desc.layout)
    a_tiles = gl.allocate_shared_memory(dtype, [1, 1, 1, CHUNK, CHUNK], a_desc.layout)
    # P, F and E
    scores = gl.allocate_shared_memory(dtype, [3, CHUNK, CHUNK], _MATRIX)
    u_tiles = gl.allocate_shared_memory(dtype, [1, 1, CHUNK, 1, V], u_desc.layout)
    y_tiles = gl.allocate_shared_memory(dtype, [1, 1, CHUNK, 1, V], dv_desc.layout)
    s_tiles = gl.allocate_shared_memory(dtype, [1, V, K], _MATRIX)
    ds_tiles = gl.allocate_shared_memory(dtype, [1, V, K], _MATRIX)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], _COLUMNS)
    state_grad_dot = gl.allocate_shared_memory(gl.float32, [STAGES, 1], plain)
    small_betas = gl.allocate_shared_memory(gl.int32, [STAGES, 1], plain)
    stage_ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    decays_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dstate_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tile_ready = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(stage_ready.index(i), count=1)
        mbarrier.init(decays_ready.index(i), count=1)
        mbarrier.init(dstate_ready.index(i), count=1)
        mbarrier.init(stage_empty.index(i), count=1)
    for i in gl.static_range(TILES):
        mbarrier.init(tile_ready.index(i), count=1)
        mbarrier.init(tile_empty.index(i), count=2 if i == S_TILE else 1)
    mbarrier.init(stage_ready.index(STAGES), count=1)
    fence_async_shared()

    first_of: gl.constexpr = None
    if cu_ptr is None:
        packed: gl.constexpr = None
        first = gl.program_id(1) * segment_chunks
        count = gl.minimum(segment_chunks, gl.cdiv(T, CHUNK) - first)
        origin = (gl.program_id(0) // H).to(gl.int64) * T
    else:
        if sequences is None:
            first, shift, T = packed_sequence(cu_ptr, gl.program_id(0) // H, T)
        else:
            segment = packed_segment(cu_ptr, gl.program_id(0) // H, segment_chunks, sequences, T)
            first, shift, T = segment.chunk0, segment.shift, segment.end
            first_of = gl.where(segment.segment == 0, segment.sequence, -1)
        packed = PackedBounds(shift=shift, end=T)
        count = gl.cdiv(T, CHUNK) - first
        origin = shift.to(gl.int64)
    if g_ptr is not None:
        g_ptr += sequence_offset(packed, H, g_b, g_t, g_h)
    if beta_ptr is not None:
        beta_ptr += sequence_offset(packed, H, beta_b, beta_t, beta_h)
    tiles = Tiles(q=q_tiles, k=k_tiles, do=do_tiles, a=a_tiles, u=u_tiles, s=s_tiles, y=y_tiles, ds=ds_tiles)
    descs = Descs(q=q_desc, k=k_desc, do=do_desc, a=a_desc, u=u_desc, low=low_desc, high=high_desc)
    grads = Grads(dq_desc=dq_desc, dk_desc=dk_desc, dv_desc=dv_desc, dq=dq_ptr, dk=dk_ptr, dv=dv_ptr, dbeta=dbeta_ptr)
    stages = Stages(
        decays=decays,
        state_grad_dot=state_grad_dot,
        small_betas=small_betas,
        stage_ready=stage_ready,
        decays_ready=decays_ready,
        dstate_ready=dstate_ready,
        stage_empty=stage_empty,
        tile_ready=tile_ready,
        tile_empty=tile_empty,
    )
    chunks = Chunks(T=T, H=H, first=first, count=count, scale=scale, packed=packed, origin=origin)
    values = Values(ptr=v_ptr, b=v_b, t=v_t, h=v_h)
    dstates = DStateIO(start=start_ptr, end=end_ptr, initial=initial_ptr, first=first_of)
    pointers = DecayPointers(g=g_ptr, beta=beta_ptr, g_t=g_t, beta_t=beta_t, dg=dg_ptr)
    gl.warp_specialize(
        [
            (dstate_partition, (tiles, scores, stages, dstates, chunks, KEYS, VALUES, dg_ptr is not None)),
            (grad_partition, (tiles, scores, stages, grads, values, chunks, KEYS, VALUES)),
            (load_partition, (tiles, descs, grads, stages, qk_group, chunks)),
            (decay_partition, (stages, pointers, chunks)),
        ],
        [4, 1, 1],
        [168, 24, 24],
    )


@gluon.jit
def dstate_partition(
    tiles,
    scores,
    stages,
    dstates,
    chunks,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    needs_dg: gl.constexpr,
):
    """Carry dS from the last chunk to the dstates.first, and leave dS' and Y times beta of each for its gradients."""
    H, ready, empty = chunks.H, stages.tile_ready, stages.tile_empty
    V: gl.constexpr = tiles.ds.shape[1]
    K: gl.constexpr = tiles.ds.shape[2]
    dtype: gl.constexpr = tiles.ds.dtype
    warps: gl.constexpr = V // 16
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, CHUNK * 4 // warps, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, K, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    s_operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)

    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [warps], [0])
    rows = gl.arange(0, V, gl.SliceLayout(1, s_layout))
    keys = gl.arange(0, K, gl.SliceLayout(0, s_layout))
    if dstates.start is None:
        state = gl.zeros([V, K], gl.float32, s_layout)
    else:
        inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :]
        at = segment_index(H, 1) * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
        state = gl.load(dstates.start + at, mask=inside, other=0.0)

    stage = 0
    phase = 0
    parity = 0
    for i in range(chunks.count):
        mbarrier.wait(stages.stage_ready.index(stage), phase)
        q = tiles.q.index(stage).reshape([CHUNK, K])
        k = tiles.k.index(stage).reshape([CHUNK, K])
        do = tiles.do.index(stage).reshape([CHUNK, V])
        zero = opaque(i ^ i)
        a = tiles.a.index(zero).reshape([CHUNK, CHUNK])
        p_tile = scores.index(zero)
        y_tile = tiles.y.index(zero).reshape([CHUNK, V])
        ds = tiles.ds.index(zero)
        p = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        p = warpgroup_mma(k, q.permute((1, 0)), p, use_acc=False, is_async=True)
        mbarrier.wait(stages.decays_ready.index(stage), phase)
        cumsum = stages.decays.index(stage * VECTORS + LOG_DECAY_CUMSUM)
        earlier = cumsum.load(gl.SliceLayout(1, p_layout))[:, None]
        later = cumsum.load(gl.SliceLayout(0, p_layout))[None, :]
        row = (zero + gl.arange(0, CHUNK, gl.SliceLayout(1, p_layout)))[:, None]
        column = gl.arange(0, CHUNK, gl.SliceLayout(0, p_layout))[None, :]
        weight = gl.exp2(gl.where(row <= column, later - earlier, float("-inf"))) * chunks.scale
        p = warpgroup_mma_wait(0, deps=(p,))
        p_tile.store((p * weight).to(dtype))
        fence_async_shared()
        barrier()
        du = gl.zeros([V, CHUNK], gl.float32, layout)
        du = warpgroup_mma(do.permute((1, 0)), p_tile.permute((1, 0)), du, use_acc=False, is_async=True)
        du = warpgroup_mma_wait(0, deps=(du,))
        # the gradients of the chunk after this one have been found: the tile is free
        mbarrier.wait(empty.index(DS_TILE), parity ^ 1)
        ds.store(state.to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready.index(DS_TILE), count=1)
        k_ds = gl.zeros([V, CHUNK], gl.float32, layout)
        k_ds = warpgroup_mma(ds, k.permute((1, 0)), k_ds, use_acc=False, is_async=True)
        last = cumsum.slice(CHUNK - 1, 1).load(gl.SliceLayout(0, layout))
        write = gl.exp2(last - cumsum.load(gl.SliceLayout(0, layout)))
        k_ds, du = warpgroup_mma_wait(0, deps=(k_ds, du))
        du = du + k_ds * write[None, :]
        du_rounded = gl.convert_layout(du.to(dtype), operand)
        du, du_rounded = warpgroup_mma_wait(0, deps=(du, du_rounded))
        mbarrier.wait(ready.index(A_TILE), parity)
        y = warpgroup_mma(du_rounded, a.permute((1, 0)), du, is_async=True)
        beta = stages.decays.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, layout))
        y_weight = beta * gl.exp2(cumsum.load(gl.SliceLayout(0, layout))) * -1.0
        y, du_rounded = warpgroup_mma_wait(0, deps=(y, du_rounded))
        factor = gl.where((beta <= BETA_EPS) & (beta >= -BETA_EPS), 1.0, beta)
        mbarrier.wait(empty.index(Y_TILE), parity ^ 1)
        y_tile.permute((1, 0)).store((y * factor[None, :]).to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(empty.index(A_TILE), count=1)
        mbarrier.arrive(ready.index(Y_TILE), count=1)
        y_weighted = gl.convert_layout((y * y_weight[None, :]).to(dtype), s_operand)
        do_operand = do.permute((1, 0)).load(s_operand)
        read = gl.exp2(cumsum.load(gl.SliceLayout(0, s_operand))) * chunks.scale
        do_read = (do_operand.to(gl.float32) * read[None, :]).to(dtype)
        state = state * gl.exp2(cumsum.slice(CHUNK - 1, 1).load(gl.SliceLayout(1, s_layout)))[:, None]
        state, do_read, y_weighted = warpgroup_mma_wait(0, deps=(state, do_read, y_weighted))
        state = warpgroup_mma(do_read, q, state, is_async=True)
        state = warpgroup_mma(y_weighted, k, state, is_async=True)
        state, do_read, y_weighted = warpgroup_mma_wait(0, deps=(state, do_read, y_weighted))
        # for dg
        mbarrier.wait(ready.index(S_TILE), parity)
        if needs_dg:
            dot = matrix_dot(tiles.s.index(zero), ds, wide)
            if dstates.initial is not None:  # noqa: SIM102 - known while compiling
                if chunks.count == 1:
                    own = segment_index(H, 1) * (KEYS * VALUES)
                    dot = unrounded_dot(dstates.initial + own, dstates.start + own, KEYS * VALUES, flat)
            chunk_decay = gl.exp2(cumsum.slice(CHUNK - 1, 1).load(one))
            stages.state_grad_dot.index(stage).store(chunk_decay * dot)
        fence_async_shared()
        barrier()
        mbarrier.arrive(empty.index(S_TILE), count=1)
        mbarrier.arrive(stages.dstate_ready.index(stage), count=1)
        parity ^= 1
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    # addresses are computed again: kept from the start, they would take as many registers as dS does
    rows = opaque(rows)
    if dstates.end is not None:
        if dstates.first is None:
            inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :] & (gl.program_id(1) == 0)
            place = gl.program_id(0).to(gl.int64)
        else:
            inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :] & (dstates.first >= 0)
            place = dstates.first.to(gl.int64) * H + gl.program_id(0) % H
        at = place * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
        gl.store(dstates.end + at, state, mask=inside)
