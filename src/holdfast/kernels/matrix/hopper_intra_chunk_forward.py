"""Device code of the outputs inside chunks on Hopper, in Gluon: triton_intra_chunk_forward.py with copies by TMA.

A program owns 64 steps of one chunk and head and all values. Everything that it reads is asked for at its start, as far
as shared memory goes, and the next tiles of keys and values while it multiplies; the state's place takes the gate and
then the output. It works through the state, tiles of earlier steps, nearest first, then its own.

Log decays are summed once, in float64, and kept as two float32 numbers, high and low, less the sum before the program's
own steps: to earlier tiles the decay splits there into a factor of the query and one of the key.
"""

from holdfast.kernels.common.gluon import (
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

from .triton_intra_chunk_forward import place

TILE = gl.constexpr(64)
# exp(-1e4) is 0 in float32; -inf would turn differences into NaN
LEAST = gl.constexpr(-1e4)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def add(x, y):
    return x + y


# one machine code for all lengths, the one that tests compile and read
@gluon.jit(do_not_specialize=["length", "chunks", "heads", "groups"], do_not_specialize_on_alignment=["g"])
def forward(
    q_desc,
    k_desc,
    v_desc,
    states_desc,
    gate_desc,
    o_desc,
    g,
    scale,
    length,
    chunk: gl.constexpr,
    chunks,
    heads,
    groups,
    SIGMOID: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """o [B, T, H, V]; by descriptors q, k [B, T, groups, K], v, gate [B, T, H, V] in blocks [1, 64, 1, columns], states
    [B * chunks * H, K, V] in whole; g [B, T, H]. The chunk is a multiple of 64, K and V are 64 or 128."""
    dtype: gl.constexpr = q_desc.dtype
    K: gl.constexpr = q_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_count: gl.constexpr = chunk // TILE
    program, start, size, head, group, entered = place(tile_count, length, chunk, chunks, heads, groups)
    # the last tile of a chunk has the most to do: it starts first
    tile = tile_count - 1 - program
    first = tile * TILE
    if first >= size:
        return
    batch = (start // length).to(gl.int32)
    token = (start - start // length * length).to(gl.int32)
    q_tile = gl.allocate_shared_memory(dtype, [1, TILE, 1, K], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2, 1, TILE, 1, K], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [V_STAGES, 1, TILE, 1, V], v_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [2 + 2 + V_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4 + V_STAGES):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    barrier()
    q_here = arrived.index(0)
    o_here = arrived.index(1)
    q_bytes: gl.constexpr = q_desc.block_type.nbytes
    v_bytes: gl.constexpr = v_desc.block_type.nbytes
    if states_desc is not None:
        state = gl.allocate_shared_memory(dtype, [1, K, V], states_desc.layout)
        mbarrier.expect(q_here, q_bytes + states_desc.block_type.nbytes)
        tma_load(q_desc, [batch, token + first, group, 0], q_here, q_tile)
        tma_load(states_desc, [entered.to(gl.int32), 0, 0], q_here, state)
    else:
        mbarrier.expect(q_here, q_bytes)
        tma_load(q_desc, [batch, token + first, group, 0], q_here, q_tile)
    # nearest first, the program's own last
    for i in gl.static_range(2):
        if i <= tile:
            s = token + (first if i == tile else first - (i + 1) * TILE)
            mbarrier.expect(arrived.index(2 + i), q_bytes)
            tma_load(k_desc, [batch, s, group, 0], arrived.index(2 + i), k_tiles.index(i))
            if i < V_STAGES:
                mbarrier.expect(arrived.index(4 + i), v_bytes)
                tma_load(v_desc, [batch, s, head, 0], arrived.index(4 + i), v_tiles.index(i))
    # sums of log decays less the sum before the program's own steps
    high = gl.allocate_shared_memory(gl.float32, [tile_count, TILE], plain)
    low = gl.allocate_shared_memory(gl.float32, [tile_count, TILE], plain)
    before = 1.0
    if g is not None:
        line: gl.constexpr = gl.BlockedLayout([max(chunk // 128, 1)], [32], [4], [0])
        i = gl.arange(0, chunk, line)
        log = gl.load(g + (start + i) * heads + head, mask=i < size, other=0.0).to(gl.float32)
        log = (gl.maximum(log, LEAST) * LOG2E).to(gl.float64)
        past = gl.sum(gl.where(i < first, log, 0.0), 0)
        total = gl.associative_scan(log, 0, add) - past
        top = total.to(gl.float32)
        reinterpret(high, gl.float32, [chunk], plain).store(top)
        reinterpret(low, gl.float32, [chunk], plain).store((total - top.to(gl.float64)).to(gl.float32))
        before = gl.exp2(past.to(gl.float32))
    query = q_tile.reshape([TILE, K])
    mbarrier.wait(q_here, 0)
    acc = gl.zeros([TILE, V], gl.float32, o_layout)
    if states_desc is not None:
        acc = warpgroup_mma(query, state.reshape([K, V]), acc, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        acc = acc * before
        # the state has been used: its place takes the gate, and then the output
        barrier()
        o_tile = reinterpret(state, dtype, [1, TILE, 1, V], o_desc.layout)
    else:
        o_tile = gl.allocate_shared_memory(dtype, [1, TILE, 1, V], o_desc.layout)
    if gate_desc is not None:
        mbarrier.expect(o_here, v_bytes)
        tma_load(gate_desc, [batch, token + first, head, 0], o_here, o_tile)
    for i in range(tile):
        slot = i % 2
        v_slot = i % V_STAGES
        mbarrier.wait(arrived.index(2 + slot), (i // 2) & 1)
        key = k_tiles.index(slot).reshape([TILE, K])
        scores = gl.zeros([TILE, TILE], gl.float32, s_layout)
        scores = warpgroup_mma(query, key.permute((1, 0)), scores, use_acc=False, is_async=True)
        if g is not None:
            t = tile - 1 - i
            up = gl.exp2(-high.index(t).load(columns) - low.index(t).load(columns))
        scores = warpgroup_mma_wait(0, deps=(scores,))
        # every warp is through with the key
        barrier()
        if i + 2 <= tile:
            s = token + (first if i + 2 == tile else first - (i + 3) * TILE)
            mbarrier.expect(arrived.index(2 + slot), q_bytes)
            tma_load(k_desc, [batch, s, group, 0], arrived.index(2 + slot), k_tiles.index(slot))
        if g is not None:
            scores = scores * up[None, :]
        held = gl.convert_layout(scores.to(dtype), p_layout)
        mbarrier.wait(arrived.index(4 + v_slot), (i // V_STAGES) & 1)
        acc = warpgroup_mma(held, v_tiles.index(v_slot).reshape([TILE, V]), acc, is_async=True)
        acc, held = warpgroup_mma_wait(0, deps=(acc, held))
        barrier()
        if i + V_STAGES <= tile:
            s = token + (first if i + V_STAGES == tile else first - (i + V_STAGES + 1) * TILE)
            mbarrier.expect(arrived.index(4 + v_slot), v_bytes)
            tma_load(v_desc, [batch, s, head, 0], arrived.index(4 + v_slot), v_tiles.index(v_slot))
    slot = tile % 2
    v_slot = tile % V_STAGES
    mbarrier.wait(arrived.index(2 + slot), (tile // 2) & 1)
    scores = gl.zeros([TILE, TILE], gl.float32, s_layout)
    key = k_tiles.index(slot).reshape([TILE, K])
    scores = warpgroup_mma(query, key.permute((1, 0)), scores, use_acc=False, is_async=True)
    if g is not None:
        row: gl.constexpr = gl.SliceLayout(1, o_layout)
        down = gl.exp2(high.index(tile).load(row) + low.index(tile).load(row))
        acc = acc * down[:, None]
        own: gl.constexpr = gl.SliceLayout(1, s_layout)
        apart = high.index(tile).load(own)[:, None] - high.index(tile).load(columns)[None, :]
        apart += low.index(tile).load(own)[:, None] - low.index(tile).load(columns)[None, :]
        weight = gl.exp2(apart)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    if g is not None:
        scores = scores * weight
    m = gl.arange(0, TILE, gl.SliceLayout(1, s_layout))
    n = gl.arange(0, TILE, gl.SliceLayout(0, s_layout))
    scores = gl.where(m[:, None] >= n[None, :], scores, 0.0)
    held = gl.convert_layout(scores.to(dtype), p_layout)
    mbarrier.wait(arrived.index(4 + v_slot), (tile // V_STAGES) & 1)
    acc = warpgroup_mma(held, v_tiles.index(v_slot).reshape([TILE, V]), acc, is_async=True)
    acc, held = warpgroup_mma_wait(0, deps=(acc, held))
    acc = acc * scale
    if gate_desc is not None:
        mbarrier.wait(o_here, 0)
        opening = o_tile.reshape([TILE, V]).load(o_layout).to(gl.float32)
        slope = 1.0 / (1.0 + gl.exp2(-LOG2E * opening))
        acc = acc * (slope if SIGMOID else opening * slope)
    o_tile.reshape([TILE, V]).store(acc.to(dtype))
    fence_async_shared()
    barrier()
    tma_store(o_desc, [batch, token + first, head, 0], o_tile)
    tma_store_wait(0)
