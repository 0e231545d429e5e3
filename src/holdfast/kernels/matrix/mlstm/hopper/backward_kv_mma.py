"""The mma partition of backward_kv.py. In each chunk, with scores as [later, earlier]:

    dK^T = (dS V^T + dn) * read + Q^T (((dO V^T) * y + z) * causal decay * beta)
    dV^T = (dS^T K^T) * read + dO^T ((Q K^T) * y * causal decay * beta)
    dS = decay dS + (Q^T * y * write) dO;  dn = decay dn + the sum over tokens of Q^T * z * write,
read with beta in it, y and z with scale in them.
"""

from typing import Any, NamedTuple

from holdfast.kernels.lib.gluon.compat import (
    aggregate,
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

from .decay import D_NORM, INV_NORM, KV_VECTORS, READ_BETA, WRITE_D_NORM, WRITE_INV_NORM


class Operands(NamedTuple):
    """q, k, do and v: descriptors, or a ring of tiles [stages, 1, 64, 1, columns] in shared memory."""

    q: Any
    k: Any
    do: Any
    v: Any


class Outputs(NamedTuple):
    """Descriptors of dk and dv, and of the states that the dq kernel saved."""

    dk: Any
    dv: Any
    saved: Any


class StatePointers(NamedTuple):
    """S before the first token, dS after the last and before the first, each with its column n, or None; saved n."""

    initial: gl.tensor
    dfinal: gl.tensor
    dinitial: gl.tensor
    saved_n: gl.tensor


@aggregate
class Sizes:
    """Heads and chunks; columns of k and v; chunks from one saved state to the next."""

    H: gl.tensor
    count: gl.tensor
    KEYS: gl.constexpr
    VALUES: gl.constexpr
    SAVE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, H, count, KEYS, VALUES, SAVE):
        self.H = H
        self.count = count
        self.KEYS = gl.constexpr(KEYS)
        self.VALUES = gl.constexpr(VALUES)
        self.SAVE = gl.constexpr(SAVE)


