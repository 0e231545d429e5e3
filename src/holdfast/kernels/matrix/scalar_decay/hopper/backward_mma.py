"""The mma partition of backward.py. In each chunk, with score tiles [later, earlier]:

    dK^T = (dS V^T) * read + Q^T ((dO V^T) * causal);  dV^T = (dS^T K^T) * read + dO^T ((Q K^T) * causal);
    dS = decay dS + (Q^T * write) dO.
The rounded dS goes through shared memory, because one product needs it transposed.
"""

from typing import NamedTuple

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
from holdfast.kernels.lib.gluon.decay import BETA, CHUNK, READ_DECAY, VECTORS, WRITE_DECAY, causal_decay
from holdfast.kernels.lib.gluon.pdl import grid_dependency_wait
from holdfast.kernels.lib.gluon.reduce import warp_column_sums
from holdfast.kernels.lib.gluon.sequence import segment_index
from holdfast.kernels.lib.gluon.split import opaque, round_to
from holdfast.kernels.lib.gluon.tails import store_tail, zero_tail_rows

# chunks between saved states from which on one is fetched when it is wanted, and not while a chunk's last products run,
# for which all chunks have a barrier more
SELDOM = gl.constexpr(8)


@aggregate
class Options:
    """What the mma partition is compiled for.

    SUMS: with dg. WEIGHTED: with beta. KEYS, VALUES: columns of k and of v. TRANSPOSED: boundary states are [V, K].
    SAVE: chunks from one saved state to the next. FROM: the first chunk with one.
    """

    SUMS: gl.constexpr
    WEIGHTED: gl.constexpr
    KEYS: gl.constexpr
    VALUES: gl.constexpr
    TRANSPOSED: gl.constexpr
    SAVE: gl.constexpr
    FROM: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, SUMS, WEIGHTED, KEYS, VALUES, TRANSPOSED, SAVE, FROM):
        self.SUMS = gl.constexpr(SUMS)
        self.WEIGHTED = gl.constexpr(WEIGHTED)
        self.KEYS = gl.constexpr(KEYS)
        self.VALUES = gl.constexpr(VALUES)
        self.TRANSPOSED = gl.constexpr(TRANSPOSED)
        self.SAVE = gl.constexpr(SAVE)
        self.FROM = gl.constexpr(FROM)


class SavedStates(NamedTuple):
    """Saved states: their descriptor, the tile that one is loaded into, and the barrier that it arrives at."""

    desc: gl.tensor
    ready: gl.shared_memory_descriptor
    tile: gl.shared_memory_descriptor


