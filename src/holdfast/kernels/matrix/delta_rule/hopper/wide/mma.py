"""The warps of kernel.py that multiply. In each chunk, forth in time, with [v's column, token or key]:

    E^T = (V^T - (S^T K^T) * read) * beta;  U^T = E^T + E^T A^T;
    O^T = (S^T Q^T) * read + U^T (K Q^T * within);  S^T = decay S^T + (U^T * write) K;

and back, with u the output's gradient, S that of the state:

    dU^T = (S^T K^T) * write + u^T (Q K^T * within);  Y^T = dU^T + dU^T A;
    S^T = decay S^T + (u^T * read) Q - (Y^T * read * beta) K.
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
from holdfast.kernels.lib.gluon.decay import BETA, CHUNK, READ_DECAY, VECTORS, WRITE_DECAY
from holdfast.kernels.lib.gluon.sequence import chunk_coords
from holdfast.kernels.lib.gluon.split import opaque
from holdfast.kernels.lib.gluon.tails import store_tail


@gluon.jit
def _enter(s_tile, start_ptr, KEYS: gl.constexpr, VALUES: gl.constexpr, layout: gl.constexpr):
    """The first state, which is left in its tile too."""
    V: gl.constexpr = s_tile.shape[2]
    K: gl.constexpr = s_tile.shape[3]
    if start_ptr is None:
        state = gl.zeros([V, K], gl.float32, layout)
    else:
        rows = gl.program_id(1) * V + gl.arange(0, V, gl.SliceLayout(1, layout))
        keys = gl.arange(0, K, gl.SliceLayout(0, layout))
        inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :]
        at = gl.program_id(0).to(gl.int64) * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
        state = gl.load(start_ptr + at, mask=inside, other=0.0)
    s_tile.reshape([V, K]).store(state.to(s_tile.dtype))
    fence_async_shared()
    barrier()
    return state


@gluon.jit
def _leave(state, end_ptr, KEYS: gl.constexpr, VALUES: gl.constexpr, layout: gl.constexpr):
    """Writes the last state."""
    V: gl.constexpr = state.shape[0]
    K: gl.constexpr = state.shape[1]
    if end_ptr is not None:
        # addresses computed here: kept from the start, they would take as many registers as the state
        rows = opaque(gl.program_id(1) * V + gl.arange(0, V, gl.SliceLayout(1, layout)))
        keys = gl.arange(0, K, gl.SliceLayout(0, layout))
        inside = (rows < VALUES)[:, None] & (keys < KEYS)[None, :]
        at = gl.program_id(0).to(gl.int64) * (KEYS * VALUES) + (keys[None, :] * VALUES + rows[:, None])
        gl.store(end_ptr + at, state, mask=inside)


@gluon.jit
def forth(
    tiles,
    o_tile,
    kept,
    places,
    out,
    ends,
    numbers,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The products of every chunk with 64 columns of v, and their state from the first to the last."""
    q_tiles, k_tiles, v_tiles, a_tiles, p_tiles = tiles
    s_tile, kept_desc, slot = kept
    gates, decays, loaded, gated, scored, free = places
    start_ptr, end_ptr = ends
    o_desc, o_ptr = out
    H, chunk0, count, scale, aside = numbers
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    s_operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)

    head = gl.program_id(0) % H
    column = gl.program_id(1) * V
    state = _enter(s_tile, start_ptr, KEYS, VALUES, s_layout)
    s = s_tile.reshape([V, K])
    stage = 0
    phase = 0
    for i in range(count):
        mbarrier.wait(loaded.index(stage), phase)
        k = k_tiles.index(stage).reshape([CHUNK, K])
        a = a_tiles.index(stage).reshape([CHUNK, CHUNK])
        known = gl.zeros([V, CHUNK], gl.float32, layout)
        known = warpgroup_mma(s, k.permute((1, 0)), known, use_acc=False, is_async=True)
        if kept_desc is not None:
            tma_store(kept_desc, [slot + i, head, column, 0], s_tile)
        mbarrier.wait(gated.index(stage), phase)
        vt = v_tiles.index(stage).reshape([CHUNK, V]).permute((1, 0)).load(operand)
        read = gates.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, layout))
        strength = gates.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, layout))
        known = warpgroup_mma_wait(0, deps=(known,))
        missed = (gl.convert_layout(vt.to(gl.float32), layout) - known * read[None, :]) * strength[None, :]
        new = gl.convert_layout(missed.to(dtype), operand)
        missed, new = warpgroup_mma_wait(0, deps=(missed, new))
        u = warpgroup_mma(new, a.permute((1, 0)), missed, is_async=True)
        if o_tile is not None:
            q = q_tiles.index(stage).reshape([CHUNK, K])
            o = gl.zeros([V, CHUNK], gl.float32, layout)
            o = warpgroup_mma(s, q.permute((1, 0)), o, use_acc=False, is_async=True)
        state = state * decays.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
        if o_tile is not None:
            u, new = warpgroup_mma_wait(1, deps=(u, new))
        else:
            u, new = warpgroup_mma_wait(0, deps=(u, new))
        write = gates.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, layout))
        written = gl.convert_layout((u * write[None, :]).to(dtype), s_operand)
        if o_tile is not None:
            mbarrier.wait(scored.index(stage), phase)
            p = p_tiles.index(stage).reshape([CHUNK, CHUNK])
            o, state, written = warpgroup_mma_wait(0, deps=(o, state, written))
            o = o * (gates.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, layout)) * scale)[None, :]
            ut = gl.convert_layout(u.to(dtype), operand)
            o, ut, state, written = warpgroup_mma_wait(0, deps=(o, ut, state, written))
            o = warpgroup_mma(ut, p, o, is_async=True)
            state = warpgroup_mma(written, k, state, is_async=True)
            o, ut, state, written = warpgroup_mma_wait(0, deps=(o, ut, state, written))
        else:
            state, written = warpgroup_mma_wait(0, deps=(state, written))
            state = warpgroup_mma(written, k, state, is_async=True)
            state, written = warpgroup_mma_wait(0, deps=(state, written))
        # one barrier for three: this chunk's tiles and the state's are read, what was sent to memory has left
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(free.index(stage), count=1)
        s.store(state.to(dtype))
        if o_tile is not None:
            o_tile.reshape([CHUNK, V]).permute((1, 0)).store(o.to(dtype))
        fence_async_shared()
        barrier()
        if o_tile is not None:
            batch, token = chunk_coords(aside, chunk0 + i, H)
            # what ends in another sequence is written after all others
            if aside is None or aside[1] >= (chunk0 + i + 1) * CHUNK:
                tma_store(o_desc, [batch, token, head, column], o_tile)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    if o_tile is not None and aside is not None:
        shift, end = aside
        left = end % CHUNK
        if left > 0:
            # the tile's other rows are the next sequence's
            corner = o_ptr + (((shift + end - left).to(gl.int64) * H + head) * VALUES + column)
            store_tail(o_tile, corner, H * VALUES, left, VALUES - column)
    _leave(state, end_ptr, KEYS, VALUES, s_layout)
    tma_store_wait(0)


