"""The forward pass on Hopper: the additive recurrence with scalar decay, its state in registers throughout.

    S = exp(g_t) S + beta_t k_t v_t^T;  o_t = scale S^T q_t.

A block owns a (batch, head, slice of v's columns) and goes over chunks of 64 tokens. Its partitions: load, one warp,
copies tiles in by TMA; decay, one, sums log decays (lib/gluon/decay.py); score, four, multiplies q and k of a chunk
(forward_scores.py); mma, four or eight, does the rest (forward_mma.py).
"""
# ruff: noqa: RUF005 - Gluon does not compile starred expressions

from typing import NamedTuple

from holdfast.kernels.lib.gluon.compat import fence_async_shared, gl, gluon, mbarrier, tma_load
from holdfast.kernels.lib.gluon.decay import CHUNK, VECTORS, clamp_log2_decay, prefetch_decay_beta, publish_decays
from holdfast.kernels.lib.gluon.pdl import grid_dependency_wait, launch_dependents
from holdfast.kernels.lib.gluon.reduce import reduce_warp_partials
from holdfast.kernels.lib.gluon.sequence import sequence_bounds, token_offset

from .forward_mma import Options, mma_partition
from .forward_scores import score_partition

# chunks whose g and beta are on their way: under load that takes as long as several chunks
_IN_FLIGHT = gl.constexpr(4)


class Operands(NamedTuple):
    """Of q, k, v and x each: descriptors, or their stages in shared memory; x is None without sums for dg."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    x: gl.tensor


class StageBuffers(NamedTuple):
    """Per stage: decays [VECTORS, CHUNK], the chunk's decay, row sums [warps, CHUNK] or None, and three barriers.

    tiles_ready: load -> score and mma. decays_ready: decay -> score and mma. empty: score and mma -> load and decay.
    """

    decays: gl.shared_memory_descriptor
    chunk_decay: gl.shared_memory_descriptor
    row_sums: gl.shared_memory_descriptor
    tiles_ready: gl.shared_memory_descriptor
    decays_ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Barriers(NamedTuple):
    """ready: filled. empty: may be filled again. Of the stages of x: load -> mma -> load."""

    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class ScoreBuffers(NamedTuple):
    """Two tiles of scores, [source, reader] of a chunk each; ready: score -> mma, empty: mma -> score."""

    tiles: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class MmaBuffers(NamedTuple):
    """Shared memory of the mma partition."""

    tiles: Operands
    o_tiles: gl.shared_memory_descriptor
    stages: StageBuffers
    x: Barriers
    scores: ScoreBuffers


class SegmentSums(NamedTuple):
    """What each segment but the last adds to the state, and log2 of its decay; None of a sequence in one."""

    states: gl.tensor
    decay: gl.tensor


class MmaTensors(NamedTuple):
    """What the mma partition reads and writes in memory: scalar_decay_fwd's arguments of these names."""

    o_desc: gl.tensor
    start: gl.tensor
    added: SegmentSums
    end: gl.tensor
    saved: gl.tensor
    against: gl.tensor
    before: gl.tensor
    passing: gl.tensor
    o: gl.tensor
    sums: gl.tensor


class Heads(NamedTuple):
    """Heads of v, and how many of them share one of q and k, of v and of x."""

    H: gl.tensor
    qk_group: gl.tensor
    v_group: gl.tensor
    x_group: gl.tensor


class DecayInputs(NamedTuple):
    """g and beta where the sequence's first token is, or None, and their strides from token to token."""

    g: gl.tensor
    beta: gl.tensor
    g_t: gl.tensor
    beta_t: gl.tensor


