"""The state that each segment of a sequence adds to the one that enters it, for few sequences and heads.

Few blocks leave most of a GPU idle, so sequences are cut: local states of the segments here, and then each segment's
own forward kernel, which adds up those before it (segment_entry.py). The backward pass needs the states, forward in
time, and their gradients, backward in time: a block finds one after the other in one launch, and a scan over them
follows (triton/segment_scan_backward.py).

A segment's state is a sum over its tokens, each multiplied with the decay from there to the segment's end. It is added
up from the end back, and its gradient from the start on, so that no state has to decay and the chunks that were read
last are those that the next launch reads first.
"""

from typing import NamedTuple

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

from .segment_entry import store_segment_sum


class Tiles(NamedTuple):
    """Stages of k and v in shared memory, then of q and do."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor


class Descriptors(NamedTuple):
    """Of k and v, and of q and do, which are None in a forward pass."""

    k: gl.tensor
    v: gl.tensor
    q: gl.tensor
    do: gl.tensor


class StageBuffers(NamedTuple):
    """Per stage: what its tokens are multiplied with [TOKENS], and three barriers.

    tiles_ready: load -> mma. decays_ready: decay -> mma. empty: mma -> load and decay.
    """

    writes: gl.shared_memory_descriptor
    tiles_ready: gl.shared_memory_descriptor
    decays_ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Heads(NamedTuple):
    """Heads of v, and how many of them share one of k and q."""

    H: gl.tensor
    k_group: gl.tensor


class DecayInputs(NamedTuple):
    """g and beta where the head's first token is, or None, and their strides from token to token."""

    g: gl.tensor
    beta: gl.tensor
    g_t: gl.tensor
    beta_t: gl.tensor


class Chunks(NamedTuple):
    """A segment's first chunk, and how many there are in the pass forward in time and in the one backward."""

    first: gl.tensor
    forth: gl.tensor
    back: gl.tensor


