"""The mma partition of kernel.py.

Products are transposed, as in hopper/forward_mma.py, and a chunk is half a segment, its queries in two parts:
    S^T = decay S^T + (V^T * write) K;  P^T = K Q^T;  O^T = (S^T Q^T) * read + V^T (P^T * causal decay),
all from a state of zero. The state that enters the segment adds (S_in^T Q^T) * read to the outputs when it is there.
"""

from typing import NamedTuple

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
from holdfast.kernels.lib.gluon.split import opaque


class ChunkInWork(NamedTuple):
    """A chunk's outputs so far, its scores and what they are multiplied with."""

    o: gl.tensor
    p: gl.tensor
    weight: gl.tensor


@gluon.jit
def mma_partition(tiles, decays, barriers, o_desc, states_desc, H, scale):
    """Find a segment's own state, its outputs from a state of zero, and what the state that enters it adds to them."""
    K: gl.constexpr = tiles.k.shape[4]
    V: gl.constexpr = tiles.v.shape[4]
    half: gl.constexpr = tiles.k.shape[2]
    dtype: gl.constexpr = tiles.k.dtype
    warps: gl.constexpr = gl.num_warps()
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, K, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    read_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    state_tiles = reinterpret(tiles.scores, dtype, [1, 1, K, V], states_desc.layout)

    mbarrier.wait(barriers.decays_ready.index(0), 0)
    log_decays = _chunk_log_decays(decays)
    state = gl.zeros([V, K], gl.float32, s_layout)
    for i in gl.static_range(2):
        write = _write_weights(decays, log_decays, i, gl.SliceLayout(0, write_layout))
        mbarrier.wait(barriers.kv_ready.index(i), 0)
        value = tiles.v.index(i).reshape([half, V]).permute((1, 0)).load(write_layout)
        value = (value.to(gl.float32) * write[None, :]).to(dtype)
        if i == 1:
            # of the second half's queries the state that the first half leaves
            rounded_state = gl.convert_layout(state.to(dtype), read_layout)
            state *= gl.exp2(log_decays[2] + log_decays[3])
            rounded_state, state = warpgroup_mma_wait(0, deps=(rounded_state, state))
        state, value = warpgroup_mma_wait(0, deps=(state, value))
        state = warpgroup_mma(value, tiles.k.index(i).reshape([half, K]), state, is_async=True)
        state, value = warpgroup_mma_wait(0, deps=(state, value))
    state_tiles.index(0).reshape([K, V]).permute((1, 0)).store(state.to(dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(barriers.sum_ready.index(0), count=1)

    # the second half first: its queries read the state that the first half leaves, whose registers are then free
    zero = gl.zeros([V, CHUNK], gl.float32, o_layout)
    mbarrier.wait(barriers.q_ready.index(2), 0)
    mbarrier.wait(barriers.q_ready.index(3), 0)
    o2 = warpgroup_mma(rounded_state, _queries(tiles, 2), zero, use_acc=False, is_async=True)
    o3 = warpgroup_mma(rounded_state, _queries(tiles, 3), zero, use_acc=False, is_async=True)
    p = _score_chunk(tiles, 2)
    read2 = _read_weights(decays, scale, 2, 0.0, o_layout)
    read3 = _read_weights(decays, scale, 3, log_decays[2], o_layout)
    o2, o3, rounded_state, p = warpgroup_mma_wait(0, deps=(o2, o3, rounded_state, p))
    o2 *= read2[None, :]
    o3 *= read3[None, :]
    weight = _score_weights(decays, log_decays, scale, 2)
    mbarrier.wait(barriers.sum_empty.index(0), 0)
    # a chunk's queries with its half's keys
    o2, p, weight = _add_chunk(
        tiles, decays, log_decays, barriers.q_ready, scale, ChunkInWork(o=o2, p=p, weight=weight), 2, 3
    )
    o3, p, weight = _add_chunk(
        tiles, decays, log_decays, barriers.q_ready, scale, ChunkInWork(o=o3, p=p, weight=weight), 3, 0
    )
    o0, p, weight = _add_chunk(
        tiles, decays, log_decays, barriers.q_ready, scale, ChunkInWork(o=zero, p=p, weight=weight), 0, 1
    )
    _store_scores(tiles.scores.index(1), p * weight)
    o1 = warpgroup_mma_wait(0, deps=(_add_values(tiles, zero, 1),))
    barrier()
    mbarrier.arrive(barriers.scores_empty.index(0), count=1)

    mbarrier.wait(barriers.entry_ready.index(0), 0)
    outputs = (o0, o1, o2, o3)
    o_tiles = reinterpret(tiles.v, dtype, [4, 1, CHUNK, 1, V], o_desc.layout)
    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    before = 0.0
    from_entry = _read_entry(tiles, state_tiles, 0, zero)
    for i in gl.static_range(4):
        read = _read_weights(decays, scale, i, before, o_layout)
        before += log_decays[i]
        from_entry = warpgroup_mma_wait(0, deps=(from_entry,))
        o = outputs[i] + from_entry * read[None, :]
        o_tiles.index(i).reshape([CHUNK, V]).permute((1, 0)).store(o.to(dtype))
        # not before o is in memory: the compiler would keep both of its terms
        if i < 3:
            from_entry = _read_entry(tiles, state_tiles, i + 1, zero)
        fence_async_shared()
        barrier()
        tma_store(o_desc, [batch, (gl.program_id(1) * 4 + i) * CHUNK, head, 0], o_tiles.index(i))
    tma_store_wait(0)


@gluon.jit
def _anew(i: gl.constexpr):
    """Return i as a number opaque to the compiler, which would keep addresses made before in spilled registers."""
    # the grid has but one block along its last axis
    nothing = opaque(gl.program_id(2))
    return nothing + i


@gluon.jit
def _part(vector, i: gl.constexpr, size: gl.constexpr):
    """Return the i-th part of `size` numbers of a vector in shared memory."""
    parts: gl.constexpr = vector.shape[0] // size
    return reinterpret(vector, gl.float32, [parts, size], gl.SwizzledSharedLayout(1, 1, 1, [0])).index(i)


@gluon.jit
def _chunk_log_decays(decays):
    """Return each chunk's log decay, as scalars."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    found = ()
    for i in gl.static_range(4):
        found += (gl.sum(_part(decays.chunk, i, 1).load(layout), 0),)
    return found


@gluon.jit
def _write_weights(decays, log_decays, half: gl.constexpr, layout: gl.constexpr):
    """Return the decay from each of a half's tokens to its end, times beta."""
    size: gl.constexpr = 2 * CHUNK
    token = gl.arange(0, size, layout)
    to_end = gl.where(token < CHUNK, log_decays[2 * half] + log_decays[2 * half + 1], log_decays[2 * half + 1])
    write = gl.exp2(to_end - _part(decays.cumsum, half, size).load(layout))
    if decays.beta is not None:
        write *= _part(decays.beta, half, size).load(layout)
    return write


@gluon.jit
def _read_weights(decays, scale, chunk: gl.constexpr, before, layout: gl.constexpr):
    """Return the decay to each of a chunk's queries from `before`, the log decay of chunks ahead of it, times scale."""
    return gl.exp2(_part(decays.cumsum, chunk, CHUNK).load(gl.SliceLayout(0, layout)) + before) * scale


@gluon.jit
def _score_weights(decays, log_decays, scale, chunk: gl.constexpr):
    """Return what scores of a chunk's queries and its half's keys are multiplied with, [keys, queries]."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CHUNK, 16])
    half: gl.constexpr = chunk // 2
    size: gl.constexpr = 2 * CHUNK
    key = gl.arange(0, size, gl.SliceLayout(1, layout))
    query = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    onward = -_part(decays.cumsum, half, size).load(gl.SliceLayout(1, layout))
    if chunk % 2 == 1:
        # from the chunk before; with keys of the queries' own a difference of sums within it
        onward = gl.where(key < CHUNK, log_decays[chunk - 1] + onward, onward)
    log = _part(decays.cumsum, chunk, CHUNK).load(gl.SliceLayout(0, layout))[None, :] + onward[:, None]
    seen = key[:, None] <= (query + chunk % 2 * CHUNK)[None, :]
    weight = gl.exp2(gl.where(seen, log, float("-inf")))
    if decays.beta is None:
        weight *= scale
    else:
        weight *= (_part(decays.beta, half, size).load(gl.SliceLayout(1, layout)) * scale)[:, None]
    return weight


@gluon.jit
def _queries(tiles, chunk: gl.constexpr):
    """Return a chunk's Q^T."""
    return tiles.q.index(_anew(chunk)).reshape([CHUNK, tiles.q.shape[4]]).permute((1, 0))


@gluon.jit
def _read_entry(tiles, states, chunk: gl.constexpr, zero):
    """Start the product of the state that enters the segment and a chunk's queries."""
    K: gl.constexpr = states.shape[2]
    V: gl.constexpr = states.shape[3]
    state = states.index(_anew(0)).reshape([K, V]).permute((1, 0))
    return warpgroup_mma(state, _queries(tiles, chunk), zero, use_acc=False, is_async=True)


@gluon.jit
def _score_chunk(tiles, chunk: gl.constexpr):
    """Start the product of a half's keys and a chunk's queries."""
    K: gl.constexpr = tiles.k.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CHUNK, 16])
    p = gl.zeros([2 * CHUNK, CHUNK], gl.float32, layout)
    k = tiles.k.index(_anew(chunk // 2)).reshape([2 * CHUNK, K])
    return warpgroup_mma(k, _queries(tiles, chunk), p, use_acc=False, is_async=True)


@gluon.jit
def _add_chunk(tiles, decays, log_decays, q_ready, scale, work, chunk: gl.constexpr, following: gl.constexpr):
    """Add to o what a chunk's scores give, while those of the chunk that follows are taken."""
    mbarrier.wait(q_ready.index(following), 0)
    _store_scores(tiles.scores.index(chunk % 2), work.p * work.weight)
    o = _add_values(tiles, work.o, chunk)
    p = _score_chunk(tiles, following)
    weight = _score_weights(decays, log_decays, scale, following)
    return warpgroup_mma_wait(0, deps=(o, p, weight))


@gluon.jit
def _store_scores(tile, p):
    """Leave scores, decayed, where the next product finds them."""
    tile.store(p.to(tile.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def _add_values(tiles, o, chunk: gl.constexpr):
    """Start the product of a half's values and a chunk's scores, added to o."""
    v = tiles.v.index(_anew(chunk // 2)).reshape([2 * CHUNK, tiles.v.shape[4]])
    return warpgroup_mma(v.permute((1, 0)), tiles.scores.index(_anew(chunk % 2)), o, is_async=True)
