"""One sweep over a sequence on Hopper that keeps what the delta rule's gradients need of each chunk: its state, and U.

As forward.py, without outputs: a block owns a (batch, head, 64 or 128 of v's columns) and walks over chunks,
    E^T = (V^T - (S^T K^T) * read) * beta;  U^T = E^T + E^T A^T;  S^T = decay S^T + (U^T * write) K.
E and U are operands in two parts: where nothing decays, keys alike add their roundings up, and dg has the sum of them.
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
from holdfast.kernels.lib.gluon.decay import BETA, CHUNK, READ_DECAY, VECTORS, WRITE_DECAY
from holdfast.kernels.lib.gluon.sequence import (
    PackedBounds,
    chunk_coords,
    packed_segment,
    packed_sequence,
    segment_index,
    sequence_offset,
)

from .chunk_inverse import parts
from .producers import COLUMNS, copy, gate


@gluon.jit(
    do_not_specialize=["sequences", "T", "H", "k_group", "g_b", "g_t", "g_h", "beta_b", "beta_t", "beta_h", "span"],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "start_ptr", "cu_ptr"],
)
def delta_states(
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
    span,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, slices of CONSUMERS * 64 of v's columns, segments of `span` chunks), or (N * H, slices, 1).

    cu, sequences: as of delta_sweep. Of packed sequences u is in whole chunks as well, [1, chunks * 64, H, VALUES].
    k: [B, T, H / k_group, KEYS], v, u: [B, T, H, VALUES] by descriptors of blocks [1, 64, 1, columns], of v and u 64.
    a: of chunk_inverse.py, by a descriptor of blocks [1, 1, 64, 64]. start: state before each segment,
    float32 [B, segments, H, KEYS, VALUES], or None. low, high: [B, chunks * 64, H, KEYS] by descriptors of blocks
    [1, 64, 1, columns]: the state that enters a chunk, rounded; its rows are v's columns, the first 64 in low.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, 1, CHUNK, 1, COLUMNS], v_desc.layout)
    a_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], a_desc.layout)
    u_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, CHUNK, 1, COLUMNS], u_desc.layout)
    s_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, COLUMNS, 1, K], low_desc.layout)
    gates = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        mbarrier.init(free.index(i), count=CONSUMERS)
    mbarrier.init(loaded.index(STAGES), count=1)
    fence_async_shared()

    if cu_ptr is None:
        aside: gl.constexpr = None
        chunk0 = gl.program_id(2) * span
        count = gl.minimum(span, gl.cdiv(T, CHUNK) - chunk0)
    else:
        if sequences is None:
            chunk0, shift, T = packed_sequence(cu_ptr, gl.program_id(0) // H, T)
        else:
            chunk0, shift, T, _, _, _ = packed_segment(cu_ptr, gl.program_id(0) // H, span, sequences, T)
        aside = PackedBounds(shift=shift, end=T)
        count = gl.cdiv(T, CHUNK) - chunk0
    if g_ptr is not None:
        g_ptr += sequence_offset(aside, H, g_b, g_t, g_h)
    if beta_ptr is not None:
        beta_ptr += sequence_offset(aside, H, beta_b, beta_t, beta_h)
    tiles = (None, k_tiles, v_tiles, a_tiles, None)
    sources = (None, k_desc, v_desc, a_desc)
    kept = (u_tiles, s_tiles, u_desc, low_desc, high_desc)
    places = (gates, decays, loaded, gated, None, free)
    numbers = (H, chunk0, count, 1.0, aside)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_walk, (tiles, kept, places, start_ptr, numbers, KEYS, VALUES, CONSUMERS, 0, STAGES)),
                (_walk, (tiles, kept, places, start_ptr, numbers, KEYS, VALUES, CONSUMERS, 1, STAGES)),
                (copy, (tiles, sources, loaded, free, k_group, numbers, CONSUMERS, STAGES)),
                (gate, (places, g_ptr, beta_ptr, g_t, beta_t, T, numbers, STAGES)),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_walk, (tiles, kept, places, start_ptr, numbers, KEYS, VALUES, CONSUMERS, 0, STAGES)),
                (copy, (tiles, sources, loaded, free, k_group, numbers, CONSUMERS, STAGES)),
                (gate, (places, g_ptr, beta_ptr, g_t, beta_t, T, numbers, STAGES)),
            ],
            [1, 1],
            [40, 40],
        )


@gluon.jit
def _in_two(x, dtype: gl.constexpr, layout: gl.constexpr):
    """x as the sum of two left operands."""
    high, low = parts(x, dtype)
    return gl.convert_layout(high, layout), gl.convert_layout(low, layout)


@gluon.jit
def keep_state(tile, low_desc, high_desc, batch, row, head, column):
    """Sends 64 of a state's rows, which are v's columns, from shared memory to where they are kept."""
    if column == 0:
        tma_store(low_desc, [batch, row, head, 0], tile)
    else:
        tma_store(high_desc, [batch, row, head, 0], tile)


@gluon.jit
def _walk(
    tiles,
    kept,
    places,
    start_ptr,
    numbers,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CONSUMER: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The state of 64 columns of v from the first chunk to the last."""
    _, k_tiles, v_tiles, a_tiles, _ = tiles
    u_tiles, s_tiles, u_desc, low_desc, high_desc = kept
    gates, decays, loaded, gated, _, free = places
    H, chunk0, count, _, aside = numbers
    K: gl.constexpr = k_tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    s_operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)

    batch, _ = chunk_coords(aside, chunk0, H)
    head = gl.program_id(0) % H
    column = (gl.program_id(1) * CONSUMERS + CONSUMER) * COLUMNS
    if start_ptr is None:
        state = gl.zeros([COLUMNS, K], gl.float32, s_layout)
    else:
        rows = column + gl.arange(0, COLUMNS, gl.SliceLayout(1, s_layout))
        keys = gl.arange(0, K, gl.SliceLayout(0, s_layout))
        inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :]
        at = segment_index(H, 2) * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
        state = gl.load(start_ptr + at, mask=inside, other=0.0)
    u_tile = u_tiles.index(CONSUMER)
    s_tile = s_tiles.index(CONSUMER)
    rounded = state.to(dtype)
    held = gl.convert_layout(rounded, s_operand)
    held = warpgroup_mma_wait(0, deps=(held,))
    s_tile.reshape([COLUMNS, K]).store(rounded)
    fence_async_shared()
    barrier()
    keep_state(s_tile, low_desc, high_desc, batch, chunk0 * CHUNK, head, column)

    stage = 0
    phase = 0
    for i in range(count):
        mbarrier.wait(loaded.index(stage), phase)
        k = k_tiles.index(stage).reshape([CHUNK, K])
        v = v_tiles.index(stage * CONSUMERS + CONSUMER).reshape([CHUNK, COLUMNS])
        a = a_tiles.index(stage).reshape([CHUNK, CHUNK])
        known = gl.zeros([COLUMNS, CHUNK], gl.float32, layout)
        known = warpgroup_mma(held, k.permute((1, 0)), known, use_acc=False, is_async=True)
        mbarrier.wait(gated.index(stage), phase)
        vt = v.permute((1, 0)).load(operand)
        read = gates.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, layout))
        strength = gates.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, layout))
        known, held = warpgroup_mma_wait(0, deps=(known, held))
        missed = (gl.convert_layout(vt.to(gl.float32), layout) - known * read[None, :]) * strength[None, :]
        new, rest = _in_two(missed, dtype, operand)
        missed, new, rest = warpgroup_mma_wait(0, deps=(missed, new, rest))
        u = warpgroup_mma(new, a, missed, is_async=True)
        u = warpgroup_mma(rest, a, u, is_async=True)
        state = state * decays.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
        write = gates.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, layout))
        u, new, rest = warpgroup_mma_wait(0, deps=(u, new, rest))
        written, rest = _in_two(u * write[None, :], dtype, s_operand)
        state, written, rest = warpgroup_mma_wait(0, deps=(state, written, rest))
        state = warpgroup_mma(written, k, state, is_async=True)
        state = warpgroup_mma(rest, k, state, is_async=True)
        # the last chunk's tiles are on their way before this one's take their place
        tma_store_wait(0)
        barrier()
        u_tile.reshape([CHUNK, COLUMNS]).permute((1, 0)).store(u.to(dtype))
        state, written, rest = warpgroup_mma_wait(0, deps=(state, written, rest))
        rounded = state.to(dtype)
        s_tile.reshape([COLUMNS, K]).store(rounded)
        held = gl.convert_layout(rounded, s_operand)
        held = warpgroup_mma_wait(0, deps=(held,))
        fence_async_shared()
        barrier()
        mbarrier.arrive(free.index(stage), count=1)
        token = (chunk0 + i) * CHUNK
        tma_store(u_desc, [batch, token, head, column], u_tile)
        if i + 1 < count:
            keep_state(s_tile, low_desc, high_desc, batch, token + CHUNK, head, column)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    tma_store_wait(0)
