"""The delta rule on Hopper with keys of more than 128 columns: walks through a sequence, forth and back in time.

Rows of such a state cannot be cut apart, since each write reads them all. So a block owns a (batch, head, 64 of v's
columns): four warps hold S^T [64, 256] in their registers, and its rounded copy, which products read, is in shared
memory. Inverses come from triton/chunk_inverse.py; the walks back in time and for the states leave what
triton/chunk_grads.py needs of each chunk. The equations are those of triton/states.py.
"""
# ruff: noqa: RUF005 - Gluon does not compile starred expressions

from holdfast.kernels.lib.gluon.compat import barrier, fence_async_shared, gl, gluon, mbarrier, tma_load
from holdfast.kernels.lib.gluon.decay import (
    BETA,
    CHUNK,
    LOG_DECAY_CUMSUM,
    READ_DECAY,
    VECTORS,
    WRITE_DECAY,
    load_decay_beta,
)
from holdfast.kernels.lib.gluon.reduce import add
from holdfast.kernels.lib.gluon.sequence import PackedBounds, chunk_coords, packed_sequence, sequence_offset
from holdfast.kernels.lib.gluon.tails import zero_tail_tiles
from holdfast.kernels.matrix.delta_rule.hopper.forward import score

from .mma import back, forth

# columns of v that a block works on
COLUMNS = gl.constexpr(64)


