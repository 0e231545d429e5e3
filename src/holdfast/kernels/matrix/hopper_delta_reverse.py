"""The delta rule's sweep back through a sequence on Hopper: the gradient of the state, in registers throughout.

A block owns a (batch, head, 64 or 128 of v's columns) and walks over chunks from the last to the first, with P scores
and their decay, dS' the gradient of the state that leaves a chunk, all transposed as in hopper_delta_sweep.py:
    dU^T = dO^T P + (dS'^T K^T) * write;  Y^T = dU^T + dU^T A;
    dS^T = decay dS'^T + (dO^T * scale read) Q - (Y^T * read beta) K.
It keeps what the gradients need of each chunk: dS' rounded, and Y times beta, which is v's gradient. Where beta says
little or nothing of Y (WEAK), it keeps Y itself.
"""

from holdfast.kernels.common.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_delta_states import keep_state
from .hopper_delta_sweep import COLUMNS, _score
from .hopper_gates import CHUNK, READ, STRENGTH, TOTAL, VECTORS, WRITE, add, load_gates, of_head, of_segment

# strengths up to it are weak
WEAK = gl.constexpr(0.01)


@gluon.jit(
    do_not_specialize=[
        "T",
        "H",
        "qk_group",
        "g_b",
        "g_t",
        "g_h",
        "beta_b",
        "beta_t",
        "beta_h",
        "chunk0",
        "count",
        "span",
        "segment0",
        "segments",
    ],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "start_ptr", "end_ptr"],
)
def delta_reverse(
    q_desc,
    k_desc,
    do_desc,
    a_desc,
    y_desc,
    low_desc,
    high_desc,
    g_ptr,
    beta_ptr,
    start_ptr,
    end_ptr,
    T,
    H,
    qk_group,
    g_b,
    g_t,
    g_h,
    beta_b,
    beta_t,
    beta_h,
    chunk0,
    count,
    span,
    segment0,
    segments,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, slices of CONSUMERS * 64 of v's columns, segments), over `count` chunks from chunk0 on.

    q, k: [B, T, H / qk_group, KEYS], do: [B, T, H, VALUES] by descriptors of blocks [1, 64, 1, columns], of do 64.
    a: of hopper_delta_prepare.py. y [B, count * 64, H, VALUES]; low, high: [B, count * 64, H, KEYS], as delta_states
    keeps the states. These chunks are segments of `span`, of the sequence's `segments` those from segment0 on. start:
    dS after each of the sequence's segments, float32 [B, segments, H, KEYS, VALUES], end: dS before the first of these
    chunks, [B, H, KEYS, VALUES], or None. With y, low and high None the segments are all of the sequence's but the
    first, start is dS after the sequence, and end [B, segments - 1, H, KEYS, VALUES] is what is dS before each if that
    after it is 0, but after the last start.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, 1, CHUNK, 1, COLUMNS], do_desc.layout)
    a_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], a_desc.layout)
    p_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], a_desc.layout)
    if y_desc is None:
        y_tiles: gl.constexpr = None
        s_tiles: gl.constexpr = None
        before = (gl.program_id(2) + 1) * span
    else:
        y_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, CHUNK, 1, COLUMNS], y_desc.layout)
        s_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, COLUMNS, 1, K], low_desc.layout)
        before = gl.program_id(2) * span
    gates = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], plain)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], plain)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1], plain)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        mbarrier.init(scored.index(i), count=1)
        mbarrier.init(free.index(i), count=CONSUMERS + 1)
    fence_async_shared()

    if g_ptr is not None:
        g_ptr += of_head(H, g_b, g_h)
    if beta_ptr is not None:
        beta_ptr += of_head(H, beta_b, beta_h)
    tiles = (q_tiles, k_tiles, do_tiles, a_tiles, p_tiles)
    sources = (q_desc, k_desc, do_desc, a_desc)
    kept = (y_tiles, s_tiles, y_desc, low_desc, high_desc)
    places = (gates, decays, loaded, gated, scored, free)
    ends = (start_ptr, end_ptr, before, segment0, segments)
    numbers = (H, chunk0 + before, gl.minimum(span, count - before), scale)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_walk_back, (tiles, kept, places, factors, ends, numbers, KEYS, VALUES, CONSUMERS, 0, STAGES)),
                (_walk_back, (tiles, kept, places, factors, ends, numbers, KEYS, VALUES, CONSUMERS, 1, STAGES)),
                (_score, (tiles, places, numbers, STAGES)),
                (_copy_back, (tiles, sources, loaded, free, qk_group, numbers, CONSUMERS, STAGES)),
                (_gate_back, (places, factors, g_ptr, beta_ptr, g_t, beta_t, T, numbers, STAGES)),
            ],
            [4, 4, 1, 1],
            [208, 56, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_walk_back, (tiles, kept, places, factors, ends, numbers, KEYS, VALUES, CONSUMERS, 0, STAGES)),
                (_score, (tiles, places, numbers, STAGES)),
                (_copy_back, (tiles, sources, loaded, free, qk_group, numbers, CONSUMERS, STAGES)),
                (_gate_back, (places, factors, g_ptr, beta_ptr, g_t, beta_t, T, numbers, STAGES)),
            ],
            [4, 1, 1],
            [88, 40, 40],
        )


