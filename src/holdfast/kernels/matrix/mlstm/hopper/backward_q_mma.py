"""The mma partition of backward_q.py, which has the formulas."""

from typing import Any, NamedTuple

from holdfast.kernels.lib.gluon.compat import (
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from holdfast.kernels.lib.gluon.decay import BETA, CHUNK, READ_DECAY, VECTORS, WRITE_DECAY, causal_decay
from holdfast.kernels.lib.gluon.reduce import warp_column_sums
from holdfast.kernels.lib.gluon.sequence import segment_index
from holdfast.kernels.lib.gluon.split import opaque
from holdfast.kernels.lib.gluon.state import save_state

from .decay import D_NORM, D_STABILIZER, INTER_NORM, INV_NORM, NORM_FACTOR, Q_DQ, Q_VECTORS, STABILIZER_FACTOR
from .normalizer import to_half


class Tiles(NamedTuple):
    """do, v, k and q: descriptors, or a ring of tiles [stages, 1, 64, 1, columns] in shared memory."""

    do: Any
    v: Any
    k: Any
    q: Any


class Sums(NamedTuple):
    """Buffers of a chunk: q_dq_parts [warps, 64] and score_sums [4, 64], which warps leave, and d_norms [64]."""

    q_dq_parts: gl.shared_memory_descriptor
    score_sums: gl.shared_memory_descriptor
    d_norms: gl.shared_memory_descriptor


class TokenPointers(NamedTuple):
    """A head's do . o, or None, and the first of its four rows of results."""

    do_o: gl.tensor
    token: gl.tensor


class StatePointers(NamedTuple):
    """The first state and the one before the last chunk, or None; where states and normalisers are saved."""

    initial: gl.tensor
    last_entry: gl.tensor
    saved: gl.tensor
    saved_n: gl.tensor


@aggregate
class Sizes:
    """Tokens, heads and chunks of a sequence; columns of k and v; chunks from one saved state to the next."""

    T: gl.tensor
    H: gl.tensor
    count: gl.tensor
    KEYS: gl.constexpr
    VALUES: gl.constexpr
    SAVE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, T, H, count, KEYS, VALUES, SAVE):
        self.T = T
        self.H = H
        self.count = count
        self.KEYS = gl.constexpr(KEYS)
        self.VALUES = gl.constexpr(VALUES)
        self.SAVE = gl.constexpr(SAVE)


