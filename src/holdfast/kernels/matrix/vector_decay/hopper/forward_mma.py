"""The warps of vector decay's sweep that multiply: outputs of each chunk, and the state in their registers.

Products are transposed, so that the state S^T is a wgmma accumulator that is rounded in registers to be the next one's
operand.
"""

from holdfast.kernels.lib.gluon.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from holdfast.kernels.lib.gluon.decay import CHUNK
from holdfast.kernels.lib.gluon.sequence import packed_sequence
from holdfast.kernels.lib.gluon.slice_sums import slice_sums_index, slice_sums_offset, slice_sums_stride
from holdfast.kernels.lib.gluon.split import opaque
from holdfast.kernels.lib.gluon.tails import store_tail

from .forward_loads import PAIR, STAGES, fetch_keys, fetch_values, token_of
from .forward_scores import scores_of
from .token_layout import HALF


@gluon.jit
def _store_last(tile, o_ptr, cu_ptr, T, H, VALUES: gl.constexpr):
    """Writes what of a sequence's last chunk is its own."""
    # found again: what is kept for this takes registers from the loop
    heads = opaque(H)
    _, shift, end = packed_sequence(cu_ptr, gl.program_id(0) // heads, T)
    token = (end - 1) // CHUNK * CHUNK
    corner = o_ptr + ((token + shift).to(gl.int64) * heads + gl.program_id(0) % heads) * VALUES
    store_tail(tile, corner, heads * VALUES, end - token, VALUES)


@gluon.jit
def _half_of(state, half: gl.constexpr):
    """64 of its columns."""
    if state.shape[1] == HALF:
        return state
    else:
        first, second = gl.split(gl.permute(gl.reshape(state, [state.shape[0], 2, HALF]), (0, 2, 1)))
        return first if half == 0 else second


@gluon.jit
def multiply(
    keys,
    values,
    met_tiles,
    p_tile,
    near_tile,
    decays,
    strengths,
    weighed,
    met_read,
    o_desc,
    kept_desc,
    start_ptr,
    end_ptr,
    o_ptr,
    cu_ptr,
    sums_ptr,
    T,
    H,
    walk,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    REVERSE: gl.constexpr,
    ADDS: gl.constexpr,
    LEAVES: gl.constexpr,
):
    """The products of every chunk, and the state from the first to the last."""
    _, k_desc, qk_tiles, qk_come, _ = keys
    v_desc, v_tiles, v_come, _ = values
    batch, count, aside = walk
    head = gl.program_id(0) % H
    K: gl.constexpr = qk_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = qk_tiles.dtype
    HALVES: gl.constexpr = K // HALF
    SLABS: gl.constexpr = V // HALF
    # of 64 x 64 values in those of a chunk's queries and keys
    PLACES: gl.constexpr = 2 * HALVES
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    warps: gl.constexpr = gl.num_warps()
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, K, 16])
    v_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    read_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)

    rows = gl.arange(0, V, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, K, gl.SliceLayout(0, s_layout))
    inside = (rows < VALUES)[:, None] & (columns < KEYS)[None, :]
    corner = gl.program_id(0).to(gl.int64) * (KEYS * VALUES)
    if start_ptr is None:
        state = gl.zeros([V, K], gl.float32, s_layout)
    else:
        state = gl.load(start_ptr + corner + columns[None, :] * VALUES + rows[:, None], mask=inside, other=0.0)
    if ADDS or LEAVES:
        place = (batch, 0, T) if aside is None else (batch, aside[0], T)
        sums_ptr += slice_sums_offset(place, H, V, aside is not None)
        chunk_of_sums = slice_sums_stride(H, V)

    stage = 0
    phase = 0
    for i in range(count):
        turn = i % PAIR
        token = token_of(i, walk, REVERSE)
        # where queries and keys have been read
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        if kept_desc is not None:
            states = reinterpret(qk_tiles, dtype, [STAGES * PLACES // SLABS, V, HALF], flat)
            for half in gl.static_range(HALVES):
                states.index(free * (PLACES // SLABS) + half).store(_half_of(state, half).to(dtype))
            fence_async_shared()
            barrier()
            slabs = reinterpret(qk_tiles, dtype, [STAGES * PLACES, 1, CHUNK, 1, HALF], kept_desc.layout)
            for slab in gl.static_range(HALVES * SLABS):
                row = token if aside is None else token - aside[1]
                tma_store(kept_desc, [batch, row, head, slab * HALF], slabs.index(free * PLACES + slab))
            # the compiler would keep what is rounded for the product below
            state = warpgroup_mma_wait(0, deps=(state,))
        # half of the state at a time, for want of registers, and rounded while no product runs: the compiler would move
        # that past the next one and then wait for each
        held = gl.convert_layout(_half_of(state, 0).to(dtype), read_layout)
        held = warpgroup_mma_wait(0, deps=(held,))
        mbarrier.wait(weighed.index(stage), phase)
        k = qk_tiles.index(2 * stage).reshape([CHUNK, K])
        q = qk_tiles.index(2 * stage + 1).reshape([CHUNK, K])
        scores_of(met_tiles, opaque(0), near_tile, strengths, turn, scale, p_tile)
        fence_async_shared()
        mbarrier.expect(qk_come.index(free), 2 * k_desc.block_type.nbytes, pred=i + STAGES - 1 < count)
        mbarrier.expect(v_come.index(turn ^ 1), v_desc.block_type.nbytes, pred=i + 1 < count)
        # what was sent to memory has left its place
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(met_read, count=1)
        fetch_keys(keys, walk, i + STAGES - 1, free, REVERSE)
        fetch_values(values, walk, i + 1, turn ^ 1, REVERSE)
        o = gl.zeros([V, CHUNK], gl.float32, o_layout)
        for half in gl.static_range(HALVES):
            if half > 0:
                held = gl.convert_layout(_half_of(state, half).to(dtype), read_layout)
            o, held = warpgroup_mma_wait(0, deps=(o, held))
            read = (k if REVERSE else q).slice(half * HALF, HALF, 1)
            o = warpgroup_mma(held, read.permute((1, 0)), o, use_acc=half > 0, is_async=True)
        mbarrier.wait(v_come.index(turn), (i // PAIR) % 2)
        o, held = warpgroup_mma_wait(0, deps=(o, held))
        v = v_tiles.index(turn)
        vt = v.reshape([CHUNK, V]).permute((1, 0)).load(v_layout)
        written = gl.convert_layout(vt, read_layout)
        by_key = reinterpret(decays, gl.float32, [PAIR, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        decay = by_key.index(i % PAIR).load(gl.SliceLayout(0, s_layout))[None, :]
        o, written = warpgroup_mma_wait(0, deps=(o, written))
        if ADDS:
            o = o + gl.load(sums_ptr + i * chunk_of_sums + slice_sums_index(V, o_layout))
        vt = gl.convert_layout(written, v_layout)
        o = warpgroup_mma(vt, p_tile if REVERSE else p_tile.permute((1, 0)), o, is_async=True)
        state = warpgroup_mma(written, q if REVERSE else k, state * decay, is_async=True)
        o = warpgroup_mma_wait(1, deps=(o,))
        # in the place of values that all have read
        barrier()
        if LEAVES:
            gl.store(sums_ptr + i * chunk_of_sums + slice_sums_index(V, o_layout), o)
        else:
            v.reshape([CHUNK, V]).permute((1, 0)).store(o.to(dtype))
        fence_async_shared()
        barrier()
        if aside is None and not LEAVES:
            tma_store(o_desc, [batch, token, head, 0], v)
        state, written = warpgroup_mma_wait(0, deps=(state, written))
        if aside is not None and not LEAVES:
            # no branch while a product runs
            if i > 0 if REVERSE else i + 1 < count:
                tma_store(o_desc, [batch, token, head, 0], v)
            elif REVERSE:
                _store_last(v, o_ptr, cu_ptr, T, H, VALUES)
        if kept_desc is not None:
            # the next state takes the place of what all have read
            barrier()
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    if aside is not None and not REVERSE and not LEAVES:  # noqa: SIM102 - known while compiling
        if count > 0:
            _store_last(v_tiles.index((count - 1) % PAIR), o_ptr, cu_ptr, T, H, VALUES)
    if end_ptr is not None:
        # addresses computed again: kept from the start, they would take as many registers as the state
        rows = opaque(rows)
        gl.store(end_ptr + corner + columns[None, :] * VALUES + rows[:, None], state, mask=inside)
    tma_store_wait(0)