@gluon.jit
def _copy_back(tiles, sources, loaded, free, qk_group, numbers, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Keeps STAGES chunks of q, k, do and A on their way into shared memory."""
    q_tiles, k_tiles, do_tiles, a_tiles, _ = tiles
    q_desc, k_desc, do_desc, a_desc = sources
    H, chunk0, count, _ = numbers
    width: gl.constexpr = (
        2 * k_desc.block_type.nbytes + CONSUMERS * do_desc.block_type.nbytes + a_desc.block_type.nbytes
    )
    pair = gl.program_id(0)
    batch = pair // H
    head = pair % H
    stage = 0
    phase = 1
    for i in range(count):
        mbarrier.wait(free.index(stage), phase)
        chunk = chunk0 + count - 1 - i
        token = chunk * CHUNK
        mbarrier.expect(loaded.index(stage), width)
        tma_load(k_desc, [batch, token, head // qk_group, 0], loaded.index(stage), k_tiles.index(stage))
        tma_load(q_desc, [batch, token, head // qk_group, 0], loaded.index(stage), q_tiles.index(stage))
        for consumer in gl.static_range(CONSUMERS):
            column = (gl.program_id(1) * CONSUMERS + consumer) * COLUMNS
            tile = do_tiles.index(stage * CONSUMERS + consumer)
            tma_load(do_desc, [batch, token, head, column], loaded.index(stage), tile)
        tma_load(a_desc, [pair, chunk, 0, 0], loaded.index(stage), a_tiles.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _gate_back(places, factors, g_ptr, beta_ptr, g_t, beta_t, T, numbers, STAGES: gl.constexpr):
    """Weighs each chunk when its stage is free.

    READ: scale times the decay to each token; WRITE: the decay from it to the end; STRENGTH: what Y is multiplied with
    on its way to dS; factors: what it is kept times.
    """
    gates, decays, _, gated, _, free = places
    _, chunk0, count, scale = numbers
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    stage = 0
    phase = 1
    last = chunk0 + count - 1
    g, beta = load_gates(g_ptr, beta_ptr, g_t, beta_t, last, count > 0, T)
    for i in range(count):
        g_next, beta_next = load_gates(g_ptr, beta_ptr, g_t, beta_t, last - 1 - i, i + 1 < count, T)
        mbarrier.wait(free.index(stage), phase)
        total = gl.associative_scan(g, 0, add)
        whole = gl.sum(g, 0)
        read = gl.exp2(total)
        gates.index(stage * VECTORS + TOTAL).store(total)
        gates.index(stage * VECTORS + READ).store(read * scale)
        gates.index(stage * VECTORS + WRITE).store(gl.exp2(whole - total))
        gates.index(stage * VECTORS + STRENGTH).store(beta * read * -1.0)
        is_weak = (beta <= WEAK) & (beta >= -WEAK)
        factors.index(stage).store(gl.where(is_weak, 1.0, beta))
        decays.index(stage).store(gl.full([1], 1.0, gl.float32, layout) * gl.exp2(whole))
        barrier()
        mbarrier.arrive(gated.index(stage), count=1)
        g = g_next
        beta = beta_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _walk_back(
    tiles,
    kept,
    places,
    factors,
    ends,
    numbers,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CONSUMER: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The gradient of the state's 64 columns of v from the last chunk to the first."""
    q_tiles, k_tiles, do_tiles, a_tiles, p_tiles = tiles
    y_tiles, s_tiles, y_desc, low_desc, high_desc = kept
    gates, decays, loaded, gated, scored, free = places
    start_ptr, end_ptr, before, segment0, segments = ends
    H, _, count, _ = numbers
    keeps: gl.constexpr = y_desc is not None
    K: gl.constexpr = k_tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    s_operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)

    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    column = (gl.program_id(1) * CONSUMERS + CONSUMER) * COLUMNS
    rows = column + gl.arange(0, COLUMNS, gl.SliceLayout(1, s_layout))
    keys = gl.arange(0, K, gl.SliceLayout(0, s_layout))
    if start_ptr is None:
        state = gl.zeros([COLUMNS, K], gl.float32, s_layout)
    else:
        inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :]
        if keeps:
            place = (batch.to(gl.int64) * segments + segment0 + gl.program_id(2)) * H + head
        else:
            place = gl.program_id(0).to(gl.int64)
            inside = inside & (gl.program_id(2) == gl.num_programs(2) - 1)
        at = place * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
        state = gl.load(start_ptr + at, mask=inside, other=0.0)
    rounded = state.to(dtype)
    held = gl.convert_layout(rounded, s_operand)
    held = warpgroup_mma_wait(0, deps=(held,))
    if keeps:
        y_tile = y_tiles.index(CONSUMER)
        s_tile = s_tiles.index(CONSUMER)
        s_tile.reshape([COLUMNS, K]).store(rounded)
        fence_async_shared()
        barrier()
        keep_state(s_tile, low_desc, high_desc, batch, (before + count - 1) * CHUNK, head, column)

    stage = 0
    phase = 0
    for i in range(count):
        mbarrier.wait(loaded.index(stage), phase)
        mbarrier.wait(gated.index(stage), phase)
        mbarrier.wait(scored.index(stage), phase)
        q = q_tiles.index(stage).reshape([CHUNK, K])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        do = do_tiles.index(stage * CONSUMERS + CONSUMER).reshape([CHUNK, COLUMNS])
        a = a_tiles.index(stage).reshape([CHUNK, CHUNK])
        p = p_tiles.index(stage).reshape([CHUNK, CHUNK])
        known = gl.zeros([COLUMNS, CHUNK], gl.float32, layout)
        known = warpgroup_mma(held, k.permute((1, 0)), known, use_acc=False, is_async=True)
        du = gl.zeros([COLUMNS, CHUNK], gl.float32, layout)
        du = warpgroup_mma(do.permute((1, 0)), p.permute((1, 0)), du, use_acc=False, is_async=True)
        dot = do.permute((1, 0)).load(s_operand)
        read = gates.index(stage * VECTORS + READ).load(gl.SliceLayout(0, s_operand))
        written = (dot.to(gl.float32) * read[None, :]).to(dtype)
        state = state * decays.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
        write = gates.index(stage * VECTORS + WRITE).load(gl.SliceLayout(0, layout))
        known, du, held, state, written = warpgroup_mma_wait(0, deps=(known, du, held, state, written))
        du = du + known * write[None, :]
        new = gl.convert_layout(du.to(dtype), operand)
        du, new = warpgroup_mma_wait(0, deps=(du, new))
        y = warpgroup_mma(new, a.permute((1, 0)), du, is_async=True)
        state = warpgroup_mma(written, q, state, is_async=True)
        strength = gates.index(stage * VECTORS + STRENGTH).load(gl.SliceLayout(0, layout))
        y, new = warpgroup_mma_wait(1, deps=(y, new))
        taken = gl.convert_layout((y * strength[None, :]).to(dtype), s_operand)
        state, written, taken = warpgroup_mma_wait(0, deps=(state, written, taken))
        state = warpgroup_mma(taken, k, state, is_async=True)
        if keeps:
            factor = factors.index(stage).load(gl.SliceLayout(0, layout))
            # the last chunk's tiles are on their way before this one's take their place
            tma_store_wait(0)
            barrier()
            y_tile.reshape([CHUNK, COLUMNS]).permute((1, 0)).store((y * factor[None, :]).to(dtype))
        state, taken = warpgroup_mma_wait(0, deps=(state, taken))
        rounded = state.to(dtype)
        if keeps:
            s_tile.reshape([COLUMNS, K]).store(rounded)
        held = gl.convert_layout(rounded, s_operand)
        held = warpgroup_mma_wait(0, deps=(held,))
        fence_async_shared()
        barrier()
        mbarrier.arrive(free.index(stage), count=1)
        if keeps:
            row = (before + count - 1 - i) * CHUNK
            tma_store(y_desc, [batch, row, head, column], y_tile)
            if i + 1 < count:
                keep_state(s_tile, low_desc, high_desc, batch, row - CHUNK, head, column)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    # addresses are computed again: kept from the start, they would take as many registers as the state
    rows = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [rows], gl.int32, is_pure=False, pack=1)
    if end_ptr is not None:
        inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :]
        if keeps:
            place = gl.program_id(0).to(gl.int64)
            inside = inside & (gl.program_id(2) == 0)
        else:
            place = of_segment(H, 2)
        at = place * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
        gl.store(end_ptr + at, state, mask=inside)
    if keeps:
        tma_store_wait(0)
