"""One sweep over a sequence on Hopper: the delta rule with scalar decay, its state in registers throughout.

    S = exp(g_t) S;  S = S + beta_t k_t (v_t - S^T k_t)^T;  o_t = scale S^T q_t.

A block owns a (batch, head, 64 or 128 of v's columns, segment) and walks over chunks of 64 tokens, whose inverse A is
there already (chunk_inverse.py). One warp copies tiles in by TMA, one sums log decays, four multiply keys with
queries, and four for every 64 columns do the rest. Products are transposed, so that each one's accumulator is rounded
in registers to be the next one's operand, and the state S^T never leaves them:
    E^T = (V^T - (S^T K^T) * read) * beta;  U^T = E^T + E^T A^T;
    O^T = (S^T Q^T) * read + U^T (K Q^T * within);  S^T = decay S^T + (U^T * write) K.
E stays in float32, since its rounding would be the same for every write of a strength.
"""

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

from .producers import COLUMNS, copy, gate


@gluon.jit(
    do_not_specialize=["sequences", "T", "H", "qk_group", "g_b", "g_t", "g_h", "beta_b", "beta_t", "beta_h", "span"],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "start_ptr", "end_ptr", "transition_ptr", "cu_ptr"],
)
def delta_sweep(
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
    span,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, slices, segments of `span` chunks), or (N * H, slices, 1) of packed sequences.

    q, k: [B, T, H / qk_group, KEYS], v, o: [B, T, H, VALUES] by descriptors of blocks [1, 64, 1, columns], of v and o
    64; q and o both None where only states are wanted. a: [B * H, chunks, 64, 64] by a descriptor of blocks
    [1, 1, 64, 64]. start: state before each segment, float32 [B, segments, H, KEYS, VALUES], or None. end: the state
    after each segment likewise, or with q and o that after the last, [B, H, KEYS, VALUES], or None.
    transition: [B, segments, H, KEYS, KEYS], what each segment multiplies the state before it with, or None; its
    columns are the slices after v's. With v None they are all, and o, [B, T, H, KEYS], is what the outputs multiply
    that state with; VALUES is then KEYS.
    cu: [N + 1], where packed sequences begin and end, or None; with it, o: the output's pointer, for chunks that end in
    another sequence, and a: [H, T // 64 + N, 64, 64], sequence n's chunks from begin // 64 + n on. sequences: N if they
    are cut into segments, else None; the grid is then (places * H, slices, 1), and start, end and transition are of
    places, as lib/gluon/sequence.py counts them, but for the end with q and o, which is of sequences.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    if v_desc is None:
        v_tiles: gl.constexpr = None
    else:
        v_tiles = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, 1, CHUNK, 1, COLUMNS], v_desc.layout)
    a_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], a_desc.layout)
    gates = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # one more than stages: of a chunk that ends in another sequence, before it is ready
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if q_desc is None:
        q_tiles: gl.constexpr = None
        o_tiles: gl.constexpr = None
        p_tiles: gl.constexpr = None
        readers: gl.constexpr = CONSUMERS
    else:
        q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
        o_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, CHUNK, 1, COLUMNS], o_desc.layout)
        p_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], a_desc.layout)
        readers: gl.constexpr = CONSUMERS + 1
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        mbarrier.init(scored.index(i), count=1)
        mbarrier.init(free.index(i), count=readers)
    mbarrier.init(loaded.index(STAGES), count=1)
    fence_async_shared()

    last: gl.constexpr = None
    if cu_ptr is None:
        aside: gl.constexpr = None
        chunk0 = gl.program_id(2) * span
        count = gl.minimum(span, gl.cdiv(T, CHUNK) - chunk0)
    else:
        if sequences is None:
            chunk0, shift, T = packed_sequence(cu_ptr, gl.program_id(0) // H, T)
        else:
            chunk0, shift, T, sequence, part, parts = packed_segment(cu_ptr, gl.program_id(0) // H, span, sequences, T)
            is_last = part == parts - 1
            if q_desc is None:
                # nobody asks for the state after the last segment: it comes with the outputs
                T = gl.where(is_last, chunk0 * CHUNK, T)
            last = gl.where(is_last, sequence, -1)
        aside = PackedBounds(shift=shift, end=T)
        count = gl.cdiv(T, CHUNK) - chunk0
    if g_ptr is not None:
        g_ptr += sequence_offset(aside, H, g_b, g_t, g_h)
    if beta_ptr is not None:
        beta_ptr += sequence_offset(aside, H, beta_b, beta_t, beta_h)
    tiles = (q_tiles, k_tiles, v_tiles, a_tiles, p_tiles)
    sources = (q_desc, k_desc, v_desc, a_desc)
    places = (gates, decays, loaded, gated, scored, free)
    ends = (start_ptr, end_ptr, transition_ptr, last)
    out = (o_desc, o_ptr)
    numbers = (H, chunk0, count, scale, aside)
    if CONSUMERS == 2:
        if q_desc is None:
            gl.warp_specialize(
                [
                    (_multiply, (tiles, o_tiles, places, out, ends, numbers, KEYS, VALUES, CONSUMERS, 0, STAGES)),
                    (_multiply, (tiles, o_tiles, places, out, ends, numbers, KEYS, VALUES, CONSUMERS, 1, STAGES)),
                    (copy, (tiles, sources, loaded, free, qk_group, numbers, CONSUMERS, STAGES)),
                    (gate, (places, g_ptr, beta_ptr, g_t, beta_t, T, numbers, STAGES)),
                ],
                [4, 1, 1],
                [232, 40, 40],
            )
        else:
            gl.warp_specialize(
                [
                    (_multiply, (tiles, o_tiles, places, out, ends, numbers, KEYS, VALUES, CONSUMERS, 0, STAGES)),
                    (_multiply, (tiles, o_tiles, places, out, ends, numbers, KEYS, VALUES, CONSUMERS, 1, STAGES)),
                    (score, (tiles, places, numbers, STAGES)),
                    (copy, (tiles, sources, loaded, free, qk_group, numbers, CONSUMERS, STAGES)),
                    (gate, (places, g_ptr, beta_ptr, g_t, beta_t, T, numbers, STAGES)),
                ],
                [4, 4, 1, 1],
                [208, 56, 40, 40],
            )
    elif q_desc is None:
        gl.warp_specialize(
            [
                (_multiply, (tiles, o_tiles, places, out, ends, numbers, KEYS, VALUES, CONSUMERS, 0, STAGES)),
                (copy, (tiles, sources, loaded, free, qk_group, numbers, CONSUMERS, STAGES)),
                (gate, (places, g_ptr, beta_ptr, g_t, beta_t, T, numbers, STAGES)),
            ],
            [1, 1],
            [40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (tiles, o_tiles, places, out, ends, numbers, KEYS, VALUES, CONSUMERS, 0, STAGES)),
                (score, (tiles, places, numbers, STAGES)),
                (copy, (tiles, sources, loaded, free, qk_group, numbers, CONSUMERS, STAGES)),
                (gate, (places, g_ptr, beta_ptr, g_t, beta_t, T, numbers, STAGES)),
            ],
            [4, 1, 1],
            [88, 40, 40],
        )


@gluon.jit
def score(tiles, places, numbers, STAGES: gl.constexpr):
    """Scaled products of keys and queries with the decay between them, [earlier, later]."""
    q_tiles, k_tiles, _, _, p_tiles = tiles
    gates, _, loaded, gated, scored, free = places
    _, _, count, scale, _ = numbers
    K: gl.constexpr = k_tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    half: gl.constexpr = CHUNK // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, half, 16])
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    column = gl.arange(0, half, gl.SliceLayout(0, layout))
    stage = 0
    phase = 0
    for _ in range(count):
        mbarrier.wait(loaded.index(stage), phase)
        mbarrier.wait(gated.index(stage), phase)
        k = k_tiles.index(stage).reshape([CHUNK, K])
        # half the queries at a time: few registers are left
        for side in gl.static_range(2):
            q = q_tiles.index(stage).reshape([CHUNK, K]).slice(side * half, half)
            p = gl.zeros([CHUNK, half], gl.float32, layout)
            p = warpgroup_mma(k, q.permute((1, 0)), p, use_acc=False, is_async=True)
            rows = gates.index(stage * VECTORS + LOG_DECAY_CUMSUM).load(gl.SliceLayout(1, layout))
            columns = (
                gates.index(stage * VECTORS + LOG_DECAY_CUMSUM).slice(side * half, half).load(gl.SliceLayout(0, layout))
            )
            seen = row[:, None] <= (side * half + column)[None, :]
            weight = gl.exp2(gl.where(seen, columns[None, :] - rows[:, None], float("-inf"))) * scale
            p = warpgroup_mma_wait(0, deps=(p,))
            tile = p_tiles.index(stage).reshape([CHUNK, CHUNK]).slice(side * half, half, 1)
            tile.store((p * weight).to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(scored.index(stage), count=1)
        mbarrier.arrive(free.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _multiply(
    tiles,
    o_tiles,
    places,
    out,
    ends,
    numbers,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CONSUMER: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The products of every chunk with 64 columns of v, and their state from the first to the last."""
    q_tiles, k_tiles, v_tiles, a_tiles, p_tiles = tiles
    gates, decays, loaded, gated, scored, free = places
    start_ptr, end_ptr, transition_ptr, last = ends
    o_desc, o_ptr = out
    H, chunk0, count, scale, aside = numbers
    K: gl.constexpr = k_tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    s_operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    writes_out: gl.constexpr = q_tiles is not None

    head = gl.program_id(0) % H
    column = (gl.program_id(1) * CONSUMERS + CONSUMER) * COLUMNS
    rows = column + gl.arange(0, COLUMNS, gl.SliceLayout(1, s_layout))
    keys = gl.arange(0, K, gl.SliceLayout(0, s_layout))
    if start_ptr is None:
        state = gl.zeros([COLUMNS, K], gl.float32, s_layout)
    else:
        inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :]
        at = segment_index(H, 2) * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
        state = gl.load(start_ptr + at, mask=inside, other=0.0)
    if transition_ptr is not None:
        # behind v's last slice, or without v, the state starts from the identity, and is written nothing
        own = rows
        if v_tiles is not None:
            own -= gl.cdiv(VALUES, CONSUMERS * COLUMNS) * (CONSUMERS * COLUMNS)
        state = gl.where(own[:, None] == keys[None, :], 1.0, state)
    held = gl.convert_layout(state.to(dtype), s_operand)
    held = warpgroup_mma_wait(0, deps=(held,))

    stage = 0
    phase = 0
    for i in range(count):
        mbarrier.wait(loaded.index(stage), phase)
        k = k_tiles.index(stage).reshape([CHUNK, K])
        if v_tiles is not None:
            v = v_tiles.index(stage * CONSUMERS + CONSUMER).reshape([CHUNK, COLUMNS])
        a = a_tiles.index(stage).reshape([CHUNK, CHUNK])
        known = gl.zeros([COLUMNS, CHUNK], gl.float32, layout)
        known = warpgroup_mma(held, k.permute((1, 0)), known, use_acc=False, is_async=True)
        mbarrier.wait(gated.index(stage), phase)
        if v_tiles is not None:
            vt = v.permute((1, 0)).load(operand)
        read = gates.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, layout))
        strength = gates.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, layout))
        known, held = warpgroup_mma_wait(0, deps=(known, held))
        if v_tiles is None:
            missed = (known * read[None, :]) * -strength[None, :]
        else:
            missed = (gl.convert_layout(vt.to(gl.float32), layout) - known * read[None, :]) * strength[None, :]
        new = gl.convert_layout(missed.to(dtype), operand)
        missed, new = warpgroup_mma_wait(0, deps=(missed, new))
        u = warpgroup_mma(new, a, missed, is_async=True)
        if writes_out:
            q = q_tiles.index(stage).reshape([CHUNK, K])
            o = gl.zeros([COLUMNS, CHUNK], gl.float32, layout)
            o = warpgroup_mma(held, q.permute((1, 0)), o, use_acc=False, is_async=True)
        state = state * decays.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
        if writes_out:
            u, new = warpgroup_mma_wait(1, deps=(u, new))
        else:
            u, new = warpgroup_mma_wait(0, deps=(u, new))
        write = gates.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, layout))
        written = gl.convert_layout((u * write[None, :]).to(dtype), s_operand)
        if writes_out:
            mbarrier.wait(scored.index(stage), phase)
            p = p_tiles.index(stage).reshape([CHUNK, CHUNK])
            o, held, state, written = warpgroup_mma_wait(0, deps=(o, held, state, written))
            o = o * (gates.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, layout)) * scale)[None, :]
            o, state, written = warpgroup_mma_wait(0, deps=(o, state, written))
        else:
            state, written = warpgroup_mma_wait(0, deps=(state, written))
        state = warpgroup_mma(written, k, state, is_async=True)
        if writes_out:
            ut = gl.convert_layout(u.to(dtype), operand)
            ut = warpgroup_mma_wait(1, deps=(ut,))
            o = warpgroup_mma(ut, p, o, is_async=True)
            state, written = warpgroup_mma_wait(1, deps=(state, written))
            held = gl.convert_layout(state.to(dtype), s_operand)
            o, ut, held = warpgroup_mma_wait(0, deps=(o, ut, held))
            # one barrier for two: this chunk's tiles are read, the last output has left its tile
            fence_async_shared()
            tma_store_wait(0)
            barrier()
            mbarrier.arrive(free.index(stage), count=1)
            o_tiles.index(CONSUMER).reshape([CHUNK, COLUMNS]).permute((1, 0)).store(o.to(dtype))
            fence_async_shared()
            barrier()
            batch, token = chunk_coords(aside, chunk0 + i, H)
            # what ends in another sequence is written after all others
            if aside is None or aside[1] >= (chunk0 + i + 1) * CHUNK:
                tma_store(o_desc, [batch, token, head, column], o_tiles.index(CONSUMER))
        else:
            state, written = warpgroup_mma_wait(0, deps=(state, written))
            held = gl.convert_layout(state.to(dtype), s_operand)
            held = warpgroup_mma_wait(0, deps=(held,))
            fence_async_shared()
            barrier()
            mbarrier.arrive(free.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    if writes_out and aside is not None:
        shift, end = aside
        left = end % CHUNK
        if left > 0:
            # the tile's other rows are the next sequence's
            corner = o_ptr + (((shift + end - left).to(gl.int64) * H + head) * VALUES + column)
            store_tail(o_tiles.index(CONSUMER), corner, H * VALUES, left, VALUES - column)

    # addresses are computed again: kept from the start, they would take as many registers as the state
    rows = opaque(rows)
    if end_ptr is not None:
        inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :]
        if not writes_out:
            if last is not None:
                inside = inside & (count > 0)
            place = segment_index(H, 2)
        elif last is None:
            inside = inside & (gl.program_id(2) == gl.num_programs(2) - 1)
            place = gl.program_id(0).to(gl.int64)
        else:
            inside = inside & (last >= 0)
            place = last.to(gl.int64) * H + head
        at = place * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
        gl.store(end_ptr + at, state, mask=inside)
    if transition_ptr is not None:
        own = rows
        if v_tiles is not None:
            own -= gl.cdiv(VALUES, CONSUMERS * COLUMNS) * (CONSUMERS * COLUMNS)
        inside = (own >= 0)[:, None] & (own < KEYS)[:, None] & (keys < KEYS)[None, :]
        if last is not None and not writes_out:
            inside = inside & (count > 0)
        at = segment_index(H, 2) * (KEYS * KEYS) + (keys[None, :] * KEYS + own[:, None])
        gl.store(transition_ptr + at, state, mask=inside)
    if writes_out:
        tma_store_wait(0)