@gluon.jit
def back(
    tiles,
    kept,
    places,
    ends,
    numbers,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The gradient of the state, 64 columns of v of it, from the last chunk to the first."""
    q_tiles, k_tiles, u_tiles, a_tiles, p_tiles = tiles
    s_tile, kept_desc, slot = kept
    gates, decays, loaded, gated, scored, free = places
    start_ptr, end_ptr = ends
    H, _, count, scale, _ = numbers
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = u_tiles.shape[4]
    dtype: gl.constexpr = k_tiles.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    s_operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)

    head = gl.program_id(0) % H
    column = gl.program_id(1) * V
    state = _enter(s_tile, start_ptr, KEYS, VALUES, s_layout)
    s = s_tile.reshape([V, K])
    stage = 0
    phase = 0
    for i in range(count):
        mbarrier.wait(loaded.index(stage), phase)
        q = q_tiles.index(stage).reshape([CHUNK, K])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        a = a_tiles.index(stage).reshape([CHUNK, CHUNK])
        p = p_tiles.index(stage).reshape([CHUNK, CHUNK])
        du = gl.zeros([V, CHUNK], gl.float32, layout)
        du = warpgroup_mma(s, k.permute((1, 0)), du, use_acc=False, is_async=True)
        tma_store(kept_desc, [slot + count - 1 - i, head, column, 0], s_tile)
        mbarrier.wait(gated.index(stage), phase)
        ut = u_tiles.index(stage).reshape([CHUNK, V]).permute((1, 0)).load(operand)
        write = gates.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, layout))
        by_token = gates.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, operand)) * scale
        reads = gl.convert_layout((ut.to(gl.float32) * by_token[None, :]).to(dtype), s_operand)
        state = state * decays.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
        mbarrier.wait(scored.index(stage), phase)
        du = warpgroup_mma_wait(0, deps=(du,))
        du = du * write[None, :]
        du, ut, state, reads = warpgroup_mma_wait(0, deps=(du, ut, state, reads))
        du = warpgroup_mma(ut, p.permute((1, 0)), du, is_async=True)
        state = warpgroup_mma(reads, q, state, is_async=True)
        du, ut = warpgroup_mma_wait(1, deps=(du, ut))
        new = gl.convert_layout(du.to(dtype), operand)
        state, reads, du, new = warpgroup_mma_wait(0, deps=(state, reads, du, new))
        y = warpgroup_mma(new, a, du, is_async=True)
        weight = gates.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, layout))
        weight *= gates.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, layout))
        y, new = warpgroup_mma_wait(0, deps=(y, new))
        taken = gl.convert_layout((y * -weight[None, :]).to(dtype), s_operand)
        state, taken = warpgroup_mma_wait(0, deps=(state, taken))
        state = warpgroup_mma(taken, k, state, is_async=True)
        state, taken = warpgroup_mma_wait(0, deps=(state, taken))
        # one barrier for two: this chunk's tiles are read, and the state's, which has left for memory
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(free.index(stage), count=1)
        s.store(state.to(dtype))
        fence_async_shared()
        barrier()
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    _leave(state, end_ptr, KEYS, VALUES, s_layout)
    tma_store_wait(0)
