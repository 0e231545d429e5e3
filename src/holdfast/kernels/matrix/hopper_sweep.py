"""One sweep over a sequence on Hopper: the additive recurrence with scalar decay, its state in registers throughout.

    S = exp(g_t) S + beta_t k_t v_t^T;  o_t = scale S^T q_t.

A block owns a (batch, head, slice of v's columns) and walks over chunks of 64 tokens: one warp copies tiles in by TMA,
one sums log decays (hopper_gates.py), four or eight multiply. Products are transposed, so that the state S^T is a wgmma
accumulator that is rounded in registers to be the next product's operand:
    P^T = K Q^T;  O^T = (S^T Q^T) * read + V^T (P^T * within);  S^T = decay S^T + (V^T * write) K.
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

from .hopper_gates import (
    CHUNK,
    READ,
    STRENGTH,
    VECTORS,
    WRITE,
    clear_rows,
    gather,
    load_gates,
    of_segment,
    of_token,
    parts_of_columns,
    place_of,
    store_rows,
    weigh,
    within,
)


@gluon.jit(
    do_not_specialize=[
        "T",
        "H",
        "qk_group",
        "v_group",
        "x_group",
        "g_b",
        "g_t",
        "g_h",
        "beta_b",
        "beta_t",
        "beta_h",
        "span",
    ],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "row_ptr", "cu_ptr"],
)
def sweep(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    x_desc,
    g_ptr,
    beta_ptr,
    start_ptr,
    end_ptr,
    saved_ptr,
    row_ptr,
    cu_ptr,
    o_ptr,
    T,
    H,
    qk_group,
    v_group,
    x_group,
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
    TURNED: gl.constexpr,
    SAVE: gl.constexpr,
    SAVE_TURNED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, slices of v, segments of `span` chunks), or (N * H, slices, 1) of packed sequences.

    cu: [N + 1], where packed sequences begin and end, or None; with it, o: the output's pointer, for chunks that end in
    another sequence.
    q, k: [B, T, H / qk_group, KEYS] and v: [B, T, H / v_group, VALUES] by descriptors of blocks [1, 64, 1, columns].
    start, end: state before and after each segment, float32 [B, segments, H, KEYS, VALUES], or [..., VALUES, KEYS] if
    TURNED, or None.
    x: [B, T, H / x_group, VALUES], what the part of the output that comes from earlier chunks is multiplied with and
    summed over columns, into row [slices, B, H, T]; or None.
    saved: [B, H, segments * ceil(span / SAVE), VALUES, KEYS], or [..., KEYS, VALUES] if SAVE_TURNED, the state before
    every SAVE-th chunk of each segment, rounded; or None. Packed: [H, T // (64 SAVE) + N, ...], sequence n's from
    first // (64 SAVE) + n on.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], v_desc.layout)
    o_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, V], o_desc.layout)
    if x_desc is None:
        x_tiles: gl.constexpr = None
    else:
        x_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], x_desc.layout)
    gates = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if row_ptr is None:
        parts: gl.constexpr = None
    else:
        parts = gl.allocate_shared_memory(
            gl.float32, [STAGES, gl.num_warps(), CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()

    batch, first, length = place_of(cu_ptr, T, H)
    if g_ptr is not None:
        g_ptr += of_token(H, batch, first, g_b, g_t, g_h)
    if beta_ptr is not None:
        beta_ptr += of_token(H, batch, first, beta_b, beta_t, beta_h)
    if row_ptr is not None:
        heads = gl.num_programs(0) if cu_ptr is None else H
        of_slice = gl.program_id(1).to(gl.int64) * heads + batch * H + gl.program_id(0) % H
        row_ptr += of_slice * T + first
    if SAVE > 0:
        if cu_ptr is None:
            entry = (gl.program_id(0).to(gl.int64) * gl.num_programs(2) + gl.program_id(2)) * gl.cdiv(span, SAVE)
        else:
            entries = T // (CHUNK * SAVE) + gl.num_programs(0) // H
            entry = (gl.program_id(0) % H).to(gl.int64) * entries + first // (CHUNK * SAVE) + gl.program_id(0) // H
        saved_ptr += entry * (KEYS * VALUES)
    if o_ptr is not None:
        o_ptr += (first.to(gl.int64) * H + gl.program_id(0) % H) * VALUES
    chunk0 = gl.program_id(2) * span
    count = gl.minimum(span, gl.cdiv(length, CHUNK) - chunk0)
    place = (batch, first, length)
    tiles = (q_tiles, k_tiles, v_tiles, x_tiles)
    sources = (q_desc, k_desc, v_desc, x_desc)
    places = (gates, decays, parts, loaded, gated, free)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    tiles,
                    o_tile,
                    places,
                    o_desc,
                    start_ptr,
                    end_ptr,
                    saved_ptr,
                    o_ptr,
                    place,
                    H,
                    chunk0,
                    count,
                    scale,
                    beta_ptr is not None,
                    KEYS,
                    VALUES,
                    TURNED,
                    SAVE,
                    SAVE_TURNED,
                    STAGES,
                ),
            ),
            (_copy, (tiles, sources, loaded, free, place, H, qk_group, v_group, x_group, chunk0, count, STAGES)),
            (
                _gate,
                (
                    places,
                    g_ptr,
                    beta_ptr,
                    g_t,
                    beta_t,
                    row_ptr,
                    length,
                    chunk0,
                    count,
                    scale,
                    STAGES,
                ),
            ),
        ],
        [1, 1],
        [40, 40],
    )


@gluon.jit
def _copy(tiles, sources, loaded, free, place, H, qk_group, v_group, x_group, chunk0, count, STAGES: gl.constexpr):
    """Keeps STAGES chunks of q, k, v and x on their way into shared memory."""
    q_tiles, k_tiles, v_tiles, x_tiles = tiles
    q_desc, k_desc, v_desc, x_desc = sources
    V: gl.constexpr = v_desc.block_type.shape[3]
    width: gl.constexpr = 2 * q_desc.block_type.nbytes + v_desc.block_type.nbytes * (1 if x_desc is None else 2)
    batch, first, _ = place
    head = gl.program_id(0) % H
    column = gl.program_id(1) * V
    stage = 0
    phase = 1
    for i in range(count):
        mbarrier.wait(free.index(stage), phase)
        token = first + (chunk0 + i) * CHUNK
        mbarrier.expect(loaded.index(stage), width)
        tma_load(k_desc, [batch, token, head // qk_group, 0], loaded.index(stage), k_tiles.index(stage))
        tma_load(q_desc, [batch, token, head // qk_group, 0], loaded.index(stage), q_tiles.index(stage))
        tma_load(v_desc, [batch, token, head // v_group, column], loaded.index(stage), v_tiles.index(stage))
        if x_desc is not None:
            tma_load(x_desc, [batch, token, head // x_group, column], loaded.index(stage), x_tiles.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _gate(
    places,
    g_ptr,
    beta_ptr,
    g_t,
    beta_t,
    row_ptr,
    length,
    chunk0,
    count,
    scale,
    STAGES: gl.constexpr,
):
    """Weighs each chunk when its stage is free, and adds up the row sums of the chunk that left it."""
    gates, decays, parts, _, gated, free = places
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    stage = 0
    phase = 1
    g, beta = load_gates(g_ptr, beta_ptr, g_t, beta_t, chunk0, count > 0, length)
    # two chunks ahead: a load takes as long as a chunk
    g_next, beta_next = load_gates(g_ptr, beta_ptr, g_t, beta_t, chunk0 + 1, count > 1, length)
    drain: gl.constexpr = 0 if row_ptr is None else STAGES
    for i in range(count + drain):
        g_later, beta_later = load_gates(g_ptr, beta_ptr, g_t, beta_t, chunk0 + i + 2, i + 2 < count, length)
        mbarrier.wait(free.index(stage), phase)
        if row_ptr is not None:  # noqa: SIM102 - known while compiling
            if i >= STAGES:
                row = gather(parts, stage)
                tokens = (chunk0 + i - STAGES) * CHUNK + gl.arange(0, CHUNK, layout)
                gl.store(row_ptr + tokens, row, mask=tokens < length)
        if i < count:
            weigh(gates, decays, gated, stage, g, beta, scale, False)
        g, beta = g_next, beta_next
        g_next, beta_next = g_later, beta_later
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _multiply(
    tiles,
    o_tile,
    places,
    o_desc,
    start_ptr,
    end_ptr,
    saved_ptr,
    o_ptr,
    place,
    H,
    chunk0,
    count,
    scale,
    WEIGHTED: gl.constexpr,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    TURNED: gl.constexpr,
    SAVE: gl.constexpr,
    SAVE_TURNED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The products of every chunk, and the state from the first to the last."""
    q_tiles, k_tiles, v_tiles, x_tiles = tiles
    gates, decays, parts, loaded, gated, free = places
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = q_tiles.dtype
    warps: gl.constexpr = gl.num_warps()
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, K, 16])
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, CHUNK // (warps // 4), 16])
    read_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    p_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))

    batch, first, length = place
    slice_ = gl.program_id(1)
    head = gl.program_id(0) % H
    rows = gl.arange(0, V, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, K, gl.SliceLayout(0, s_layout))
    if KEYS == K and VALUES % V == 0:
        inside: gl.constexpr = None
        outside: gl.constexpr = None
    else:
        inside = (slice_ * V + rows < VALUES)[:, None] & (columns < KEYS)[None, :]
        outside: gl.constexpr = 0.0
    # this block's part of the states before and after the segment
    corner = of_segment(H, 2) * (KEYS * VALUES)
    if TURNED:
        corner += slice_ * (V * KEYS)
        at = rows[:, None] * KEYS + columns[None, :]
    else:
        corner += slice_ * V
        at = columns[None, :] * VALUES + rows[:, None]
    if start_ptr is None:
        state = gl.zeros([V, K], gl.float32, s_layout)
    else:
        state = gl.load(start_ptr + corner + at, mask=inside, other=outside)

    stage = 0
    phase = 0
    last = 0
    for i in range(count):
        chunk = chunk0 + i
        if SAVE > 0:  # noqa: SIM102 - known while compiling
            if i % SAVE == 0:
                if SAVE_TURNED:
                    kept = columns[None, :] * VALUES + (slice_ * V + rows)[:, None]
                else:
                    kept = (slice_ * V + rows)[:, None] * KEYS + columns[None, :]
                gl.store(
                    saved_ptr + ((chunk - chunk0) // SAVE).to(gl.int64) * (KEYS * VALUES) + kept,
                    state.to(dtype),
                    mask=inside,
                )
        mbarrier.wait(loaded.index(stage), phase)
        if o_ptr is not None:
            left = length - chunk * CHUNK
            if left < CHUNK:
                clear_rows(k_tiles.index(stage), left)
                clear_rows(v_tiles.index(stage), left)
                fence_async_shared()
                barrier()
        q = q_tiles.index(stage).reshape([CHUNK, K])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        v = v_tiles.index(stage).reshape([CHUNK, V])
        held = gl.convert_layout(state.to(dtype), read_layout)
        # rounded here, while no product runs: the compiler would move it past the next one and then wait for each
        held = warpgroup_mma_wait(0, deps=(held,))
        p = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        p = warpgroup_mma(k, q.permute((1, 0)), p, use_acc=False, is_async=True)
        o = gl.zeros([V, CHUNK], gl.float32, o_layout)
        o = warpgroup_mma(held, q.permute((1, 0)), o, use_acc=False, is_async=True)

        mbarrier.wait(gated.index(stage), phase)
        read = gates.index(stage * VECTORS + READ).load(gl.SliceLayout(0, o_layout))
        write = gates.index(stage * VECTORS + WRITE).load(gl.SliceLayout(0, read_layout))
        decay = decays.index(stage).load(gl.SliceLayout(1, s_layout))
        weight = within(gates, stage, p_layout, False)
        if WEIGHTED:
            weight *= gates.index(stage * VECTORS + STRENGTH).load(gl.SliceLayout(1, p_layout))[:, None]
        else:
            weight *= scale
        vt = v.permute((1, 0)).load(read_layout)
        written = gl.convert_layout((vt.to(gl.float32) * write[None, :]).to(dtype), write_layout)

        p = warpgroup_mma_wait(1, deps=(p,))
        p_tile.store((p * weight).to(dtype))
        # one barrier for three: p is there, the last output has left its tile, the last chunk's tiles are read
        fence_async_shared()
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(free.index(last), count=1, pred=i > 0)
        last = stage
        state = state * decay[:, None]
        if parts is not None:
            x = x_tiles.index(stage).reshape([CHUNK, V]).permute((1, 0)).load(o_layout).to(gl.float32) * read[None, :]
            if not SAVE_TURNED:
                # rounded as the adjoint sweep adds it to its state, so that <S, dS> changes by exactly this
                x = x.to(dtype).to(gl.float32)
        o, held = warpgroup_mma_wait(0, deps=(o, held))
        if parts is not None:
            row = o * x
        o = o * read[None, :]
        o, state, vt, written = warpgroup_mma_wait(0, deps=(o, state, vt, written))
        o = warpgroup_mma(vt, p_tile, o, is_async=True)
        state = warpgroup_mma(written, k, state, is_async=True)
        o, vt = warpgroup_mma_wait(1, deps=(o, vt))
        if parts is not None:
            parts.index(stage).store(parts_of_columns(row, warps))
        o_tile.reshape([CHUNK, V]).permute((1, 0)).store(o.to(dtype))
        fence_async_shared()
        barrier()
        if o_ptr is None:
            tma_store(o_desc, [batch, chunk * CHUNK, head, slice_ * V], o_tile)
        else:
            if left < CHUNK:
                # the tile's other rows are the next sequence's
                corner_of_o = o_ptr + (chunk * CHUNK).to(gl.int64) * (H * VALUES) + slice_ * V
                store_rows(o_tile, corner_of_o, H * VALUES, left, VALUES - slice_ * V)
            else:
                tma_store(o_desc, [batch, first + chunk * CHUNK, head, slice_ * V], o_tile)
        state, written = warpgroup_mma_wait(0, deps=(state, written))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    barrier()
    mbarrier.arrive(free.index(last), count=1, pred=count > 0)
    if end_ptr is not None:
        # addresses computed again: kept from the start, they would take as many registers as the state
        rows = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [rows], gl.int32, is_pure=False, pack=1)
        if TURNED:
            at = rows[:, None] * KEYS + columns[None, :]
        else:
            at = columns[None, :] * VALUES + rows[:, None]
        gl.store(end_ptr + corner + at, state, mask=inside)
    tma_store_wait(0)
