"""Gradients inside chunks of 64 steps on Hopper: triton/backward_single_tile.py with copies by TMA.

The equations are in triton/backward_tiled.py.

A program owns one chunk of one head. It issues all of its loads at its start. P and dA go through shared memory,
because products need them both as they are and transposed, and what a product has used up makes room for what leaves.
"""

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

from .ring import activate, add, load_log_decays, pair_decay, program_coords, store_decay_sums, sums_by_tile, tile_decay

TILE = gl.constexpr(64)


@gluon.jit(do_not_specialize=["length", "chunks"], do_not_specialize_on_alignment=["g", "dg"])
def intra_chunk_bwd_single_tile_tma(
    q_desc, k_desc, v_desc, states_desc, gate_desc, grad_o_desc, dq_desc, dk_desc, dv_desc,
    dstates_desc, dgate_desc, g, dg, scale, length, chunks, HEADS: gl.constexpr, SIGMOID: gl.constexpr,
):  # fmt: skip
    """Grid (chunks * B * HEADS,). K and V are 64 or 128. By TMA in blocks [1, 64, 1, columns]:

    q, k            [B, T, HEADS, K]
    v, gate         [B, T, HEADS, V]; gate or None
    states          [B * chunks * HEADS, K, V], one in a block, or None
    grad_o          [B, T, HEADS, V]
    dq, dk          [B, T, HEADS, K], written
    dv, dgate       [B, T, HEADS, V], written
    dstates         as states, written

    g, dg           [B, T, HEADS], or None; dg is written
    """
    dtype: gl.constexpr = q_desc.dtype
    K: gl.constexpr = q_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    warps: gl.constexpr = gl.num_warps()
    pairs: gl.constexpr = warps // 4
    # of scores, of tiles of keys and values, of the state
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, pairs], [16, TILE // pairs, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, pairs], [16, K // pairs, 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, pairs], [16, V // pairs, 16])
    k_tiles: gl.constexpr = K // TILE
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4 * pairs, 1] if k_tiles == pairs else [4, pairs], [16, V if k_tiles == pairs else V // pairs, 16]
    )
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pairs_shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    coords = program_coords(1, HEADS, chunks)
    head, number, batch = coords.head, coords.chunk, coords.batch
    token = number * TILE
    size = gl.minimum(TILE, length - token)
    start = batch.to(gl.int64) * length + token
    entered = (batch * chunks + number) * HEADS + head
    q_tile = gl.allocate_shared_memory(dtype, [1, TILE, 1, K], q_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, TILE, 1, K], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [1, TILE, 1, V], v_desc.layout)
    do_tile = gl.allocate_shared_memory(dtype, [1, TILE, 1, V], v_desc.layout)
    p_tile = gl.allocate_shared_memory(dtype, [TILE, TILE], pairs_shared)
    da_tile = gl.allocate_shared_memory(dtype, [TILE, TILE], pairs_shared)
    sums = gl.allocate_shared_memory(gl.float32, [2, TILE], plain)
    tile_sums = sums_by_tile(sums, TILE)
    change = gl.allocate_shared_memory(gl.float32, [TILE], plain)
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(ready.index(0), q_desc.block_type.nbytes + k_desc.block_type.nbytes)
    tma_load(q_desc, [batch, token, head, 0], ready.index(0), q_tile)
    tma_load(k_desc, [batch, token, head, 0], ready.index(0), k_tile)
    if gate_desc is not None:
        gate_tile = gl.allocate_shared_memory(dtype, [1, TILE, 1, V], v_desc.layout)
        given_tile = gl.allocate_shared_memory(dtype, [1, TILE, 1, V], v_desc.layout)
        mbarrier.expect(ready.index(1), 2 * v_desc.block_type.nbytes)
        tma_load(grad_o_desc, [batch, token, head, 0], ready.index(1), given_tile)
        tma_load(gate_desc, [batch, token, head, 0], ready.index(1), gate_tile)
    else:
        mbarrier.expect(ready.index(1), v_desc.block_type.nbytes)
        tma_load(grad_o_desc, [batch, token, head, 0], ready.index(1), do_tile)
    mbarrier.expect(ready.index(2), v_desc.block_type.nbytes)
    tma_load(v_desc, [batch, token, head, 0], ready.index(2), v_tile)
    if states_desc is not None:
        state_tile = gl.allocate_shared_memory(dtype, [1, K, V], states_desc.layout)
        mbarrier.expect(ready.index(3), states_desc.block_type.nbytes)
        tma_load(states_desc, [entered, 0, 0], ready.index(3), state_tile)
    q = q_tile.reshape([TILE, K])
    k = k_tile.reshape([TILE, K])
    v = v_tile.reshape([TILE, V])
    do = do_tile.reshape([TILE, V])
    if g is not None:
        store_decay_sums(sums, load_log_decays(g, start, size, head, HEADS, TILE), None, TILE)
        barrier()
    mbarrier.wait(ready.index(0), 0)
    scores = gl.zeros([TILE, TILE], gl.float32, p_layout)
    scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=False, is_async=True)
    mbarrier.wait(ready.index(1), 0)
    if gate_desc is not None:
        gate = gate_tile.reshape([TILE, V]).load(v_layout).to(gl.float32)
        activation = activate(gate, SIGMOID)
        do.store((given_tile.reshape([TILE, V]).load(v_layout).to(gl.float32) * activation.value).to(dtype))
        fence_async_shared()
        barrier()
    mbarrier.wait(ready.index(2), 0)
    grad = gl.zeros([TILE, TILE], gl.float32, p_layout)
    grad = warpgroup_mma(do, v.permute((1, 0)), grad, use_acc=False, is_async=True)
    m = gl.arange(0, TILE, gl.SliceLayout(1, p_layout))[:, None]
    n = gl.arange(0, TILE, gl.SliceLayout(0, p_layout))[None, :]
    if g is not None:
        weight = gl.where(m >= n, pair_decay(tile_sums, 0, tile_sums, 0, p_layout, 1), 0.0)
    else:
        weight = gl.where(m >= n, 1.0, 0.0)
    scores, grad = warpgroup_mma_wait(0, deps=(scores, grad))
    if g is not None:
        products = gl.where(m > n, scores * grad * weight, 0.0)
        over_keys = gl.sum(products, 1)
        over_queries = gl.sum(products, 0)
        change.store(over_queries)
    p_tile.store((scores * weight).to(dtype))
    da_tile.store((grad * weight).to(dtype))
    fence_async_shared()
    barrier()
    rows_k: gl.constexpr = gl.SliceLayout(1, k_layout)
    rows_v: gl.constexpr = gl.SliceLayout(1, v_layout)
    if states_desc is not None:
        mbarrier.wait(ready.index(3), 0)
    state = None if states_desc is None else state_tile.reshape([K, V])
    # the output before its gate; its gradient and that of values
    if gate_desc is not None:
        o = gl.zeros([TILE, V], gl.float32, v_layout)
        if states_desc is not None:
            o = warpgroup_mma(q, state, o, use_acc=False, is_async=True)
            if g is not None:
                enter_v = tile_decay(tile_sums, 0, rows_v, 1)
                o = warpgroup_mma_wait(0, deps=(o,))
                o = o * enter_v[:, None]
        o = warpgroup_mma(p_tile, v, o, is_async=True)
    dv = gl.zeros([TILE, V], gl.float32, v_layout)
    dv = warpgroup_mma(p_tile.permute((1, 0)), do, dv, use_acc=False, is_async=True)
    if gate_desc is not None:
        gate = gate_tile.reshape([TILE, V]).load(v_layout).to(gl.float32)
        activation = activate(gate, SIGMOID)
        derivative = activation.derivative * scale * given_tile.reshape([TILE, V]).load(v_layout).to(gl.float32)
        o, dv = warpgroup_mma_wait(0, deps=(o, dv))
        given_tile.reshape([TILE, V]).store((o * derivative).to(dtype))
    else:
        dv = warpgroup_mma_wait(0, deps=(dv,))
    barrier()
    v.store((dv * scale).to(dtype))
    fence_async_shared()
    barrier()
    tma_store(dv_desc, [batch, token, head, 0], v_tile)
    if gate_desc is not None:
        tma_store(dgate_desc, [batch, token, head, 0], given_tile)
        # the gate has been used
        dk_tile = (
            reinterpret(gate_tile, dtype, [1, TILE, 1, K], k_desc.layout)
            if V >= K
            else gl.allocate_shared_memory(dtype, [1, TILE, 1, K], k_desc.layout)
        )
    else:
        dk_tile = gl.allocate_shared_memory(dtype, [1, TILE, 1, K], k_desc.layout)
    dk = gl.zeros([TILE, K], gl.float32, k_layout)
    dk = warpgroup_mma(da_tile.permute((1, 0)), q, dk, use_acc=False, is_async=True)
    dq = gl.zeros([TILE, K], gl.float32, k_layout)
    if states_desc is not None:
        dq = warpgroup_mma(do, state.permute((1, 0)), dq, use_acc=False, is_async=True)
        qt = q.permute((1, 0)).load(write_layout)
        if g is not None:
            columns_of_write: gl.constexpr = gl.SliceLayout(0, write_layout)
            enter_w = tile_decay(tile_sums, 0, columns_of_write, 1)
            qt = (qt.to(gl.float32) * enter_w[None, :]).to(dtype)
            enter_k = tile_decay(tile_sums, 0, rows_k, 1)
            queries = q.load(k_layout).to(gl.float32)
        dk, dq, qt = warpgroup_mma_wait(0, deps=(dk, dq, qt))
        if g is not None:
            dq = dq * enter_k[:, None]
            read = gl.sum(dq * queries, 1)
    dq = warpgroup_mma(da_tile, k, dq, is_async=True)
    if states_desc is None:
        dk = warpgroup_mma_wait(1, deps=(dk,))
    dk_tile.reshape([TILE, K]).store((dk * scale).to(dtype))
    if g is not None:
        row: gl.constexpr = gl.SliceLayout(1, p_layout)
        rest = over_keys - change.load(row)
        if states_desc is not None:
            rest += gl.convert_layout(read, row)
        change.store(rest)
        barrier()
        line: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
        last = gl.arange(0, TILE, line)
        # sums from the end: all less what is behind
        moved = change.load(line).to(gl.float64) * scale
        summed = gl.sum(moved, 0) - gl.associative_scan(moved, 0, add) + moved
        gl.store(dg + (start + last) * HEADS + head, summed.to(dg.dtype.element_ty), mask=last < size)
    if states_desc is not None:
        # its first operand is in registers: nothing may branch before the wait
        ds = gl.zeros([K, V], gl.float32, s_layout)
        ds = warpgroup_mma(qt, do, ds, use_acc=False, is_async=True)
        dq, ds, qt = warpgroup_mma_wait(0, deps=(dq, ds, qt))
    else:
        dq = warpgroup_mma_wait(0, deps=(dq,))
    barrier()
    # every product is done: inputs' places wait_item the rest
    k.store((dq * scale).to(dtype))
    if states_desc is not None:
        state_tile.reshape([K, V]).store((ds * scale).to(dtype))
    fence_async_shared()
    barrier()
    tma_store(dk_desc, [batch, token, head, 0], dk_tile)
    tma_store(dq_desc, [batch, token, head, 0], k_tile)
    if states_desc is not None:
        tma_store(dstates_desc, [entered, 0, 0], state_tile)
    tma_store_wait(0)
    # else the compiler takes these tiles for what is stored after them, while they are still on their way out
    v_tile._keep_alive()
    if gate_desc is not None:
        given_tile._keep_alive()
