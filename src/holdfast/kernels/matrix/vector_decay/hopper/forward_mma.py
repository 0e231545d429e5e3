"""The mma partition of vector decay's forward kernel: the output of each chunk, and the state in registers.

Products are transposed, so that the state S^T is a wgmma accumulator that is rounded in registers to be the operand of
the next product.
"""

from typing import NamedTuple

from holdfast.kernels.lib.gluon.compat import (
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from holdfast.kernels.lib.gluon.decay import CHUNK
from holdfast.kernels.lib.gluon.sequence import packed_sequence
from holdfast.kernels.lib.gluon.slice_sums import slice_sums_index, slice_sums_offset, slice_sums_stride
from holdfast.kernels.lib.gluon.split import opaque
from holdfast.kernels.lib.gluon.tails import store_tail

from .forward_loads import QK_STAGES, V_STAGES, chunk_token, load_qk, load_v
from .forward_scores import store_scores
from .token_layout import HALF


class Memory(NamedTuple):
    """Where the mma partition reads and writes beside its tiles, and the sizes of that; see `gla_fwd`."""

    o_desc: gl.tensor
    o_ptr: gl.tensor | None
    cu_ptr: gl.tensor | None
    sums_ptr: gl.tensor | None
    initial_ptr: gl.tensor | None
    final_ptr: gl.tensor | None
    saved_desc: gl.tensor | None
    T: gl.tensor
    H: gl.tensor
    scale: gl.tensor


@aggregate
class Constants:
    """What `gla_fwd` is compiled for."""

    KEYS: gl.constexpr
    VALUES: gl.constexpr
    REVERSE: gl.constexpr
    ADDS: gl.constexpr
    LEAVES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, KEYS, VALUES, REVERSE, ADDS, LEAVES):
        self.KEYS = gl.constexpr(KEYS)
        self.VALUES = gl.constexpr(VALUES)
        self.REVERSE = gl.constexpr(REVERSE)
        self.ADDS = gl.constexpr(ADDS)
        self.LEAVES = gl.constexpr(LEAVES)


