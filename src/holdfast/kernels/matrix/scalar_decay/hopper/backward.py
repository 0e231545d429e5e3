"""The adjoint sweep on Hopper: from the last token to the first, the gradients of k, v, g and beta.

With u the gradient of o, and dS the gradient of the state, carried backward in time in registers:
    dS = exp(g_{t+1}) dS + scale q_t u_t^T;  dk_t = beta_t dS v_t;  dv_t = beta_t dS^T k_t.

A block owns a (batch, head) and walks over chunks of 64 tokens like forward.py's; backward_mma.py
multiplies. The log decay's and the strength's gradients are of sums over rows, which the warps that multiply leave to a
warp of its own: backward_decay.py.
"""

from holdfast.kernels.lib.gluon.compat import fence_async_shared, gl, gluon, mbarrier, tma_load
from holdfast.kernels.lib.gluon.decay import CHUNK, VECTORS
from holdfast.kernels.lib.gluon.pdl import launch_dependents
from holdfast.kernels.lib.gluon.sequence import sequence_bounds, token_offset

from .backward_decay import gate, sum_up
from .backward_mma import multiply


@gluon.jit(
    do_not_specialize=[
        "T",
        "H",
        "q_group",
        "v_group",
        "beta_b",
        "beta_t",
        "beta_h",
        "slices",
        "span",
    ],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "row_ptr", "passing_ptr", "dg_ptr", "dbeta_ptr", "cu_ptr"],
)
def adjoint(
    q_desc,
    k_desc,
    u_desc,
    v_desc,
    dk_desc,
    dv_desc,
    saved_desc,
    g_ptr,
    beta_ptr,
    start_ptr,
    end_ptr,
    row_ptr,
    passing_ptr,
    dg_ptr,
    dbeta_ptr,
    cu_ptr,
    dk_ptr,
    dv_ptr,
    T,
    H,
    q_group,
    v_group,
    beta_b,
    beta_t,
    beta_h,
    slices,
    span,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    TURNED: gl.constexpr,
    SAVE: gl.constexpr,
    FROM: gl.constexpr,
    ROUNDING: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, segments of `span` chunks), or (N * H, 1) of packed sequences: cu, dk and dv as in forward.py.

    The two sides (q, k, dk) and (u, v, dv) may change places; the first must be the wider.
    q, k: [B, T, H / q_group, KEYS]; u, v: [B, T, H / v_group, VALUES]; dk, dv: [B, T, H, *], all by descriptors of
    blocks [1, 64, 1, columns].
    start, end: dS after each segment's last and before its first token, float32 [B, segments, H, KEYS, VALUES], or
    [..., VALUES, KEYS] if TURNED, or None.
    g: log decays to base 2 [B, H, T], as forward.py left them, or None.
    dg: [B, T, H], contiguous, or None. For it, row [slices, B, H, T]: what forward.py summed; passing [slices, B,
    segments, H]: its parts of <S, dS>, S before and dS after each segment's last chunk, None for 0; saved [B, H,
    segments * ceil(span / SAVE), KEYS, VALUES], by a descriptor of blocks [1, 1, *, *]: the states it saved, before
    every SAVE-th chunk of each segment from chunk FROM on, which is 1 where the first state is 0.
    ROUNDING: the variance of one number's rounding, relative to its square. dbeta: [B, T, H], or None.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = q_desc.dtype
    warps: gl.constexpr = gl.num_warps()
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    u_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], u_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], v_desc.layout)
    dk_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, K], dk_desc.layout)
    dv_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, V], dv_desc.layout)
    gates = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # row sums that each warp leaves: of pairs in the chunk over the earlier and over the later token, of a token with
    # itself, of what comes from later chunks, and of the products of states, with the gradient as it is and rounded
    later_parts = gl.allocate_shared_memory(gl.float32, [STAGES, warps // 4, CHUNK], plain)
    earlier_parts = gl.allocate_shared_memory(gl.float32, [STAGES, 4, CHUNK], plain)
    if dbeta_ptr is None:
        own_parts: gl.constexpr = None
    else:
        own_parts = gl.allocate_shared_memory(gl.float32, [STAGES, 4, CHUNK], plain)
    cross_parts = gl.allocate_shared_memory(gl.float32, [STAGES, warps, CHUNK], plain)
    state_parts = gl.allocate_shared_memory(gl.float32, [STAGES * 2, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # of the chunks since the last saved state: dg, and two numbers that correct it
    if SAVE > 0:
        waiting = gl.allocate_shared_memory(gl.float32, [SAVE - 1, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        strays = gl.allocate_shared_memory(gl.float32, [SAVE * 2 - 2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    else:
        waiting: gl.constexpr = None
        strays: gl.constexpr = None
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    restored = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(restored, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        # by weights that are there, and sums that have been read
        mbarrier.init(gated.index(i), count=2)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()

    launch_dependents()
    batch, begin, length = sequence_bounds(cu_ptr, T, H)
    if g_ptr is not None:
        g_ptr += (batch * H + gl.program_id(0) % H).to(gl.int64) * T + begin
    if beta_ptr is not None:
        beta_ptr += token_offset(H, batch, begin, beta_b, beta_t, beta_h)
    head = gl.program_id(0) % H
    of_tokens = (batch.to(gl.int64) * T + begin) * H + head
    if dg_ptr is not None:
        dg_ptr += of_tokens
    if dbeta_ptr is not None:
        dbeta_ptr += of_tokens
    if row_ptr is not None:
        row_ptr += (batch * H + head).to(gl.int64) * T + begin
    if dk_ptr is not None:
        dk_ptr += of_tokens * KEYS
        dv_ptr += of_tokens * VALUES
    first = gl.program_id(1) * span
    count = gl.minimum(span, gl.cdiv(length, CHUNK) - first)
    place = (batch, begin, length)
    tiles = (q_tiles, k_tiles, u_tiles, v_tiles)
    sources = (q_desc, k_desc, u_desc, v_desc)
    places = (gates, decays, loaded, gated, free)
    parts = (later_parts, earlier_parts, own_parts, cross_parts, state_parts)
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    tiles,
                    dk_tile,
                    dv_tile,
                    places,
                    parts,
                    restored,
                    dk_desc,
                    dv_desc,
                    saved_desc,
                    start_ptr,
                    end_ptr,
                    dk_ptr,
                    dv_ptr,
                    place,
                    H,
                    first,
                    span,
                    count,
                    scale,
                    dg_ptr is not None,
                    beta_ptr is not None,
                    KEYS,
                    VALUES,
                    TURNED,
                    SAVE,
                    FROM,
                    STAGES,
                ),
            ),
            (_copy, (tiles, sources, loaded, free, place, H, q_group, v_group, first, count, STAGES)),
            (gate, (places, g_ptr, beta_ptr, beta_t, length, first, count, scale, STAGES)),
            (
                sum_up,
                (
                    (gated, free),
                    parts,
                    (waiting, strays),
                    g_ptr,
                    beta_ptr,
                    None,
                    beta_t,
                    row_ptr,
                    passing_ptr,
                    dg_ptr,
                    dbeta_ptr,
                    length,
                    (gl.num_programs(0) if cu_ptr is None else H).to(gl.int64) * T,
                    H,
                    H,
                    slices,
                    first,
                    count,
                    TURNED,
                    SAVE,
                    FROM,
                    ROUNDING,
                    STAGES,
                ),
            ),
        ],
        [1, 1, 1],
        # a number that a thread that multiplies has to spill in its loop costs 10 us, since no L1 cache is left for it
        [40, 40, 40],
    )


@gluon.jit
def _copy(tiles, sources, loaded, free, place, H, q_group, v_group, first, count, STAGES: gl.constexpr):
    """Keeps STAGES chunks of q, k, u and v on their way into shared memory."""
    q_tiles, k_tiles, u_tiles, v_tiles = tiles
    q_desc, k_desc, u_desc, v_desc = sources
    width: gl.constexpr = 2 * (q_desc.block_type.nbytes + v_desc.block_type.nbytes)
    batch, begin, _ = place
    head = gl.program_id(0) % H
    stage = 0
    phase = 1
    for i in range(count):
        mbarrier.wait(free.index(stage), phase)
        token = begin + (first + count - 1 - i) * CHUNK
        mbarrier.expect(loaded.index(stage), width)
        tma_load(q_desc, [batch, token, head // q_group, 0], loaded.index(stage), q_tiles.index(stage))
        tma_load(k_desc, [batch, token, head // q_group, 0], loaded.index(stage), k_tiles.index(stage))
        tma_load(u_desc, [batch, token, head // v_group, 0], loaded.index(stage), u_tiles.index(stage))
        tma_load(v_desc, [batch, token, head // v_group, 0], loaded.index(stage), v_tiles.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