@gluon.jit(
    do_not_specialize=["T", "H", "k_group", "g_b", "g_t", "g_h", "beta_b", "beta_t", "beta_h", "segment_chunks"],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "decay_ptr"],
)
def hopper_segment_states(
    k_desc,
    v_desc,
    q_desc,
    do_desc,
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
    segment_chunks,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    PASSES: gl.constexpr,
    FIRST: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, segments); where PASSES is 1 without the last, which adds to no other.

    segment_chunks: of a segment, TOKENS each

    read by load, through descriptors of blocks [1, TOKENS, 1, columns]:
        k, q    [B, T, H / k_group, KEYS]; q is None where PASSES is 1
        v, do   [B, T, H, VALUES]; do, the output's gradient, is None where PASSES is 1
    read by decay:
        g, beta [B, T, H], by strides, or None
    written by mma:
        end     the state that each segment ends in if it starts from zero. Where PASSES is 1, [B, segments, H, V * K]
                as store_segment_sum writes it. Else float32 [2, B, segments, H, KEYS, VALUES]: first of k and v,
                forward in time, 0 of the last segment; then of q and do, backward, 0 of the first unless FIRST
    written by decay:
        decay   float32 [B, segments, H]: log2 of each segment's decay; or None
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, TOKENS, 1, K], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, TOKENS, 1, V], v_desc.layout)
    writes = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    decays_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(tiles_ready.index(i), count=1)
        mbarrier.init(decays_ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()

    launch_dependents()
    first = gl.program_id(1) * segment_chunks
    count = gl.minimum(segment_chunks, gl.cdiv(T, TOKENS) - first)
    # chunks of each pass
    forth = count * 1
    back = count * 1
    if PASSES == 2:
        forth = gl.where(gl.program_id(1) == gl.num_programs(1) - 1, 0, count)
    if not FIRST:
        back = gl.where(gl.program_id(1) == 0, 0, count)
    if g_ptr is not None:
        g_ptr += head_offset(H, g_b, g_h)
    if beta_ptr is not None:
        beta_ptr += head_offset(H, beta_b, beta_h)
    tiles = Tiles(k=k_tiles, v=v_tiles)
    stages = StageBuffers(writes=writes, tiles_ready=tiles_ready, decays_ready=decays_ready, empty=empty)
    chunks = Chunks(first=first, forth=forth, back=back)
    gl.warp_specialize(
        [
            (_mma_partition, (tiles, stages, end_ptr, H, chunks, KEYS, VALUES, PASSES)),
            (
                _load_partition,
                (
                    tiles,
                    Descriptors(k=k_desc, v=v_desc, q=q_desc, do=do_desc),
                    tiles_ready,
                    empty,
                    Heads(H=H, k_group=k_group),
                    chunks,
                    PASSES,
                ),
            ),
            (
                _decay_partition,
                (
                    stages,
                    DecayInputs(g=g_ptr, beta=beta_ptr, g_t=g_t, beta_t=beta_t),
                    decay_ptr,
                    T,
                    H,
                    chunks,
                    scale,
                    PASSES,
                ),
            ),
        ],
        [1, 1],
        [40, 40],
    )


@gluon.jit
def _load_partition(tiles, descs, ready, empty, heads, chunks, PASSES: gl.constexpr):
    """Keep a stage's worth of chunks on their way into shared memory: of k and v, then from the last on of q and do."""
    STAGES: gl.constexpr = tiles.k.shape[0]
    TOKENS: gl.constexpr = tiles.k.shape[2]
    batch = gl.program_id(0) // heads.H
    head = gl.program_id(0) % heads.H
    stage = 0
    phase = 1
    for i in range(chunks.forth):
        mbarrier.wait(empty.index(stage), phase)
        token = (chunks.first + chunks.forth - 1 - i) * TOKENS
        mbarrier.expect(ready.index(stage), descs.k.block_type.nbytes + descs.v.block_type.nbytes)
        tma_load(descs.k, [batch, token, head // heads.k_group, 0], ready.index(stage), tiles.k.index(stage))
        tma_load(descs.v, [batch, token, head, 0], ready.index(stage), tiles.v.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if PASSES == 2:
        for i in range(chunks.back):
            mbarrier.wait(empty.index(stage), phase)
            token = (chunks.first + i) * TOKENS
            mbarrier.expect(ready.index(stage), descs.k.block_type.nbytes + descs.v.block_type.nbytes)
            tma_load(descs.q, [batch, token, head // heads.k_group, 0], ready.index(stage), tiles.k.index(stage))
            tma_load(descs.do, [batch, token, head, 0], ready.index(stage), tiles.v.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _decay_partition(stages, inputs, decay_ptr, T, H, chunks, scale, PASSES: gl.constexpr):
    """Publish what each chunk's tokens are multiplied with when its stage is empty, and sum the segment's log decay."""
    STAGES: gl.constexpr = stages.writes.shape[0]
    TOKENS: gl.constexpr = stages.writes.shape[1]
    count = chunks.forth
    if PASSES == 2:
        count += chunks.back
    stage = 0
    phase = 1
    beyond = 0.0
    g, beta = load_decay_beta(inputs.g, inputs.beta, inputs.g_t, inputs.beta_t, _chunk(chunks, 0), count > 0, T, TOKENS)
    for i in range(count):
        g_next, beta_next = load_decay_beta(
            inputs.g, inputs.beta, inputs.g_t, inputs.beta_t, _chunk(chunks, i + 1), i + 1 < count, T, TOKENS
        )
        # the decay of the chunks that came before, which lie between this one and the segment's end, or its start
        total = gl.associative_scan(g, 0, add)
        decay = gl.sum(g, 0)
        if i == chunks.forth:
            beyond = decay * 0.0
        # forward in time with the decay to the segment's end, backward with that from its start
        write = gl.where(i < chunks.forth, gl.exp2(decay - total + beyond) * beta, gl.exp2(total + beyond) * scale)
        beyond += decay
        mbarrier.wait(stages.empty.index(stage), phase)
        stages.writes.index(stage).store(write)
        barrier()
        mbarrier.arrive(stages.decays_ready.index(stage), count=1)
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
    """Return the i-th chunk of both passes."""
    return chunks.first + gl.where(i < chunks.forth, chunks.forth - 1 - i, i - chunks.forth)


@gluon.jit
def _mma_partition(tiles, stages, end_ptr, H, chunks, KEYS: gl.constexpr, VALUES: gl.constexpr, PASSES: gl.constexpr):
    """Add up S^T = S^T + (V^T * write) K over the segment's chunks."""
    STAGES: gl.constexpr = tiles.k.shape[0]
    TOKENS: gl.constexpr = tiles.k.shape[2]
    K: gl.constexpr = tiles.k.shape[4]
    V: gl.constexpr = tiles.v.shape[4]
    dtype: gl.constexpr = tiles.k.dtype
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
    for pass_ in range(PASSES):
        state = gl.zeros([V, K], gl.float32, s_layout)
        count = gl.where(pass_ == 0, chunks.forth, chunks.back)
        written = gl.zeros([V, TOKENS], dtype, write_layout)
        if count > 0:
            written = _written(
                tiles.v, stages.writes, stages.tiles_ready, stages.decays_ready, stage, phase, write_layout
            )
        for i in range(count):
            state, written = warpgroup_mma_wait(0, deps=(state, written))
            state = warpgroup_mma(written, tiles.k.index(stage).reshape([TOKENS, K]), state, is_async=True)
            last = stage
            last_phase = phase
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            # while the product runs, without a branch, or the compiler gives away the registers that it reads; after
            # the last chunk that one again
            more = i + 1 < count
            ready_stage = gl.where(more, stage, last)
            ready_phase = gl.where(more, phase, last_phase)
            following = _written(
                tiles.v, stages.writes, stages.tiles_ready, stages.decays_ready, ready_stage, ready_phase, write_layout
            )
            state, written, following = warpgroup_mma_wait(0, deps=(state, written, following))
            written = following
            fence_async_shared()
            barrier()
            mbarrier.arrive(stages.empty.index(last), count=1)
        if PASSES == 1:
            store_segment_sum(end_ptr + segment_index(H, 1) * (K * V), state, dtype)
        else:
            place = pass_ * (gl.num_programs(0) * gl.num_programs(1)).to(gl.int64) + segment_index(H, 1)
            at = columns[None, :] * VALUES + rows[:, None]
            gl.store(end_ptr + place * (KEYS * VALUES) + at, state, mask=inside)


@gluon.jit
def _written(v_tiles, writes, tiles_ready, decays_ready, stage, phase, layout: gl.constexpr):
    """Wait for a chunk, and return its V^T * write, [V, TOKENS]."""
    V: gl.constexpr = v_tiles.shape[4]
    mbarrier.wait(tiles_ready.index(stage), phase)
    mbarrier.wait(decays_ready.index(stage), phase)
    vt = v_tiles.index(stage).reshape([v_tiles.shape[2], V]).permute((1, 0)).load(layout)
    write = writes.index(stage).load(gl.SliceLayout(0, layout))
    return (vt.to(gl.float32) * write[None, :]).to(v_tiles.dtype)
