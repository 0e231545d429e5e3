"""The mma partition of mLSTM's forward kernel on Hopper. In each chunk, with scores as [earlier, later]:

    P = (K Q^T) * causal decay * beta * scale;  O^T = ((S^T Q^T) * read + V^T P) / d
    S^T = decay S^T + (V^T * write) K,
d = max(|norm|, exp(-m)) + eps, whose inverse the normaliser partition finds from the sums of P over earlier tokens.
"""

from typing import Any, NamedTuple

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
from holdfast.kernels.lib.gluon.decay import BETA, CHUNK, READ_DECAY, VECTORS, WRITE_DECAY, causal_decay
from holdfast.kernels.lib.gluon.reduce import warp_column_sums
from holdfast.kernels.lib.gluon.sequence import segment_index
from holdfast.kernels.lib.gluon.slice_sums import slice_sums_index, slice_sums_offset, slice_sums_stride
from holdfast.kernels.lib.gluon.split import opaque

from .normalizer import to_half


class Tiles(NamedTuple):
    """q, k and v: descriptors, or a ring of tiles [stages, 1, 64, 1, columns] in shared memory."""

    q: Any
    k: Any
    v: Any


class Stages(NamedTuple):
    """A ring of stages: decay vectors [stages * VECTORS, 64], chunk decays [stages, 1] and the stages' barriers."""

    decay_vectors: gl.shared_memory_descriptor
    chunk_decays: gl.shared_memory_descriptor
    tiles_ready: gl.shared_memory_descriptor
    decay_ready: gl.shared_memory_descriptor
    stage_empty: gl.shared_memory_descriptor


class Division(NamedTuple):
    """What the mma partition exchanges with the normaliser partition: score_sums [4, 64] for inv_norms [64]."""

    score_sums: gl.shared_memory_descriptor
    inv_norms: gl.shared_memory_descriptor
    score_sums_ready: gl.shared_memory_descriptor
    inv_norms_ready: gl.shared_memory_descriptor


class StateIO(NamedTuple):
    """The states before and after, and the sums of the outputs of the slices of K."""

    initial: gl.tensor
    final: gl.tensor
    sums: gl.tensor


@aggregate
class Sizes:
    """Tokens, heads and chunks of a sequence; columns of k and v; what is done with sums of slices of K."""

    T: gl.tensor
    H: gl.tensor
    count: gl.tensor
    KEYS: gl.constexpr
    VALUES: gl.constexpr
    ADDS: gl.constexpr
    LEAVES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, T, H, count, KEYS, VALUES, ADDS, LEAVES):
        self.T = T
        self.H = H
        self.count = count
        self.KEYS = gl.constexpr(KEYS)
        self.VALUES = gl.constexpr(VALUES)
        self.ADDS = gl.constexpr(ADDS)
        self.LEAVES = gl.constexpr(LEAVES)


