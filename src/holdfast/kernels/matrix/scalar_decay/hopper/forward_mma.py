"""The mma partition of forward.py.

Products are transposed, so that the state S^T is a wgmma accumulator that is rounded in registers to be the next
product's operand:
    O^T = (S^T Q^T) * read + V^T (P^T * causal decay);  S^T = decay S^T + (V^T * write) K.
A chunk's V^T * write does not need the state: it is made ready while the chunk before it is multiplied. Nor do its
scores P^T * causal decay, which the score partition finds (forward_scores.py).
"""

from holdfast.kernels.lib.gluon.compat import (
    aggregate,
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
from holdfast.kernels.lib.gluon.decay import CHUNK, READ_DECAY, VECTORS, WRITE_DECAY
from holdfast.kernels.lib.gluon.pdl import grid_dependency_wait
from holdfast.kernels.lib.gluon.reduce import warp_column_sums
from holdfast.kernels.lib.gluon.sequence import segment_index
from holdfast.kernels.lib.gluon.slice_sums import slice_sums_index, slice_sums_offset, slice_sums_stride
from holdfast.kernels.lib.gluon.split import opaque, round_to
from holdfast.kernels.lib.gluon.state import save_state
from holdfast.kernels.lib.gluon.tails import store_tail
from holdfast.kernels.matrix.state_passing.hopper.segment_entry import segment_initial_state


@aggregate
class Options:
    """What the mma partition is compiled for.

    KEYS, VALUES: columns of k and of v. TRANSPOSED: boundary states are [V, K]. SAVE: chunks from one saved state to
    the next, or 0. SAVE_TRANSPOSED: saved states are [K, V]. ADDS, LEAVES: outputs come from `sums`, or go there.
    UNROUNDED: the first state is read in two parts, and x is not rounded for the row sums; sequences have one chunk.
    """

    KEYS: gl.constexpr
    VALUES: gl.constexpr
    TRANSPOSED: gl.constexpr
    SAVE: gl.constexpr
    SAVE_TRANSPOSED: gl.constexpr
    ADDS: gl.constexpr
    LEAVES: gl.constexpr
    UNROUNDED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, KEYS, VALUES, TRANSPOSED, SAVE, SAVE_TRANSPOSED, ADDS, LEAVES, UNROUNDED):
        self.KEYS = gl.constexpr(KEYS)
        self.VALUES = gl.constexpr(VALUES)
        self.TRANSPOSED = gl.constexpr(TRANSPOSED)
        self.SAVE = gl.constexpr(SAVE)
        self.SAVE_TRANSPOSED = gl.constexpr(SAVE_TRANSPOSED)
        self.ADDS = gl.constexpr(ADDS)
        self.LEAVES = gl.constexpr(LEAVES)
        self.UNROUNDED = gl.constexpr(UNROUNDED)


