"""Gradients inside chunks of several tiles on Hopper, in Gluon: triton/backward_tiled.py with copies by TMA.

The equations stand there. A program owns a tile of 64 queries and goes over all keys up to its last one, or a tile of
keys and values and goes over all queries from its first one on, or it sums the gradient of a state over all queries.
What it goes over comes STEP steps at a time through a ring of slots. Pairs stay in registers: for keys they lie
transposed.
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


class Chunk(NamedTuple):
    """A chunk of a head: where TMA finds it, its first step of all, its size, the number of the state that enters."""

    batch: gl.tensor
    token: gl.tensor
    head: gl.tensor
    start: gl.tensor
    size: gl.tensor
    state: gl.tensor


class Shared(NamedTuple):
    """Barriers, of each slot and of what is owned, and the sums of log decays [2, CHUNK]."""

    ready: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor


class KVLoads(NamedTuple):
    """Descriptors of what programs of queries go over, in blocks of STEP steps."""

    k_desc: gl.tensor
    v_desc: gl.tensor


class QLoads(NamedTuple):
    """Descriptors of what the other programs go over, in blocks of STEP steps."""

    q_desc: gl.tensor
    grad_o_desc: gl.tensor
    gate_desc: gl.tensor | None


class QueryIO(NamedTuple):
    """What a program of queries reads and writes, beside what it goes over."""

    q_desc: gl.tensor
    gate_desc: gl.tensor | None
    grad_o_desc: gl.tensor
    states_desc: gl.tensor | None
    dq_desc: gl.tensor
    dgate_desc: gl.tensor | None
    row_sums: gl.tensor | None


class KeyIO(NamedTuple):
    """What a program of keys and values reads and writes, beside what it goes over."""

    k_desc: gl.tensor
    v_desc: gl.tensor
    dk_desc: gl.tensor
    dv_desc: gl.tensor
    column_sums: gl.tensor | None


class KVTiles(NamedTuple):
    """A tile of keys and of values, [64, K] and [64, V], in shared memory."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor


class QDo(NamedTuple):
    """A step's queries and do, [STEP, K] and [STEP, V], in shared memory."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor


class KVGrads(NamedTuple):
    """Sums in registers: dk, dv, and those of M's columns."""

    dk: gl.tensor
    dv: gl.tensor
    pair_sums: gl.tensor


class DecaySums(NamedTuple):
    """The sums of log decays, high and low, in tiles of 64 steps and of STEP steps."""

    tiles: tuple
    steps: tuple


@aggregate
class Constants:
    """What the kernel is compiled for."""

    HEADS: gl.constexpr
    CHUNK: gl.constexpr
    SIGMOID: gl.constexpr
    SLOTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, HEADS, CHUNK, SIGMOID, SLOTS):
        self.HEADS = gl.constexpr(HEADS)
        self.CHUNK = gl.constexpr(CHUNK)
        self.SIGMOID = gl.constexpr(SIGMOID)
        self.SLOTS = gl.constexpr(SLOTS)


@gluon.jit
def store_do(given, gate, into, SIGMOID: gl.constexpr):
    """Store do, the gradient of the output before its gate, in `into`."""
    V: gl.constexpr = given.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [gl.num_warps(), 1], [1, 0])
    activation = activate(gate.load(layout).to(gl.float32), SIGMOID)
    into.store((given.load(layout).to(gl.float32) * activation.value).to(given.dtype))
    fence_async_shared()
    barrier()


