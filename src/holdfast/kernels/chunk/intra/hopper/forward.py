"""Device code of the outputs inside chunks on Hopper, in Gluon: triton/forward.py with copies by TMA.

A program owns 64 steps of one chunk and head and all values. It works through the state, tiles of earlier keys and
values, nearest first, then its own, and the gate. They come through a ring of slots, of which the state takes the
first; each load is issued as soon as a slot is free.

Log decays are summed once, in float64, and kept as two float32 numbers, high and low, less the sum before the program's
own steps: to earlier tiles the decay splits there into a factor of the query and one of the key.
"""

from typing import NamedTuple

from holdfast.kernels.lib.gluon.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .ring import (
    Ring,
    activate,
    load_item,
    load_log_decays,
    pair_decay,
    program_coords,
    store_decay_sums,
    sums_by_tile,
    tile_decay,
    wait_item,
)

TILE = gl.constexpr(64)


class Loads(NamedTuple):
    """Descriptors of what comes through the ring, and where the chunk is: head of v, and of q and k."""

    k_desc: gl.tensor
    v_desc: gl.tensor
    gate_desc: gl.tensor | None
    batch: gl.tensor
    token: gl.tensor
    head: gl.tensor
    group: gl.tensor


@gluon.jit
def issue_load(item, tile, loads, ring, TAKEN: gl.constexpr):
    """Issue the load of an item, from TAKEN on: k and v by turns, the program's own last, then the gate."""
    number = item - TAKEN
    t = number // 2
    step = loads.token + (tile if t >= tile else tile - 1 - t) * TILE
    if t <= tile:
        if number % 2 == 0:
            load_item(item, loads.k_desc, [loads.batch, step, loads.group, 0], ring)
        else:
            load_item(item, loads.v_desc, [loads.batch, step, loads.head, 0], ring)
    if loads.gate_desc is not None:  # noqa: SIM102 - known while compiling
        if number == 2 * tile + 2:
            load_item(item, loads.gate_desc, [loads.batch, step, loads.head, 0], ring)


