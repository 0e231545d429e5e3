"""The warps of backward_kv.py that multiply. In each chunk, with [later, earlier]:

    dK^T = (dS V^T + dn) * read + Q^T (((U V^T) * y + z) * within * beta)
    dV^T = (dS^T K^T) * read + U^T ((Q K^T) * y * within * beta)
    dS = decay dS + (Q^T * y * write) U;  dn = decay dn + the sum over tokens of Q^T * z * write,
read with beta in it, y and z with scale in them.
"""

from holdfast.kernels.lib.gluon.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from holdfast.kernels.lib.gluon.decay import BETA, CHUNK, READ_DECAY, VECTORS, causal_decay
from holdfast.kernels.lib.gluon.reduce import warp_column_sums
from holdfast.kernels.lib.gluon.sequence import segment_index
from holdfast.kernels.lib.gluon.split import opaque, round_to

from .decay import ADJOINT_COLUMNS, INVERSE, READ_STRENGTH, SLOPE, WRITE_INVERSE, WRITE_SLOPE


@gluon.jit
def multiply(
    tiles,
    out_tiles,
    places,
    parts,
    restored,
    targets,
    start_ptr,
    end_ptr,
    saved_n_ptr,
    H,
    count,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    SAVE: gl.constexpr,
    FROM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The products of every chunk, and the gradient of the state from the last to the first."""
    q_tiles, k_tiles, u_tiles, v_tiles = tiles
    dk_tile, dv_tile = out_tiles
    dk_desc, dv_desc, saved_desc = targets
    gates, columns, decays, loaded, gated, free = places
    later_parts, earlier_parts, own_parts, cross_parts, state_parts = parts
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = q_tiles.dtype
    warps: gl.constexpr = gl.num_warps()
    pairs: gl.constexpr = warps // 4
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, V, 16])
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, pairs], [16, CHUNK // pairs, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    v_layout: gl.constexpr = k_layout if V == K else p_layout
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    of_key: gl.constexpr = gl.SliceLayout(1, k_layout)
    later: gl.constexpr = gl.SliceLayout(1, p_layout)
    qk_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    uv_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    s_tile = gl.allocate_shared_memory(dtype, [1, 1, K, V], gl.NVMMASharedLayout(128, 16, 4))

    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    key = gl.arange(0, K, gl.SliceLayout(1, s_layout))
    value = gl.arange(0, V, gl.SliceLayout(0, s_layout))
    n_key = gl.arange(0, K, of_key)
    if KEYS == K and VALUES == V:
        inside: gl.constexpr = None
        outside: gl.constexpr = None
    else:
        inside = (key < KEYS)[:, None] & (value < VALUES)[None, :]
        outside: gl.constexpr = 0.0
    corner = segment_index(H, 1) * (KEYS * (VALUES + 1))
    if start_ptr is None:
        state = gl.zeros([K, V], gl.float32, s_layout)
        dn = gl.zeros([K], gl.float32, of_key)
    else:
        at = key[:, None] * (VALUES + 1) + value[None, :]
        state = gl.load(start_ptr + corner + at, mask=inside, other=outside)
        dn = gl.load(start_ptr + corner + n_key * (VALUES + 1) + VALUES, mask=n_key < KEYS, other=0.0)

    stage = 0
    phase = 0
    last = 0
    turns = 0
    s = s_tile.reshape([K, V])
    for i in range(count):
        chunk = count - 1 - i
        mbarrier.wait(loaded.index(stage), phase)
        q = q_tiles.index(stage).reshape([CHUNK, K])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        u = u_tiles.index(stage).reshape([CHUNK, V])
        v = v_tiles.index(stage).reshape([CHUNK, V])
        # rounded here, while no product runs: the compiler would move it past the next one and then wait for each
        held = warpgroup_mma_wait(0, deps=(state.to(dtype),))
        qk = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        qk = warpgroup_mma(q, k.permute((1, 0)), qk, use_acc=False, is_async=True)
        uv = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        uv = warpgroup_mma(u, v.permute((1, 0)), uv, use_acc=False, is_async=True)
        s.store(held)
        # while these products run
        mbarrier.wait(gated.index(stage), phase)
        weight = causal_decay(gates, stage, p_layout, True)
        inverse = columns.index(stage * ADJOINT_COLUMNS + INVERSE).load(later)[:, None]
        slope = columns.index(stage * ADJOINT_COLUMNS + SLOPE).load(later)[:, None]
        state = state * decays.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
        # one barrier for three: the state is there, the last outputs have left their tiles, the last tiles are read
        fence_async_shared()
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(free.index(last), count=1, pred=i > 0)
        last = stage
        dk = gl.zeros([K, CHUNK], gl.float32, k_layout)
        dk = warpgroup_mma(s, v.permute((1, 0)), dk, use_acc=False, is_async=True)
        dv = gl.zeros([V, CHUNK], gl.float32, v_layout)
        dv = warpgroup_mma(s.permute((1, 0)), k.permute((1, 0)), dv, use_acc=False, is_async=True)
        qk, uv = warpgroup_mma_wait(2, deps=(qk, uv))
        qk = qk * weight
        uv = uv * inverse + slope
        strength = gates.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, p_layout))[None, :]
        qk_tile.store((qk * inverse * strength).to(dtype))
        uv_tile.store((uv * weight * strength).to(dtype))
        fence_async_shared()
        barrier()
        both = qk * uv
        itself = gl.arange(0, CHUNK, later)[:, None] == gl.arange(0, CHUNK, gl.SliceLayout(0, p_layout))[None, :]
        apart = gl.where(itself, 0.0, both)
        earlier_parts.index(stage).store(warp_column_sums(apart, 4))
        own_parts.index(stage).permute((1, 0)).store(_rows_by_warps(gl.where(itself, both, 0.0)))
        later_parts.index(stage).permute((1, 0)).store(_rows_by_warps(apart * strength))
        qt = q.permute((1, 0)).load(write_layout).to(gl.float32)
        added = qt * columns.index(stage * ADJOINT_COLUMNS + WRITE_SLOPE).load(gl.SliceLayout(0, write_layout))[None, :]
        added = gl.convert_layout(gl.sum(added, 1), of_key)
        write = columns.index(stage * ADJOINT_COLUMNS + WRITE_INVERSE).load(gl.SliceLayout(0, write_layout))
        written = (qt * write[None, :]).to(dtype)
        read_k = columns.index(stage * ADJOINT_COLUMNS + READ_STRENGTH).load(gl.SliceLayout(0, k_layout))
        read_v = columns.index(stage * ADJOINT_COLUMNS + READ_STRENGTH).load(gl.SliceLayout(0, v_layout))
        kt = k.permute((1, 0)).load(k_layout).to(gl.float32)
        kt *= gates.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, k_layout))[None, :]
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        dk = dk + dn[:, None]
        cross = dk * kt
        dk = dk * read_k[None, :]
        dv = dv * read_v[None, :]
        dn = dn * decays.index(stage).load(of_key) + added
        dk, dv, state, written = warpgroup_mma_wait(0, deps=(dk, dv, state, written))
        dk = warpgroup_mma(q.permute((1, 0)), uv_tile, dk, is_async=True)
        dv = warpgroup_mma(u.permute((1, 0)), qk_tile, dv, is_async=True)
        state = warpgroup_mma(written, u, state, is_async=True)
        dk, dv = warpgroup_mma_wait(1, deps=(dk, dv))
        cross_parts.index(stage).store(warp_column_sums(cross, warps))
        dk_tile.reshape([CHUNK, K]).permute((1, 0)).store(dk.to(dtype))
        dv_tile.reshape([CHUNK, V]).permute((1, 0)).store(dv.to(dtype))
        fence_async_shared()
        barrier()
        tma_store(dk_desc, [batch, chunk * CHUNK, head, 0], dk_tile)
        tma_store(dv_desc, [batch, chunk * CHUNK, head, 0], dv_tile)
        if (chunk % SAVE == 0) & (chunk >= FROM):
            # every warp is past the products with the state's tile
            mbarrier.expect(restored, saved_desc.block_type.nbytes)
            tma_load(saved_desc, [gl.program_id(0), chunk // SAVE, 0, 0], restored, s_tile)
        state, written = warpgroup_mma_wait(0, deps=(state, written))
        if (chunk % SAVE == 0) & (chunk >= FROM):
            n = gl.load(saved_n_ptr + chunk // SAVE * KEYS + n_key, mask=n_key < KEYS, other=0.0)
            own = gl.convert_layout(n * dn, gl.SliceLayout(1, s_layout))
            mbarrier.wait(restored, turns & 1)
            turns += 1
            kept = s.load(s_layout).to(gl.float32)
            state_parts.index(stage * 2).store(gl.sum(state * kept, 1) + own)
            state_parts.index(stage * 2 + 1).store(gl.sum(round_to(state, dtype) * kept, 1) + own)
            # read by all before the next chunk's state takes its place
            barrier()
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    barrier()
    mbarrier.arrive(free.index(last), count=1, pred=count > 0)
    if end_ptr is not None:
        # addresses computed again: kept from the start, they would take as many registers as the state
        key = opaque(key)
        at = key[:, None] * (VALUES + 1) + value[None, :]
        gl.store(end_ptr + corner + at, state, mask=inside)
        gl.store(end_ptr + corner + n_key * (VALUES + 1) + VALUES, dn, mask=n_key < KEYS)
    tma_store_wait(0)


@gluon.jit
def _rows_by_warps(x):
    """Of scores [CHUNK, CHUNK]: the sum over each row of what a warp has of it, [CHUNK, warps side by side]."""
    pairs: gl.constexpr = gl.num_warps() // 4
    return gl.sum(gl.reshape(x, [CHUNK, pairs, CHUNK // pairs]), 2)
