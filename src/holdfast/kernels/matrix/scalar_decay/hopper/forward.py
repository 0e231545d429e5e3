"""One sweep over a sequence on Hopper: the additive recurrence with scalar decay, its state in registers throughout.

    S = exp(g_t) S + beta_t k_t v_t^T;  o_t = scale S^T q_t.

A block owns a (batch, head, slice of v's columns) and walks over chunks of 64 tokens: one warp copies tiles in by TMA,
one sums log decays (lib/gluon/decay.py), four score tokens of a chunk with one another (forward_scores.py), four or
eight multiply (forward_mma.py).
"""
# ruff: noqa: RUF005 - Gluon does not compile starred expressions

from holdfast.kernels.lib.gluon.compat import fence_async_shared, gl, gluon, mbarrier, tma_load
from holdfast.kernels.lib.gluon.decay import CHUNK, VECTORS, clamp_log2_decay, prefetch_decay_beta, publish_decays
from holdfast.kernels.lib.gluon.pdl import grid_dependency_wait, launch_dependents
from holdfast.kernels.lib.gluon.reduce import reduce_warp_partials
from holdfast.kernels.lib.gluon.sequence import sequence_bounds, token_offset

from .forward_mma import multiply
from .forward_scores import score

# chunks whose gates are on their way: under load that takes as long as several chunks
_AHEAD = gl.constexpr(4)


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
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "row_ptr", "log_ptr", "cu_ptr", "passing_ptr", "decay_ptr"],
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
    added_ptr,
    decay_ptr,
    end_ptr,
    saved_ptr,
    row_ptr,
    log_ptr,
    against_ptr,
    before_ptr,
    passing_ptr,
    cu_ptr,
    o_ptr,
    sums_ptr,
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
    ADDS: gl.constexpr,
    LEAVES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, slices of v, segments of `span` chunks), or (N * H, slices, 1) of packed sequences.

    cu: [N + 1], where packed sequences begin and end, or None; with it, o: the output's pointer, for chunks that end in
    another sequence.
    q, k: [B, T, H / qk_group, KEYS] and v: [B, T, H / v_group, VALUES] by descriptors of blocks [1, 64, 1, columns].
    start: state before each segment, float32 [B, segments, H, KEYS, VALUES], or [..., VALUES, KEYS] if TURNED, or None.
    added, decay: what each segment but the last adds to the state, [B, segments - 1, H, slices * V * K] as store_added
    writes it, and log2 of its decay, [B, segments - 1, H]; or None. With added, start is that before the first alone.
    end: state after the last, [B, H, ...], or None.
    against, as start: what the state before each segment's last chunk is multiplied with and summed, into passing
    [slices, B, segments, H]; or None. before: room for that state until then, float32 [blocks, V, K], whole tiles.
    x: [B, T, H / x_group, VALUES], what the part of the output that comes from earlier chunks is multiplied with and
    summed over columns, into row [slices, B, H, T]; or None. log, with row: log decays to base 2 [B, H, T], of which a
    head's lie side by side for the adjoint sweep.
    saved: [B, H, segments * ceil(span / SAVE), VALUES, KEYS], or [..., KEYS, VALUES] if SAVE_TURNED, the state before
    every SAVE-th chunk of each segment, rounded; or None. A first state of 0 is not written. Packed:
    [H, T // (64 SAVE) + N, ...], sequence n's from first // (64 SAVE) + n on.
    sums: of a state in slices of K, what the outputs of those before add up to (lib/gluon/slice_sums.py), or None.
    ADDS: it is added to the output. LEAVES: the output is left there, in float32, and o is not written.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], v_desc.layout)
    # where there is x, a chunk's output takes the place of its x, of which each warp has read what it writes
    if x_desc is None:
        x_tiles: gl.constexpr = None
        o_tiles = gl.allocate_shared_memory(dtype, [2, 1, CHUNK, 1, V], o_desc.layout)
    else:
        x_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], x_desc.layout)
        o_tiles = x_tiles
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
    x_loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_tiles = gl.allocate_shared_memory(dtype, [2, CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    scored = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    spent = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(x_loaded.index(i), count=1)
        mbarrier.init(x_free.index(i), count=1)
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        # by those that score and those that multiply
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(scored.index(i), count=1)
        mbarrier.init(spent.index(i), count=1)
    fence_async_shared()

    launch_dependents()
    batch, first, length = sequence_bounds(cu_ptr, T, H)
    if g_ptr is not None:
        g_ptr += token_offset(H, batch, first, g_b, g_t, g_h)
    if beta_ptr is not None:
        beta_ptr += token_offset(H, batch, first, beta_b, beta_t, beta_h)
    if row_ptr is not None:
        heads = gl.num_programs(0) if cu_ptr is None else H
        of_slice = gl.program_id(1).to(gl.int64) * heads + batch * H + gl.program_id(0) % H
        row_ptr += of_slice * T + first
        log_ptr += (batch * H + gl.program_id(0) % H).to(gl.int64) * T + first
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
    of_scores = (p_tiles, scored, spent)
    left = length - chunk0 * CHUNK
    # registers of a thread that scores: as many as others of eight warps with `before` leave
    scoring: gl.constexpr = 88 if passing_ptr is not None and V == 128 else 104
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    tiles,
                    o_tiles,
                    places,
                    (x_loaded, x_free),
                    of_scores,
                    o_desc,
                    start_ptr,
                    (added_ptr, decay_ptr),
                    end_ptr,
                    saved_ptr,
                    against_ptr,
                    before_ptr,
                    passing_ptr,
                    o_ptr,
                    sums_ptr,
                    place,
                    H,
                    chunk0,
                    count,
                    KEYS,
                    VALUES,
                    TURNED,
                    SAVE,
                    SAVE_TURNED,
                    ADDS,
                    LEAVES,
                    STAGES,
                ),
            ),
            # first, since wgmma wants its four warps at a multiple of four
            (
                score,
                (
                    tiles,
                    places,
                    of_scores,
                    left,
                    count,
                    scale,
                    beta_ptr is not None,
                    cu_ptr is not None,
                    STAGES,
                ),
            ),
            (
                _copy,
                (
                    tiles,
                    sources,
                    loaded,
                    free,
                    (x_loaded, x_free),
                    place,
                    H,
                    qk_group,
                    v_group,
                    x_group,
                    chunk0,
                    count,
                    STAGES,
                ),
            ),
            (
                _gate,
                (
                    places,
                    g_ptr,
                    beta_ptr,
                    g_t,
                    beta_t,
                    row_ptr,
                    log_ptr,
                    length,
                    chunk0,
                    count,
                    scale,
                    STAGES,
                ),
            ),
        ],
        [4, 1, 1],
        [scoring, 40, 40],
    )