# one machine code for all lengths, the one that tests compile and read
@gluon.jit(do_not_specialize=["length", "chunks"], do_not_specialize_on_alignment=["g"])
def intra_chunk_fwd_tma(
    q_desc,
    k_desc,
    v_desc,
    states_desc,
    gate_desc,
    o_desc,
    g,
    scale,
    length,
    chunks,
    HEADS: gl.constexpr,
    SHARED: gl.constexpr,
    CHUNK: gl.constexpr,
    SIGMOID: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Grid (CHUNK / 64 * chunks * B * HEADS,). CHUNK is a multiple of 64; K and V are 64 or 128.

    By TMA in blocks [1, 64, 1, columns]:

    q, k    [B, T, HEADS / SHARED, K]
    v       [B, T, HEADS, V]
    gate    [B, T, HEADS, V], or None
    states  [B * chunks * HEADS, K, V], one in a block, or None: the state that enters each chunk
    o       [B, T, HEADS, V], written

    g       [B, T, HEADS], or None
    """
    dtype: gl.constexpr = q_desc.dtype
    K: gl.constexpr = q_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    W: gl.constexpr = max(K, V)
    TAKEN: gl.constexpr = 0 if states_desc is None else (K * V) // (TILE * W)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    program, head, number, batch = program_coords(CHUNK // TILE, HEADS, chunks)
    # the last tile of a chunk has the most to do: it starts first
    tile = CHUNK // TILE - 1 - program
    token = number * CHUNK
    size = gl.minimum(CHUNK, length - token)
    if tile * TILE >= size:
        return
    own = gl.allocate_shared_memory(dtype, [1, TILE, 1, W], o_desc.layout)
    slots = gl.allocate_shared_memory(dtype, [SLOTS, 1, TILE, 1, W], k_desc.layout)
    sums = gl.allocate_shared_memory(gl.float32, [2, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS + 1):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    barrier()
    loads = Loads(
        k_desc=k_desc,
        v_desc=v_desc,
        gate_desc=gate_desc,
        batch=batch,
        token=token,
        head=head,
        group=head // SHARED,
    )
    ring = Ring(tiles=slots, ready=ready)
    q_tile = reinterpret(own, dtype, [1, TILE, 1, K], q_desc.layout)
    here = ready.index(SLOTS)
    if states_desc is None:
        mbarrier.expect(here, q_desc.block_type.nbytes)
    else:
        state = reinterpret(slots, dtype, [1, K, V], states_desc.layout)
        mbarrier.expect(here, q_desc.block_type.nbytes + states_desc.block_type.nbytes)
        tma_load(states_desc, [(batch * chunks + number) * HEADS + head, 0, 0], here, state)
    tma_load(q_desc, [batch, token + tile * TILE, head // SHARED, 0], here, q_tile)
    for i in gl.static_range(TAKEN, SLOTS):
        issue_load(i, tile, loads, ring, TAKEN)
    if g is not None:
        log = load_log_decays(g, batch.to(gl.int64) * length + token, size, head, HEADS, CHUNK)
    tile_sums = sums_by_tile(sums, TILE)
    query = q_tile.reshape([TILE, K])
    mbarrier.wait(here, 0)
    acc = gl.zeros([TILE, V], gl.float32, o_layout)
    if states_desc is not None:
        acc = warpgroup_mma(query, state.reshape([K, V]), acc, use_acc=False, is_async=True)
    before = 1.0
    if g is not None:
        before = store_decay_sums(sums, log, None if CHUNK == TILE else tile * TILE, CHUNK)
    if states_desc is not None:
        acc = warpgroup_mma_wait(0, deps=(acc,))
        acc = acc * before
    # every warp is through with the state
    barrier()
    for i in gl.static_range(TAKEN):
        issue_load(i + SLOTS, tile, loads, ring, TAKEN)
    for i in range(tile):
        item = TAKEN + 2 * i
        key = wait_item(item, k_desc, ring, TAKEN)
        scores = gl.zeros([TILE, TILE], gl.float32, s_layout)
        scores = warpgroup_mma(query, key.permute((1, 0)), scores, use_acc=False, is_async=True)
        if g is not None:
            up = tile_decay(tile_sums, tile - 1 - i, gl.SliceLayout(0, s_layout), -1)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        # every warp is through with the key
        barrier()
        issue_load(item + SLOTS, tile, loads, ring, TAKEN)
        if g is not None:
            scores = scores * up[None, :]
        p = gl.convert_layout(scores.to(dtype), p_layout)
        value = wait_item(item + 1, v_desc, ring, TAKEN)
        acc = warpgroup_mma(p, value, acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        barrier()
        issue_load(item + 1 + SLOTS, tile, loads, ring, TAKEN)
    item = TAKEN + 2 * tile
    key = wait_item(item, k_desc, ring, TAKEN)
    scores = gl.zeros([TILE, TILE], gl.float32, s_layout)
    scores = warpgroup_mma(query, key.permute((1, 0)), scores, use_acc=False, is_async=True)
    if g is not None:
        acc = acc * tile_decay(tile_sums, tile, gl.SliceLayout(1, o_layout), 1)[:, None]
        weight = pair_decay(tile_sums, tile, tile_sums, tile, s_layout, 1)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    # every warp is through with the queries, whose place takes the output
    barrier()
    if g is not None:
        scores = scores * weight
    m = gl.arange(0, TILE, gl.SliceLayout(1, s_layout))
    n = gl.arange(0, TILE, gl.SliceLayout(0, s_layout))
    p = gl.convert_layout(gl.where(m[:, None] >= n[None, :], scores, 0.0).to(dtype), p_layout)
    value = wait_item(item + 1, v_desc, ring, TAKEN)
    acc = warpgroup_mma(p, value, acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    acc = acc * scale
    if gate_desc is not None:
        gate = wait_item(item + 2, gate_desc, ring, TAKEN)
        activation = activate(gate.load(o_layout).to(gl.float32), SIGMOID)
        acc = acc * activation.value
    o_tile = reinterpret(own, dtype, [1, TILE, 1, V], o_desc.layout)
    o_tile.reshape([TILE, V]).store(acc.to(dtype))
    fence_async_shared()
    barrier()
    tma_store(o_desc, [batch, token + tile * TILE, head, 0], o_tile)
    tma_store_wait(0)