@gluon.jit(
    do_not_specialize=["T", "H", "qk_group", "g_b", "g_t", "g_h", "beta_b", "beta_t", "beta_h", "lowest", "window"],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "start_ptr", "end_ptr", "cu_ptr"],
)
def delta_walk(
    k_desc,
    q_desc,
    v_desc,
    a_desc,
    o_desc,
    kept_desc,
    g_ptr,
    beta_ptr,
    start_ptr,
    end_ptr,
    cu_ptr,
    o_ptr,
    T,
    H,
    qk_group,
    g_b,
    g_t,
    g_h,
    beta_b,
    beta_t,
    beta_h,
    lowest,
    window,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    BACK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, slices), or (N * H, slices) of packed sequences: over `window` chunks from `lowest` on, or all.

    q, k: [B, T, H / qk_group, KEYS], v, o: [B, T, H, VALUES], a: [B, T, H, 64], by descriptors of blocks
    [1, 64, 1, columns]; of v and o 64. start, end: float32 [B, H, KEYS, VALUES], before and after, or None.
    Forth, q and o may both be None, for the states alone. BACK: v is the output's gradient, the states are gradients,
    o is None. kept: the state before each chunk, or back in time after it, rounded, [B * window, H, VALUES, KEYS] by a
    descriptor of blocks [1, 1, 64, 256], or None.
    cu: [N + 1], where packed sequences begin and end, or None; with it, o: the output's pointer, and chunks in kept as
    lib/gluon/sequence.py counts them.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, COLUMNS], v_desc.layout)
    a_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, CHUNK], a_desc.layout)
    s_tile = gl.allocate_shared_memory(dtype, [1, 1, COLUMNS, K], k_desc.layout)
    gates = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # one more than stages: of a chunk that ends in another sequence, before it is ready
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if q_desc is None:
        q_tiles: gl.constexpr = None
        p_tiles: gl.constexpr = None
        readers: gl.constexpr = 1
    else:
        q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
        p_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, CHUNK], a_desc.layout)
        readers: gl.constexpr = 2
    if o_desc is None:
        o_tile: gl.constexpr = None
    else:
        o_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, COLUMNS], o_desc.layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        mbarrier.init(scored.index(i), count=1)
        mbarrier.init(free.index(i), count=readers)
    mbarrier.init(loaded.index(STAGES), count=1)
    fence_async_shared()

    if cu_ptr is None:
        aside: gl.constexpr = None
        chunk0 = lowest
        count = gl.minimum(window, gl.cdiv(T, CHUNK) - lowest)
        slot = gl.program_id(0) // H * window
    else:
        chunk0, shift, T = packed_sequence(cu_ptr, gl.program_id(0) // H, T)
        aside = PackedBounds(shift=shift, end=T)
        count = gl.cdiv(T, CHUNK) - chunk0
        slot = chunk0
    if g_ptr is not None:
        g_ptr += sequence_offset(aside, H, g_b, g_t, g_h)
    if beta_ptr is not None:
        beta_ptr += sequence_offset(aside, H, beta_b, beta_t, beta_h)
    tiles = (q_tiles, k_tiles, v_tiles, a_tiles, p_tiles)
    sources = (q_desc, k_desc, v_desc, a_desc)
    places = (gates, decays, loaded, gated, scored, free)
    kept = (s_tile, kept_desc, slot)
    ends = (start_ptr, end_ptr)
    numbers = (H, chunk0, count, scale, aside)
    copied = (tiles, sources, loaded, free, qk_group, numbers, BACK, STAGES)
    gated_by = (places, g_ptr, beta_ptr, g_t, beta_t, T, numbers, BACK, STAGES)
    if BACK:
        gl.warp_specialize(
            [
                (back, (tiles, kept, places, ends, numbers, KEYS, VALUES, STAGES)),
                (score, (tiles, places, numbers, STAGES)),
                (_copy, copied),
                (_gate, gated_by),
            ],
            [4, 1, 1],
            [88, 40, 40],
        )
    elif q_desc is None:
        gl.warp_specialize(
            [
                (forth, (tiles, None, kept, places, (None, None), ends, numbers, KEYS, VALUES, STAGES)),
                (_copy, copied),
                (_gate, gated_by),
            ],
            [1, 1],
            [40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (forth, (tiles, o_tile, kept, places, (o_desc, o_ptr), ends, numbers, KEYS, VALUES, STAGES)),
                (score, (tiles, places, numbers, STAGES)),
                (_copy, copied),
                (_gate, gated_by),
            ],
            [4, 1, 1],
            [88, 40, 40],
        )


@gluon.jit
def _copy(tiles, sources, loaded, free, qk_group, numbers, BACK: gl.constexpr, STAGES: gl.constexpr):
    """Keeps STAGES chunks of q, k, v and A on their way into shared memory."""
    q_tiles, k_tiles, v_tiles, a_tiles, _ = tiles
    q_desc, k_desc, v_desc, a_desc = sources
    H, chunk0, count, _, aside = numbers
    keys: gl.constexpr = k_desc.block_type.nbytes * (1 if q_desc is None else 2)
    width: gl.constexpr = keys + v_desc.block_type.nbytes + a_desc.block_type.nbytes
    head = gl.program_id(0) % H
    column = gl.program_id(1) * COLUMNS
    stage = 0
    phase = 1
    for i in range(count):
        mbarrier.wait(free.index(stage), phase)
        chunk = chunk0 + (count - 1 - i if BACK else i)
        batch, token = chunk_coords(aside, chunk, H)
        arrived = loaded.index(stage)
        if aside is not None:
            rows = aside[1] - chunk * CHUNK
            arrived = loaded.index(gl.where(rows < CHUNK, STAGES, stage))
        mbarrier.expect(arrived, width)
        tma_load(k_desc, [batch, token, head // qk_group, 0], arrived, k_tiles.index(stage))
        tma_load(v_desc, [batch, token, head, column], arrived, v_tiles.index(stage))
        tma_load(a_desc, [batch, token, head, 0], arrived, a_tiles.index(stage))
        if q_desc is not None:
            tma_load(q_desc, [batch, token, head // qk_group, 0], arrived, q_tiles.index(stage))
        if aside is not None:  # noqa: SIM102 - known while compiling
            if rows < CHUNK:
                cut = (k_tiles.index(stage), v_tiles.index(stage), a_tiles.index(stage))
                if q_desc is not None:
                    cut = cut + (q_tiles.index(stage),)
                zero_tail_tiles(cut, rows, arrived, loaded.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _gate(places, g_ptr, beta_ptr, g_t, beta_t, T, numbers, BACK: gl.constexpr, STAGES: gl.constexpr):
    """Weighs each chunk when its stage is free: decays to each token, from it to the end, of the chunk; strengths."""
    gates, decays, _, gated, _, free = places
    _, chunk0, count, _, _ = numbers
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    stage = 0
    phase = 1
    chunk = chunk0 + (count - 1 if BACK else 0)
    step: gl.constexpr = -1 if BACK else 1
    g, beta = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, chunk, count > 0, T)
    for i in range(count):
        chunk += step
        g_next, beta_next = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, chunk, i + 1 < count, T)
        mbarrier.wait(free.index(stage), phase)
        total = gl.associative_scan(g, 0, add)
        whole = gl.sum(g, 0)
        gates.index(stage * VECTORS + LOG_DECAY_CUMSUM).store(total)
        gates.index(stage * VECTORS + READ_DECAY).store(gl.exp2(total))
        gates.index(stage * VECTORS + WRITE_DECAY).store(gl.exp2(whole - total))
        gates.index(stage * VECTORS + BETA).store(beta)
        decays.index(stage).store(gl.full([1], 1.0, gl.float32, layout) * gl.exp2(whole))
        barrier()
        mbarrier.arrive(gated.index(stage), count=1)
        g = g_next
        beta = beta_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
