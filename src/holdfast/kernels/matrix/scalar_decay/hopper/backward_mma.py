"""The warps of backward.py that multiply. In each chunk, with [later, earlier]:

    dK^T = (dS V^T) * read + Q^T ((U V^T) * within);  dV^T = (dS^T K^T) * read + U^T ((Q K^T) * within);
    dS = decay dS + (Q^T * write) U.
The rounded state goes through shared memory, because one product needs it transposed.
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
from holdfast.kernels.lib.gluon.decay import BETA, CHUNK, READ_DECAY, VECTORS, WRITE_DECAY, causal_decay
from holdfast.kernels.lib.gluon.pdl import grid_dependency_wait
from holdfast.kernels.lib.gluon.reduce import warp_column_sums
from holdfast.kernels.lib.gluon.sequence import segment_index
from holdfast.kernels.lib.gluon.split import opaque, round_to
from holdfast.kernels.lib.gluon.tails import store_tail, zero_tail_rows

# chunks between saved states from which on one is fetched when it is wanted, and not while a chunk's last products run,
# for which all chunks have a barrier more
SELDOM = gl.constexpr(8)


@gluon.jit
def multiply(
    tiles,
    dk_tile,
    dv_tile,
    places,
    parts,
    restored,
    dk_desc,
    dv_desc,
    saved_desc,
    start_ptr,
    end_ptr,
    dk_ptr,
    dv_ptr,
    place,
    H,
    first,
    span,
    count,
    scale,
    SUMS: gl.constexpr,
    WEIGHTED: gl.constexpr,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    TURNED: gl.constexpr,
    SAVE: gl.constexpr,
    FROM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The products of every chunk, and the gradient of the state from the last to the first."""
    q_tiles, k_tiles, u_tiles, v_tiles = tiles
    gates, decays, loaded, gated, free = places
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
    qk_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    uv_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    s_tile = gl.allocate_shared_memory(dtype, [1, 1, K, V], gl.NVMMASharedLayout(128, 16, 4))

    batch, begin, length = place
    head = gl.program_id(0) % H
    rows = gl.arange(0, K, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, V, gl.SliceLayout(0, s_layout))
    if KEYS == K and VALUES == V:
        inside: gl.constexpr = None
        outside: gl.constexpr = None
    else:
        inside = (rows < KEYS)[:, None] & (columns < VALUES)[None, :]
        outside: gl.constexpr = 0.0
    if TURNED:
        at = columns[None, :] * KEYS + rows[:, None]
    else:
        at = rows[:, None] * VALUES + columns[None, :]
    grid_dependency_wait()
    if start_ptr is None:
        state = gl.zeros([K, V], gl.float32, s_layout)
    else:
        state = gl.load(start_ptr + segment_index(H, 1) * (KEYS * VALUES) + at, mask=inside, other=outside)

    stage = 0
    phase = 0
    last = 0
    turns = 0
    s = s_tile.reshape([K, V])
    for i in range(count):
        chunk = first + count - 1 - i
        mbarrier.wait(loaded.index(stage), phase)
        if dk_ptr is not None:
            left = length - chunk * CHUNK
            if left < CHUNK:
                zero_tail_rows(q_tiles.index(stage), left)
                zero_tail_rows(k_tiles.index(stage), left)
                zero_tail_rows(u_tiles.index(stage), left)
                zero_tail_rows(v_tiles.index(stage), left)
                fence_async_shared()
                barrier()
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
        weight = causal_decay(gates, stage, p_layout, True) * scale
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
        qk_tile.store(qk.to(dtype))
        uv_tile.store((uv * weight).to(dtype))
        fence_async_shared()
        barrier()
        if SUMS or WEIGHTED:
            both = qk * uv
            itself = (
                gl.arange(0, CHUNK, gl.SliceLayout(1, p_layout))[:, None]
                == gl.arange(0, CHUNK, gl.SliceLayout(0, p_layout))[None, :]
            )
            apart = gl.where(itself, 0.0, both)
            earlier_parts.index(stage).store(warp_column_sums(apart, 4))
            if WEIGHTED:
                own_parts.index(stage).store(warp_column_sums(gl.where(itself, both, 0.0), 4))
                apart *= gates.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, p_layout))[None, :]
            if SUMS:
                over = gl.sum(gl.reshape(apart, [CHUNK, pairs, CHUNK // pairs]), 2)
                later_parts.index(stage).permute((1, 0)).store(over)
        qt = q.permute((1, 0)).load(write_layout)
        write = gates.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, write_layout))
        written = (qt.to(gl.float32) * write[None, :]).to(dtype)
        read_k = gates.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, k_layout))
        if V == K:
            read_v = read_k
        else:
            read_v = gates.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, v_layout))
        if SUMS or WEIGHTED:
            kt = k.permute((1, 0)).load(k_layout)
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        if SAVE > 0 and SAVE < SELDOM:
            barrier()
            here = ((chunk - first) % SAVE == 0) & (chunk - first >= FROM)
            _fetch(saved_desc, restored, s_tile, (chunk - first) // SAVE, begin, span, H, dk_ptr, SAVE, here)
        dk = dk * read_k[None, :]
        dv = dv * read_v[None, :]
        if SUMS or WEIGHTED:
            cross = dk * kt.to(gl.float32)
        dk, dv, state, written = warpgroup_mma_wait(0, deps=(dk, dv, state, written))
        dk = warpgroup_mma(q.permute((1, 0)), uv_tile, dk, is_async=True)
        dv = warpgroup_mma(u.permute((1, 0)), qk_tile, dv, is_async=True)
        state = warpgroup_mma(written, u, state, is_async=True)
        dk, dv = warpgroup_mma_wait(1, deps=(dk, dv))
        if SUMS or WEIGHTED:
            cross_parts.index(stage).store(warp_column_sums(cross, warps))
        if WEIGHTED:
            dk = dk * gates.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, k_layout))[None, :]
            dv = dv * gates.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, v_layout))[None, :]
        dk_tile.reshape([CHUNK, K]).permute((1, 0)).store(dk.to(dtype))
        dv_tile.reshape([CHUNK, V]).permute((1, 0)).store(dv.to(dtype))
        fence_async_shared()
        barrier()
        if dk_ptr is None:
            tma_store(dk_desc, [batch, chunk * CHUNK, head, 0], dk_tile)
            tma_store(dv_desc, [batch, chunk * CHUNK, head, 0], dv_tile)
        else:
            if left < CHUNK:
                # the tiles' other rows are the next sequence's
                rows_before = (chunk * CHUNK).to(gl.int64) * H
                store_tail(dk_tile, dk_ptr + rows_before * KEYS, H * KEYS, left, KEYS)
                store_tail(dv_tile, dv_ptr + rows_before * VALUES, H * VALUES, left, VALUES)
            else:
                tma_store(dk_desc, [batch, begin + chunk * CHUNK, head, 0], dk_tile)
                tma_store(dv_desc, [batch, begin + chunk * CHUNK, head, 0], dv_tile)
        state, written = warpgroup_mma_wait(0, deps=(state, written))
        if SAVE > 0:  # noqa: SIM102 - known while compiling
            if ((chunk - first) % SAVE == 0) & (chunk - first >= FROM):
                if SAVE >= SELDOM:
                    _fetch(saved_desc, restored, s_tile, (chunk - first) // SAVE, begin, span, H, dk_ptr, SAVE)
                mbarrier.wait(restored, turns & 1)
                turns += 1
                kept = s.load(s_layout).to(gl.float32)
                state_parts.index(stage * 2).store(gl.sum(state * kept, 1))
                state_parts.index(stage * 2 + 1).store(gl.sum(round_to(state, dtype) * kept, 1))
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
        rows = opaque(rows)
        if TURNED:
            at = columns[None, :] * KEYS + rows[:, None]
        else:
            at = rows[:, None] * VALUES + columns[None, :]
        gl.store(end_ptr + segment_index(H, 1) * (KEYS * VALUES) + at, state, mask=inside)
    tma_store_wait(0)


@gluon.jit
def _fetch(saved_desc, restored, s_tile, entry, begin, span, H, dk_ptr, SAVE: gl.constexpr, pred=True):
    """Asks for a saved state, in the place of the state's tile, of which every warp is past the products."""
    mbarrier.expect(restored, saved_desc.block_type.nbytes, pred=pred)
    if dk_ptr is None:
        entry += gl.program_id(1) * gl.cdiv(span, SAVE)
        tma_load(saved_desc, [gl.program_id(0), entry, 0, 0], restored, s_tile, pred=pred)
    else:
        entry += begin // (CHUNK * SAVE) + gl.program_id(0) // H
        tma_load(saved_desc, [gl.program_id(0) % H, entry, 0, 0], restored, s_tile, pred=pred)