@gluon.jit
def mma_partition(buffers, tensors, tokens, H, segment, scale, options):
    """Multiply every chunk, and carry the state's gradient from the last to the segment.first."""
    tiles = buffers.tiles
    stages = buffers.stages
    sums = buffers.sums
    KEYS: gl.constexpr = options.KEYS
    VALUES: gl.constexpr = options.VALUES
    SAVE: gl.constexpr = options.SAVE
    STAGES: gl.constexpr = tiles.q.shape[0]
    K: gl.constexpr = tiles.k.shape[4]
    V: gl.constexpr = tiles.v.shape[4]
    dtype: gl.constexpr = tiles.q.dtype
    warps: gl.constexpr = gl.num_warps()
    pairs: gl.constexpr = warps // 4
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, V, 16])
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, pairs], [16, CHUNK // pairs, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    v_layout: gl.constexpr = k_layout if V == K else p_layout
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    qk_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    dov_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    s_tile = gl.allocate_shared_memory(dtype, [1, 1, K, V], gl.NVMMASharedLayout(128, 16, 4))

    head = gl.program_id(0) % H
    rows = gl.arange(0, K, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, V, gl.SliceLayout(0, s_layout))
    if KEYS == K and VALUES == V:
        inside: gl.constexpr = None
        outside: gl.constexpr = None
    else:
        inside = (rows < KEYS)[:, None] & (columns < VALUES)[None, :]
        outside: gl.constexpr = 0.0
    if options.TRANSPOSED:
        at = columns[None, :] * KEYS + rows[:, None]
    else:
        at = rows[:, None] * VALUES + columns[None, :]
    grid_dependency_wait()
    if tensors.start is None:
        state = gl.zeros([K, V], gl.float32, s_layout)
    else:
        state = gl.load(tensors.start + segment_index(H, 1) * (KEYS * VALUES) + at, mask=inside, other=outside)

    stage = 0
    phase = 0
    last = 0
    loads = 0
    s = s_tile.reshape([K, V])
    for i in range(segment.count):
        chunk = segment.first + segment.count - 1 - i
        mbarrier.wait(stages.tiles_ready.index(stage), phase)
        if tensors.dk is not None:
            left = tokens.length - chunk * CHUNK
            if left < CHUNK:
                zero_tail_rows(tiles.q.index(stage), left)
                zero_tail_rows(tiles.k.index(stage), left)
                zero_tail_rows(tiles.do.index(stage), left)
                zero_tail_rows(tiles.v.index(stage), left)
                fence_async_shared()
                barrier()
        q = tiles.q.index(stage).reshape([CHUNK, K])
        k = tiles.k.index(stage).reshape([CHUNK, K])
        do = tiles.do.index(stage).reshape([CHUNK, V])
        v = tiles.v.index(stage).reshape([CHUNK, V])
        # rounded here, while no product runs: the compiler would move it past the next one and then wait for each
        rounded_state = warpgroup_mma_wait(0, deps=(state.to(dtype),))
        qk = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        qk = warpgroup_mma(q, k.permute((1, 0)), qk, use_acc=False, is_async=True)
        dov = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        dov = warpgroup_mma(do, v.permute((1, 0)), dov, use_acc=False, is_async=True)
        s.store(rounded_state)
        # while these products run
        mbarrier.wait(stages.decays_ready.index(stage), phase)
        weight = causal_decay(stages.decays, stage, p_layout, True) * scale
        state = state * stages.chunk_decay.index(stage).load(gl.SliceLayout(1, s_layout))[:, None]
        # one barrier for three: the state is there, the last outputs have left their tiles, the last tiles are read
        fence_async_shared()
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(stages.empty.index(last), count=1, pred=i > 0)
        last = stage
        dk = gl.zeros([K, CHUNK], gl.float32, k_layout)
        dk = warpgroup_mma(s, v.permute((1, 0)), dk, use_acc=False, is_async=True)
        dv = gl.zeros([V, CHUNK], gl.float32, v_layout)
        dv = warpgroup_mma(s.permute((1, 0)), k.permute((1, 0)), dv, use_acc=False, is_async=True)

        qk, dov = warpgroup_mma_wait(2, deps=(qk, dov))
        qk = qk * weight
        qk_tile.store(qk.to(dtype))
        dov_tile.store((dov * weight).to(dtype))
        fence_async_shared()
        barrier()
        if options.SUMS or options.WEIGHTED:
            both = qk * dov
            itself = (
                gl.arange(0, CHUNK, gl.SliceLayout(1, p_layout))[:, None]
                == gl.arange(0, CHUNK, gl.SliceLayout(0, p_layout))[None, :]
            )
            apart = gl.where(itself, 0.0, both)
            sums.earlier.index(stage).store(warp_column_sums(apart, 4))
            if options.WEIGHTED:
                sums.own.index(stage).store(warp_column_sums(gl.where(itself, both, 0.0), 4))
                apart *= stages.decays.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, p_layout))[None, :]
            if options.SUMS:
                over = gl.sum(gl.reshape(apart, [CHUNK, pairs, CHUNK // pairs]), 2)
                sums.later.index(stage).permute((1, 0)).store(over)
        qt = q.permute((1, 0)).load(write_layout)
        write = stages.decays.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, write_layout))
        written = (qt.to(gl.float32) * write[None, :]).to(dtype)
        read_k = stages.decays.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, k_layout))
        if V == K:
            read_v = read_k
        else:
            read_v = stages.decays.index(stage * VECTORS + READ_DECAY).load(gl.SliceLayout(0, v_layout))
        if options.SUMS or options.WEIGHTED:
            kt = k.permute((1, 0)).load(k_layout)
        dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
        if SAVE > 0 and SAVE < SELDOM:
            barrier()
            here = ((chunk - segment.first) % SAVE == 0) & (chunk - segment.first >= options.FROM)
            _load_saved(
                SavedStates(desc=tensors.saved_desc, ready=buffers.saved_ready, tile=s_tile),
                (chunk - segment.first) // SAVE,
                tokens.first,
                segment.chunks,
                H,
                tensors.dk,
                SAVE,
                here,
            )
        dk = dk * read_k[None, :]
        dv = dv * read_v[None, :]
        if options.SUMS or options.WEIGHTED:
            cross = dk * kt.to(gl.float32)
        dk, dv, state, written = warpgroup_mma_wait(0, deps=(dk, dv, state, written))
        dk = warpgroup_mma(q.permute((1, 0)), dov_tile, dk, is_async=True)
        dv = warpgroup_mma(do.permute((1, 0)), qk_tile, dv, is_async=True)
        state = warpgroup_mma(written, do, state, is_async=True)
        dk, dv = warpgroup_mma_wait(1, deps=(dk, dv))
        if options.SUMS or options.WEIGHTED:
            sums.cross.index(stage).store(warp_column_sums(cross, warps))
        if options.WEIGHTED:
            dk = dk * stages.decays.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, k_layout))[None, :]
            dv = dv * stages.decays.index(stage * VECTORS + BETA).load(gl.SliceLayout(0, v_layout))[None, :]
        buffers.dk_tile.reshape([CHUNK, K]).permute((1, 0)).store(dk.to(dtype))
        buffers.dv_tile.reshape([CHUNK, V]).permute((1, 0)).store(dv.to(dtype))
        fence_async_shared()
        barrier()
        if tensors.dk is None:
            tma_store(tensors.dk_desc, [tokens.batch, chunk * CHUNK, head, 0], buffers.dk_tile)
            tma_store(tensors.dv_desc, [tokens.batch, chunk * CHUNK, head, 0], buffers.dv_tile)
        else:
            if left < CHUNK:
                # the tiles' other rows are the next sequence's
                rows_before = (chunk * CHUNK).to(gl.int64) * H
                store_tail(buffers.dk_tile, tensors.dk + rows_before * KEYS, H * KEYS, left, KEYS)
                store_tail(buffers.dv_tile, tensors.dv + rows_before * VALUES, H * VALUES, left, VALUES)
            else:
                tma_store(tensors.dk_desc, [tokens.batch, tokens.first + chunk * CHUNK, head, 0], buffers.dk_tile)
                tma_store(tensors.dv_desc, [tokens.batch, tokens.first + chunk * CHUNK, head, 0], buffers.dv_tile)
        state, written = warpgroup_mma_wait(0, deps=(state, written))
        if SAVE > 0:  # noqa: SIM102 - known while compiling
            if ((chunk - segment.first) % SAVE == 0) & (chunk - segment.first >= options.FROM):
                if SAVE >= SELDOM:
                    _load_saved(
                        SavedStates(desc=tensors.saved_desc, ready=buffers.saved_ready, tile=s_tile),
                        (chunk - segment.first) // SAVE,
                        tokens.first,
                        segment.chunks,
                        H,
                        tensors.dk,
                        SAVE,
                    )
                mbarrier.wait(buffers.saved_ready, loads & 1)
                loads += 1
                saved = s.load(s_layout).to(gl.float32)
                sums.state.index(stage * 2).store(gl.sum(state * saved, 1))
                sums.state.index(stage * 2 + 1).store(gl.sum(round_to(state, dtype) * saved, 1))
                # read by all before the next chunk's state takes its place
                barrier()
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    barrier()
    mbarrier.arrive(stages.empty.index(last), count=1, pred=segment.count > 0)
    if tensors.end is not None:
        # addresses computed again: kept from the start, they would take as many registers as the state
        rows = opaque(rows)
        if options.TRANSPOSED:
            at = columns[None, :] * KEYS + rows[:, None]
        else:
            at = rows[:, None] * VALUES + columns[None, :]
        gl.store(tensors.end + segment_index(H, 1) * (KEYS * VALUES) + at, state, mask=inside)
    tma_store_wait(0)


@gluon.jit
def _load_saved(saved, entry, first, segment_chunks, H, packed_ptr, SAVE: gl.constexpr, pred=True):
    """Issue the load of a saved state into the state's tile, of which every warp is past the products.

    packed_ptr: None where sequences are not packed.
    """
    mbarrier.expect(saved.ready, saved.desc.block_type.nbytes, pred=pred)
    if packed_ptr is None:
        entry += gl.program_id(1) * gl.cdiv(segment_chunks, SAVE)
        tma_load(saved.desc, [gl.program_id(0), entry, 0, 0], saved.ready, saved.tile, pred=pred)
    else:
        entry += first // (CHUNK * SAVE) + gl.program_id(0) // H
        tma_load(saved.desc, [gl.program_id(0) % H, entry, 0, 0], saved.ready, saved.tile, pred=pred)
