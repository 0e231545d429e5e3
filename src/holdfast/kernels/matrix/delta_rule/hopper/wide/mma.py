"""The warps of kernel.py that carry states. Tiles are [v's column, token or key].

In each chunk, forward in time, with r a token's decay from its chunk's start and w that to its chunk's end,

    E^T = (V^T - (S^T K^T) * r) * beta;  U^T = E^T + E^T A^T;
    O^T = (S^T Q^T) * r + U^T (K Q^T * causal decay);  S^T = decay S^T + (U^T * w) K;

and backward, with dS the state's gradient,

    dU^T = (dS^T K^T) * w + dO^T (Q K^T * causal decay);  Y^T = dU^T + dU^T A;
    dS^T = decay dS^T + (dO^T * r) Q - (Y^T * r * beta) K.
"""

from typing import Any, NamedTuple

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


class Saved(NamedTuple):
    """The state's tile in shared memory, [1, 1, 64, K]; a descriptor of where it is saved, or None; the first slot."""

    tile: Any
    desc: Any
    slot: Any


@gluon.jit
def _load_state(s_tile, start_ptr, KEYS: gl.constexpr, VALUES: gl.constexpr, layout: gl.constexpr):
    """Return the first state, and store it rounded in its tile."""
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
def _store_state(state, end_ptr, KEYS: gl.constexpr, VALUES: gl.constexpr, layout: gl.constexpr):
    """Store the last state."""
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
def mma_partition(tiles, o_tile, saved, stages, output, states, chunks, sizes):
    """Carry the state of 64 columns of v over the chunks, and multiply what each chunk's outputs take."""
    KEYS: gl.constexpr = sizes.KEYS
    VALUES: gl.constexpr = sizes.VALUES
    STAGES: gl.constexpr = sizes.STAGES
    H, packed, s_tile, decays = chunks.H, chunks.packed, saved.tile, stages.decays
    K: gl.constexpr = tiles.k.shape[4]
    V: gl.constexpr = tiles.v.shape[4]
    dtype: gl.constexpr = tiles.k.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    s_operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)

    head = gl.program_id(0) % H
    column = gl.program_id(1) * V
    state = _load_state(s_tile, states.start, KEYS, VALUES, s_layout)
    s = s_tile.reshape([V, K])
    stage = 0
    phase = 0
    for i in range(chunks.count):
        mbarrier.wait(stages.tiles_ready.index(stage), phase)
        k = tiles.k.index(stage).reshape([CHUNK, K])
        a = tiles.a.index(stage).reshape([CHUNK, CHUNK])
        predicted = gl.zeros([V, CHUNK], gl.float32, layout)
        predicted = warpgroup_mma(s, k.permute((1, 0)), predicted, use_acc=False, is_async=True)
        if saved.desc is not None:
            tma_store(saved.desc, [saved.slot + i, head, column, 0], s_tile)
        mbarrier.wait(stages.decays_ready.index(stage), phase)
        vt = tiles.v.index(stage).reshape([CHUNK, V]).permute((1, 0)).load(operand)
        read = decays.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, layout))
        beta = decays.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, layout))
        predicted = warpgroup_mma_wait(0, deps=(predicted,))
        e = (gl.convert_layout(vt.to(gl.float32), layout) - predicted * read[None, :]) * beta[None, :]
        e_rounded = gl.convert_layout(e.to(dtype), operand)
        e, e_rounded = warpgroup_mma_wait(0, deps=(e, e_rounded))
        u = warpgroup_mma(e_rounded, a.permute((1, 0)), e, is_async=True)
        if o_tile is not None:
            q = tiles.q.index(stage).reshape([CHUNK, K])
            o = gl.zeros([V, CHUNK], gl.float32, layout)
            o = warpgroup_mma(s, q.permute((1, 0)), o, use_acc=False, is_async=True)
        state = state * stages.chunk_decay.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
        if o_tile is not None:
            u, e_rounded = warpgroup_mma_wait(1, deps=(u, e_rounded))
        else:
            u, e_rounded = warpgroup_mma_wait(0, deps=(u, e_rounded))
        write = decays.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, layout))
        u_write = gl.convert_layout((u * write[None, :]).to(dtype), s_operand)
        if o_tile is not None:
            mbarrier.wait(stages.scores_ready.index(stage), phase)
            p = tiles.scores.index(stage).reshape([CHUNK, CHUNK])
            o, state, u_write = warpgroup_mma_wait(0, deps=(o, state, u_write))
            o = o * (decays.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, layout)) * chunks.scale)[None, :]
            ut = gl.convert_layout(u.to(dtype), operand)
            o, ut, state, u_write = warpgroup_mma_wait(0, deps=(o, ut, state, u_write))
            o = warpgroup_mma(ut, p, o, is_async=True)
            state = warpgroup_mma(u_write, k, state, is_async=True)
            o, ut, state, u_write = warpgroup_mma_wait(0, deps=(o, ut, state, u_write))
        else:
            state, u_write = warpgroup_mma_wait(0, deps=(state, u_write))
            state = warpgroup_mma(u_write, k, state, is_async=True)
            state, u_write = warpgroup_mma_wait(0, deps=(state, u_write))
        # one barrier for three: this chunk's tiles and the state's are read, what was sent to memory has left
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(stages.stage_empty.index(stage), count=1)
        s.store(state.to(dtype))
        if o_tile is not None:
            o_tile.reshape([CHUNK, V]).permute((1, 0)).store(o.to(dtype))
        fence_async_shared()
        barrier()
        if o_tile is not None:
            batch, token = chunk_coords(packed, chunks.first + i, H)
            # what ends in another sequence is stored after all others
            if packed is None or packed.end >= (chunks.first + i + 1) * CHUNK:
                tma_store(output.desc, [batch, token, head, column], o_tile)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    if o_tile is not None and packed is not None:
        shift, end = packed.shift, packed.end
        left = end % CHUNK
        if left > 0:
            # the tile's other rows are the next sequence's
            corner = output.ptr + (((shift + end - left).to(gl.int64) * H + head) * VALUES + column)
            store_tail(o_tile, corner, H * VALUES, left, VALUES - column)
    _store_state(state, states.end, KEYS, VALUES, s_layout)
    tma_store_wait(0)


