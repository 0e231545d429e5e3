"""The load partition of kernel.py, four warps, which also exchange states with the head's other blocks."""

from typing import NamedTuple

from holdfast.kernels.lib.gluon.compat import (
    barrier,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
)
from holdfast.kernels.lib.gluon.decay import CHUNK, clamp_log2_decay
from holdfast.kernels.lib.gluon.grid_sync import (
    fence_generic_to_async,
    grid_arrive,
    grid_phase,
    grid_wait,
    tma_store_wait_written,
)
from holdfast.kernels.lib.gluon.reduce import add

# cells of a state that a block scans together, and segments whose states a thread has at once
_CELLS = gl.constexpr(1024)
_BATCH = gl.constexpr(8)


class StatePointers(NamedTuple):
    """What the scan over segments reads and writes."""

    states: gl.tensor
    start: gl.tensor
    end: gl.tensor
    decay: gl.tensor


@gluon.jit
def load_partition(tiles, decays, barriers, descs, pointers, sizes, KEYS: gl.constexpr, VALUES: gl.constexpr):
    """Load all that the mma partition waits for: tiles, decays, and the state that enters the segment."""
    K: gl.constexpr = tiles.k.shape[4]
    V: gl.constexpr = tiles.v.shape[4]
    chunks: gl.constexpr = tiles.q.shape[0]
    half: gl.constexpr = tiles.k.shape[2]
    batch = gl.program_id(0) // sizes.H
    head = gl.program_id(0) % sizes.H
    segment = gl.program_id(1)
    segments = gl.num_programs(1)
    first = segment * (chunks * CHUNK)
    # a chunk a warp
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    token = first + (
        gl.arange(0, chunks, gl.SliceLayout(1, layout))[:, None] * CHUNK
        + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))[None, :]
    )
    g = gl.zeros([chunks, CHUNK], gl.float32, layout)
    if pointers.g is not None:
        g = clamp_log2_decay(
            gl.load(pointers.g + token.to(gl.int64) * sizes.g_t, mask=token < sizes.T, other=0.0).to(gl.float32)
        )
    if pointers.beta is not None:
        beta = gl.load(pointers.beta + token.to(gl.int64) * sizes.beta_t, mask=token < sizes.T, other=0.0).to(
            gl.float32
        )

    before = grid_phase()
    # beyond the sequence zeros are read
    for i in gl.static_range(2):
        mbarrier.expect(barriers.kv_ready.index(i), descs.k.block_type.nbytes + descs.v.block_type.nbytes)
        tma_load(
            descs.k, [batch, first + i * half, head // sizes.qk_group, 0], barriers.kv_ready.index(i), tiles.k.index(i)
        )
        tma_load(
            descs.v, [batch, first + i * half, head // sizes.v_group, 0], barriers.kv_ready.index(i), tiles.v.index(i)
        )

    decays.cumsum.store(gl.reshape(gl.associative_scan(g, 1, add), [chunks * CHUNK]))
    whole = gl.sum(g, 1)
    decays.chunk.store(whole)
    if pointers.beta is not None:
        decays.beta.store(gl.reshape(beta, [chunks * CHUNK]))
    place = gl.program_id(0) * segments + segment
    gl.store(pointers.decay + place, gl.exp2(gl.sum(whole, 0)))
    barrier()
    mbarrier.arrive(barriers.decays_ready.index(0), count=1)

    # not sooner: other blocks' k and v are what all wait for
    mbarrier.wait(barriers.kv_ready.index(1), 0)
    for i in gl.static_range(2, 4):
        _load_queries(descs.q, tiles.q, barriers.q_ready, i, batch, first, head // sizes.qk_group)
    for i in gl.static_range(2):
        _load_queries(descs.q, tiles.q, barriers.q_ready, i, batch, first, head // sizes.qk_group)

    state = reinterpret(tiles.scores, descs.k.dtype, [1, K, V], descs.states.layout)
    mbarrier.wait(barriers.sum_ready.index(0), 0)
    tma_store(descs.states, [place, 0, 0], state)
    tma_store_wait(0)
    mbarrier.arrive(barriers.sum_empty.index(0), count=1)
    tma_store_wait_written()
    grid_arrive()
    grid_wait(before)

    entries = gl.num_programs(0) * segments
    scan = StatePointers(states=pointers.states, start=pointers.start, end=pointers.end, decay=pointers.decay)
    _scan_states(scan, entries, descs.k.dtype, K, V, KEYS, VALUES)
    grid_arrive()
    mbarrier.wait(barriers.scores_empty.index(0), 0)
    # all of them have arrived twice, and the bit is what it was
    grid_wait(~before)
    fence_generic_to_async()
    mbarrier.expect(barriers.entry_ready.index(0), descs.states.block_type.nbytes)
    tma_load(descs.states, [entries + place, 0, 0], barriers.entry_ready.index(0), state)


@gluon.jit
def _load_queries(q_desc, q_tiles, ready, chunk: gl.constexpr, batch, first, head):
    """Issue the load of a chunk of q."""
    mbarrier.expect(ready.index(chunk), q_desc.block_type.nbytes)
    tma_load(q_desc, [batch, first + chunk * CHUNK, head, 0], ready.index(chunk), q_tiles.index(chunk))


@gluon.jit
def _scan_states(
    pointers, entries, dtype: gl.constexpr, K: gl.constexpr, V: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr
):
    """Find the state that enters each segment from what all segments add, for this block's cells.

    entries: how many states there are before those that enter segments.
    """
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    segments = gl.num_programs(1)
    first = gl.program_id(0) * segments
    decay = pointers.decay + first
    for slice_ in range(gl.program_id(1), K * V // _CELLS, segments):
        cell = slice_ * _CELLS + gl.arange(0, _CELLS, layout)
        at = gl.program_id(0).to(gl.int64) * (KEYS * VALUES) + (cell // V * VALUES + cell % V)
        if KEYS == K and VALUES == V:
            inside: gl.constexpr = None
            outside: gl.constexpr = None
        else:
            inside = (cell // V < KEYS) & (cell % V < VALUES)
            outside: gl.constexpr = 0.0
        if pointers.start is None:
            sum_ = gl.zeros([_CELLS], gl.float32, layout)
        else:
            sum_ = gl.load(pointers.start + at, mask=inside, other=outside)
        local = pointers.states + first.to(gl.int64) * (K * V) + cell
        enter = pointers.states + (entries + first).to(gl.int64) * (K * V) + cell
        for begin in range(0, segments, _BATCH):
            # all loads before any use: one after another each would take its whole latency
            adds = ()
            decays = ()
            for j in gl.static_range(_BATCH):
                there = begin + j < segments
                adds += (gl.load(local + (begin + j) * (K * V), mask=there, other=0.0),)
                decays += (gl.load(decay + begin + j, mask=there, other=1.0),)
            for j in gl.static_range(_BATCH):
                gl.store(enter + (begin + j) * (K * V), sum_.to(dtype), mask=begin + j < segments)
                sum_ = sum_ * decays[j] + adds[j].to(gl.float32)
        gl.store(pointers.end + at, sum_, mask=inside)