@gluon.jit
def mma_partition(tiles, o_tile, stages, division, o_desc, states, sizes):
    """Multiply each chunk's tiles, and carry the state from the first chunk to the last."""
    q_tiles, k_tiles, v_tiles = tiles
    decay_vectors, chunk_decays, tiles_ready, decay_ready, stage_empty = stages
    score_sums, inv_norms, score_sums_ready, inv_norms_ready = division
    initial_ptr, final_ptr, sums_ptr = states
    T, H, count = sizes.T, sizes.H, sizes.count
    KEYS: gl.constexpr = sizes.KEYS
    VALUES: gl.constexpr = sizes.VALUES
    ADDS: gl.constexpr = sizes.ADDS
    LEAVES: gl.constexpr = sizes.LEAVES
    STAGES: gl.constexpr = k_tiles.shape[0]
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = q_tiles.dtype
    warps: gl.constexpr = gl.num_warps()
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, K, 16])
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, CHUNK // (warps // 4), 16])
    read_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    p_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))

    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    rows = gl.arange(0, V, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, K, gl.SliceLayout(0, s_layout))
    if KEYS == K and VALUES == V:
        inside: gl.constexpr = None
        outside: gl.constexpr = None
    else:
        inside = (rows < VALUES)[:, None] & (columns < KEYS)[None, :]
        outside: gl.constexpr = 0.0
    corner = segment_index(H, 1) * (KEYS * (VALUES + 1))
    if initial_ptr is None:
        state = gl.zeros([V, K], gl.float32, s_layout)
    else:
        at = columns[None, :] * (VALUES + 1) + rows[:, None]
        state = gl.load(initial_ptr + corner + at, mask=inside, other=outside)
    if ADDS or LEAVES:
        sums_ptr += slice_sums_offset((batch, 0, T), H, V, False)
        chunk_of_sums = slice_sums_stride(H, V)

    stage = 0
    phase = 0
    last = 0
    for i in range(count):
        mbarrier.wait(tiles_ready.index(stage), phase)
        q = q_tiles.index(stage).reshape([CHUNK, K])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        v = v_tiles.index(stage).reshape([CHUNK, V])
        state_operand = gl.convert_layout(state.to(dtype), read_layout)
        # rounded here, while no product runs: the compiler would move the rounding past the next one, and wait for each
        state_operand = warpgroup_mma_wait(0, deps=(state_operand,))
        p = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        p = warpgroup_mma(k, q.permute((1, 0)), p, use_acc=False, is_async=True)
        o = gl.zeros([V, CHUNK], gl.float32, o_layout)
        o = warpgroup_mma(state_operand, q.permute((1, 0)), o, use_acc=False, is_async=True)

        mbarrier.wait(decay_ready.index(stage), phase)
        write = decay_vectors.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, read_layout))
        decay = chunk_decays.index(stage).load(gl.SliceLayout(1, s_layout))
        weight = causal_decay(decay_vectors, stage, p_layout, False)
        weight *= decay_vectors.index(stage * VECTORS + BETA).load(gl.SliceLayout(1, p_layout))[:, None]
        vt = v.permute((1, 0)).load(read_layout)
        written = gl.convert_layout(to_half(vt.to(gl.float32) * write[None, :], dtype), write_layout)

        p = warpgroup_mma_wait(1, deps=(p,))
        p = p * weight
        p_tile.store(p.to(dtype))
        score_sums.store(warp_column_sums(p, 4))
        # one barrier for three: p is there, the last output has left its tile, the last chunk's tiles are read
        fence_async_shared()
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(score_sums_ready, count=1)
        mbarrier.arrive(stage_empty.index(last), count=1, pred=i > 0)
        last = stage
        read = decay_vectors.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, o_layout))
        state = state * decay[:, None]
        if ADDS:
            earlier = gl.load(sums_ptr + i * chunk_of_sums + slice_sums_index(V, o_layout))
        o, state_operand = warpgroup_mma_wait(0, deps=(o, state_operand))
        o = o * read[None, :]
        if ADDS:
            o = o + earlier
        o, state, vt, written = warpgroup_mma_wait(0, deps=(o, state, vt, written))
        o = warpgroup_mma(vt, p_tile, o, is_async=True)
        state = warpgroup_mma(written, k, state, is_async=True)
        mbarrier.wait(inv_norms_ready, i & 1)
        inv_norm = inv_norms.load(gl.SliceLayout(0, o_layout))
        o, vt = warpgroup_mma_wait(1, deps=(o, vt))
        if LEAVES:
            gl.store(sums_ptr + i * chunk_of_sums + slice_sums_index(V, o_layout), o)
        else:
            o_tile.reshape([CHUNK, V]).permute((1, 0)).store((o * inv_norm[None, :]).to(dtype))
        fence_async_shared()
        barrier()
        if not LEAVES:
            tma_store(o_desc, [batch, i * CHUNK, head, 0], o_tile)
        state, written = warpgroup_mma_wait(0, deps=(state, written))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    barrier()
    mbarrier.arrive(stage_empty.index(last), count=1, pred=count > 0)
    # addresses computed again: kept from the start, they would take as many registers as the state
    rows = opaque(rows)
    at = columns[None, :] * (VALUES + 1) + rows[:, None]
    gl.store(final_ptr + corner + at, state, mask=inside)
    tma_store_wait(0)
