"""What a segment of a sequence adds to the state that enters it: a sweep without outputs, for few sequences and heads.

Few blocks leave most of a GPU idle, so sequences are cut: local states of the segments here, a scan over them
(hopper_compose.py), and then each segment's own sweep from its state. The composition is exact. The backward pass needs
the states, forward in time, and their gradients, backward in time: a block finds one after the other in one launch.
"""

from holdfast.kernels.common.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_gates import CHUNK, add, load_gates, of_head, of_segment


@gluon.jit(
    do_not_specialize=["T", "H", "k_group", "g_b", "g_t", "g_h", "beta_b", "beta_t", "beta_h", "span"],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "decay_ptr"],
)
def advance(
    k_desc,
    v_desc,
    q_desc,
    u_desc,
    g_ptr,
    beta_ptr,
    end_ptr,
    decay_ptr,
    T,
    H,
    k_group,
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
    TURNS: gl.constexpr,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, segments of `span` chunks).

    k, q: [B, T, H / k_group, KEYS], v, u: [B, T, H, VALUES], by descriptors of blocks [1, 64, 1, columns]; q and u, the
    gradient of the output, are None where TURNS is 1.
    end: the state that each segment ends in if it starts from zero, float32 [TURNS, B, segments, H, KEYS, VALUES],
    first of k and v forward in time, then of q and u backward. LAST, FIRST: whether the last segment's is wanted of the
    one, and the first's of the other; else it is 0. decay [B, segments, H]: log2 of each segment's decay; or None.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, CHUNK, 1, V], v_desc.layout)
    gates = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()

    first = gl.program_id(1) * span
    count = gl.minimum(span, gl.cdiv(T, CHUNK) - first)
    # chunks of each turn
    forth = count * 1
    back = count * 1
    if not LAST:
        forth = gl.where(gl.program_id(1) == gl.num_programs(1) - 1, 0, count)
    if not FIRST:
        back = gl.where(gl.program_id(1) == 0, 0, count)
    if g_ptr is not None:
        g_ptr += of_head(H, g_b, g_h)
    if beta_ptr is not None:
        beta_ptr += of_head(H, beta_b, beta_h)
    chunks = (first, forth, back)
    sources = (k_desc, v_desc, q_desc, u_desc)
    places = (gates, decays, loaded, gated, free)
    gl.warp_specialize(
        [
            (_multiply, (k_tiles, v_tiles, places, end_ptr, H, chunks, KEYS, VALUES, TURNS, STAGES)),
            (_copy, (k_tiles, v_tiles, sources, loaded, free, H, k_group, chunks, TURNS, STAGES)),
            (_gate, (places, g_ptr, beta_ptr, g_t, beta_t, decay_ptr, T, H, chunks, scale, TURNS, STAGES)),
        ],
        [1, 1],
        [40, 40],
    )


@gluon.jit
def _copy(
    k_tiles,
    v_tiles,
    sources,
    loaded,
    free,
    H,
    k_group,
    chunks,
    TURNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Keeps STAGES chunks on their way into shared memory: of k and v, then from the last on of q and u."""
    k_desc, v_desc, q_desc, u_desc = sources
    first, forth, back = chunks
    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    stage = 0
    phase = 1
    for i in range(forth):
        mbarrier.wait(free.index(stage), phase)
        token = (first + i) * CHUNK
        mbarrier.expect(loaded.index(stage), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma_load(k_desc, [batch, token, head // k_group, 0], loaded.index(stage), k_tiles.index(stage))
        tma_load(v_desc, [batch, token, head, 0], loaded.index(stage), v_tiles.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if TURNS == 2:
        for i in range(back):
            mbarrier.wait(free.index(stage), phase)
            token = (first + back - 1 - i) * CHUNK
            mbarrier.expect(loaded.index(stage), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            tma_load(q_desc, [batch, token, head // k_group, 0], loaded.index(stage), k_tiles.index(stage))
            tma_load(u_desc, [batch, token, head, 0], loaded.index(stage), v_tiles.index(stage))
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
    decay_ptr,
    T,
    H,
    chunks,
    scale,
    TURNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Weighs each chunk when its stage is free, and sums the segment's log decay."""
    gates, decays, _, gated, free = places
    _, forth, back = chunks
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    count = forth
    if TURNS == 2:
        count += back
    stage = 0
    phase = 1
    whole = 0.0
    g, beta = load_gates(g_ptr, beta_ptr, g_t, beta_t, _chunk(chunks, 0), count > 0, T)
    for i in range(count):
        g_next, beta_next = load_gates(g_ptr, beta_ptr, g_t, beta_t, _chunk(chunks, i + 1), i + 1 < count, T)
        total = gl.associative_scan(g, 0, add)
        decay = gl.sum(g, 0)
        # once, though both turns may pass
        whole += gl.where((i < forth) | (forth == 0), decay, 0.0)
        # forward in time with the decay to the chunk's end, backward with that from its start
        write = gl.where(i < forth, gl.exp2(decay - total) * beta, gl.exp2(total) * scale)
        mbarrier.wait(free.index(stage), phase)
        gates.index(stage).store(write)
        decays.index(stage).store(gl.full([1], 1.0, gl.float32, layout) * gl.exp2(decay))
        barrier()
        mbarrier.arrive(gated.index(stage), count=1)
        g = g_next
        beta = beta_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if decay_ptr is not None:
        gl.store(decay_ptr + of_segment(H, 1), whole)


@gluon.jit
def _chunk(chunks, i):
    """The i-th chunk of both turns."""
    first, forth, back = chunks
    return first + gl.where(i < forth, i, forth + back - 1 - i)


@gluon.jit
def _multiply(
    k_tiles,
    v_tiles,
    places,
    end_ptr,
    H,
    chunks,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    TURNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """S = decay S + (K^T * write) V, over the segment's chunks."""
    gates, decays, loaded, gated, free = places
    _, forth, back = chunks
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, V, 16])
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    rows = gl.arange(0, K, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, V, gl.SliceLayout(0, s_layout))
    if KEYS == K and VALUES == V:
        inside: gl.constexpr = None
    else:
        inside = (rows < KEYS)[:, None] & (columns < VALUES)[None, :]
    stage = 0
    phase = 0
    for turn in range(TURNS):
        state = gl.zeros([K, V], gl.float32, s_layout)
        count = gl.where(turn == 0, forth, back)
        for _ in range(count):
            mbarrier.wait(loaded.index(stage), phase)
            mbarrier.wait(gated.index(stage), phase)
            kt = k_tiles.index(stage).reshape([CHUNK, K]).permute((1, 0)).load(write_layout)
            write = gates.index(stage).load(gl.SliceLayout(0, write_layout))
            written = (kt.to(gl.float32) * write[None, :]).to(dtype)
            state = state * decays.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
            state, written = warpgroup_mma_wait(0, deps=(state, written))
            state = warpgroup_mma(written, v_tiles.index(stage).reshape([CHUNK, V]), state, is_async=True)
            state, written = warpgroup_mma_wait(0, deps=(state, written))
            fence_async_shared()
            barrier()
            mbarrier.arrive(free.index(stage), count=1)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        place = turn * (gl.num_programs(0) * gl.num_programs(1)).to(gl.int64) + of_segment(H, 1)
        at = rows[:, None] * VALUES + columns[None, :]
        gl.store(end_ptr + place * (KEYS * VALUES) + at, state, mask=inside)