@gluon.jit
def mma_partition(buffers, tensors, tokens, H, chunks, options):
    """Multiply every chunk, and carry the state from the first to the last."""
    tiles = buffers.tiles
    stages = buffers.stages
    scores = buffers.scores
    KEYS: gl.constexpr = options.KEYS
    VALUES: gl.constexpr = options.VALUES
    SAVE: gl.constexpr = options.SAVE
    STAGES: gl.constexpr = tiles.q.shape[0]
    K: gl.constexpr = tiles.k.shape[4]
    V: gl.constexpr = tiles.v.shape[4]
    dtype: gl.constexpr = tiles.q.dtype
    warps: gl.constexpr = gl.num_warps()
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, K, 16])
    read_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    # a first state of 0 need not be saved
    FROM: gl.constexpr = 1 if tensors.start is None else 0

    slice_ = gl.program_id(1)
    head = gl.program_id(0) % H
    rows = gl.arange(0, V, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, K, gl.SliceLayout(0, s_layout))
    if KEYS == K and VALUES % V == 0:
        inside: gl.constexpr = None
        outside: gl.constexpr = None
    else:
        inside = (slice_ * V + rows < VALUES)[:, None] & (columns < KEYS)[None, :]
        outside: gl.constexpr = 0.0
    # this block's part of the states before and after the segment
    if tensors.added.states is None:
        corner = segment_index(H, 2) * (KEYS * VALUES)
    else:
        corner = gl.program_id(0).to(gl.int64) * (KEYS * VALUES)
    if options.TRANSPOSED:
        corner += slice_ * (V * KEYS)
        at = rows[:, None] * KEYS + columns[None, :]
    else:
        corner += slice_ * V
        at = columns[None, :] * VALUES + rows[:, None]
    if options.ADDS or options.LEAVES:
        sums_ptr = tensors.sums + slice_sums_offset(tokens, H, V, tensors.o is not None)
        chunk_of_sums = slice_sums_stride(H, V)
    stage = 0
    phase = 0
    last = 0
    left = tokens.length - chunks.first * CHUNK
    # of the first chunk what does not need the state, as in the loop
    mbarrier.wait(stages.tiles_ready.index(0), 0, pred=chunks.count > 0)
    mbarrier.wait(stages.decays_ready.index(0), 0, pred=chunks.count > 0)
    mbarrier.wait(scores.ready.index(0), 0, pred=chunks.count > 0)
    written = _written(tiles.v, stages.decays, 0, read_layout, write_layout)
    if tensors.added.states is None:
        grid_dependency_wait()
    if tensors.start is None:
        state = gl.zeros([V, K], gl.float32, s_layout)
    else:
        state = gl.load(tensors.start + corner + at, mask=inside, other=outside)
    if tensors.added.states is not None:
        state = segment_initial_state(state, tensors.added.states, tensors.added.decay, slice_ * V, H, s_layout)
    for i in range(chunks.count):
        chunk = chunks.first + i
        if SAVE > 0:  # noqa: SIM102 - known while compiling
            if (i % SAVE == 0) & (i >= FROM):
                entry = ((chunk - chunks.first) // SAVE).to(gl.int64) * (KEYS * VALUES)
                save_state(
                    tensors.saved + entry, state.to(dtype), slice_ * V, KEYS, VALUES, options.SAVE_TRANSPOSED, s_layout
                )
        if tensors.passing is not None:  # noqa: SIM102 - known while compiling
            if i == chunks.count - 1:
                gl.store(_own(tensors.before, rows, columns), state)
        next_stage = stage + 1
        next_phase = phase
        if next_stage == STAGES:
            next_stage = 0
            next_phase = phase ^ 1
        more = i + 1 < chunks.count
        # what is waited for before the next chunk's work: after the last chunk that one again, which is there. While
        # products run there must be no branch, or the compiler gives away the registers that they read
        ready_stage = gl.where(more, next_stage, stage)
        ready_phase = gl.where(more, next_phase, phase)
        next_chunk = gl.where(more, i + 1, i)
        q = tiles.q.index(stage).reshape([CHUNK, K])
        k = tiles.k.index(stage).reshape([CHUNK, K])
        v = tiles.v.index(stage).reshape([CHUNK, V])
        o = gl.zeros([V, CHUNK], gl.float32, o_layout)
        if options.UNROUNDED:
            # all that is read may be of the first state, and what its rounding leaves may be all of dg
            low = gl.convert_layout((state - round_to(state, dtype)).to(dtype), read_layout)
            o, low = warpgroup_mma_wait(0, deps=(o, low))
            o = warpgroup_mma(low, q.permute((1, 0)), o, use_acc=False, is_async=True)
            o, low = warpgroup_mma_wait(0, deps=(o, low))
        rounded_state = gl.convert_layout(state.to(dtype), read_layout)
        state = state * stages.chunk_decay.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
        # rounded here, while no product runs: the compiler would move it past the next one and then wait for each
        rounded_state, state, written = warpgroup_mma_wait(0, deps=(rounded_state, state, written))
        state = warpgroup_mma(written, k, state, is_async=True)
        o = warpgroup_mma(rounded_state, q.permute((1, 0)), o, use_acc=options.UNROUNDED, is_async=True)
        read = stages.decays.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, o_layout))
        if options.ADDS:
            earlier = gl.load(sums_ptr + chunk * chunk_of_sums + slice_sums_index(V, o_layout))
        if stages.row_sums is not None:
            mbarrier.wait(buffers.x.ready.index(stage), phase)
            x = tiles.x.index(stage).reshape([CHUNK, V]).permute((1, 0)).load(o_layout).to(gl.float32) * read[None, :]
            if not (options.SAVE_TRANSPOSED or options.UNROUNDED):
                # rounded as scalar_decay_bwd adds it to dS, so that <S, dS> changes by exactly this
                x = round_to(x, dtype)
        state, written, o, rounded_state = warpgroup_mma_wait(0, deps=(state, written, o, rounded_state))
        if stages.row_sums is not None:
            row = o * x
        o = o * read[None, :]
        if options.ADDS:
            o = o + earlier
        o = warpgroup_mma(v.permute((1, 0)), scores.tiles.index(i & 1), o, is_async=True)
        if stages.row_sums is not None:
            stages.row_sums.index(stage).store(warp_column_sums(row, warps))
        # of the next chunk what does not need the state; after the last, of tiles that nobody needs
        mbarrier.wait(stages.tiles_ready.index(ready_stage), ready_phase)
        mbarrier.wait(stages.decays_ready.index(ready_stage), ready_phase)
        mbarrier.wait(scores.ready.index(next_chunk & 1), (next_chunk >> 1) & 1)
        following = _written(tiles.v, stages.decays, next_stage, read_layout, write_layout)
        o, state, written = warpgroup_mma_wait(0, deps=(o, state, following))
        slot = i & 1 if tiles.x is None else stage
        if options.LEAVES:
            gl.store(sums_ptr + chunk * chunk_of_sums + slice_sums_index(V, o_layout), o)
        else:
            buffers.o_tiles.index(slot).reshape([CHUNK, V]).permute((1, 0)).store(o.to(dtype))
        # one barrier: this chunk's tiles and scores are read, its output is there, the last has left
        fence_async_shared()
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(stages.empty.index(stage), count=1)
        mbarrier.arrive(scores.empty.index(i & 1), count=1)
        if tiles.x is not None:
            mbarrier.arrive(buffers.x.empty.index(last), count=1, pred=i > 0)
        if not options.LEAVES:
            if tensors.o is None:
                tma_store(tensors.o_desc, [tokens.batch, chunk * CHUNK, head, slice_ * V], buffers.o_tiles.index(slot))
            else:
                if left < CHUNK:
                    # the tile's other rows are the next sequence's
                    corner_of_o = tensors.o + (chunk * CHUNK).to(gl.int64) * (H * VALUES) + slice_ * V
                    store_tail(buffers.o_tiles.index(slot), corner_of_o, H * VALUES, left, VALUES - slice_ * V)
                else:
                    tma_store(
                        tensors.o_desc,
                        [tokens.batch, tokens.first + chunk * CHUNK, head, slice_ * V],
                        buffers.o_tiles.index(slot),
                    )
        left -= CHUNK
        last = stage
        stage = next_stage
        phase = next_phase

    if tensors.passing is not None:
        passing_ptr = tensors.passing
        if chunks.count > 0:
            before = gl.load(_own(tensors.before, rows, columns))
            against = gl.load(tensors.against + corner + at, mask=inside, other=outside)
            passing_ptr += gl.program_id(1) * (gl.num_programs(0) * gl.num_programs(2)) + segment_index(H, 2)
            gl.store(passing_ptr, gl.sum(gl.sum(before * against, 1), 0))
    if tensors.end is not None:
        # addresses computed again: kept from the start, they would take as many registers as the state
        rows = opaque(rows)
        if options.TRANSPOSED:
            at = rows[:, None] * KEYS + columns[None, :]
        else:
            at = columns[None, :] * VALUES + rows[:, None]
        corner = gl.program_id(0).to(gl.int64) * (KEYS * VALUES) + slice_ * (V * KEYS if options.TRANSPOSED else V)
        if gl.program_id(2) == gl.num_programs(2) - 1:
            gl.store(tensors.end + corner + at, state, mask=inside)
    tma_store_wait(0)


@gluon.jit
def _own(ptr, rows, columns):
    """Return this block's own places for a state [V, K], computed again at each call."""
    V: gl.constexpr = rows.shape[0]
    K: gl.constexpr = columns.shape[0]
    block = (gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)) * gl.num_programs(0) + gl.program_id(0)
    return ptr + block.to(gl.int64) * (V * K) + (opaque(rows)[:, None] * K + columns[None, :])


@gluon.jit
def _written(v_tiles, decays, stage, read_layout: gl.constexpr, write_layout: gl.constexpr):
    """Return a chunk's V^T * write, rounded."""
    V: gl.constexpr = v_tiles.shape[4]
    vt = v_tiles.index(stage).reshape([CHUNK, V]).permute((1, 0)).load(read_layout)
    write = decays.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, read_layout))
    return gl.convert_layout((vt.to(gl.float32) * write[None, :]).to(v_tiles.dtype), write_layout)