@gluon.jit
def dstate_partition(tiles, saved, stages, states, chunks, sizes):
    """Carry the gradient of the state, 64 columns of v of it, from the last chunk to the first."""
    KEYS: gl.constexpr = sizes.KEYS
    VALUES: gl.constexpr = sizes.VALUES
    STAGES: gl.constexpr = sizes.STAGES
    H, s_tile, decays = chunks.H, saved.tile, stages.decays
    K: gl.constexpr = tiles.k.shape[4]
    V: gl.constexpr = tiles.v.shape[4]
    dtype: gl.constexpr = tiles.k.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    s_operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)

    head = gl.program_id(0) % H
    column = gl.program_id(1) * V
    state = _load_state(s_tile, states.start, KEYS, VALUES, s_layout)
    s = s_tile.reshape([V, K])
    stage = 0
    phase = 0
    for i in range(chunks.count):
        mbarrier.wait(stages.tiles_ready.index(stage), phase)
        q = tiles.q.index(stage).reshape([CHUNK, K])
        k = tiles.k.index(stage).reshape([CHUNK, K])
        a = tiles.a.index(stage).reshape([CHUNK, CHUNK])
        p = tiles.scores.index(stage).reshape([CHUNK, CHUNK])
        du = gl.zeros([V, CHUNK], gl.float32, layout)
        du = warpgroup_mma(s, k.permute((1, 0)), du, use_acc=False, is_async=True)
        tma_store(saved.desc, [saved.slot + chunks.count - 1 - i, head, column, 0], s_tile)
        mbarrier.wait(stages.decays_ready.index(stage), phase)
        do_t = tiles.v.index(stage).reshape([CHUNK, V]).permute((1, 0)).load(operand)
        write = decays.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, layout))
        read = decays.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, operand)) * chunks.scale
        do_read = gl.convert_layout((do_t.to(gl.float32) * read[None, :]).to(dtype), s_operand)
        # waits for nothing: newer assemblers would wait for du before they touch the last chunk's product
        du, state = warpgroup_mma_wait(1, deps=(du, state))
        state = state * stages.chunk_decay.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
        mbarrier.wait(stages.scores_ready.index(stage), phase)
        du = warpgroup_mma_wait(0, deps=(du,))
        du = du * write[None, :]
        du, do_t, state, do_read = warpgroup_mma_wait(0, deps=(du, do_t, state, do_read))
        du = warpgroup_mma(do_t, p.permute((1, 0)), du, is_async=True)
        state = warpgroup_mma(do_read, q, state, is_async=True)
        du, do_t = warpgroup_mma_wait(1, deps=(du, do_t))
        du_rounded = gl.convert_layout(du.to(dtype), operand)
        state, do_read, du, du_rounded = warpgroup_mma_wait(0, deps=(state, do_read, du, du_rounded))
        y = warpgroup_mma(du_rounded, a, du, is_async=True)
        weight = decays.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, layout))
        weight *= decays.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, layout))
        y, du_rounded = warpgroup_mma_wait(0, deps=(y, du_rounded))
        y_weighted = gl.convert_layout((y * -weight[None, :]).to(dtype), s_operand)
        state, y_weighted = warpgroup_mma_wait(0, deps=(state, y_weighted))
        state = warpgroup_mma(y_weighted, k, state, is_async=True)
        state, y_weighted = warpgroup_mma_wait(0, deps=(state, y_weighted))
        # one barrier for two: this chunk's tiles are read, and the state's, which has left for memory
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(stages.stage_empty.index(stage), count=1)
        s.store(state.to(dtype))
        fence_async_shared()
        barrier()
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    _store_state(state, states.end, KEYS, VALUES, s_layout)
    tma_store_wait(0)
