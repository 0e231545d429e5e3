"""The warps of forward.py that multiply.

Products are transposed, so that the state S^T is a wgmma accumulator that is rounded in registers to be the next
product's operand:
    O^T = (S^T Q^T) * read + V^T (P^T * within);  S^T = decay S^T + (V^T * write) K.
A chunk's weighed V does not need the state: it is made ready while the chunk before it is multiplied. Nor do its scores
P^T * within, which other warps find (forward_scores.py).
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
from holdfast.kernels.lib.gluon.decay import CHUNK, READ_DECAY, VECTORS, WRITE_DECAY
from holdfast.kernels.lib.gluon.pdl import grid_dependency_wait
from holdfast.kernels.lib.gluon.reduce import warp_column_sums
from holdfast.kernels.lib.gluon.sequence import segment_index
from holdfast.kernels.lib.gluon.slice_sums import slice_sums_index, slice_sums_offset, slice_sums_stride
from holdfast.kernels.lib.gluon.split import opaque, round_to
from holdfast.kernels.lib.gluon.state import save_state
from holdfast.kernels.lib.gluon.tails import store_tail
from holdfast.kernels.matrix.state_passing.hopper.segment_entry import entering


@gluon.jit
def multiply(
    tiles,
    o_tiles,
    places,
    of_x,
    of_scores,
    o_desc,
    start_ptr,
    of_others,
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
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    TURNED: gl.constexpr,
    SAVE: gl.constexpr,
    SAVE_TURNED: gl.constexpr,
    ADDS: gl.constexpr,
    LEAVES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The products of every chunk, and the state from the first to the last."""
    q_tiles, k_tiles, v_tiles, x_tiles = tiles
    gates, decays, parts, loaded, gated, free = places
    p_tiles, scored, spent = of_scores
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = q_tiles.dtype
    warps: gl.constexpr = gl.num_warps()
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, K, 16])
    read_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    # a first state of 0 need not be saved
    FROM: gl.constexpr = 1 if start_ptr is None else 0
    x_loaded, x_free = of_x

    batch, first, length = place
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
    added_ptr, decay_ptr = of_others
    if added_ptr is None:
        corner = segment_index(H, 2) * (KEYS * VALUES)
    else:
        corner = gl.program_id(0).to(gl.int64) * (KEYS * VALUES)
    if TURNED:
        corner += slice_ * (V * KEYS)
        at = rows[:, None] * KEYS + columns[None, :]
    else:
        corner += slice_ * V
        at = columns[None, :] * VALUES + rows[:, None]
    if ADDS or LEAVES:
        sums_ptr += slice_sums_offset(place, H, V, o_ptr is not None)
        chunk_of_sums = slice_sums_stride(H, V)
    stage = 0
    phase = 0
    last = 0
    left = length - chunk0 * CHUNK
    # of the first chunk what does not need the state, as in the loop
    mbarrier.wait(loaded.index(0), 0, pred=count > 0)
    mbarrier.wait(gated.index(0), 0, pred=count > 0)
    mbarrier.wait(scored.index(0), 0, pred=count > 0)
    written = _written(v_tiles, gates, 0, read_layout, write_layout)
    if added_ptr is None:
        grid_dependency_wait()
    if start_ptr is None:
        state = gl.zeros([V, K], gl.float32, s_layout)
    else:
        state = gl.load(start_ptr + corner + at, mask=inside, other=outside)
    if added_ptr is not None:
        state = entering(state, added_ptr, decay_ptr, slice_ * V, H, s_layout)
    for i in range(count):
        chunk = chunk0 + i
        if SAVE > 0:  # noqa: SIM102 - known while compiling
            if (i % SAVE == 0) & (i >= FROM):
                entry = ((chunk - chunk0) // SAVE).to(gl.int64) * (KEYS * VALUES)
                save_state(saved_ptr + entry, state.to(dtype), slice_ * V, KEYS, VALUES, SAVE_TURNED, s_layout)
        if passing_ptr is not None:  # noqa: SIM102 - known while compiling
            if i == count - 1:
                gl.store(_own(before_ptr, rows, columns), state)
        onward = stage + 1
        turned = phase
        if onward == STAGES:
            onward = 0
            turned = phase ^ 1
        more = i + 1 < count
        # what is waited for before the next chunk's work: after the last chunk that one again, which is there. While
        # products run there must be no branch, or the compiler gives away the registers that they read
        there = gl.where(more, onward, stage)
        then = gl.where(more, turned, phase)
        turn = gl.where(more, i + 1, i)
        q = q_tiles.index(stage).reshape([CHUNK, K])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        v = v_tiles.index(stage).reshape([CHUNK, V])
        held = gl.convert_layout(state.to(dtype), read_layout)
        state = state * decays.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
        # rounded here, while no product runs: the compiler would move it past the next one and then wait for each
        held, state, written = warpgroup_mma_wait(0, deps=(held, state, written))
        state = warpgroup_mma(written, k, state, is_async=True)
        o = gl.zeros([V, CHUNK], gl.float32, o_layout)
        o = warpgroup_mma(held, q.permute((1, 0)), o, use_acc=False, is_async=True)
        read = gates.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, o_layout))
        if ADDS:
            earlier = gl.load(sums_ptr + chunk * chunk_of_sums + slice_sums_index(V, o_layout))
        if parts is not None:
            mbarrier.wait(x_loaded.index(stage), phase)
            x = x_tiles.index(stage).reshape([CHUNK, V]).permute((1, 0)).load(o_layout).to(gl.float32) * read[None, :]
            if not SAVE_TURNED:
                # rounded as the adjoint sweep adds it to its state, so that <S, dS> changes by exactly this
                x = round_to(x, dtype)
        state, written, o, held = warpgroup_mma_wait(0, deps=(state, written, o, held))
        if parts is not None:
            row = o * x
        o = o * read[None, :]
        if ADDS:
            o = o + earlier
        o = warpgroup_mma(v.permute((1, 0)), p_tiles.index(i & 1), o, is_async=True)
        if parts is not None:
            parts.index(stage).store(warp_column_sums(row, warps))
        # of the next chunk what does not need the state; after the last, of tiles that nobody needs
        mbarrier.wait(loaded.index(there), then)
        mbarrier.wait(gated.index(there), then)
        mbarrier.wait(scored.index(turn & 1), (turn >> 1) & 1)
        following = _written(v_tiles, gates, onward, read_layout, write_layout)
        o, state, written = warpgroup_mma_wait(0, deps=(o, state, following))
        slot = i & 1 if x_tiles is None else stage
        if LEAVES:
            gl.store(sums_ptr + chunk * chunk_of_sums + slice_sums_index(V, o_layout), o)
        else:
            o_tiles.index(slot).reshape([CHUNK, V]).permute((1, 0)).store(o.to(dtype))
        # one barrier: this chunk's tiles and scores are read, its output is there, the last has left
        fence_async_shared()
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(free.index(stage), count=1)
        mbarrier.arrive(spent.index(i & 1), count=1)
        if x_tiles is not None:
            mbarrier.arrive(x_free.index(last), count=1, pred=i > 0)
        if not LEAVES:
            if o_ptr is None:
                tma_store(o_desc, [batch, chunk * CHUNK, head, slice_ * V], o_tiles.index(slot))
            else:
                if left < CHUNK:
                    # the tile's other rows are the next sequence's
                    corner_of_o = o_ptr + (chunk * CHUNK).to(gl.int64) * (H * VALUES) + slice_ * V
                    store_tail(o_tiles.index(slot), corner_of_o, H * VALUES, left, VALUES - slice_ * V)
                else:
                    tma_store(o_desc, [batch, first + chunk * CHUNK, head, slice_ * V], o_tiles.index(slot))
        left -= CHUNK
        last = stage
        stage = onward
        phase = turned

    if passing_ptr is not None:  # noqa: SIM102 - known while compiling
        if count > 0:
            before = gl.load(_own(before_ptr, rows, columns))
            against = gl.load(against_ptr + corner + at, mask=inside, other=outside)
            passing_ptr += gl.program_id(1) * (gl.num_programs(0) * gl.num_programs(2)) + segment_index(H, 2)
            gl.store(passing_ptr, gl.sum(gl.sum(before * against, 1), 0))
    if end_ptr is not None:
        # addresses computed again: kept from the start, they would take as many registers as the state
        rows = opaque(rows)
        if TURNED:
            at = rows[:, None] * KEYS + columns[None, :]
        else:
            at = columns[None, :] * VALUES + rows[:, None]
        corner = gl.program_id(0).to(gl.int64) * (KEYS * VALUES) + slice_ * (V * KEYS if TURNED else V)
        if gl.program_id(2) == gl.num_programs(2) - 1:
            gl.store(end_ptr + corner + at, state, mask=inside)
    tma_store_wait(0)


@gluon.jit
def _own(ptr, rows, columns):
    """Places of this block's alone for a state [V, K], computed anew wherever they are asked for."""
    V: gl.constexpr = rows.shape[0]
    K: gl.constexpr = columns.shape[0]
    block = (gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)) * gl.num_programs(0) + gl.program_id(0)
    return ptr + block.to(gl.int64) * (V * K) + (opaque(rows)[:, None] * K + columns[None, :])


@gluon.jit
def _written(v_tiles, gates, stage, read_layout: gl.constexpr, write_layout: gl.constexpr):
    """A chunk's V^T * write, rounded."""
    V: gl.constexpr = v_tiles.shape[4]
    vt = v_tiles.index(stage).reshape([CHUNK, V]).permute((1, 0)).load(read_layout)
    write = gates.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, read_layout))
    return gl.convert_layout((vt.to(gl.float32) * write[None, :]).to(v_tiles.dtype), write_layout)
