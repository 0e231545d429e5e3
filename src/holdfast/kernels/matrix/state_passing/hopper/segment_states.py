"""What a segment of a sequence adds to the state that enters it: a sweep without outputs, for few sequences and heads.

Few blocks leave most of a GPU idle, so sequences are cut: local states of the segments here, and then each segment's
own sweep, which adds up those before it (segment_entry.py). The backward pass needs the states, forward in time, and
their gradients, backward in time: a block finds one after the other in one launch, and a scan over them follows
(triton/segment_scan_backward.py).

A segment's state is a sum over its tokens, each weighed with the decay from there to the segment's end. It is added up
from the end back, and its gradient from the start on, so that no state has to decay and the chunks that were read last
are those that the next launch reads first.
"""

from holdfast.kernels.lib.gluon.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from holdfast.kernels.lib.gluon.decay import load_decay_beta
from holdfast.kernels.lib.gluon.pdl import launch_dependents
from holdfast.kernels.lib.gluon.reduce import add
from holdfast.kernels.lib.gluon.sequence import head_offset, segment_index

from .segment_entry import store_added


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
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, segments of `span` chunks of TOKENS); where TURNS is 1 without the last, which adds to no other.

    k, q: [B, T, H / k_group, KEYS], v, u: [B, T, H, VALUES], by descriptors of blocks [1, TOKENS, 1, columns]; q and
    u, the gradient of the output, are None where TURNS is 1.
    end: the state that each segment ends in if it starts from zero. Where TURNS is 1 as store_added writes it, [B,
    segments, H, V * K]; else float32 [2, B, segments, H, KEYS, VALUES], first of k and v forward in time, of the last
    segment 0, then of q and u backward, of the first 0 unless FIRST. decay [B, segments, H]: log2 of each segment's
    decay; or None.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, TOKENS, 1, K], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, TOKENS, 1, V], v_desc.layout)
    gates = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(gated.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()

    launch_dependents()
    first = gl.program_id(1) * span
    count = gl.minimum(span, gl.cdiv(T, TOKENS) - first)
    # chunks of each turn
    forth = count * 1
    back = count * 1
    if TURNS == 2:
        forth = gl.where(gl.program_id(1) == gl.num_programs(1) - 1, 0, count)
    if not FIRST:
        back = gl.where(gl.program_id(1) == 0, 0, count)
    if g_ptr is not None:
        g_ptr += head_offset(H, g_b, g_h)
    if beta_ptr is not None:
        beta_ptr += head_offset(H, beta_b, beta_h)
    chunks = (first, forth, back)
    sources = (k_desc, v_desc, q_desc, u_desc)
    places = (gates, loaded, gated, free)
    gl.warp_specialize(
        [
            (_multiply, (k_tiles, v_tiles, places, end_ptr, H, chunks, KEYS, VALUES, TURNS, TOKENS, STAGES)),
            (_copy, (k_tiles, v_tiles, sources, loaded, free, H, k_group, chunks, TURNS, TOKENS, STAGES)),
            (_gate, (places, g_ptr, beta_ptr, g_t, beta_t, decay_ptr, T, H, chunks, scale, TURNS, TOKENS, STAGES)),
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
    TOKENS: gl.constexpr,
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
        token = (first + forth - 1 - i) * TOKENS
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
            token = (first + i) * TOKENS
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
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Weighs each chunk when its stage is free, and sums the segment's log decay."""
    gates, _, gated, free = places
    _, forth, back = chunks
    count = forth
    if TURNS == 2:
        count += back
    stage = 0
    phase = 1
    beyond = 0.0
    g, beta = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, _chunk(chunks, 0), count > 0, T, TOKENS)
    for i in range(count):
        g_next, beta_next = load_decay_beta(
            g_ptr, beta_ptr, g_t, beta_t, _chunk(chunks, i + 1), i + 1 < count, T, TOKENS
        )
        # the decay of the chunks that came before, which lie between this one and the segment's end, or its start
        total = gl.associative_scan(g, 0, add)
        decay = gl.sum(g, 0)
        if i == forth:
            beyond = decay * 0.0
        # forward in time with the decay to the segment's end, backward with that from its start
        write = gl.where(i < forth, gl.exp2(decay - total + beyond) * beta, gl.exp2(total + beyond) * scale)
        beyond += decay
        mbarrier.wait(free.index(stage), phase)
        gates.index(stage).store(write)
        barrier()
        mbarrier.arrive(gated.index(stage), count=1)
        g = g_next
        beta = beta_next
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if decay_ptr is not None:
        gl.store(decay_ptr + segment_index(H, 1), beyond)


@gluon.jit
def _chunk(chunks, i):
    """The i-th chunk of both turns."""
    first, forth, _ = chunks
    return first + gl.where(i < forth, forth - 1 - i, i - forth)


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
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """S^T = S^T + (V^T * write) K, over the segment's chunks."""
    gates, loaded, gated, free = places
    _, forth, back = chunks
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    rows = gl.arange(0, V, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, K, gl.SliceLayout(0, s_layout))
    if KEYS == K and VALUES == V:
        inside: gl.constexpr = None
    else:
        inside = (rows < VALUES)[:, None] & (columns < KEYS)[None, :]
    stage = 0
    phase = 0
    for turn in range(TURNS):
        state = gl.zeros([V, K], gl.float32, s_layout)
        count = gl.where(turn == 0, forth, back)
        written = gl.zeros([V, TOKENS], dtype, write_layout)
        if count > 0:
            written = _weighed(v_tiles, gates, loaded, gated, stage, phase, write_layout)
        for i in range(count):
            state, written = warpgroup_mma_wait(0, deps=(state, written))
            state = warpgroup_mma(written, k_tiles.index(stage).reshape([TOKENS, K]), state, is_async=True)
            last = stage
            turned = phase
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            # while the product runs, without a branch, or the compiler gives away the registers that it reads; after
            # the last chunk that one again
            more = i + 1 < count
            there = gl.where(more, stage, last)
            then = gl.where(more, phase, turned)
            onward = _weighed(v_tiles, gates, loaded, gated, there, then, write_layout)
            state, written, onward = warpgroup_mma_wait(0, deps=(state, written, onward))
            written = onward
            fence_async_shared()
            barrier()
            mbarrier.arrive(free.index(last), count=1)
        if TURNS == 1:
            store_added(end_ptr + segment_index(H, 1) * (K * V), state, dtype)
        else:
            place = turn * (gl.num_programs(0) * gl.num_programs(1)).to(gl.int64) + segment_index(H, 1)
            at = columns[None, :] * VALUES + rows[:, None]
            gl.store(end_ptr + place * (KEYS * VALUES) + at, state, mask=inside)


@gluon.jit
def _weighed(v_tiles, gates, loaded, gated, stage, phase, layout: gl.constexpr):
    """A chunk's V^T * write, [V, TOKENS], when it is there."""
    V: gl.constexpr = v_tiles.shape[4]
    mbarrier.wait(loaded.index(stage), phase)
    mbarrier.wait(gated.index(stage), phase)
    vt = v_tiles.index(stage).reshape([v_tiles.shape[2], V]).permute((1, 0)).load(layout)
    write = gates.index(stage).load(gl.SliceLayout(0, layout))
    return (vt.to(gl.float32) * write[None, :]).to(v_tiles.dtype)
