"""The four warps of kernel.py that load tiles and gates, and exchange states with the head's other blocks."""

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


@gluon.jit
def load_partition(tiles, gates, signals, sources, memory, sizes, KEYS: gl.constexpr, VALUES: gl.constexpr):
    """All that the warps that multiply wait for."""
    q_tiles, k_tiles, v_tiles, scores = tiles
    written, asked, gated, entered, added, taken, scored = signals
    q_desc, k_desc, v_desc, states_desc = sources
    g_ptr, beta_ptr, start_ptr, end_ptr, states_ptr, decay_ptr = memory
    T, H, qk_group, v_group, g_t, beta_t = sizes
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    chunks: gl.constexpr = q_tiles.shape[0]
    half: gl.constexpr = k_tiles.shape[2]
    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
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
    if g_ptr is not None:
        g = clamp_log2_decay(gl.load(g_ptr + token.to(gl.int64) * g_t, mask=token < T, other=0.0).to(gl.float32))
    if beta_ptr is not None:
        beta = gl.load(beta_ptr + token.to(gl.int64) * beta_t, mask=token < T, other=0.0).to(gl.float32)

    before = grid_phase()
    # beyond the sequence zeros are read
    for i in gl.static_range(2):
        mbarrier.expect(written.index(i), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma_load(k_desc, [batch, first + i * half, head // qk_group, 0], written.index(i), k_tiles.index(i))
        tma_load(v_desc, [batch, first + i * half, head // v_group, 0], written.index(i), v_tiles.index(i))

    totals, wholes, strengths = gates
    totals.store(gl.reshape(gl.associative_scan(g, 1, add), [chunks * CHUNK]))
    whole = gl.sum(g, 1)
    wholes.store(whole)
    if beta_ptr is not None:
        strengths.store(gl.reshape(beta, [chunks * CHUNK]))
    place = gl.program_id(0) * segments + segment
    gl.store(decay_ptr + place, gl.exp2(gl.sum(whole, 0)))
    barrier()
    mbarrier.arrive(gated.index(0), count=1)

    # not sooner: other blocks' k and v are what all wait for
    mbarrier.wait(written.index(1), 0)
    for i in gl.static_range(2, 4):
        _load_queries(q_desc, q_tiles, asked, i, batch, first, head // qk_group)
    for i in gl.static_range(2):
        _load_queries(q_desc, q_tiles, asked, i, batch, first, head // qk_group)

    state = reinterpret(scores, k_desc.dtype, [1, K, V], states_desc.layout)
    mbarrier.wait(added.index(0), 0)
    tma_store(states_desc, [place, 0, 0], state)
    tma_store_wait(0)
    mbarrier.arrive(taken.index(0), count=1)
    tma_store_wait_written()
    grid_arrive()
    grid_wait(before)

    entering = gl.num_programs(0) * segments
    _scan_states(states_ptr, start_ptr, end_ptr, decay_ptr, entering, k_desc.dtype, K, V, KEYS, VALUES)
    grid_arrive()
    mbarrier.wait(scored.index(0), 0)
    # all of them have arrived twice, and the bit is what it was
    grid_wait(~before)
    fence_generic_to_async()
    mbarrier.expect(entered.index(0), states_desc.block_type.nbytes)
    tma_load(states_desc, [entering + place, 0, 0], entered.index(0), state)


@gluon.jit
def _load_queries(q_desc, q_tiles, asked, chunk: gl.constexpr, batch, first, head):
    """Has a chunk of q loaded."""
    mbarrier.expect(asked.index(chunk), q_desc.block_type.nbytes)
    tma_load(q_desc, [batch, first + chunk * CHUNK, head, 0], asked.index(chunk), q_tiles.index(chunk))


@gluon.jit
def _scan_states(
    states_ptr,
    start_ptr,
    end_ptr,
    decay_ptr,
    entering,
    dtype: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
):
    """From what all segments add to the state what enters each, of this block's cells."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    segments = gl.num_programs(1)
    first = gl.program_id(0) * segments
    decay_ptr += first
    for slice_ in range(gl.program_id(1), K * V // _CELLS, segments):
        cell = slice_ * _CELLS + gl.arange(0, _CELLS, layout)
        at = gl.program_id(0).to(gl.int64) * (KEYS * VALUES) + (cell // V * VALUES + cell % V)
        if KEYS == K and VALUES == V:
            inside: gl.constexpr = None
            outside: gl.constexpr = None
        else:
            inside = (cell // V < KEYS) & (cell % V < VALUES)
            outside: gl.constexpr = 0.0
        if start_ptr is None:
            sum_ = gl.zeros([_CELLS], gl.float32, layout)
        else:
            sum_ = gl.load(start_ptr + at, mask=inside, other=outside)
        local = states_ptr + first.to(gl.int64) * (K * V) + cell
        enter = states_ptr + (entering + first).to(gl.int64) * (K * V) + cell
        for begin in range(0, segments, _BATCH):
            # all loads before any use: one after another each would take its whole latency
            adds = ()
            kept = ()
            for j in gl.static_range(_BATCH):
                there = begin + j < segments
                adds += (gl.load(local + (begin + j) * (K * V), mask=there, other=0.0),)
                kept += (gl.load(decay_ptr + begin + j, mask=there, other=1.0),)
            for j in gl.static_range(_BATCH):
                gl.store(enter + (begin + j) * (K * V), sum_.to(dtype), mask=begin + j < segments)
                sum_ = sum_ * kept[j] + adds[j].to(gl.float32)
        gl.store(end_ptr + at, sum_, mask=inside)