class Chunks(NamedTuple):
    """A block's chunks: the first, and how many there are."""

    first: gl.tensor
    count: gl.tensor


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
        "segment_chunks",
    ],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "row_ptr", "log_ptr", "cu_ptr", "passing_ptr", "decay_ptr"],
)
def scalar_decay_fwd(
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
    segment_chunks,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    SAVE: gl.constexpr,
    SLICE: gl.constexpr,
    UNROUNDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (B * H, slices of v, segments of `segment_chunks`), or (N * H, slices, 1) of packed sequences.

    read by load, through descriptors of blocks [1, 64, 1, columns]:
        q, k    [B, T, H / qk_group, KEYS]
        v       [B, T, H / v_group, VALUES]
        x       [B, T, H / x_group, VALUES]: what the part of the output that comes from earlier chunks is multiplied
                with and summed over columns, into row; or None
    read by decay:
        g, beta [B, T, H], by strides, or None
    read by mma:
        start   float32 [B, segments, H, KEYS, VALUES], or [..., VALUES, KEYS] if TRANSPOSED: the state before each
                segment; with added, [B, 1, ...] that before the first alone; or None for 0
        added   [B, segments - 1, H, slices * V * K]: what each segment but the last adds to the state, as
                store_segment_sum writes it; or None
        decay   float32 [B, segments - 1, H]: log2 of these segments' chunk_decay; or None
        against as start: what the state before each segment's last chunk is multiplied with and summed, into passing;
                or None
    written by mma:
        o       [B, T, H, VALUES], by a descriptor as above, and by a pointer, for chunks that end in another sequence,
                with cu
        end     [B, H, ...] as start: the state after the last token; or None
        saved   [B, H, segments * ceil(segment_chunks / SAVE), VALUES, KEYS], or [..., KEYS, VALUES] if only k's tile is
                128 wide, rounded: the state before every SAVE-th chunk of each segment; or None. A first state of 0 is
                not written. Packed: [H, T // (64 SAVE) + N, ...], sequence n's from first // (64 SAVE) + n on.
        before  float32 [blocks, V, K], whole tiles: room for the state that `against` meets
        passing float32 [slices, B, segments, H], or None
        sums    float32: of a state in slices of K, what the outputs of those before add up to
                (lib/gluon/slice_sums.py); or None. SLICE of 2 or 3: it is added to the output. Of 1 or 3: the output
                is left there, and o is not written.
    written by decay, with x:
        row     float32 [slices, B, H, T]
        log     float32 [B, H, T]: log chunk_decay to base 2, those of a head beside each other for scalar_decay_bwd
    cu: [N + 1], where packed sequences begin and end, or None.
    UNROUNDED: of sequences of one chunk, the first state and x are not rounded where row is summed.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    # the wider side of a saved state comes first, as scalar_decay_bwd takes it
    SAVE_TRANSPOSED: gl.constexpr = K > 64 and VALUES <= 64
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
    decays = gl.allocate_shared_memory(gl.float32, [STAGES * VECTORS, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    chunk_decay = gl.allocate_shared_memory(gl.float32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if row_ptr is None:
        row_sums: gl.constexpr = None
    else:
        row_sums = gl.allocate_shared_memory(
            gl.float32, [STAGES, gl.num_warps(), CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
    tiles_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    decays_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    score_tiles = gl.allocate_shared_memory(dtype, [2, CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    score_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    score_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(x_ready.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=1)
        mbarrier.init(tiles_ready.index(i), count=1)
        mbarrier.init(decays_ready.index(i), count=1)
        # by those that score and those that multiply
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(score_ready.index(i), count=1)
        mbarrier.init(score_empty.index(i), count=1)
    fence_async_shared()

    launch_dependents()
    tokens = sequence_bounds(cu_ptr, T, H)
    if g_ptr is not None:
        g_ptr += token_offset(H, tokens.batch, tokens.first, g_b, g_t, g_h)
    if beta_ptr is not None:
        beta_ptr += token_offset(H, tokens.batch, tokens.first, beta_b, beta_t, beta_h)
    if row_ptr is not None:
        heads = gl.num_programs(0) if cu_ptr is None else H
        row = gl.program_id(1).to(gl.int64) * heads + tokens.batch * H + gl.program_id(0) % H
        row_ptr += row * T + tokens.first
        log_ptr += (tokens.batch * H + gl.program_id(0) % H).to(gl.int64) * T + tokens.first
    if SAVE > 0:
        if cu_ptr is None:
            entry = gl.program_id(0).to(gl.int64) * gl.num_programs(2) + gl.program_id(2)
            entry *= gl.cdiv(segment_chunks, SAVE)
        else:
            entries = T // (CHUNK * SAVE) + gl.num_programs(0) // H
            entry = (
                (gl.program_id(0) % H).to(gl.int64) * entries + tokens.first // (CHUNK * SAVE) + gl.program_id(0) // H
            )
        saved_ptr += entry * (KEYS * VALUES)
    if o_ptr is not None:
        o_ptr += (tokens.first.to(gl.int64) * H + gl.program_id(0) % H) * VALUES
    chunk0 = gl.program_id(2) * segment_chunks
    count = gl.minimum(segment_chunks, gl.cdiv(tokens.length, CHUNK) - chunk0)
    tiles = Operands(q=q_tiles, k=k_tiles, v=v_tiles, x=x_tiles)
    descs = Operands(q=q_desc, k=k_desc, v=v_desc, x=x_desc)
    stages = StageBuffers(
        decays=decays,
        chunk_decay=chunk_decay,
        row_sums=row_sums,
        tiles_ready=tiles_ready,
        decays_ready=decays_ready,
        empty=empty,
    )
    x_barriers = Barriers(ready=x_ready, empty=x_empty)
    scores = ScoreBuffers(tiles=score_tiles, ready=score_ready, empty=score_empty)
    chunks = Chunks(first=chunk0, count=count)
    left = tokens.length - chunk0 * CHUNK
    # registers of a thread that scores: as many as others of eight warps with `before` leave
    scoring: gl.constexpr = 88 if passing_ptr is not None and V == 128 else 104
    gl.warp_specialize(
        [
            (
                mma_partition,
                (
                    MmaBuffers(tiles=tiles, o_tiles=o_tiles, stages=stages, x=x_barriers, scores=scores),
                    MmaTensors(
                        o_desc=o_desc,
                        start=start_ptr,
                        added=SegmentSums(states=added_ptr, decay=decay_ptr),
                        end=end_ptr,
                        saved=saved_ptr,
                        against=against_ptr,
                        before=before_ptr,
                        passing=passing_ptr,
                        o=o_ptr,
                        sums=sums_ptr,
                    ),
                    tokens,
                    H,
                    chunks,
                    Options(
                        KEYS, VALUES, TRANSPOSED, SAVE, SAVE_TRANSPOSED, SLICE // 2 == 1, SLICE % 2 == 1, UNROUNDED
                    ),
                ),
            ),
            # first, since wgmma wants its four warps at a multiple of four
            (
                score_partition,
                (tiles, stages, scores, left, count, scale, beta_ptr is not None, cu_ptr is not None),
            ),
            (
                _load_partition,
                (
                    tiles,
                    descs,
                    tiles_ready,
                    empty,
                    x_barriers,
                    tokens,
                    Heads(H=H, qk_group=qk_group, v_group=v_group, x_group=x_group),
                    chunks,
                ),
            ),
            (
                _decay_partition,
                (
                    stages,
                    DecayInputs(g=g_ptr, beta=beta_ptr, g_t=g_t, beta_t=beta_t),
                    row_ptr,
                    log_ptr,
                    tokens.length,
                    chunks,
                    scale,
                ),
            ),
        ],
        [4, 1, 1],
        [scoring, 40, 40],
    )


@gluon.jit
def _load_partition(tiles, descs, ready, empty, x_barriers, tokens, heads, chunks):
    """Keep a stage's worth of chunks of q, k, v and x on their way into shared memory."""
    STAGES: gl.constexpr = tiles.q.shape[0]
    V: gl.constexpr = descs.v.block_type.shape[3]
    width: gl.constexpr = 2 * descs.q.block_type.nbytes + descs.v.block_type.nbytes
    batch = tokens.batch
    head = gl.program_id(0) % heads.H
    column = gl.program_id(1) * V
    stage = 0
    phase = 1
    for i in range(chunks.count):
        mbarrier.wait(empty.index(stage), phase)
        token = tokens.first + (chunks.first + i) * CHUNK
        mbarrier.expect(ready.index(stage), width)
        tma_load(descs.k, [batch, token, head // heads.qk_group, 0], ready.index(stage), tiles.k.index(stage))
        tma_load(descs.q, [batch, token, head // heads.qk_group, 0], ready.index(stage), tiles.q.index(stage))
        tma_load(descs.v, [batch, token, head // heads.v_group, column], ready.index(stage), tiles.v.index(stage))
        if descs.x is not None:
            mbarrier.wait(x_barriers.empty.index(stage), phase)
            mbarrier.expect(x_barriers.ready.index(stage), descs.x.block_type.nbytes)
            corner = [batch, token, head // heads.x_group, column]
            tma_load(descs.x, corner, x_barriers.ready.index(stage), tiles.x.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _decay_partition(stages, inputs, row_ptr, log_ptr, length, chunks, scale):
    """Publish each chunk's decays when its stage is empty, and add up the row sums of the chunk that left it."""
    STAGES: gl.constexpr = stages.decays.shape[0] // VECTORS
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    stage = 0
    phase = 1
    loads = ()
    for j in gl.static_range(_IN_FLIGHT):
        loads = loads + (
            prefetch_decay_beta(
                inputs.g, inputs.beta, inputs.g_t, inputs.beta_t, chunks.first + j, j < chunks.count, length
            ),
        )
    drain: gl.constexpr = 0 if row_ptr is None else STAGES
    for begin in range(0, chunks.count + drain, _IN_FLIGHT):
        later = ()
        for j in gl.static_range(_IN_FLIGHT):
            i = begin + j
            g, beta = loads[j]
            mbarrier.wait(stages.empty.index(stage), phase, pred=i < chunks.count + drain)
            if row_ptr is not None:  # noqa: SIM102 - known while compiling
                if (i >= STAGES) & (i < chunks.count + drain):
                    row = reduce_warp_partials(stages.row_sums, stage)
                    tokens = (chunks.first + i - STAGES) * CHUNK + gl.arange(0, CHUNK, layout)
                    gl.store(row_ptr + tokens, row, mask=tokens < length)
            if i < chunks.count:
                # another name: a branch may not change a variable's dtype
                log = clamp_log2_decay(g.to(gl.float32))
                publish_decays(
                    stages.decays,
                    stages.chunk_decay,
                    stages.decays_ready,
                    stage,
                    log,
                    beta.to(gl.float32),
                    scale,
                    False,
                )
                if log_ptr is not None:
                    grid_dependency_wait()
                    tokens = (chunks.first + i) * CHUNK + gl.arange(0, CHUNK, layout)
                    gl.store(log_ptr + tokens, log, mask=(tokens < length) & (gl.program_id(1) == 0))
            prefetched = i + _IN_FLIGHT
            later = later + (
                prefetch_decay_beta(
                    inputs.g,
                    inputs.beta,
                    inputs.g_t,
                    inputs.beta_t,
                    chunks.first + prefetched,
                    prefetched < chunks.count,
                    length,
                ),
            )
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        loads = later