@gluon.jit
def mma_partition(tiles, out_tiles, stages, parts, saved_ready, descs, states, sizes):
    """Multiply each chunk's tiles, and carry dS and dn from the last chunk to the first."""
    q_tiles, k_tiles, do_tiles, v_tiles = tiles
    dk_tile, dv_tile = out_tiles
    dk_desc, dv_desc, saved_desc = descs
    decay_vectors, token_vectors, chunk_decays, tiles_ready, decay_ready, stage_empty = stages
    later_parts, earlier_parts, own_parts, cross_parts, state_parts = parts
    initial_ptr, dfinal_ptr, dinitial_ptr, saved_n_ptr = states
    H, count = sizes.H, sizes.count
    KEYS: gl.constexpr = sizes.KEYS
    VALUES: gl.constexpr = sizes.VALUES
    SAVE: gl.constexpr = sizes.SAVE
    STAGES: gl.constexpr = k_tiles.shape[0]
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = q_tiles.dtype
    warps: gl.constexpr = gl.num_warps()
    groups: gl.constexpr = warps // 4
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, V, 16])
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, CHUNK // groups, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    v_layout: gl.constexpr = k_layout if V == K else p_layout
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    of_key: gl.constexpr = gl.SliceLayout(1, k_layout)
    later: gl.constexpr = gl.SliceLayout(1, p_layout)
    qk_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    do_v_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
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
    if dfinal_ptr is None:
        dstate = gl.zeros([K, V], gl.float32, s_layout)
        dn = gl.zeros([K], gl.float32, of_key)
    else:
        at = key[:, None] * (VALUES + 1) + value[None, :]
        dstate = gl.load(dfinal_ptr + corner + at, mask=inside, other=outside)
        dn = gl.load(dfinal_ptr + corner + n_key * (VALUES + 1) + VALUES, mask=n_key < KEYS, other=0.0)

    stage = 0
    phase = 0
    last = 0
    loads = 0
    s = s_tile.reshape([K, V])
    for i in range(count):
        chunk = count - 1 - i
        mbarrier.wait(tiles_ready.index(stage), phase)
        if initial_ptr is not None:  # noqa: SIM102 - known while compiling
            if chunk == 0:
                # what passes the first chunk, but for its decay; the first state is not rounded
                mbarrier.wait(decay_ready.index(stage), phase)
                at = opaque(key)[:, None] * (VALUES + 1) + value[None, :]
                initial = gl.load(initial_ptr + corner + at, mask=inside, other=outside)
                n = gl.load(initial_ptr + corner + n_key * (VALUES + 1) + VALUES, mask=n_key < KEYS, other=0.0)
                own = gl.convert_layout(n * dn, gl.SliceLayout(1, s_layout))
                state_parts.index(stage * 2).store(gl.sum(dstate * initial, 1) + own)
        q = q_tiles.index(stage).reshape([CHUNK, K])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        do = do_tiles.index(stage).reshape([CHUNK, V])
        v = v_tiles.index(stage).reshape([CHUNK, V])
        # rounded here, while no product runs: the compiler would move the rounding past the next one, and wait for each
        dstate_operand = warpgroup_mma_wait(0, deps=(dstate.to(dtype),))
        qk = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        qk = warpgroup_mma(q, k.permute((1, 0)), qk, use_acc=False, is_async=True)
        do_v = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        do_v = warpgroup_mma(do, v.permute((1, 0)), do_v, use_acc=False, is_async=True)
        s.store(dstate_operand)
        # while these products run
        mbarrier.wait(decay_ready.index(stage), phase)
        weight = causal_decay(decay_vectors, stage, p_layout, True)
        inv_norm = token_vectors.index(stage * KV_VECTORS + INV_NORM).load(later)[:, None]
        d_norm = token_vectors.index(stage * KV_VECTORS + D_NORM).load(later)[:, None]
        dstate = dstate * chunk_decays.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
        # one barrier for three: dS is in its tile, the last outputs have left theirs, the last chunk's tiles are read
        fence_async_shared()
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(stage_empty.index(last), count=1, pred=i > 0)
        last = stage
        dk = gl.zeros([K, CHUNK], gl.float32, k_layout)
        dk = warpgroup_mma(s, v.permute((1, 0)), dk, use_acc=False, is_async=True)
        dv = gl.zeros([V, CHUNK], gl.float32, v_layout)
        dv = warpgroup_mma(s.permute((1, 0)), k.permute((1, 0)), dv, use_acc=False, is_async=True)
        qk, do_v = warpgroup_mma_wait(2, deps=(qk, do_v))
        qk = qk * weight
        do_v = do_v * inv_norm + d_norm
        beta = decay_vectors.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, p_layout))[None, :]
        qk_tile.store((qk * inv_norm * beta).to(dtype))
        do_v_tile.store((do_v * weight * beta).to(dtype))
        fence_async_shared()
        barrier()
        both = qk * do_v
        itself = gl.arange(0, CHUNK, later)[:, None] == gl.arange(0, CHUNK, gl.SliceLayout(0, p_layout))[None, :]
        apart = gl.where(itself, 0.0, both)
        earlier_parts.index(stage).store(warp_column_sums(apart, 4))
        own_parts.index(stage).permute((1, 0)).store(_row_sums_by_warpgroup(gl.where(itself, both, 0.0)))
        later_parts.index(stage).permute((1, 0)).store(_row_sums_by_warpgroup(apart * beta))
        qt = q.permute((1, 0)).load(write_layout).to(gl.float32)
        write_dn = token_vectors.index(stage * KV_VECTORS + WRITE_D_NORM).load(gl.SliceLayout(0, write_layout))
        added = gl.convert_layout(gl.sum(qt * write_dn[None, :], 1), of_key)
        write = token_vectors.index(stage * KV_VECTORS + WRITE_INV_NORM).load(gl.SliceLayout(0, write_layout))
        written = (qt * write[None, :]).to(dtype)
        read_k = token_vectors.index(stage * KV_VECTORS + READ_BETA).load(gl.SliceLayout(0, k_layout))
        read_v = token_vectors.index(stage * KV_VECTORS + READ_BETA).load(gl.SliceLayout(0, v_layout))
        kt = k.permute((1, 0)).load(k_layout).to(gl.float32)
        kt *= decay_vectors.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, k_layout))[None, :]
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        dk = dk + dn[:, None]
        cross = dk * kt
        dk = dk * read_k[None, :]
        dv = dv * read_v[None, :]
        dn = dn * chunk_decays.index(stage).load(of_key) + added
        dk, dv, dstate, written = warpgroup_mma_wait(0, deps=(dk, dv, dstate, written))
        dk = warpgroup_mma(q.permute((1, 0)), do_v_tile, dk, is_async=True)
        dv = warpgroup_mma(do.permute((1, 0)), qk_tile, dv, is_async=True)
        dstate = warpgroup_mma(written, do, dstate, is_async=True)
        dk, dv = warpgroup_mma_wait(1, deps=(dk, dv))
        cross_parts.index(stage).store(warp_column_sums(cross, warps))
        dk_tile.reshape([CHUNK, K]).permute((1, 0)).store(dk.to(dtype))
        dv_tile.reshape([CHUNK, V]).permute((1, 0)).store(dv.to(dtype))
        fence_async_shared()
        barrier()
        tma_store(dk_desc, [batch, chunk * CHUNK, head, 0], dk_tile)
        tma_store(dv_desc, [batch, chunk * CHUNK, head, 0], dv_tile)
        if (chunk % SAVE == 0) & (chunk > 0):
            # every warp is past the products with dS's tile
            mbarrier.expect(saved_ready, saved_desc.block_type.nbytes)
            tma_load(saved_desc, [gl.program_id(0), chunk // SAVE, 0, 0], saved_ready, s_tile)
        dstate, written = warpgroup_mma_wait(0, deps=(dstate, written))
        if (chunk % SAVE == 0) & (chunk > 0):
            n = gl.load(saved_n_ptr + chunk // SAVE * KEYS + n_key, mask=n_key < KEYS, other=0.0)
            own = gl.convert_layout(n * dn, gl.SliceLayout(1, s_layout))
            mbarrier.wait(saved_ready, loads & 1)
            loads += 1
            saved_state = s.load(s_layout).to(gl.float32)
            state_parts.index(stage * 2).store(gl.sum(dstate * saved_state, 1) + own)
            state_parts.index(stage * 2 + 1).store(gl.sum(round_to(dstate, dtype) * saved_state, 1) + own)
            # read by all warps before the next chunk's dS takes its place
            barrier()
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    barrier()
    mbarrier.arrive(stage_empty.index(last), count=1, pred=count > 0)
    if dinitial_ptr is not None:
        # addresses computed again: kept from the start, they would take as many registers as dS
        key = opaque(key)
        at = key[:, None] * (VALUES + 1) + value[None, :]
        gl.store(dinitial_ptr + corner + at, dstate, mask=inside)
        gl.store(dinitial_ptr + corner + n_key * (VALUES + 1) + VALUES, dn, mask=n_key < KEYS)
    tma_store_wait(0)


@gluon.jit
def _row_sums_by_warpgroup(x):
    """Sum each row of scores [CHUNK, CHUNK] over the columns of one warpgroup: [CHUNK, warpgroups]."""
    groups: gl.constexpr = gl.num_warps() // 4
    return gl.sum(gl.reshape(x, [CHUNK, groups, CHUNK // groups]), 2)
