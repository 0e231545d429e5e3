"""The delta rule's sweep back through a sequence on Hopper: the gradient of the state, and all others chunk by chunk.

A block owns a (batch, head) and walks over chunks from the last to the first. Eight warps have dS in registers: with P
the scores and their decay, dS' the gradient of the state that leaves a chunk, all transposed as in
forward.py,
    dU^T = dO^T P + (dS'^T K^T) * write;  Y^T = dU^T + dU^T A;
    dS^T = decay dS'^T + (dO^T * scale read) Q - (Y^T * read beta) K.
They leave dS' and Y times beta, rounded, in shared memory, where the warps of backward_grads.py find the
chunk's gradients while these go on with the chunk before it. Where beta says little or nothing of Y (WEAK), they leave
Y itself.
"""

from holdfast.kernels.lib.gluon.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from holdfast.kernels.lib.gluon.decay import CHUNK
from holdfast.kernels.lib.gluon.sequence import (
    PackedBounds,
    packed_segment,
    packed_sequence,
    segment_index,
    sequence_offset,
)
from holdfast.kernels.lib.gluon.split import opaque

from .backward_decay import A_TILE, DS_TILE, S_TILE, STAGES, STRENGTH, TILES, TOTAL, VECTORS, WEAK, Y_TILE, copy, gate
from .backward_grads import find_gradients