@gluon.jit
def mma_partition(tiles, stages, sums, dq_desc, tokens_of, states, sizes):
    """Multiply each chunk's tiles, and carry the state from the first chunk to the last."""
    do_tiles, v_tiles, k_tiles, q_tiles = tiles
    decay_vectors, token_vectors, chunk_decays, tiles_ready, decay_ready, stage_empty = stages
    q_dq_parts, score_sums, d_norms = sums
    do_o_ptr, token_ptr = tokens_of
    initial_ptr, last_entry_ptr, saved_ptr, saved_n_ptr = states
    T, H, count = sizes.T, sizes.H, sizes.count
    KEYS: gl.constexpr = sizes.KEYS
    VALUES: gl.constexpr = sizes.VALUES
    SAVE: gl.constexpr = sizes.SAVE
    STAGES: gl.constexpr = k_tiles.shape[0]
    K: gl.constexpr = k_tiles.shape[4]
    V: gl.constexpr = v_tiles.shape[4]
    dtype: gl.constexpr = q_tiles.dtype
    warps: gl.constexpr = gl.num_warps()
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, V, 16])
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, CHUNK // (warps // 4), 16])
    read_layout: gl.constexpr = gl.DotOperandLayout(0, q_layout, 2)
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    token: gl.constexpr = gl.SliceLayout(0, q_layout)
    later: gl.constexpr = gl.SliceLayout(0, p_layout)
    of_warps: gl.constexpr = gl.BlockedLayout([warps, 1], [1, 32], [1, warps], [1, 0])
    of_four: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [1, warps], [1, 0])
    each: gl.constexpr = gl.SliceLayout(0, of_warps)
    p_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))

    batch = gl.program_id(0) // H
    head = gl.program_id(0) % H
    key = gl.arange(0, K, gl.SliceLayout(1, s_layout))
    value = gl.arange(0, V, gl.SliceLayout(0, s_layout))
    n_key = gl.arange(0, K, gl.SliceLayout(1, q_layout))
    if KEYS == K and VALUES == V:
        inside: gl.constexpr = None
        outside: gl.constexpr = None
    else:
        inside = (key < KEYS)[:, None] & (value < VALUES)[None, :]
        outside: gl.constexpr = 0.0
    corner = segment_index(H, 1) * (KEYS * (VALUES + 1))
    if initial_ptr is None:
        state = gl.zeros([K, V], gl.float32, s_layout)
        n = gl.zeros([K], gl.float32, gl.SliceLayout(1, q_layout))
    else:
        at = key[:, None] * (VALUES + 1) + value[None, :]
        state = gl.load(initial_ptr + corner + at, mask=inside, other=outside)
        n = gl.load(initial_ptr + corner + n_key * (VALUES + 1) + VALUES, mask=n_key < KEYS, other=0.0)

    stage = 0
    phase = 0
    last = 0
    for i in range(count):
        if (i % SAVE == 0) & (i > 0):
            entry = i // SAVE * KEYS
            save_state(saved_ptr + entry * VALUES, state.to(dtype), 0, VALUES, KEYS, False, s_layout)
            gl.store(saved_n_ptr + entry + n_key, n, mask=n_key < KEYS)
        if last_entry_ptr is not None:  # noqa: SIM102 - known while compiling
            if i == count - 1:
                # addresses computed again: kept, they would take as many registers as the state
                at = opaque(key)[:, None] * (VALUES + 1) + value[None, :]
                gl.store(last_entry_ptr + corner + at, state, mask=inside)
                gl.store(last_entry_ptr + corner + n_key * (VALUES + 1) + VALUES, n, mask=n_key < KEYS)
        mbarrier.wait(tiles_ready.index(stage), phase)
        do = do_tiles.index(stage).reshape([CHUNK, V])
        v = v_tiles.index(stage).reshape([CHUNK, V])
        k = k_tiles.index(stage).reshape([CHUNK, K])
        q = q_tiles.index(stage).reshape([CHUNK, K])
        dq = gl.zeros([K, CHUNK], gl.float32, q_layout)
        if initial_ptr is not None:  # noqa: SIM102 - known while compiling
            if i == 0:
                # of the first state what its rounding leaves too: it may be all that a sequence reads, and cancel
                low = (state - state.to(dtype).to(gl.float32)).to(dtype)
                low = gl.convert_layout(low, read_layout)
                dq, low = warpgroup_mma_wait(0, deps=(dq, low))
                dq = warpgroup_mma(low, do.permute((1, 0)), dq, use_acc=False, is_async=True)
                dq, low = warpgroup_mma_wait(0, deps=(dq, low))
        state_operand = gl.convert_layout(state.to(dtype), read_layout)
        # rounded here, while no product runs: the compiler would move the rounding past the next one, and wait for each
        state_operand = warpgroup_mma_wait(0, deps=(state_operand,))
        p = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        p = warpgroup_mma(v, do.permute((1, 0)), p, use_acc=False, is_async=True)
        kq = gl.zeros([CHUNK, CHUNK], gl.float32, p_layout)
        if do_o_ptr is None:
            kq = warpgroup_mma(k, q.permute((1, 0)), kq, use_acc=False, is_async=True)
        else:
            tokens = i * CHUNK + gl.arange(0, CHUNK, each)
            do_o = gl.load(do_o_ptr + tokens, mask=tokens < T, other=0.0)
        if initial_ptr is None:
            dq = warpgroup_mma(state_operand, do.permute((1, 0)), dq, use_acc=False, is_async=True)
        else:
            dq = warpgroup_mma(state_operand, do.permute((1, 0)), dq, use_acc=i == 0, is_async=True)

        mbarrier.wait(decay_ready.index(stage), phase)
        write = decay_vectors.index(stage * VECTORS + WRITE_DECAY).load(gl.SliceLayout(0, read_layout))
        decay = chunk_decays.index(stage).load(gl.SliceLayout(1, s_layout))
        weight = causal_decay(decay_vectors, stage, p_layout, False)
        weight *= decay_vectors.index(stage * VECTORS + BETA).load(gl.SliceLayout(1, p_layout))[:, None]
        kt = k.permute((1, 0)).load(read_layout)
        weighted = kt.to(gl.float32) * write[None, :]
        written = gl.convert_layout(to_half(weighted, dtype), write_layout)
        added = gl.convert_layout(gl.sum(weighted, 1), gl.SliceLayout(1, q_layout))

        p, kq = warpgroup_mma_wait(1, deps=(p, kq))
        p = p * weight
        if do_o_ptr is None:
            score_sums.store(warp_column_sums(p * kq, 4))
        state = state * decay[:, None]
        dq, state_operand = warpgroup_mma_wait(0, deps=(dq, state_operand))
        read = decay_vectors.index(stage * VECTORS + READ_DECAY).load(token)
        read *= token_vectors.index(stage * Q_VECTORS + INV_NORM).load(token)
        dq = dq * read[None, :]
        qt = q.permute((1, 0)).load(q_layout)
        q_dq_parts.store(warp_column_sums(dq * qt.to(gl.float32), warps))
        barrier()
        q_dq = gl.sum(q_dq_parts.load(of_warps), 0)
        inv_norm = token_vectors.index(stage * Q_VECTORS + INV_NORM).load(each)
        if do_o_ptr is None:
            do_o = q_dq + gl.convert_layout(gl.sum(score_sums.load(of_four), 0), each) * inv_norm
        d_norm = do_o * token_vectors.index(stage * Q_VECTORS + NORM_FACTOR).load(each)
        d_norms.store(d_norm)
        barrier()
        p = p * token_vectors.index(stage * Q_VECTORS + INV_NORM).load(later)[None, :]
        p_tile.store((p + weight * d_norms.load(later)[None, :]).to(dtype))
        # one barrier for three: p is there, the last output has left its tile, the last chunk's tiles are read
        fence_async_shared()
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(stage_empty.index(last), count=1, pred=i > 0)
        last = stage
        read = decay_vectors.index(stage * VECTORS + READ_DECAY).load(token) * d_norms.load(token)
        dq += n[:, None] * read[None, :]
        n = n * chunk_decays.index(stage).load(gl.SliceLayout(1, q_layout)) + added
        dq, state, kt, written = warpgroup_mma_wait(0, deps=(dq, state, kt, written))
        dq = warpgroup_mma(kt, p_tile, dq, is_async=True)
        state = warpgroup_mma(written, v, state, is_async=True)
        dq, kt = warpgroup_mma_wait(1, deps=(dq, kt))
        # in place of q, which all warps have read
        q_tile = q_tiles.index(stage)
        q_tile.reshape([CHUNK, K]).permute((1, 0)).store(dq.to(dtype))
        fence_async_shared()
        barrier()
        tma_store(dq_desc, [batch, i * CHUNK, head, 0], q_tile)
        q_dq += d_norm * token_vectors.index(stage * Q_VECTORS + INTER_NORM).load(each)
        dm = do_o * token_vectors.index(stage * Q_VECTORS + STABILIZER_FACTOR).load(each)
        tokens = i * CHUNK + gl.arange(0, CHUNK, each)
        rows = gl.num_programs(0).to(gl.int64) * T
        gl.store(token_ptr + INV_NORM * rows + tokens, inv_norm, mask=tokens < T)
        gl.store(token_ptr + D_NORM * rows + tokens, d_norm, mask=tokens < T)
        gl.store(token_ptr + D_STABILIZER * rows + tokens, dm, mask=tokens < T)
        gl.store(token_ptr + Q_DQ * rows + tokens, q_dq, mask=tokens < T)
        state, written = warpgroup_mma_wait(0, deps=(state, written))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1

    barrier()
    mbarrier.arrive(stage_empty.index(last), count=1, pred=count > 0)
    tma_store_wait(0)
