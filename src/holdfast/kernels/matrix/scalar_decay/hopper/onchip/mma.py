"""The warps of kernel.py that multiply.

Products are transposed, as in hopper/forward_mma.py, and a chunk is half a segment, its queries in two parts:
    S^T = decay S^T + (V^T * write) K;  P^T = K Q^T;  O^T = (S^T Q^T) * read + V^T (P^T * within),
all from a state of zero. The state that enters the segment adds (S_in^T Q^T) * read to the outputs when it is there.
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
from holdfast.kernels.lib.gluon.split import opaque


@gluon.jit
def mma_partition(tiles, gates, signals, o_desc, states_desc, H, scale):
    """A segment's own state, its outputs from a state of zero, and what the state that enters it adds to them."""
    _, k_tiles, v_tiles, scores = tiles
    written, asked, gated, entered, added, taken, scored = signals
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    half: gl.constexpr = k_tiles.shape[2]
    dtype: gl.constexpr = k_tiles.dtype
    warps: gl.constexpr = gl.num_warps()
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, K, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    read_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    state_tiles = reinterpret(scores, dtype, [1, 1, K, V], states_desc.layout)

    mbarrier.wait(gated.index(0), 0)
    wholes = _wholes(gates)
    state = gl.zeros([V, K], gl.float32, s_layout)
    for i in gl.static_range(2):
        write = _writes(gates, wholes, i, gl.SliceLayout(0, write_layout))
        mbarrier.wait(written.index(i), 0)
        value = v_tiles.index(i).reshape([half, V]).permute((1, 0)).load(write_layout)
        value = (value.to(gl.float32) * write[None, :]).to(dtype)
        if i == 1:
            # of the second half's queries the state that the first half leaves
            held = gl.convert_layout(state.to(dtype), read_layout)
            state *= gl.exp2(wholes[2] + wholes[3])
            held, state = warpgroup_mma_wait(0, deps=(held, state))
        state, value = warpgroup_mma_wait(0, deps=(state, value))
        state = warpgroup_mma(value, k_tiles.index(i).reshape([half, K]), state, is_async=True)
        state, value = warpgroup_mma_wait(0, deps=(state, value))
    state_tiles.index(0).reshape([K, V]).permute((1, 0)).store(state.to(dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(added.index(0), count=1)

    # the second half first: its queries read the state that the first half leaves, whose registers are then free
    zero = gl.zeros([V, CHUNK], gl.float32, o_layout)
    mbarrier.wait(asked.index(2), 0)
    mbarrier.wait(asked.index(3), 0)
    o2 = warpgroup_mma(held, _queries(tiles, 2), zero, use_acc=False, is_async=True)
    o3 = warpgroup_mma(held, _queries(tiles, 3), zero, use_acc=False, is_async=True)
    p = _scores(tiles, 2)
    read2 = _reads(gates, scale, 2, 0.0, o_layout)
    read3 = _reads(gates, scale, 3, wholes[2], o_layout)
    o2, o3, held, p = warpgroup_mma_wait(0, deps=(o2, o3, held, p))
    o2 *= read2[None, :]
    o3 *= read3[None, :]
    weight = _weights(gates, wholes, scale, 2)
    mbarrier.wait(taken.index(0), 0)
    # a chunk's queries with its half's keys
    o2, p, weight = _turn(tiles, gates, wholes, asked, scale, o2, p, weight, 2, 3)
    o3, p, weight = _turn(tiles, gates, wholes, asked, scale, o3, p, weight, 3, 0)
    o0, p, weight = _turn(tiles, gates, wholes, asked, scale, zero, p, weight, 0, 1)
    _keep(scores.index(1), p * weight)
    o1 = warpgroup_mma_wait(0, deps=(_weighed(tiles, zero, 1),))
    barrier()
    mbarrier.arrive(scored.index(0), count=1)

    mbarrier.wait(entered.index(0), 0)
    outputs = (o0, o1, o2, o3)
    o_tiles = reinterpret(v_tiles, dtype, [4, 1, CHUNK, 1, V], o_desc.layout)
    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    before = 0.0
    onward = _read(tiles, state_tiles, 0, zero)
    for i in gl.static_range(4):
        read = _reads(gates, scale, i, before, o_layout)
        before += wholes[i]
        onward = warpgroup_mma_wait(0, deps=(onward,))
        o = outputs[i] + onward * read[None, :]
        o_tiles.index(i).reshape([CHUNK, V]).permute((1, 0)).store(o.to(dtype))
        # not before o is in memory: the compiler would keep both of its terms
        if i < 3:
            onward = _read(tiles, state_tiles, i + 1, zero)
        fence_async_shared()
        barrier()
        tma_store(o_desc, [batch, (gl.program_id(1) * 4 + i) * CHUNK, head, 0], o_tiles.index(i))
    tma_store_wait(0)


@gluon.jit
def _anew(i: gl.constexpr):
    """i, as a number unknown to the compiler, which would keep addresses that were made before in spilled registers."""
    # the grid has but one block along its last axis
    nothing = opaque(gl.program_id(2))
    return nothing + i


@gluon.jit
def _of(vector, i: gl.constexpr, size: gl.constexpr):
    """The i-th part of so many numbers of a vector in shared memory."""
    parts: gl.constexpr = vector.shape[0] // size
    return reinterpret(vector, gl.float32, [parts, size], gl.SwizzledSharedLayout(1, 1, 1, [0])).index(i)


@gluon.jit
def _wholes(gates):
    """Each chunk's log decay, as scalars."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    found = ()
    for i in gl.static_range(4):
        found += (gl.sum(_of(gates[1], i, 1).load(layout), 0),)
    return found


@gluon.jit
def _writes(gates, wholes, half: gl.constexpr, layout: gl.constexpr):
    """Of a half's tokens the decay to its end, times the strength."""
    totals, _, strengths = gates
    size: gl.constexpr = 2 * CHUNK
    token = gl.arange(0, size, layout)
    to_end = gl.where(token < CHUNK, wholes[2 * half] + wholes[2 * half + 1], wholes[2 * half + 1])
    write = gl.exp2(to_end - _of(totals, half, size).load(layout))
    if strengths is not None:
        write *= _of(strengths, half, size).load(layout)
    return write


@gluon.jit
def _reads(gates, scale, chunk: gl.constexpr, before, layout: gl.constexpr):
    """Of a chunk's queries the decay from some chunks before it on, whose own is given, times scale."""
    return gl.exp2(_of(gates[0], chunk, CHUNK).load(gl.SliceLayout(0, layout)) + before) * scale


@gluon.jit
def _weights(gates, wholes, scale, chunk: gl.constexpr):
    """What scores of a chunk's queries and its half's keys are multiplied with, [keys, queries]."""
    totals, _, strengths = gates
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CHUNK, 16])
    half: gl.constexpr = chunk // 2
    size: gl.constexpr = 2 * CHUNK
    key = gl.arange(0, size, gl.SliceLayout(1, layout))
    query = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    onward = -_of(totals, half, size).load(gl.SliceLayout(1, layout))
    if chunk % 2 == 1:
        # from the chunk before; with keys of the queries' own a difference of sums within it
        onward = gl.where(key < CHUNK, wholes[chunk - 1] + onward, onward)
    log = _of(totals, chunk, CHUNK).load(gl.SliceLayout(0, layout))[None, :] + onward[:, None]
    seen = key[:, None] <= (query + chunk % 2 * CHUNK)[None, :]
    weight = gl.exp2(gl.where(seen, log, float("-inf")))
    if strengths is None:
        weight *= scale
    else:
        weight *= (_of(strengths, half, size).load(gl.SliceLayout(1, layout)) * scale)[:, None]
    return weight


