"""What a segment of a sequence adds to the state that enters it: a sweep without outputs, for few sequences and heads.

Few blocks leave most of a GPU idle, so sequences are cut: local states of the segments here, a scan over them
(hopper_compose.py), and then each segment's own sweep from its state. The composition is exact.
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

from .hopper_gates import CHUNK, VECTORS, WRITE, load_gates, of_head, of_segment, weigh


@gluon.jit(
    do_not_specialize=["T", "H", "k_group", "v_group", "g_b", "g_t", "g_h", "beta_b", "beta_t", "beta_h", "span"],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "decay_ptr"],
)
def advance(
    k_desc,
    v_desc,
    g_ptr,
    beta_ptr,
    end_ptr,
    decay_ptr,
    T,
    H,
    k_group,
    v_group,
    g_b,
    g_t,
    g_h,
    beta_b,
    beta_t,
    beta_h,
    span,
    scale,
    REVERSE: gl.constexpr,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, segments of `span` chunks).

    k: [B, T, H / k_group, KEYS], v: [B, T, H / v_group, VALUES], by descriptors of blocks [1, 64, 1, columns]; for the
    adjoint's local states, REVERSE, q and the gradient of o.
    end: the state that each segment ends in, in that direction of time, if it starts from zero, float32
    [B, segments, H, KEYS, VALUES]. decay [B, segments, H]: log2 of each segment's decay; or None.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, CHUNK, 1, V], v_desc.layout)
    gates = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
    step: gl.constexpr = -1 if REVERSE else 1
    chunk0 = first + count - 1 if REVERSE else first
    if g_ptr is not None:
        g_ptr += of_head(H, g_b, g_h)
    if beta_ptr is not None:
        beta_ptr += of_head(H, beta_b, beta_h)
    places = (gates, decays, loaded, gated, free)
    gl.warp_specialize(
        [
            (_multiply, (k_tiles, v_tiles, places, end_ptr, H, count, KEYS, VALUES, STAGES)),
            (_copy, (k_tiles, v_tiles, k_desc, v_desc, loaded, free, H, k_group, v_group, chunk0, step, count, STAGES)),
            (
                _gate,
                (places, g_ptr, beta_ptr, g_t, beta_t, decay_ptr, T, H, chunk0, step, count, scale, REVERSE, STAGES),
            ),
        ],
        [1, 1],
        [40, 40],
    )


@gluon.jit
def _copy(
    k_tiles, v_tiles, k_desc, v_desc, loaded, free, H, k_group, v_group, chunk0, step, count, STAGES: gl.constexpr
):
    """Keeps STAGES chunks of k and v on their way into shared memory."""
    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    stage = 0
    phase = 1
    for i in range(count):
        mbarrier.wait(free.index(stage), phase)
        token = (chunk0 + i * step) * CHUNK
        mbarrier.expect(loaded.index(stage), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma_load(k_desc, [batch, token, head // k_group, 0], loaded.index(stage), k_tiles.index(stage))
        tma_load(v_desc, [batch, token, head // v_group, 0], loaded.index(stage), v_tiles.index(stage))
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
    chunk0,
    step,
    count,
    scale,
    REVERSE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Weighs each chunk when its stage is free, and sums the segment's log decay."""
    gates, decays, _, gated, free = places
    stage = 0
    phase = 1
    whole = 0.0
    g, beta = load_gates(g_ptr, beta_ptr, g_t, beta_t, chunk0, count > 0, T)
    for i in range(count):
        g_next, beta_next = load_gates(g_ptr, beta_ptr, g_t, beta_t, chunk0 + (i + 1) * step, i + 1 < count, T)
        whole += gl.sum(g, 0)
        mbarrier.wait(free.index(stage), phase)
        weigh(gates, decays, gated, stage, g, beta, scale, REVERSE)
        g = g_next
        beta = beta_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if decay_ptr is not None:
        gl.store(decay_ptr + of_segment(H, 1), whole)


@gluon.jit
def _multiply(
    k_tiles,
    v_tiles,
    places,
    end_ptr,
    H,
    count,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """S = decay S + (K^T * write) V, over the segment's chunks."""
    gates, decays, loaded, gated, free = places
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, V, 16])
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    state = gl.zeros([K, V], gl.float32, s_layout)
    stage = 0
    phase = 0
    for _ in range(count):
        mbarrier.wait(loaded.index(stage), phase)
        mbarrier.wait(gated.index(stage), phase)
        kt = k_tiles.index(stage).reshape([CHUNK, K]).permute((1, 0)).load(write_layout)
        write = gates.index(stage * VECTORS + WRITE).load(gl.SliceLayout(0, write_layout))
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

    rows = gl.arange(0, K, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, V, gl.SliceLayout(0, s_layout))
    if KEYS == K and VALUES == V:
        inside: gl.constexpr = None
    else:
        inside = (rows < KEYS)[:, None] & (columns < VALUES)[None, :]
    at = rows[:, None] * VALUES + columns[None, :]
    gl.store(end_ptr + of_segment(H, 1) * (KEYS * VALUES) + at, state, mask=inside)