# a vector whose numbers for a thread's columns of a product lie together: few addresses, and four numbers a load
_COLUMNS = gl.constexpr(gl.SharedLinearLayout([[1], [8], [16], [32], [2], [4]]))
_MATRIX = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit(
    do_not_specialize=[
        "sequences",
        "T",
        "H",
        "qk_group",
        "g_b",
        "g_t",
        "g_h",
        "beta_b",
        "beta_t",
        "beta_h",
        "v_b",
        "v_t",
        "v_h",
        "span",
    ],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "start_ptr", "end_ptr", "dg_ptr", "dbeta_ptr", "cu_ptr"],
)
def delta_adjoint(
    q_desc,
    k_desc,
    do_desc,
    a_desc,
    u_desc,
    low_desc,
    high_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    g_ptr,
    beta_ptr,
    v_ptr,
    start_ptr,
    end_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dg_ptr,
    dbeta_ptr,
    cu_ptr,
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
    v_b,
    v_t,
    v_h,
    span,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
):
    """Grid (B * H, segments of `span` chunks), or (N * H, 1) of packed sequences.

    q, k: [B, T, H / qk_group, KEYS], dq, dk: [B, T, H, KEYS], do, u, dv: [B, T, H, VALUES] by descriptors of blocks
    [1, 64, 1, columns]; dq and dk as contiguous float32 where the descriptors are None. a: of chunk_inverse.py,
    by a descriptor of blocks [1, 1, 64, 64]. low, high: S as delta_states keeps it, by descriptors of blocks
    [1, 64, 1, 64]. v: [B, T, H, VALUES], its strides in units of 8; dv: the same, contiguous. dg, dbeta: [B, T, H],
    float32, or None. start: dS after each segment, float32 [B, segments, H, KEYS, VALUES], or None for 0; end: dS
    before the sequence, [B, H, KEYS, VALUES], or None. A chunk's rows of dv may be where its U is, and those of dq and
    dk where S is; but not those of packed sequences: cu [N + 1] says where they begin and end, u is kept as
    delta_states keeps it, and start and end are [N, H, KEYS, VALUES]. sequences: N if they are cut into segments, else
    None; the grid is then (places * H, 1), and start is of places, as lib/gluon/sequence.py counts them.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = do_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, K], k_desc.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, CHUNK, 1, V], do_desc.layout)
    a_tiles = gl.allocate_shared_memory(dtype, [1, 1, 1, CHUNK, CHUNK], a_desc.layout)
    # P, F and E
    scores = gl.allocate_shared_memory(dtype, [3, CHUNK, CHUNK], _MATRIX)
    u_tiles = gl.allocate_shared_memory(dtype, [1, 1, CHUNK, 1, V], u_desc.layout)
    y_tiles = gl.allocate_shared_memory(dtype, [1, 1, CHUNK, 1, V], dv_desc.layout)
    s_tiles = gl.allocate_shared_memory(dtype, [1, V, K], _MATRIX)
    ds_tiles = gl.allocate_shared_memory(dtype, [1, V, K], _MATRIX)
    gates = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], _COLUMNS)
    crossings = gl.allocate_shared_memory(gl.float32, [STAGES, 1], plain)
    weak = gl.allocate_shared_memory(gl.int32, [STAGES, 1], plain)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    walked = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        mbarrier.init(walked.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(TILES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2 if i == S_TILE else 1)
    mbarrier.init(loaded.index(STAGES), count=1)
    fence_async_shared()

    first: gl.constexpr = None
    # where the tokens of all chunks begin
    if cu_ptr is None:
        aside: gl.constexpr = None
        chunk0 = gl.program_id(1) * span
        count = gl.minimum(span, gl.cdiv(T, CHUNK) - chunk0)
        origin = (gl.program_id(0) // H).to(gl.int64) * T
    else:
        if sequences is None:
            chunk0, shift, T = packed_sequence(cu_ptr, gl.program_id(0) // H, T)
        else:
            chunk0, shift, T, sequence, part, _ = packed_segment(cu_ptr, gl.program_id(0) // H, span, sequences, T)
            first = gl.where(part == 0, sequence, -1)
        aside = PackedBounds(shift=shift, end=T)
        count = gl.cdiv(T, CHUNK) - chunk0
        origin = shift.to(gl.int64)
    if g_ptr is not None:
        g_ptr += sequence_offset(aside, H, g_b, g_t, g_h)
    if beta_ptr is not None:
        beta_ptr += sequence_offset(aside, H, beta_b, beta_t, beta_h)
    tiles = (q_tiles, k_tiles, do_tiles, a_tiles, u_tiles, s_tiles, y_tiles, ds_tiles)
    sources = (q_desc, k_desc, do_desc, a_desc, u_desc, low_desc, high_desc)
    results = (dq_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr, dbeta_ptr)
    places = (gates, crossings, weak, loaded, gated, walked, free, full, empty)
    numbers = (T, H, chunk0, count, scale, aside, origin)
    values = (v_ptr, v_b, v_t, v_h)
    gl.warp_specialize(
        [
            (
                _walk_back,
                (tiles, scores, places, (start_ptr, end_ptr, first), numbers, KEYS, VALUES, dg_ptr is not None),
            ),
            (find_gradients, (tiles, scores, places, results, values, numbers, KEYS, VALUES)),
            (copy, (tiles, sources, results, places, qk_group, numbers)),
            (gate, (places, g_ptr, beta_ptr, g_t, beta_t, dg_ptr, numbers)),
        ],
        [4, 1, 1],
        [168, 24, 24],
    )


@gluon.jit
def _product(x, y, layout: gl.constexpr):
    """The sum of the products of two matrices' elements."""
    rows: gl.constexpr = x.shape[0]
    total = gl.zeros([32], gl.float32, gl.SliceLayout(1, layout))
    for part in gl.static_range(rows // 32):
        left = x.slice(part * 32, 32).load(layout).to(gl.float32)
        total += gl.sum(left * y.slice(part * 32, 32).load(layout).to(gl.float32), 1)
    return gl.sum(total, 0)


@gluon.jit
def _walk_back(
    tiles,
    scores,
    places,
    ends,
    numbers,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    needs_decays: gl.constexpr,
):
    """The gradient of the state from the last chunk to the first."""
    q_tiles, k_tiles, do_tiles, a_tiles, _, s_tiles, y_tiles, ds_tiles = tiles
    gates, crossings, _, loaded, gated, walked, _, full, empty = places
    _, H, _, count, scale, _, _ = numbers
    start_ptr, end_ptr, first = ends
    V: gl.constexpr = ds_tiles.shape[1]
    K: gl.constexpr = ds_tiles.shape[2]
    dtype: gl.constexpr = ds_tiles.dtype
    warps: gl.constexpr = V // 16
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, CHUNK * 4 // warps, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, K, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    s_operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)

    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    rows = gl.arange(0, V, gl.SliceLayout(1, s_layout))
    keys = gl.arange(0, K, gl.SliceLayout(0, s_layout))
    if start_ptr is None:
        state = gl.zeros([V, K], gl.float32, s_layout)
    else:
        inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :]
        at = segment_index(H, 1) * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
        state = gl.load(start_ptr + at, mask=inside, other=0.0)

    stage = 0
    phase = 0
    turn = 0
    for i in range(count):
        mbarrier.wait(loaded.index(stage), phase)
        q = q_tiles.index(stage).reshape([CHUNK, K])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        do = do_tiles.index(stage).reshape([CHUNK, V])
        zero = opaque(i ^ i)
        a = a_tiles.index(zero).reshape([CHUNK, CHUNK])
        p_tile = scores.index(zero)
        y_tile = y_tiles.index(zero).reshape([CHUNK, V])
        ds = ds_tiles.index(zero)
        p = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        p = warpgroup_mma(k, q.permute((1, 0)), p, use_acc=False, is_async=True)
        mbarrier.wait(gated.index(stage), phase)
        total = gates.index(stage * VECTORS + TOTAL)
        earlier = total.load(gl.SliceLayout(1, p_layout))[:, None]
        later = total.load(gl.SliceLayout(0, p_layout))[None, :]
        row = (zero + gl.arange(0, CHUNK, gl.SliceLayout(1, p_layout)))[:, None]
        column = gl.arange(0, CHUNK, gl.SliceLayout(0, p_layout))[None, :]
        weight = gl.exp2(gl.where(row <= column, later - earlier, float("-inf"))) * scale
        p = warpgroup_mma_wait(0, deps=(p,))
        p_tile.store((p * weight).to(dtype))
        fence_async_shared()
        barrier()
        du = gl.zeros([V, CHUNK], gl.float32, layout)
        du = warpgroup_mma(do.permute((1, 0)), p_tile.permute((1, 0)), du, use_acc=False, is_async=True)
        du = warpgroup_mma_wait(0, deps=(du,))
        # the gradients of the chunk before are past this tile
        mbarrier.wait(empty.index(DS_TILE), turn ^ 1)
        ds.store(state.to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(full.index(DS_TILE), count=1)
        known = gl.zeros([V, CHUNK], gl.float32, layout)
        known = warpgroup_mma(ds, k.permute((1, 0)), known, use_acc=False, is_async=True)
        last = total.slice(CHUNK - 1, 1).load(gl.SliceLayout(0, layout))
        write = gl.exp2(last - total.load(gl.SliceLayout(0, layout)))
        known, du = warpgroup_mma_wait(0, deps=(known, du))
        du = du + known * write[None, :]
        new = gl.convert_layout(du.to(dtype), operand)
        du, new = warpgroup_mma_wait(0, deps=(du, new))
        mbarrier.wait(full.index(A_TILE), turn)
        y = warpgroup_mma(new, a.permute((1, 0)), du, is_async=True)
        beta = gates.index(stage * VECTORS + STRENGTH).load(gl.SliceLayout(0, layout))
        taking = beta * gl.exp2(total.load(gl.SliceLayout(0, layout))) * -1.0
        y, new = warpgroup_mma_wait(0, deps=(y, new))
        factor = gl.where((beta <= WEAK) & (beta >= -WEAK), 1.0, beta)
        mbarrier.wait(empty.index(Y_TILE), turn ^ 1)
        y_tile.permute((1, 0)).store((y * factor[None, :]).to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.arrive(empty.index(A_TILE), count=1)
        mbarrier.arrive(full.index(Y_TILE), count=1)
        taken = gl.convert_layout((y * taking[None, :]).to(dtype), s_operand)
        dot = do.permute((1, 0)).load(s_operand)
        read = gl.exp2(total.load(gl.SliceLayout(0, s_operand))) * scale
        written = (dot.to(gl.float32) * read[None, :]).to(dtype)
        state = state * gl.exp2(total.slice(CHUNK - 1, 1).load(gl.SliceLayout(1, s_layout)))[:, None]
        state, written, taken = warpgroup_mma_wait(0, deps=(state, written, taken))
        state = warpgroup_mma(written, q, state, is_async=True)
        state = warpgroup_mma(taken, k, state, is_async=True)
        state, written, taken = warpgroup_mma_wait(0, deps=(state, written, taken))
        # for the log decays' gradient
        mbarrier.wait(full.index(S_TILE), turn)
        if needs_decays:
            through = _product(s_tiles.index(zero), ds, wide)
            whole = gl.exp2(total.slice(CHUNK - 1, 1).load(one))
            crossings.index(stage).store(whole * through)
        fence_async_shared()
        barrier()
        mbarrier.arrive(empty.index(S_TILE), count=1)
        mbarrier.arrive(walked.index(stage), count=1)
        turn ^= 1
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    # addresses are computed again: kept from the start, they would take as many registers as the state
    rows = opaque(rows)
    if end_ptr is not None:
        if first is None:
            inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :] & (gl.program_id(1) == 0)
            place = gl.program_id(0).to(gl.int64)
        else:
            inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :] & (first >= 0)
            place = first.to(gl.int64) * H + gl.program_id(0) % H
        at = place * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
        gl.store(end_ptr + at, state, mask=inside)