@gluon.jit
def _queries(tiles, chunk: gl.constexpr):
    """A chunk's Q^T."""
    q_tiles = tiles[0]
    return q_tiles.index(_anew(chunk)).reshape([CHUNK, q_tiles.shape[4]]).permute((1, 0))


@gluon.jit
def _read(tiles, states, chunk: gl.constexpr, zero):
    """Starts the product of the state that enters the segment and a chunk's queries."""
    K: gl.constexpr = states.shape[2]
    V: gl.constexpr = states.shape[3]
    state = states.index(_anew(0)).reshape([K, V]).permute((1, 0))
    return warpgroup_mma(state, _queries(tiles, chunk), zero, use_acc=False, is_async=True)


@gluon.jit
def _scores(tiles, chunk: gl.constexpr):
    """Starts the product of a half's keys and a chunk's queries."""
    _, k_tiles, _, _ = tiles
    K: gl.constexpr = k_tiles.shape[4]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, CHUNK, 16])
    p = gl.zeros([2 * CHUNK, CHUNK], gl.float32, layout)
    k = k_tiles.index(_anew(chunk // 2)).reshape([2 * CHUNK, K])
    return warpgroup_mma(k, _queries(tiles, chunk), p, use_acc=False, is_async=True)


@gluon.jit
def _turn(tiles, gates, wholes, asked, scale, o, p, weight, chunk: gl.constexpr, following: gl.constexpr):
    """Adds to o what a chunk's scores give, while those of the chunk that follows are taken."""
    mbarrier.wait(asked.index(following), 0)
    _keep(tiles[3].index(chunk % 2), p * weight)
    o = _weighed(tiles, o, chunk)
    p = _scores(tiles, following)
    weight = _weights(gates, wholes, scale, following)
    return warpgroup_mma_wait(0, deps=(o, p, weight))


@gluon.jit
def _keep(tile, p):
    """Leaves weighed scores where the next product finds them."""
    tile.store(p.to(tile.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def _weighed(tiles, o, chunk: gl.constexpr):
    """Starts the product of a half's values and a chunk's weighed scores, added to o."""
    _, _, v_tiles, scores = tiles
    v = v_tiles.index(_anew(chunk // 2)).reshape([2 * CHUNK, v_tiles.shape[4]])
    return warpgroup_mma(v.permute((1, 0)), scores.index(_anew(chunk % 2)), o, is_async=True)