@gluon.jit
def _store_tail(tile, memory, VALUES: gl.constexpr):
    """Store the rows of a sequence's last chunk that are its own."""
    # found again: what is kept for this takes registers from the loop
    heads = opaque(memory.H)
    sequence = packed_sequence(memory.cu_ptr, gl.program_id(0) // heads, memory.T)
    token = (sequence.end - 1) // CHUNK * CHUNK
    corner = memory.o_ptr + ((token + sequence.shift).to(gl.int64) * heads + gl.program_id(0) % heads) * VALUES
    store_tail(tile, corner, heads * VALUES, sequence.end - token, VALUES)


@gluon.jit
def _k_half(state, half: gl.constexpr):
    """Return 64 columns of the transposed state."""
    if state.shape[1] == HALF:
        return state
    else:
        first, second = gl.split(gl.permute(gl.reshape(state, [state.shape[0], 2, HALF]), (0, 2, 1)))
        return first if half == 0 else second


@gluon.jit
def mma_partition(qk, v, operands, barriers, p_tile, memory, order, constants):
    """Multiply every chunk's operands, and carry the state from the first chunk to the last."""
    head = gl.program_id(0) % memory.H
    K: gl.constexpr = qk.tiles.shape[4]
    V: gl.constexpr = v.tiles.shape[4]
    dtype: gl.constexpr = qk.tiles.dtype
    K_HALVES: gl.constexpr = K // HALF
    V_SLABS: gl.constexpr = V // HALF
    # slabs of 64 x 64 values that a chunk's q and k have room for
    QK_SLABS: gl.constexpr = 2 * K_HALVES
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    warps: gl.constexpr = gl.num_warps()
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, CHUNK, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, K, 16])
    v_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    read_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)

    rows = gl.arange(0, V, gl.SliceLayout(1, s_layout))
    columns = gl.arange(0, K, gl.SliceLayout(0, s_layout))
    inside = (rows < constants.VALUES)[:, None] & (columns < constants.KEYS)[None, :]
    corner = gl.program_id(0).to(gl.int64) * (constants.KEYS * constants.VALUES)
    if memory.initial_ptr is None:
        state = gl.zeros([V, K], gl.float32, s_layout)
    else:
        source = memory.initial_ptr + corner + columns[None, :] * constants.VALUES + rows[:, None]
        state = gl.load(source, mask=inside, other=0.0)
    if constants.ADDS or constants.LEAVES:
        place = (order.batch, 0, memory.T) if order.first is None else (order.batch, order.first, memory.T)
        sums_ptr = memory.sums_ptr + slice_sums_offset(place, memory.H, V, order.first is not None)
        chunk_of_sums = slice_sums_stride(memory.H, V)

    stage = 0
    phase = 0
    for i in range(order.chunks):
        v_stage = i % V_STAGES
        token = chunk_token(i, order, constants.REVERSE)
        # the stage whose q and k have been read
        free = gl.where(stage == 0, QK_STAGES - 1, stage - 1)
        if memory.saved_desc is not None:
            saved = reinterpret(qk.tiles, dtype, [QK_STAGES * QK_SLABS // V_SLABS, V, HALF], flat)
            for half in gl.static_range(K_HALVES):
                saved.index(free * (QK_SLABS // V_SLABS) + half).store(_k_half(state, half).to(dtype))
            fence_async_shared()
            barrier()
            slabs = reinterpret(qk.tiles, dtype, [QK_STAGES * QK_SLABS, 1, CHUNK, 1, HALF], memory.saved_desc.layout)
            for slab in gl.static_range(K_HALVES * V_SLABS):
                row = token if order.first is None else token - order.shift
                coords = [order.batch, row, head, slab * HALF]
                tma_store(memory.saved_desc, coords, slabs.index(free * QK_SLABS + slab))
            # the compiler would keep what is rounded for the product below
            state = warpgroup_mma_wait(0, deps=(state,))
        # half of the state at a time, for want of registers, and rounded while no product runs: the compiler would move
        # that past the next one and then wait for each
        held = gl.convert_layout(_k_half(state, 0).to(dtype), read_layout)
        held = warpgroup_mma_wait(0, deps=(held,))
        mbarrier.wait(barriers.ready.index(stage), phase)
        k = qk.tiles.index(2 * stage).reshape([CHUNK, K])
        q = qk.tiles.index(2 * stage + 1).reshape([CHUNK, K])
        store_scores(operands, opaque(0), v_stage, memory.scale, p_tile)
        fence_async_shared()
        mbarrier.expect(qk.ready.index(free), 2 * qk.k_desc.block_type.nbytes, pred=i + QK_STAGES - 1 < order.chunks)
        mbarrier.expect(v.ready.index(v_stage ^ 1), v.desc.block_type.nbytes, pred=i + 1 < order.chunks)
        # what is on its way to memory has left shared memory
        tma_store_wait(0)
        barrier()
        mbarrier.arrive(barriers.scores_empty, count=1)
        load_qk(qk, order, i + QK_STAGES - 1, free, constants.REVERSE)
        load_v(v, order, i + 1, v_stage ^ 1, constants.REVERSE)
        o = gl.zeros([V, CHUNK], gl.float32, o_layout)
        for half in gl.static_range(K_HALVES):
            if half > 0:
                held = gl.convert_layout(_k_half(state, half).to(dtype), read_layout)
            o, held = warpgroup_mma_wait(0, deps=(o, held))
            read = (k if constants.REVERSE else q).slice(half * HALF, HALF, 1)
            o = warpgroup_mma(held, read.permute((1, 0)), o, use_acc=half > 0, is_async=True)
        mbarrier.wait(v.ready.index(v_stage), (i // V_STAGES) % 2)
        o, held = warpgroup_mma_wait(0, deps=(o, held))
        v_tile = v.tiles.index(v_stage)
        vt = v_tile.reshape([CHUNK, V]).permute((1, 0)).load(v_layout)
        written = gl.convert_layout(vt, read_layout)
        decays = reinterpret(operands.chunk_decays, gl.float32, [V_STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        decay = decays.index(i % V_STAGES).load(gl.SliceLayout(0, s_layout))[None, :]
        o, written = warpgroup_mma_wait(0, deps=(o, written))
        if constants.ADDS:
            o = o + gl.load(sums_ptr + i * chunk_of_sums + slice_sums_index(V, o_layout))
        vt = gl.convert_layout(written, v_layout)
        o = warpgroup_mma(vt, p_tile if constants.REVERSE else p_tile.permute((1, 0)), o, is_async=True)
        state = warpgroup_mma(written, q if constants.REVERSE else k, state * decay, is_async=True)
        o = warpgroup_mma_wait(1, deps=(o,))
        # in the place of values that all warps have read
        barrier()
        if constants.LEAVES:
            gl.store(sums_ptr + i * chunk_of_sums + slice_sums_index(V, o_layout), o)
        else:
            v_tile.reshape([CHUNK, V]).permute((1, 0)).store(o.to(dtype))
        fence_async_shared()
        barrier()
        if order.first is None and not constants.LEAVES:
            tma_store(memory.o_desc, [order.batch, token, head, 0], v_tile)
        state, written = warpgroup_mma_wait(0, deps=(state, written))
        if order.first is not None and not constants.LEAVES:
            # no branch while a product runs
            if i > 0 if constants.REVERSE else i + 1 < order.chunks:
                tma_store(memory.o_desc, [order.batch, token, head, 0], v_tile)
            elif constants.REVERSE:
                _store_tail(v_tile, memory, constants.VALUES)
        if memory.saved_desc is not None:
            # the next state takes the place of what all warps have read
            barrier()
        stage += 1
        if stage == QK_STAGES:
            stage = 0
            phase ^= 1

    if order.first is not None and not constants.REVERSE and not constants.LEAVES:  # noqa: SIM102 - known while compiling
        if order.chunks > 0:
            _store_tail(v.tiles.index((order.chunks - 1) % V_STAGES), memory, constants.VALUES)
    if memory.final_ptr is not None:
        # addresses computed again: kept from the start, they would take as many registers as the state
        rows = opaque(rows)
        target = memory.final_ptr + corner + columns[None, :] * constants.VALUES + rows[:, None]
        gl.store(target, state, mask=inside)
    tma_store_wait(0)
