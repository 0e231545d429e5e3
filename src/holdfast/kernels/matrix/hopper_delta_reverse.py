"""The delta rule's state gradients on Hopper: what each segment of a sequence adds to that of the state before it.

A block owns a (batch, head, 64 or 128 of v's columns) and walks over chunks from the last to the first, with P scores
and their decay, dS' the gradient of the state that leaves a chunk, all transposed as in hopper_delta_sweep.py:
    dU^T = dO^T P + (dS'^T K^T) * write;  Y^T = dU^T + dU^T A;
    dS^T = decay dS'^T + (dO^T * scale read) Q - (Y^T * read beta) K.
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

from .hopper_delta_sweep import COLUMNS, _score
from .hopper_gates import CHUNK, READ, STRENGTH, TOTAL, VECTORS, WRITE, add, load_gates, of_head, of_segment


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
        "span",
    ],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "start_ptr", "end_ptr"],
)
def delta_reverse(
    q_desc,
    k_desc,
    do_desc,
    a_desc,
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
    span,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, slices of CONSUMERS * 64 of v's columns, segments of `span` chunks but the first).

    q, k: [B, T, H / qk_group, KEYS], do: [B, T, H, VALUES] by descriptors of blocks [1, 64, 1, columns], of do 64.
    a: of hopper_delta_prepare.py. start: dS after the sequence, float32 [B, H, KEYS, VALUES], or None. end: what is dS
    before each segment if that after it is 0, but after the last start, [B, segments - 1, H, KEYS, VALUES].
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, 1, CHUNK, 1, COLUMNS], do_desc.layout)
    a_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], a_desc.layout)
    p_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, CHUNK, CHUNK], a_desc.layout)
    gates = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], plain)
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
    places = (gates, decays, loaded, gated, scored, free)
    chunk0 = (gl.program_id(2) + 1) * span
    numbers = (H, chunk0, gl.minimum(span, gl.cdiv(T, CHUNK) - chunk0), scale, None)
    ends = (start_ptr, end_ptr)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_walk_back, (tiles, places, ends, numbers, KEYS, VALUES, CONSUMERS, 0, STAGES)),
                (_walk_back, (tiles, places, ends, numbers, KEYS, VALUES, CONSUMERS, 1, STAGES)),
                (_score, (tiles, places, numbers, STAGES)),
                (_copy_back, (tiles, sources, loaded, free, qk_group, numbers, CONSUMERS, STAGES)),
                (_gate_back, (places, g_ptr, beta_ptr, g_t, beta_t, T, numbers, STAGES)),
            ],
            [4, 4, 1, 1],
            [208, 56, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_walk_back, (tiles, places, ends, numbers, KEYS, VALUES, CONSUMERS, 0, STAGES)),
                (_score, (tiles, places, numbers, STAGES)),
                (_copy_back, (tiles, sources, loaded, free, qk_group, numbers, CONSUMERS, STAGES)),
                (_gate_back, (places, g_ptr, beta_ptr, g_t, beta_t, T, numbers, STAGES)),
            ],
            [4, 1, 1],
            [88, 40, 40],
        )


@gluon.jit
def _copy_back(tiles, sources, loaded, free, qk_group, numbers, CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Keeps STAGES chunks of q, k, do and A on their way into shared memory."""
    q_tiles, k_tiles, do_tiles, a_tiles, _ = tiles
    q_desc, k_desc, do_desc, a_desc = sources
    H, chunk0, count, _, _ = numbers
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
def _gate_back(places, g_ptr, beta_ptr, g_t, beta_t, T, numbers, STAGES: gl.constexpr):
    """Weighs each chunk when its stage is free.

    READ: scale times the decay to each token; WRITE: the decay from it to the end; STRENGTH: what Y is multiplied with
    on its way to dS.
    """
    gates, decays, _, gated, _, free = places
    _, chunk0, count, scale, _ = numbers
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
    places,
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
    gates, decays, loaded, gated, scored, free = places
    start_ptr, end_ptr = ends
    H, _, count, _, _ = numbers
    K: gl.constexpr = k_tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    s_operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)

    column = (gl.program_id(1) * CONSUMERS + CONSUMER) * COLUMNS
    rows = column + gl.arange(0, COLUMNS, gl.SliceLayout(1, s_layout))
    keys = gl.arange(0, K, gl.SliceLayout(0, s_layout))
    if start_ptr is None:
        state = gl.zeros([COLUMNS, K], gl.float32, s_layout)
    else:
        inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :]
        inside = inside & (gl.program_id(2) == gl.num_programs(2) - 1)
        place = gl.program_id(0).to(gl.int64)
        at = place * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
        state = gl.load(start_ptr + at, mask=inside, other=0.0)
    held = gl.convert_layout(state.to(dtype), s_operand)
    held = warpgroup_mma_wait(0, deps=(held,))

    stage = 0
    phase = 0
    for _ in range(count):
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
        state, taken = warpgroup_mma_wait(0, deps=(state, taken))
        held = gl.convert_layout(state.to(dtype), s_operand)
        held = warpgroup_mma_wait(0, deps=(held,))
        fence_async_shared()
        barrier()
        mbarrier.arrive(free.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    # addresses are computed again: kept from the start, they would take as many registers as the state
    rows = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [rows], gl.int32, is_pure=False, pack=1)
    inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :]
    at = of_segment(H, 2) * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
    gl.store(end_ptr + at, state, mask=inside)
