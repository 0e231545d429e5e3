"""The delta rule forward in time on Hopper, with scalar decay; the state is in registers throughout.

    S = exp(g_t) S;  S = S + beta_t k_t (v_t - S^T k_t)^T;  o_t = scale S^T q_t.

A block owns a (batch, head, 64 or 128 of v's columns, segment) and goes over chunks of 64 tokens, whose inverse A
chunk_inverse.py has left. One warp loads tiles by TMA, one sums log decays, four multiply keys with queries, and four
for every 64 columns do the rest. Products are transposed, so that each one's accumulator is rounded in registers to be
the next one's operand, and the state S^T never leaves them. With r a token's decay from its chunk's start, w that to
its chunk's end:
    E^T = (V^T - (S^T K^T) * r) * beta;  U^T = E^T + E^T A^T;
    O^T = (S^T Q^T) * r + U^T (K Q^T * causal decay);  S^T = decay S^T + (U^T * w) K.
E stays in float32, since its rounding would be the same for every write of one beta.
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
from holdfast.kernels.lib.gluon.decay import BETA, CHUNK, LOG_DECAY_CUMSUM, READ_DECAY, VECTORS, WRITE_DECAY
from holdfast.kernels.lib.gluon.sequence import (
    PackedBounds,
    chunk_coords,
    packed_segment,
    packed_sequence,
    segment_index,
    sequence_offset,
)
from holdfast.kernels.lib.gluon.split import opaque
from holdfast.kernels.lib.gluon.tails import store_tail

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


class Output(NamedTuple):
    """The output in memory: its descriptor, and its pointer for the rows of a chunk that ends in another sequence."""

    desc: Any
    ptr: Any


class StateIO(NamedTuple):
    """Pointers to states in memory, or None.

    start: before each segment. end: after each, or after the last. transition: what each segment multiplies the state
    before it with. last: of segments of packed sequences, whose last one this is, or -1; else None.
    """

    start: Any
    end: Any
    transition: Any
    last: Any


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
        "segment_chunks",
    ],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "start_ptr", "end_ptr", "transition_ptr", "cu_ptr"],
)
def delta_rule_fwd(
    k_desc,
    q_desc,
    v_desc,
    a_desc,
    o_desc,
    g_ptr,
    beta_ptr,
    start_ptr,
    end_ptr,
    transition_ptr,
    cu_ptr,
    o_ptr,
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
    segment_chunks,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    MMA_WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, slices, segments of segment_chunks), or (N * H, slices, 1) of packed sequences.

    | tensor | shape | how |
    | --- | --- | --- |
    | k | [B, T, H / qk_group, KEYS] | descriptor, blocks [1, 64, 1, columns] |
    | q | as k, or None where only states are wanted | descriptor, as k |
    | v | [B, T, H, VALUES], or None for transitions alone | descriptor, blocks [1, 64, 1, 64] |
    | a | [B * H, chunks, 64, 64], of chunk_inverse.py | descriptor, blocks [1, 1, 64, 64] |
    | o | [B, T, H, VALUES], or None as q is | descriptor, blocks [1, 64, 1, 64] |
    | g, beta | [B, T, H], or None for 0 and 1 | pointer, strides |
    | start | [B, segments, H, KEYS, VALUES], or None | pointer, float32 |
    | end | the same, or with q [B, H, KEYS, VALUES], or None | pointer, float32 |
    | transition | [B, segments, H, KEYS, KEYS], or None | pointer, float32 |
    | cu | [N + 1], or None | pointer |

    start: the state before each segment. end: the state after each, or with q and o the one after the last.
    transition: what each segment multiplies the state before it with; its columns are the slices after v's. With v
    None all slices are its, and o, [B, T, H, KEYS], is what the outputs multiply that state with; VALUES is then KEYS.
    cu: where packed sequences begin and end; with it, o_ptr is the output too, for chunks that end in another sequence,
    and a is [H, T // 64 + N, 64, 64], sequence n's chunks from begin // 64 + n on. sequences: N if they are cut into
    segments, else None; the grid is then (places * H, slices, 1), and start, end and transition have places, as
    lib/gluon/sequence.py counts them, for segments; but the end with q and o has sequences.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    if v_desc is None:
        v_tiles: gl.constexpr = None
    else:
        v_tiles = gl.allocate_shared_memory(dtype, [STAGES * MMA_WARPGROUPS, 1, CHUNK, 1, COLUMNS], v_desc.layout)
    a_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], a_desc.layout)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    chunk_decay = gl.allocate_shared_memory(gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles_ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    decays_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scores_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    stage_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if q_desc is None:
        q_tiles: gl.constexpr = None
        o_tiles: gl.constexpr = None
        score_tiles: gl.constexpr = None
        readers: gl.constexpr = MMA_WARPGROUPS
    else:
        q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
        o_tiles = gl.allocate_shared_memory(dtype, [MMA_WARPGROUPS, 1, CHUNK, 1, COLUMNS], o_desc.layout)
        score_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], a_desc.layout)
        readers: gl.constexpr = MMA_WARPGROUPS + 1
    stages = Stages(
        decays=decays,
        chunk_decay=chunk_decay,
        tiles_ready=tiles_ready,
        decays_ready=decays_ready,
        scores_ready=scores_ready,
        stage_empty=stage_empty,
    )
    init_barriers(stages, readers, STAGES)

    last: gl.constexpr = None
    if cu_ptr is None:
        packed: gl.constexpr = None
        first = gl.program_id(2) * segment_chunks
        count = gl.minimum(segment_chunks, gl.cdiv(T, CHUNK) - first)
    else:
        if sequences is None:
            first, shift, T = packed_sequence(cu_ptr, gl.program_id(0) // H, T)
        else:
            first, shift, T, sequence, part, parts = packed_segment(
                cu_ptr, gl.program_id(0) // H, segment_chunks, sequences, T
            )
            is_last = part == parts - 1
            if q_desc is None:
                # the state after the last segment comes with the outputs: this launch leaves it out
                T = gl.where(is_last, first * CHUNK, T)
            last = gl.where(is_last, sequence, -1)
        packed = PackedBounds(shift=shift, end=T)
        count = gl.cdiv(T, CHUNK) - first
    if g_ptr is not None:
        g_ptr += sequence_offset(packed, H, g_b, g_t, g_h)
    if beta_ptr is not None:
        beta_ptr += sequence_offset(packed, H, beta_b, beta_t, beta_h)
    tiles = Tiles(q=q_tiles, k=k_tiles, v=v_tiles, a=a_tiles, scores=score_tiles)
    descs = Descs(q=q_desc, k=k_desc, v=v_desc, a=a_desc)
    output = Output(desc=o_desc, ptr=o_ptr)
    states = StateIO(start=start_ptr, end=end_ptr, transition=transition_ptr, last=last)
    chunks = Chunks(H=H, first=first, count=count, scale=scale, packed=packed)
    inputs = DecayInputs(g=g_ptr, beta=beta_ptr, g_t=g_t, beta_t=beta_t, T=T)
    sizes = Sizes(KEYS, VALUES, MMA_WARPGROUPS, STAGES)
    ready, empty = stages.tiles_ready, stages.stage_empty
    if MMA_WARPGROUPS == 2:
        if q_desc is None:
            gl.warp_specialize(
                [
                    (mma_partition, (tiles, o_tiles, stages, output, states, chunks, sizes, 0)),
                    (mma_partition, (tiles, o_tiles, stages, output, states, chunks, sizes, 1)),
                    (load_partition, (tiles, descs, ready, empty, qk_group, chunks, MMA_WARPGROUPS, STAGES)),
                    (decay_partition, (stages, inputs, chunks, STAGES)),
                ],
                [4, 1, 1],
                [232, 40, 40],
            )
        else:
            gl.warp_specialize(
                [
                    (mma_partition, (tiles, o_tiles, stages, output, states, chunks, sizes, 0)),
                    (mma_partition, (tiles, o_tiles, stages, output, states, chunks, sizes, 1)),
                    (score_partition, (tiles, stages, chunks, STAGES)),
                    (load_partition, (tiles, descs, ready, empty, qk_group, chunks, MMA_WARPGROUPS, STAGES)),
                    (decay_partition, (stages, inputs, chunks, STAGES)),
                ],
                [4, 4, 1, 1],
                [208, 56, 40, 40],
            )
    elif q_desc is None:
        gl.warp_specialize(
            [
                (mma_partition, (tiles, o_tiles, stages, output, states, chunks, sizes, 0)),
                (load_partition, (tiles, descs, ready, empty, qk_group, chunks, MMA_WARPGROUPS, STAGES)),
                (decay_partition, (stages, inputs, chunks, STAGES)),
            ],
            [1, 1],
            [40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (mma_partition, (tiles, o_tiles, stages, output, states, chunks, sizes, 0)),
                (score_partition, (tiles, stages, chunks, STAGES)),
                (load_partition, (tiles, descs, ready, empty, qk_group, chunks, MMA_WARPGROUPS, STAGES)),
                (decay_partition, (stages, inputs, chunks, STAGES)),
            ],
            [4, 1, 1],
            [88, 40, 40],
        )


@gluon.jit
def score_partition(tiles, stages, chunks, STAGES: gl.constexpr):
    """Store each chunk's scaled products of keys and queries times their causal decay, [earlier, later]."""
    decays = stages.decays
    K: gl.constexpr = tiles.k.shape[4]
    dtype: gl.constexpr = tiles.k.dtype
    half: gl.constexpr = CHUNK // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, half, 16])
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    column = gl.arange(0, half, gl.SliceLayout(0, layout))
    stage = 0
    phase = 0
    for _ in range(chunks.count):
        mbarrier.wait(stages.tiles_ready.index(stage), phase)
        mbarrier.wait(stages.decays_ready.index(stage), phase)
        k = tiles.k.index(stage).reshape([CHUNK, K])
        # half the queries at a time, for want of registers
        for side in gl.static_range(2):
            q = tiles.q.index(stage).reshape([CHUNK, K]).slice(side * half, half)
            p = gl.zeros([CHUNK, half], gl.float32, layout)
            p = warpgroup_mma(k, q.permute((1, 0)), p, use_acc=False, is_async=True)
            cumsum = decays.index(stage * VECTORS + LOG_DECAY_CUMSUM)
            rows = cumsum.load(gl.SliceLayout(1, layout))
            columns = cumsum.slice(side * half, half).load(gl.SliceLayout(0, layout))
            seen = row[:, None] <= (side * half + column)[None, :]
            weight = gl.exp2(gl.where(seen, columns[None, :] - rows[:, None], float("-inf"))) * chunks.scale
            p = warpgroup_mma_wait(0, deps=(p,))
            tile = tiles.scores.index(stage).reshape([CHUNK, CHUNK]).slice(side * half, half, 1)
            tile.store((p * weight).to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(stages.scores_ready.index(stage), count=1)
        mbarrier.arrive(stages.stage_empty.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def mma_partition(tiles, o_tiles, stages, output, states, chunks, sizes, WARPGROUP: gl.constexpr):
    """Carry the state of 64 columns of v over the chunks, and multiply what each chunk's outputs take."""
    KEYS: gl.constexpr = sizes.KEYS
    VALUES: gl.constexpr = sizes.VALUES
    MMA_WARPGROUPS: gl.constexpr = sizes.MMA_WARPGROUPS
    STAGES: gl.constexpr = sizes.STAGES
    H, packed, last, decays = chunks.H, chunks.packed, states.last, stages.decays
    K: gl.constexpr = tiles.k.shape[4]
    dtype: gl.constexpr = tiles.k.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    s_operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    writes_out: gl.constexpr = tiles.q is not None

    head = gl.program_id(0) % H
    column = (gl.program_id(1) * MMA_WARPGROUPS + WARPGROUP) * COLUMNS
    rows = column + gl.arange(0, COLUMNS, gl.SliceLayout(1, s_layout))
    keys = gl.arange(0, K, gl.SliceLayout(0, s_layout))
    if states.start is None:
        state = gl.zeros([COLUMNS, K], gl.float32, s_layout)
    else:
        inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :]
        at = segment_index(H, 2) * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
        state = gl.load(states.start + at, mask=inside, other=0.0)
    if states.transition is not None:
        # behind v's last slice, or without v, the state starts from the identity, and nothing is written to it
        own = rows
        if tiles.v is not None:
            own -= gl.cdiv(VALUES, MMA_WARPGROUPS * COLUMNS) * (MMA_WARPGROUPS * COLUMNS)
        state = gl.where(own[:, None] == keys[None, :], 1.0, state)
    s = gl.convert_layout(state.to(dtype), s_operand)
    s = warpgroup_mma_wait(0, deps=(s,))

    stage = 0
    phase = 0
    for i in range(chunks.count):
        mbarrier.wait(stages.tiles_ready.index(stage), phase)
        k = tiles.k.index(stage).reshape([CHUNK, K])
        if tiles.v is not None:
            v = tiles.v.index(stage * MMA_WARPGROUPS + WARPGROUP).reshape([CHUNK, COLUMNS])
        a = tiles.a.index(stage).reshape([CHUNK, CHUNK])
        predicted = gl.zeros([COLUMNS, CHUNK], gl.float32, layout)
        predicted = warpgroup_mma(s, k.permute((1, 0)), predicted, use_acc=False, is_async=True)
        mbarrier.wait(stages.decays_ready.index(stage), phase)
        if tiles.v is not None:
            vt = v.permute((1, 0)).load(operand)
        read = decays.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, layout))
        beta = decays.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, layout))
        predicted, s = warpgroup_mma_wait(0, deps=(predicted, s))
        if tiles.v is None:
            e = (predicted * read[None, :]) * -beta[None, :]
        else:
            e = (gl.convert_layout(vt.to(gl.float32), layout) - predicted * read[None, :]) * beta[None, :]
        e_rounded = gl.convert_layout(e.to(dtype), operand)
        e, e_rounded = warpgroup_mma_wait(0, deps=(e, e_rounded))
        u = warpgroup_mma(e_rounded, a, e, is_async=True)
        if writes_out:
            q = tiles.q.index(stage).reshape([CHUNK, K])
            o = gl.zeros([COLUMNS, CHUNK], gl.float32, layout)
            o = warpgroup_mma(s, q.permute((1, 0)), o, use_acc=False, is_async=True)
        state = state * stages.chunk_decay.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
        if writes_out:
            u, e_rounded = warpgroup_mma_wait(1, deps=(u, e_rounded))
        else:
            u, e_rounded = warpgroup_mma_wait(0, deps=(u, e_rounded))
        write = decays.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, layout))
        u_write = gl.convert_layout((u * write[None, :]).to(dtype), s_operand)
        if writes_out:
            mbarrier.wait(stages.scores_ready.index(stage), phase)
            p = tiles.scores.index(stage).reshape([CHUNK, CHUNK])
            o, s, state, u_write = warpgroup_mma_wait(0, deps=(o, s, state, u_write))
            o = o * (decays.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, layout)) * chunks.scale)[None, :]
            o, state, u_write = warpgroup_mma_wait(0, deps=(o, state, u_write))
        else:
            state, u_write = warpgroup_mma_wait(0, deps=(state, u_write))
        state = warpgroup_mma(u_write, k, state, is_async=True)
        if writes_out:
            ut = gl.convert_layout(u.to(dtype), operand)
            ut = warpgroup_mma_wait(1, deps=(ut,))
            o = warpgroup_mma(ut, p, o, is_async=True)
            state, u_write = warpgroup_mma_wait(1, deps=(state, u_write))
            s = gl.convert_layout(state.to(dtype), s_operand)
            o, ut, s = warpgroup_mma_wait(0, deps=(o, ut, s))
            # one barrier for two: this chunk's tiles are read, the last output has left its tile
            fence_async_shared()
            tma_store_wait(0)
            barrier()
            mbarrier.arrive(stages.stage_empty.index(stage), count=1)
            o_tiles.index(WARPGROUP).reshape([CHUNK, COLUMNS]).permute((1, 0)).store(o.to(dtype))
            fence_async_shared()
            barrier()
            batch, token = chunk_coords(packed, chunks.first + i, H)
            # what ends in another sequence is stored after all others
            if packed is None or packed.end >= (chunks.first + i + 1) * CHUNK:
                tma_store(output.desc, [batch, token, head, column], o_tiles.index(WARPGROUP))
        else:
            state, u_write = warpgroup_mma_wait(0, deps=(state, u_write))
            s = gl.convert_layout(state.to(dtype), s_operand)
            s = warpgroup_mma_wait(0, deps=(s,))
            fence_async_shared()
            barrier()
            mbarrier.arrive(stages.stage_empty.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    if writes_out and packed is not None:
        shift, end = packed.shift, packed.end
        left = end % CHUNK
        if left > 0:
            # the tile's other rows are the next sequence's
            corner = output.ptr + (((shift + end - left).to(gl.int64) * H + head) * VALUES + column)
            store_tail(o_tiles.index(WARPGROUP), corner, H * VALUES, left, VALUES - column)

    # addresses are computed again: kept from the start, they would take as many registers as the state does
    rows = opaque(rows)
    if states.end is not None:
        inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :]
        if not writes_out:
            if last is not None:
                inside = inside & (chunks.count > 0)
            row = segment_index(H, 2)
        elif last is None:
            inside = inside & (gl.program_id(2) == gl.num_programs(2) - 1)
            row = gl.program_id(0).to(gl.int64)
        else:
            inside = inside & (last >= 0)
            row = last.to(gl.int64) * H + head
        at = row * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
        gl.store(states.end + at, state, mask=inside)
    if states.transition is not None:
        own = rows
        if tiles.v is not None:
            own -= gl.cdiv(VALUES, MMA_WARPGROUPS * COLUMNS) * (MMA_WARPGROUPS * COLUMNS)
        inside = (own >= 0)[:, None] & (own < KEYS)[:, None] & (keys < KEYS)[None, :]
        if last is not None and not writes_out:
            inside = inside & (chunks.count > 0)
        at = segment_index(H, 2) * (KEYS * KEYS) + (keys[None, :] * KEYS + own[:, None])
        gl.store(states.transition + at, state, mask=inside)
    if writes_out:
        tma_store_wait(0)