@gluon.jit(do_not_specialize=["length", "chunks"], do_not_specialize_on_alignment=["g", "row_sums", "column_sums"])
def intra_chunk_bwd_tma(
    q_desc, k_desc, v_desc, gate_desc, grad_o_desc, q_step, k_step, v_step, gate_step, grad_o_step, states_desc,
    dq_desc, dk_desc, dv_desc, dgate_desc, dstates_desc, g, row_sums, column_sums, scale, length, chunks,
    HEADS: gl.constexpr, CHUNK: gl.constexpr, SIGMOID: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Grid (programs * chunks * B * HEADS,), programs: two a tile of 64 steps, and one for the state.

    CHUNK is a multiple of 64; K and V are 64 or 128. By TMA in blocks [1, 64, 1, columns], *_step in [1, STEP, 1,
    columns]:

    q, k            [B, T, HEADS, K]
    v, gate         [B, T, HEADS, V]; gate or None
    grad_o          [B, T, HEADS, V]
    states          [B * chunks * HEADS, K, V], one in a block, or None
    dq, dk          [B, T, HEADS, K], written
    dv, dgate       [B, T, HEADS, V], written
    dstates         as states, written

    g               [B, T, HEADS], or None
    row_sums, column_sums  [B, T, HEADS], written: `intra_chunk_decay_grad` sums them to dg
    """
    tiles: gl.constexpr = CHUNK // TILE
    programs: gl.constexpr = 2 * tiles + (0 if states_desc is None else 1)
    program, head, number, batch = program_coords(programs, HEADS, chunks)
    token = number * CHUNK
    size = gl.minimum(CHUNK, length - token)
    start = batch.to(gl.int64) * length + token
    entered = (batch * chunks + number) * HEADS + head
    sums = gl.allocate_shared_memory(gl.float32, [2, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # of each slot, then of what is owned
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS + 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS + 2):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    barrier()
    chunk = Chunk(batch=batch, token=token, head=head, start=start, size=size, state=entered)
    shared = Shared(ready=ready, sums=sums)
    constants = Constants(HEADS, CHUNK, SIGMOID, SLOTS)
    q_loads = QLoads(q_desc=q_step, grad_o_desc=grad_o_step, gate_desc=gate_step)
    # the tiles with the most to do start first
    if program < tiles:
        if (tiles - 1 - program) * TILE < size:
            query_io = QueryIO(
                q_desc=q_desc,
                gate_desc=gate_desc,
                grad_o_desc=grad_o_desc,
                states_desc=states_desc,
                dq_desc=dq_desc,
                dgate_desc=dgate_desc,
                row_sums=row_sums,
            )
            kv_loads = KVLoads(k_desc=k_step, v_desc=v_step)
            query_grads(query_io, kv_loads, shared, chunk, g, scale, tiles - 1 - program, constants)
    elif program < 2 * tiles:
        if (program - tiles) * TILE < size:
            key_io = KeyIO(k_desc=k_desc, v_desc=v_desc, dk_desc=dk_desc, dv_desc=dv_desc, column_sums=column_sums)
            key_grads(key_io, q_loads, shared, chunk, g, scale, program - tiles, constants)
    else:
        if states_desc is not None:
            state_grads(dstates_desc, q_loads, shared, chunk, g, scale, constants)


@gluon.jit
def prefetch_kv(item, count, first, loads, chunk, ring, TAKEN: gl.constexpr):
    """Issue the load of an item: k and v by turns, those before the program's own first, of them the nearest first."""
    STEP: gl.constexpr = ring.tiles.shape[2]
    t = (item - TAKEN) // 2
    if t < count:
        place = chunk.token + (first - (t + 1) * STEP if t < first // STEP else t * STEP)
        if (item - TAKEN) % 2 == 0:
            load_item(item, loads.k_desc, [chunk.batch, place, chunk.head, 0], ring)
        else:
            load_item(item, loads.v_desc, [chunk.batch, place, chunk.head, 0], ring)


@gluon.jit
def query_grads(io, loads, shared, chunk, g, scale, tile, constants):
    """Compute dq and dgate of a tile of queries, and the sums of M's rows."""
    dtype: gl.constexpr = io.q_desc.dtype
    STEP: gl.constexpr = loads.k_desc.block_type.shape[1]
    K: gl.constexpr = io.q_desc.block_type.shape[3]
    V: gl.constexpr = io.grad_o_desc.block_type.shape[3]
    W: gl.constexpr = max(K, V)
    OWNED: gl.constexpr = (2 if io.gate_desc is None else 4) * (TILE // STEP)
    TAKEN: gl.constexpr = 0 if io.states_desc is None else (K * V) // (STEP * W)
    RING: gl.constexpr = constants.SLOTS - OWNED
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    to_k: gl.constexpr = gl.DotOperandLayout(0, k_layout, 2)
    to_v: gl.constexpr = gl.DotOperandLayout(0, v_layout, 2)
    row: gl.constexpr = gl.SliceLayout(1, p_layout)
    column: gl.constexpr = gl.SliceLayout(0, p_layout)
    first = tile * TILE
    slots = gl.allocate_shared_memory(dtype, [RING, 1, STEP, 1, W], loads.k_desc.layout)
    ring = Ring(tiles=slots, ready=shared.ready)
    q_tile = gl.allocate_shared_memory(dtype, io.q_desc.block_type.shape, io.q_desc.layout)
    do_tile = gl.allocate_shared_memory(dtype, io.grad_o_desc.block_type.shape, io.grad_o_desc.layout)
    here = shared.ready.index(constants.SLOTS)
    gate_here = shared.ready.index(constants.SLOTS + 1)
    if io.gate_desc is None:
        mbarrier.expect(gate_here, io.grad_o_desc.block_type.nbytes)
        tma_load(io.grad_o_desc, [chunk.batch, chunk.token + first, chunk.head, 0], gate_here, do_tile)
    else:
        gate_tile = gl.allocate_shared_memory(dtype, io.gate_desc.block_type.shape, io.gate_desc.layout)
        given_tile = gl.allocate_shared_memory(dtype, io.grad_o_desc.block_type.shape, io.grad_o_desc.layout)
        mbarrier.expect(gate_here, 2 * io.grad_o_desc.block_type.nbytes)
        tma_load(io.gate_desc, [chunk.batch, chunk.token + first, chunk.head, 0], gate_here, gate_tile)
        tma_load(io.grad_o_desc, [chunk.batch, chunk.token + first, chunk.head, 0], gate_here, given_tile)
    if io.states_desc is None:
        mbarrier.expect(here, io.q_desc.block_type.nbytes)
    else:
        mbarrier.expect(here, io.q_desc.block_type.nbytes + io.states_desc.block_type.nbytes)
        state_tile = reinterpret(slots, dtype, [1, K, V], io.states_desc.layout)
        tma_load(io.states_desc, [chunk.state, 0, 0], here, state_tile)
    tma_load(io.q_desc, [chunk.batch, chunk.token + first, chunk.head, 0], here, q_tile)
    count = (first + TILE) // STEP
    for i in gl.static_range(TAKEN, RING):
        prefetch_kv(i, count, first, loads, chunk, ring, TAKEN)
    by_rows = sums_by_tile(shared.sums, TILE)
    by_steps = sums_by_tile(shared.sums, STEP)
    before = 1.0
    if g is not None:
        log = load_log_decays(g, chunk.start, chunk.size, chunk.head, constants.HEADS, constants.CHUNK)
        before = store_decay_sums(shared.sums, log, first, constants.CHUNK)
    q = q_tile.reshape([TILE, K])
    do = do_tile.reshape([TILE, V])
    mbarrier.wait(gate_here, 0)
    if io.gate_desc is not None:
        store_do(given_tile.reshape([TILE, V]), gate_tile.reshape([TILE, V]), do, constants.SIGMOID)
    else:
        barrier()
    mbarrier.wait(here, 0)
    dq = gl.zeros([TILE, K], gl.float32, k_layout)
    o = gl.zeros([TILE, V], gl.float32, v_layout)
    pair_sums = gl.zeros([TILE], gl.float32, row)
    if io.states_desc is not None:
        state = state_tile.reshape([K, V])
        dq = warpgroup_mma(do, state.permute((1, 0)), dq, use_acc=False, is_async=True)
        if io.gate_desc is not None:
            o = warpgroup_mma(q, state, o, use_acc=False, is_async=True)
            dq, o = warpgroup_mma_wait(0, deps=(dq, o))
            o = o * before
        else:
            dq = warpgroup_mma_wait(0, deps=(dq,))
        dq = dq * before
        barrier()
        for i in gl.static_range(TAKEN):
            prefetch_kv(i + RING, count, first, loads, chunk, ring, TAKEN)
        if g is not None:
            pair_sums = gl.convert_layout(gl.sum(dq * q.load(k_layout).to(gl.float32), 1), row)
    for i in range(first // STEP):
        item = TAKEN + 2 * i
        k = wait_item(item, loads.k_desc, ring, TAKEN)
        scores = gl.zeros([TILE, STEP], gl.float32, p_layout)
        scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=False, is_async=True)
        v = wait_item(item + 1, loads.v_desc, ring, TAKEN)
        grad = gl.zeros([TILE, STEP], gl.float32, p_layout)
        grad = warpgroup_mma(do, v.permute((1, 0)), grad, use_acc=False, is_async=True)
        if g is not None:
            up = tile_decay(by_steps, first // STEP - 1 - i, column, -1)
        scores, grad = warpgroup_mma_wait(0, deps=(scores, grad))
        if g is not None:
            grad = grad * up[None, :]
            pair_sums += gl.sum(grad * scores, 1)
            scores = scores * up[None, :]
        da = gl.convert_layout(grad.to(dtype), to_k)
        dq = warpgroup_mma(da, k, dq, is_async=True)
        if io.gate_desc is not None:
            p = gl.convert_layout(scores.to(dtype), to_v)
            o = warpgroup_mma(p, v, o, is_async=True)
            dq, o, da, p = warpgroup_mma_wait(0, deps=(dq, o, da, p))
        else:
            dq, da = warpgroup_mma_wait(0, deps=(dq, da))
        barrier()
        prefetch_kv(item + RING, count, first, loads, chunk, ring, TAKEN)
        prefetch_kv(item + 1 + RING, count, first, loads, chunk, ring, TAKEN)
    if g is not None:
        dq = dq * tile_decay(by_rows, tile, gl.SliceLayout(1, k_layout), 1)[:, None]
        if io.gate_desc is not None:
            o = o * tile_decay(by_rows, tile, gl.SliceLayout(1, v_layout), 1)[:, None]
        pair_sums = pair_sums * tile_decay(by_rows, tile, row, 1)
    for i in gl.static_range(TILE // STEP):
        item = TAKEN + 2 * (first // STEP + i)
        k = wait_item(item, loads.k_desc, ring, TAKEN)
        scores = gl.zeros([TILE, STEP], gl.float32, p_layout)
        scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=False, is_async=True)
        v = wait_item(item + 1, loads.v_desc, ring, TAKEN)
        grad = gl.zeros([TILE, STEP], gl.float32, p_layout)
        grad = warpgroup_mma(do, v.permute((1, 0)), grad, use_acc=False, is_async=True)
        scores, grad = warpgroup_mma_wait(0, deps=(scores, grad))
        m = gl.arange(0, TILE, row)[:, None]
        n = i * STEP + gl.arange(0, STEP, column)[None, :]
        if g is not None:
            grad = grad * pair_decay(by_rows, tile, by_steps, first // STEP + i, p_layout, 1)
            pair_sums += gl.sum(gl.where(m > n, grad * scores, 0.0), 1)
        da = gl.convert_layout(gl.where(m >= n, grad, 0.0).to(dtype), to_k)
        dq = warpgroup_mma(da, k, dq, is_async=True)
        if io.gate_desc is not None:
            # decays again rather than kept
            if g is not None:
                scores = scores * pair_decay(by_rows, tile, by_steps, first // STEP + i, p_layout, 1)
            p = gl.convert_layout(gl.where(m >= n, scores, 0.0).to(dtype), to_v)
            o = warpgroup_mma(p, v, o, is_async=True)
            dq, o, da, p = warpgroup_mma_wait(0, deps=(dq, o, da, p))
        else:
            dq, da = warpgroup_mma_wait(0, deps=(dq, da))
        if i < TILE // STEP - 1:
            barrier()
            prefetch_kv(item + RING, count, first, loads, chunk, ring, TAKEN)
            prefetch_kv(item + 1 + RING, count, first, loads, chunk, ring, TAKEN)
    if g is not None:
        of_rows = first + gl.arange(0, TILE, row)
        inside = of_rows < chunk.size
        gl.store(io.row_sums + (chunk.start + of_rows) * constants.HEADS + chunk.head, pair_sums * scale, mask=inside)
    # every warp is through with what is owned
    barrier()
    q.store((dq * scale).to(dtype))
    if io.gate_desc is not None:
        activation = activate(gate_tile.reshape([TILE, V]).load(v_layout).to(gl.float32), constants.SIGMOID)
        o = o * scale * activation.derivative * given_tile.reshape([TILE, V]).load(v_layout).to(gl.float32)
        do.store(o.to(dtype))
    fence_async_shared()
    barrier()
    tma_store(io.dq_desc, [chunk.batch, chunk.token + first, chunk.head, 0], q_tile)
    if io.gate_desc is not None:
        tma_store(io.dgate_desc, [chunk.batch, chunk.token + first, chunk.head, 0], do_tile)
    tma_store_wait(0)


@gluon.jit
def prefetch_q(item, first, end, loads, chunk, ring):
    """Issue the load of an item, from the first step on: q, grad_o and the gate by turns."""
    EACH: gl.constexpr = 2 if loads.gate_desc is None else 3
    t = first + item // EACH
    place = chunk.token + t * ring.tiles.shape[2]
    if t < end:
        if item % EACH == 0:
            load_item(item, loads.q_desc, [chunk.batch, place, chunk.head, 0], ring)
        elif item % EACH == 1:
            load_item(item, loads.grad_o_desc, [chunk.batch, place, chunk.head, 0], ring)
        else:
            if loads.gate_desc is not None:
                load_item(item, loads.gate_desc, [chunk.batch, place, chunk.head, 0], ring)


@gluon.jit
def wait_q(item, loads, ring, SIGMOID: gl.constexpr):
    """Wait for the items of a step; return q and do."""
    q = wait_item(item, loads.q_desc, ring, 0)
    do = wait_item(item + 1, loads.grad_o_desc, ring, 0)
    if loads.gate_desc is not None:
        store_do(do, wait_item(item + 2, loads.gate_desc, ring, 0), do, SIGMOID)
    return QDo(q=q, do=do)


@gluon.jit
def apply_decay(x, sums, tile, t, layout: gl.constexpr, DECAYS: gl.constexpr, OWN: gl.constexpr):
    """Multiply pairs, keys down and queries across, by the decays between them; 0 where the query is the earlier."""
    if DECAYS:
        if OWN:
            x = x * pair_decay(sums.tiles, tile, sums.steps, t, layout, -1)
        else:
            x = x * tile_decay(sums.tiles, tile, gl.SliceLayout(1, layout), -1)[:, None]
            x = x * tile_decay(sums.steps, t, gl.SliceLayout(0, layout), 1)[None, :]
    if OWN:
        s = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, layout))[:, None]
        m = t * x.shape[1] + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
        x = gl.where(m >= s, x, 0.0)
    return x


@gluon.jit
def add_pairs(tiles, q_do, grads, sums, tile, t, DECAYS: gl.constexpr, OWN: gl.constexpr):
    """Add a step's queries to the gradients of a tile of keys and values, and to the sums of M's columns."""
    k, v, q, do = tiles.k, tiles.v, q_do.q, q_do.do
    pair_sums = grads.pair_sums
    dtype: gl.constexpr = k.dtype
    STEP: gl.constexpr = q.shape[0]
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, k.shape[1], 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, v.shape[1], 16])
    scores = gl.zeros([TILE, STEP], gl.float32, p_layout)
    scores = warpgroup_mma(k, q.permute((1, 0)), scores, use_acc=False, is_async=True)
    grad = gl.zeros([TILE, STEP], gl.float32, p_layout)
    grad = warpgroup_mma(v, do.permute((1, 0)), grad, use_acc=False, is_async=True)
    scores, grad = warpgroup_mma_wait(0, deps=(scores, grad))
    grad = apply_decay(grad, sums, tile, t, p_layout, DECAYS, OWN)
    if DECAYS:
        products = grad * scores
        if OWN:
            s = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, p_layout))[:, None]
            m = t * STEP + gl.arange(0, STEP, gl.SliceLayout(0, p_layout))[None, :]
            products = gl.where(m > s, products, 0.0)
        pair_sums += gl.sum(products, 1)
    da = gl.convert_layout(grad.to(dtype), gl.DotOperandLayout(0, k_layout, 2))
    dk = warpgroup_mma(da, q, grads.dk, is_async=True)
    # decays again rather than kept
    scores = apply_decay(scores, sums, tile, t, p_layout, DECAYS, OWN)
    p = gl.convert_layout(scores.to(dtype), gl.DotOperandLayout(0, v_layout, 2))
    dv = warpgroup_mma(p, do, grads.dv, is_async=True)
    dv, dk, p, da = warpgroup_mma_wait(0, deps=(dv, dk, p, da))
    # every warp is through with the queries
    barrier()
    return dk, dv, pair_sums


@gluon.jit
def key_grads(io, loads, shared, chunk, g, scale, tile, constants):
    """Compute dk and dv of a tile of keys and values, and the sums of M's columns."""
    dtype: gl.constexpr = io.k_desc.dtype
    STEP: gl.constexpr = loads.q_desc.block_type.shape[1]
    K: gl.constexpr = io.k_desc.block_type.shape[3]
    V: gl.constexpr = io.v_desc.block_type.shape[3]
    EACH: gl.constexpr = 2 if loads.gate_desc is None else 3
    OWNED: gl.constexpr = 2 * (TILE // STEP)
    RING: gl.constexpr = constants.SLOTS - OWNED
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    row: gl.constexpr = gl.SliceLayout(1, p_layout)
    first = tile * TILE // STEP
    end = gl.cdiv(chunk.size, STEP)
    slots = gl.allocate_shared_memory(dtype, [RING, 1, STEP, 1, max(K, V)], loads.q_desc.layout)
    ring = Ring(tiles=slots, ready=shared.ready)
    k_tile = gl.allocate_shared_memory(dtype, io.k_desc.block_type.shape, io.k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, io.v_desc.block_type.shape, io.v_desc.layout)
    here = shared.ready.index(constants.SLOTS)
    mbarrier.expect(here, io.k_desc.block_type.nbytes + io.v_desc.block_type.nbytes)
    tma_load(io.k_desc, [chunk.batch, chunk.token + tile * TILE, chunk.head, 0], here, k_tile)
    tma_load(io.v_desc, [chunk.batch, chunk.token + tile * TILE, chunk.head, 0], here, v_tile)
    for i in gl.static_range(RING):
        prefetch_q(i, first, end, loads, chunk, ring)
    sums = DecaySums(tiles=sums_by_tile(shared.sums, TILE), steps=sums_by_tile(shared.sums, STEP))
    if g is not None:
        log = load_log_decays(g, chunk.start, chunk.size, chunk.head, constants.HEADS, constants.CHUNK)
        store_decay_sums(shared.sums, log, (tile + 1) * TILE, constants.CHUNK)
        barrier()
    k = k_tile.reshape([TILE, K])
    v = v_tile.reshape([TILE, V])
    dk = gl.zeros([TILE, K], gl.float32, k_layout)
    dv = gl.zeros([TILE, V], gl.float32, v_layout)
    pair_sums = gl.zeros([TILE], gl.float32, row)
    tiles = KVTiles(k=k, v=v)
    mbarrier.wait(here, 0)
    for t in range(first, gl.minimum(first + TILE // STEP, end)):
        q_do = wait_q((t - first) * EACH, loads, ring, constants.SIGMOID)
        grads = KVGrads(dk=dk, dv=dv, pair_sums=pair_sums)
        dk, dv, pair_sums = add_pairs(tiles, q_do, grads, sums, tile, t, g is not None, True)
        for i in gl.static_range(EACH):
            prefetch_q((t - first) * EACH + i + RING, first, end, loads, chunk, ring)
    for t in range(first + TILE // STEP, end):
        q_do = wait_q((t - first) * EACH, loads, ring, constants.SIGMOID)
        grads = KVGrads(dk=dk, dv=dv, pair_sums=pair_sums)
        dk, dv, pair_sums = add_pairs(tiles, q_do, grads, sums, tile, t, g is not None, False)
        for i in gl.static_range(EACH):
            prefetch_q((t - first) * EACH + i + RING, first, end, loads, chunk, ring)
    if g is not None:
        of_rows = tile * TILE + gl.arange(0, TILE, row)
        inside = of_rows < chunk.size
        gl.store(
            io.column_sums + (chunk.start + of_rows) * constants.HEADS + chunk.head, pair_sums * scale, mask=inside
        )
    k.store((dk * scale).to(dtype))
    v.store((dv * scale).to(dtype))
    fence_async_shared()
    barrier()
    tma_store(io.dk_desc, [chunk.batch, chunk.token + tile * TILE, chunk.head, 0], k_tile)
    tma_store(io.dv_desc, [chunk.batch, chunk.token + tile * TILE, chunk.head, 0], v_tile)
    tma_store_wait(0)


@gluon.jit
def state_grads(dstates_desc, loads, shared, chunk, g, scale, constants):
    """Compute the gradient of the state that enters the chunk."""
    dtype: gl.constexpr = loads.q_desc.dtype
    STEP: gl.constexpr = loads.q_desc.block_type.shape[1]
    K: gl.constexpr = loads.q_desc.block_type.shape[3]
    V: gl.constexpr = loads.grad_o_desc.block_type.shape[3]
    EACH: gl.constexpr = 2 if loads.gate_desc is None else 3
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    end = gl.cdiv(chunk.size, STEP)
    slots = gl.allocate_shared_memory(dtype, [constants.SLOTS, 1, STEP, 1, max(K, V)], loads.q_desc.layout)
    ring = Ring(tiles=slots, ready=shared.ready)
    for i in gl.static_range(constants.SLOTS):
        prefetch_q(i, 0, end, loads, chunk, ring)
    if g is not None:
        log = load_log_decays(g, chunk.start, chunk.size, chunk.head, constants.HEADS, constants.CHUNK)
        store_decay_sums(shared.sums, log, None, constants.CHUNK)
        barrier()
    ds = gl.zeros([K, V], gl.float32, s_layout)
    for t in range(end):
        q_do = wait_q(t * EACH, loads, ring, constants.SIGMOID)
        transposed = q_do.q.permute((1, 0)).load(write_layout)
        if g is not None:
            enter = tile_decay(sums_by_tile(shared.sums, STEP), t, gl.SliceLayout(0, write_layout), 1)
            transposed = (transposed.to(gl.float32) * enter[None, :]).to(dtype)
        ds = warpgroup_mma(transposed, q_do.do, ds, is_async=True)
        ds, transposed = warpgroup_mma_wait(0, deps=(ds, transposed))
        fence_async_shared()
        barrier()
        for i in gl.static_range(EACH):
            prefetch_q(t * EACH + i + constants.SLOTS, 0, end, loads, chunk, ring)
    state = reinterpret(slots, dtype, [1, K, V], dstates_desc.layout)
    state.reshape([K, V]).store((ds * scale).to(dtype))
    fence_async_shared()
    barrier()
    tma_store(dstates_desc, [chunk.state, 0, 0], state)
    tma_store_wait(0)