@gluon.jit
def _copy(
    tiles, sources, loaded, free, of_x, place, H, qk_group, v_group, x_group, chunk0, count, STAGES: gl.constexpr
):
    """Keeps STAGES chunks of q, k, v and x on their way into shared memory."""
    q_tiles, k_tiles, v_tiles, x_tiles = tiles
    q_desc, k_desc, v_desc, x_desc = sources
    V: gl.constexpr = v_desc.block_type.shape[3]
    width: gl.constexpr = 2 * q_desc.block_type.nbytes + v_desc.block_type.nbytes
    x_loaded, x_free = of_x
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
            mbarrier.wait(x_free.index(stage), phase)
            mbarrier.expect(x_loaded.index(stage), x_desc.block_type.nbytes)
            tma_load(x_desc, [batch, token, head // x_group, column], x_loaded.index(stage), x_tiles.index(stage))
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
    log_ptr,
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
    asked = ()
    for j in gl.static_range(_AHEAD):
        asked = asked + (prefetch_decay_beta(g_ptr, beta_ptr, g_t, beta_t, chunk0 + j, j < count, length),)
    drain: gl.constexpr = 0 if row_ptr is None else STAGES
    for begin in range(0, count + drain, _AHEAD):
        later = ()
        for j in gl.static_range(_AHEAD):
            i = begin + j
            g, beta = asked[j]
            mbarrier.wait(free.index(stage), phase, pred=i < count + drain)
            if row_ptr is not None:  # noqa: SIM102 - known while compiling
                if (i >= STAGES) & (i < count + drain):
                    row = reduce_warp_partials(parts, stage)
                    tokens = (chunk0 + i - STAGES) * CHUNK + gl.arange(0, CHUNK, layout)
                    gl.store(row_ptr + tokens, row, mask=tokens < length)
            if i < count:
                # another name: a branch may not change a variable's dtype
                log = clamp_log2_decay(g.to(gl.float32))
                publish_decays(gates, decays, gated, stage, log, beta.to(gl.float32), scale, False)
                if log_ptr is not None:
                    grid_dependency_wait()
                    tokens = (chunk0 + i) * CHUNK + gl.arange(0, CHUNK, layout)
                    gl.store(log_ptr + tokens, log, mask=(tokens < length) & (gl.program_id(1) == 0))
            ahead = i + _AHEAD
            later = later + (prefetch_decay_beta(g_ptr, beta_ptr, g_t, beta_t, chunk0 + ahead, ahead < count, length),)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        asked = later
