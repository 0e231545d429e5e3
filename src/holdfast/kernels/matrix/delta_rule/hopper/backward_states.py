"""States and writes of the delta rule on Hopper, saved for its gradients: S that enters each chunk, and the chunk's U.

As forward.py, without outputs: a block owns a (batch, head, 64 or 128 of v's columns) and goes over chunks. With r a
token's decay from its chunk's start, w that to its chunk's end:
    E^T = (V^T - (S^T K^T) * r) * beta;  U^T = E^T + E^T A^T;  S^T = decay S^T + (U^T * w) K.
E and U are operands in two parts, high and low: where nothing decays, the roundings of writes by keys that resemble one
another add up, and dg has their sum.
"""

from typing import Any, NamedTuple

from holdfast.kernels.lib.gluon.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from holdfast.kernels.lib.gluon.decay import BETA, CHUNK, READ_DECAY, VECTORS, WRITE_DECAY
from holdfast.kernels.lib.gluon.sequence import (
    PackedBounds,
    chunk_coords,
    packed_segment,
    packed_sequence,
    segment_index,
    sequence_offset,
)

from .chunk_inverse import split_hi_lo
from .producers import (
    COLUMNS,
    Chunks,
    DecayInputs,
    Descs,
    Sizes,
    Stages,
    Tiles,
    decay_partition,
    init_barriers,
    load_partition,
)


class Saved(NamedTuple):
    """What is saved of each chunk: tiles of U and S, one for each MMA warpgroup, and where they go.

    low, high: descriptors of the states; of a chunk's rows, which are v's columns, the first 64 are in low.
    """

    u_tiles: Any
    s_tiles: Any
    u: Any
    low: Any
    high: Any


@gluon.jit(
    do_not_specialize=[
        "sequences",
        "T",
        "H",
        "k_group",
        "g_b",
        "g_t",
        "g_h",
        "beta_b",
        "beta_t",
        "beta_h",
        "segment_chunks",
    ],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "start_ptr", "cu_ptr"],
)
def delta_rule_bwd_states(
    k_desc,
    v_desc,
    a_desc,
    u_desc,
    low_desc,
    high_desc,
    g_ptr,
    beta_ptr,
    start_ptr,
    cu_ptr,
    sequences,
    T,
    H,
    k_group,
    g_b,
    g_t,
    g_h,
    beta_b,
    beta_t,
    beta_h,
    segment_chunks,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    MMA_WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, slices of MMA_WARPGROUPS * 64 columns, segments of segment_chunks), or (N * H, slices, 1) if packed.

    | tensor | shape | how |
    | --- | --- | --- |
    | k | [B, T, H / k_group, KEYS] | descriptor, blocks [1, 64, 1, columns] |
    | v | [B, T, H, VALUES] | descriptor, blocks [1, 64, 1, 64] |
    | a | [B * H, chunks, 64, 64], of chunk_inverse.py | descriptor, blocks [1, 1, 64, 64] |
    | u | [B, T, H, VALUES], if packed [1, chunks * 64, H, VALUES] | descriptor, blocks [1, 64, 1, 64] |
    | low, high | [B, chunks * 64, H, KEYS] | descriptors, blocks [1, 64, 1, columns] |
    | g, beta | [B, T, H], or None for 0 and 1 | pointer, strides |
    | start | [B, segments, H, KEYS, VALUES], or None | pointer, float32 |
    | cu | [N + 1], or None | pointer |

    low, high: the rounded state that enters a chunk; its rows are v's columns, the first 64 in low. start: the state
    before each segment. cu, sequences: as in forward.py.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES * MMA_WARPGROUPS, 1, CHUNK, 1, COLUMNS], v_desc.layout)
    a_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], a_desc.layout)
    u_tiles = gl.allocate_shared_memory(dtype, [MMA_WARPGROUPS, 1, CHUNK, 1, COLUMNS], u_desc.layout)
    s_tiles = gl.allocate_shared_memory(dtype, [MMA_WARPGROUPS, 1, COLUMNS, 1, K], low_desc.layout)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    chunk_decay = gl.allocate_shared_memory(gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles_ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    decays_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stages = Stages(
        decays=decays,
        chunk_decay=chunk_decay,
        tiles_ready=tiles_ready,
        decays_ready=decays_ready,
        scores_ready=None,
        stage_empty=stage_empty,
    )
    init_barriers(stages, MMA_WARPGROUPS, STAGES)

    if cu_ptr is None:
        packed: gl.constexpr = None
        first = gl.program_id(2) * segment_chunks
        count = gl.minimum(segment_chunks, gl.cdiv(T, CHUNK) - first)
    else:
        if sequences is None:
            first, shift, T = packed_sequence(cu_ptr, gl.program_id(0) // H, T)
        else:
            segment = packed_segment(cu_ptr, gl.program_id(0) // H, segment_chunks, sequences, T)
            first, shift, T = segment.chunk0, segment.shift, segment.end
        packed = PackedBounds(shift=shift, end=T)
        count = gl.cdiv(T, CHUNK) - first
    if g_ptr is not None:
        g_ptr += sequence_offset(packed, H, g_b, g_t, g_h)
    if beta_ptr is not None:
        beta_ptr += sequence_offset(packed, H, beta_b, beta_t, beta_h)
    tiles = Tiles(q=None, k=k_tiles, v=v_tiles, a=a_tiles, scores=None)
    descs = Descs(q=None, k=k_desc, v=v_desc, a=a_desc)
    saved = Saved(u_tiles=u_tiles, s_tiles=s_tiles, u=u_desc, low=low_desc, high=high_desc)
    chunks = Chunks(H=H, first=first, count=count, scale=1.0, packed=packed)
    inputs = DecayInputs(g=g_ptr, beta=beta_ptr, g_t=g_t, beta_t=beta_t, T=T)
    sizes = Sizes(KEYS, VALUES, MMA_WARPGROUPS, STAGES)
    ready, empty = stages.tiles_ready, stages.stage_empty
    if MMA_WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (state_partition, (tiles, saved, stages, start_ptr, chunks, sizes, 0)),
                (state_partition, (tiles, saved, stages, start_ptr, chunks, sizes, 1)),
                (load_partition, (tiles, descs, ready, empty, k_group, chunks, MMA_WARPGROUPS, STAGES)),
                (decay_partition, (stages, inputs, chunks, STAGES)),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (state_partition, (tiles, saved, stages, start_ptr, chunks, sizes, 0)),
                (load_partition, (tiles, descs, ready, empty, k_group, chunks, MMA_WARPGROUPS, STAGES)),
                (decay_partition, (stages, inputs, chunks, STAGES)),
            ],
            [1, 1],
            [40, 40],
        )


@gluon.jit
def _split_operand(x, dtype: gl.constexpr, layout: gl.constexpr):
    """Return x as the sum of two rounded left operands."""
    high, low = split_hi_lo(x, dtype)
    return gl.convert_layout(high, layout), gl.convert_layout(low, layout)


@gluon.jit
def _save_state(tile, low_desc, high_desc, batch, row, head, column):
    """Store 64 rows of a state, which are v's columns, from shared memory to where they are saved."""
    if column == 0:
        tma_store(low_desc, [batch, row, head, 0], tile)
    else:
        tma_store(high_desc, [batch, row, head, 0], tile)


@gluon.jit
def state_partition(tiles, saved, stages, start_ptr, chunks, sizes, WARPGROUP: gl.constexpr):
    """Carry the state of 64 columns of v over the chunks, and save what enters each and what it writes."""
    KEYS: gl.constexpr = sizes.KEYS
    VALUES: gl.constexpr = sizes.VALUES
    MMA_WARPGROUPS: gl.constexpr = sizes.MMA_WARPGROUPS
    STAGES: gl.constexpr = sizes.STAGES
    H, packed = chunks.H, chunks.packed
    K: gl.constexpr = tiles.k.shape[4]
    dtype: gl.constexpr = tiles.k.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    s_operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)

    batch = chunk_coords(packed, chunks.first, H)[0]
    head = gl.program_id(0) % H
    column = (gl.program_id(1) * MMA_WARPGROUPS + WARPGROUP) * COLUMNS
    if start_ptr is None:
        state = gl.zeros([COLUMNS, K], gl.float32, s_layout)
    else:
        rows = column + gl.arange(0, COLUMNS, gl.SliceLayout(1, s_layout))
        keys = gl.arange(0, K, gl.SliceLayout(0, s_layout))
        inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :]
        at = segment_index(H, 2) * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
        state = gl.load(start_ptr + at, mask=inside, other=0.0)
    u_tile = saved.u_tiles.index(WARPGROUP)
    s_tile = saved.s_tiles.index(WARPGROUP)
    rounded = state.to(dtype)
    s = gl.convert_layout(rounded, s_operand)
    s = warpgroup_mma_wait(0, deps=(s,))
    s_tile.reshape([COLUMNS, K]).store(rounded)
    fence_async_shared()
    barrier()
    _save_state(s_tile, saved.low, saved.high, batch, chunks.first * CHUNK, head, column)

    stage = 0
    phase = 0
    for i in range(chunks.count):
        mbarrier.wait(stages.tiles_ready.index(stage), phase)
        k = tiles.k.index(stage).reshape([CHUNK, K])
        v = tiles.v.index(stage * MMA_WARPGROUPS + WARPGROUP).reshape([CHUNK, COLUMNS])
        a = tiles.a.index(stage).reshape([CHUNK, CHUNK])
        predicted = gl.zeros([COLUMNS, CHUNK], gl.float32, layout)
        predicted = warpgroup_mma(s, k.permute((1, 0)), predicted, use_acc=False, is_async=True)
        mbarrier.wait(stages.decays_ready.index(stage), phase)
        vt = v.permute((1, 0)).load(operand)
        read = stages.decays.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, layout))
        beta = stages.decays.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, layout))
        predicted, s = warpgroup_mma_wait(0, deps=(predicted, s))
        e = (gl.convert_layout(vt.to(gl.float32), layout) - predicted * read[None, :]) * beta[None, :]
        e_high, e_low = _split_operand(e, dtype, operand)
        e, e_high, e_low = warpgroup_mma_wait(0, deps=(e, e_high, e_low))
        u = warpgroup_mma(e_high, a, e, is_async=True)
        u = warpgroup_mma(e_low, a, u, is_async=True)
        state = state * stages.chunk_decay.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
        write = stages.decays.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, layout))
        u, e_high, e_low = warpgroup_mma_wait(0, deps=(u, e_high, e_low))
        u_high, u_low = _split_operand(u * write[None, :], dtype, s_operand)
        state, u_high, u_low = warpgroup_mma_wait(0, deps=(state, u_high, u_low))
        state = warpgroup_mma(u_high, k, state, is_async=True)
        state = warpgroup_mma(u_low, k, state, is_async=True)
        # the last chunk's tiles have left before this one's take their place
        tma_store_wait(0)
        barrier()
        u_tile.reshape([CHUNK, COLUMNS]).permute((1, 0)).store(u.to(dtype))
        state, u_high, u_low = warpgroup_mma_wait(0, deps=(state, u_high, u_low))
        rounded = state.to(dtype)
        s_tile.reshape([COLUMNS, K]).store(rounded)
        s = gl.convert_layout(rounded, s_operand)
        s = warpgroup_mma_wait(0, deps=(s,))
        fence_async_shared()
        barrier()
        mbarrier.arrive(stages.stage_empty.index(stage), count=1)
        token = (chunks.first + i) * CHUNK
        tma_store(saved.u, [batch, token, head, column], u_tile)
        if i + 1 < chunks.count:
            _save_state(s_tile, saved.low, saved.high, batch, token + CHUNK, head, column)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    tma_store_wait(0)
