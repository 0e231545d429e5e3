"""Device code of the gradients inside chunks of several tiles on Hopper, in Gluon: triton/backward_tiled.py with
copies by TMA; the equations stand there.

A program owns a tile of 64 queries and walks over all keys up to its last, or a tile of keys and values and walks over
all queries from its first on, or it sums the gradient of a state over all queries. What it walks over comes STEP steps
at a time through a ring of slots. Pairs stay in registers: of keys they lie transposed.
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

from .ring import activate, between, by_tiles, fetch, load_decays, place, power, sum_decays, take

TILE = gl.constexpr(64)


@gluon.jit
def through_gate(given, gate, into, SIGMOID: gl.constexpr):
    """Leaves the gradient of the output before its gate."""
    V: gl.constexpr = given.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [gl.num_warps(), 1], [1, 0])
    value, _ = activate(gate.load(layout).to(gl.float32), SIGMOID)
    into.store((given.load(layout).to(gl.float32) * value).to(given.dtype))
    fence_async_shared()
    barrier()


@gluon.jit(do_not_specialize=["length", "chunks"], do_not_specialize_on_alignment=["g", "rows", "columns"])
def gradients(
    q_desc, k_desc, v_desc, gate_desc, grad_o_desc, q_step, k_step, v_step, gate_step, grad_o_step, states_desc,
    grad_q_desc, grad_k_desc, grad_v_desc, grad_gate_desc, grad_states_desc, g, rows, columns, scale, length, chunks,
    HEADS: gl.constexpr, CHUNK: gl.constexpr, SIGMOID: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """By descriptors q, k, grad_q, grad_k [B, T, HEADS, K], v, gate, grad_o, grad_v, grad_gate [B, T, HEADS, V] in
    blocks [1, 64, 1, columns], and *_step in blocks [1, STEP, 1, columns]; states, grad_states
    [B * chunks * HEADS, K, V] in whole; g [B, T, HEADS]. CHUNK is a multiple of 64, K and V are 64 or 128. rows,
    columns [B, T, HEADS]: what `decays` of chunk/intra/triton/backward_tiled.py sums to grad_g."""
    tiles: gl.constexpr = CHUNK // TILE
    programs: gl.constexpr = 2 * tiles + (0 if states_desc is None else 1)
    program, head, number, batch = place(programs, HEADS, chunks)
    token = number * CHUNK
    size = gl.minimum(CHUNK, length - token)
    start = batch.to(gl.int64) * length + token
    entered = (batch * chunks + number) * HEADS + head
    sums = gl.allocate_shared_memory(gl.float32, [2, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # of each slot, then of what is owned
    arrived = gl.allocate_shared_memory(gl.int64, [SLOTS + 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS + 2):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    barrier()
    at = (batch, token, head)
    memory = (arrived, sums)
    # the tiles with the most to do start first
    if program < tiles:
        if (tiles - 1 - program) * TILE < size:
            queries(
                (q_desc, gate_desc, grad_o_desc, states_desc, grad_q_desc, grad_gate_desc), (k_step, v_step), memory,
                at, entered, g, rows, scale, start, size, HEADS, tiles - 1 - program, CHUNK, SIGMOID, SLOTS,
            )  # fmt: skip
    elif program < 2 * tiles:
        if (program - tiles) * TILE < size:
            keys_and_values(
                (k_desc, v_desc, grad_k_desc, grad_v_desc), (q_step, grad_o_step, gate_step), memory, at,
                g, columns, scale, start, size, HEADS, program - tiles, CHUNK, SIGMOID, SLOTS,
            )  # fmt: skip
    else:
        if states_desc is not None:
            entering_states(
                grad_states_desc, (q_step, grad_o_step, gate_step), memory, at,
                entered, g, scale, start, size, HEADS, CHUNK, SIGMOID, SLOTS,
            )  # fmt: skip


@gluon.jit
def ask_keys(item, count, first, steps, at, slots, arrived, TAKEN: gl.constexpr):
    """Keys and values in turn, those before the program's own first, the nearest first of them."""
    k_step, v_step = steps
    batch, token, head = at
    STEP: gl.constexpr = slots.shape[2]
    t = (item - TAKEN) // 2
    if t < count:
        place = token + (first - (t + 1) * STEP if t < first // STEP else t * STEP)
        if (item - TAKEN) % 2 == 0:
            fetch(item, k_step, [batch, place, head, 0], slots, arrived)
        else:
            fetch(item, v_step, [batch, place, head, 0], slots, arrived)


@gluon.jit
def queries(
    descs, steps, memory, at, entered, g, rows, scale, start, size, HEADS: gl.constexpr, tile,
    CHUNK: gl.constexpr, SIGMOID: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries and of its gates, and M's rows."""
    q_desc, gate_desc, grad_o_desc, states_desc, grad_q_desc, grad_gate_desc = descs
    k_step, v_step = steps
    arrived, sums = memory
    batch, token, head = at
    dtype: gl.constexpr = q_desc.dtype
    STEP: gl.constexpr = k_step.block_type.shape[1]
    K: gl.constexpr = q_desc.block_type.shape[3]
    V: gl.constexpr = grad_o_desc.block_type.shape[3]
    W: gl.constexpr = max(K, V)
    OWNED: gl.constexpr = (2 if gate_desc is None else 4) * (TILE // STEP)
    TAKEN: gl.constexpr = 0 if states_desc is None else (K * V) // (STEP * W)
    RING: gl.constexpr = SLOTS - OWNED
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    to_k: gl.constexpr = gl.DotOperandLayout(0, k_layout, 2)
    to_v: gl.constexpr = gl.DotOperandLayout(0, v_layout, 2)
    row: gl.constexpr = gl.SliceLayout(1, p_layout)
    column: gl.constexpr = gl.SliceLayout(0, p_layout)
    first = tile * TILE
    slots = gl.allocate_shared_memory(dtype, [RING, 1, STEP, 1, W], k_step.layout)
    q_tile = gl.allocate_shared_memory(dtype, q_desc.block_type.shape, q_desc.layout)
    u_tile = gl.allocate_shared_memory(dtype, grad_o_desc.block_type.shape, grad_o_desc.layout)
    here = arrived.index(SLOTS)
    gate_here = arrived.index(SLOTS + 1)
    if gate_desc is None:
        mbarrier.expect(gate_here, grad_o_desc.block_type.nbytes)
        tma_load(grad_o_desc, [batch, token + first, head, 0], gate_here, u_tile)
    else:
        gate_tile = gl.allocate_shared_memory(dtype, gate_desc.block_type.shape, gate_desc.layout)
        given_tile = gl.allocate_shared_memory(dtype, grad_o_desc.block_type.shape, grad_o_desc.layout)
        mbarrier.expect(gate_here, 2 * grad_o_desc.block_type.nbytes)
        tma_load(gate_desc, [batch, token + first, head, 0], gate_here, gate_tile)
        tma_load(grad_o_desc, [batch, token + first, head, 0], gate_here, given_tile)
    if states_desc is None:
        mbarrier.expect(here, q_desc.block_type.nbytes)
    else:
        mbarrier.expect(here, q_desc.block_type.nbytes + states_desc.block_type.nbytes)
        state_tile = reinterpret(slots, dtype, [1, K, V], states_desc.layout)
        tma_load(states_desc, [entered, 0, 0], here, state_tile)
    tma_load(q_desc, [batch, token + first, head, 0], here, q_tile)
    count = (first + TILE) // STEP
    for i in gl.static_range(TAKEN, RING):
        ask_keys(i, count, first, steps, at, slots, arrived, TAKEN)
    by_rows = by_tiles(sums, TILE)
    by_steps = by_tiles(sums, STEP)
    before = 1.0
    if g is not None:
        before = sum_decays(sums, load_decays(g, start, size, head, HEADS, CHUNK), first, CHUNK)
    q = q_tile.reshape([TILE, K])
    u = u_tile.reshape([TILE, V])
    mbarrier.wait(gate_here, 0)
    if gate_desc is not None:
        through_gate(given_tile.reshape([TILE, V]), gate_tile.reshape([TILE, V]), u, SIGMOID)
    else:
        barrier()
    mbarrier.wait(here, 0)
    dq = gl.zeros([TILE, K], gl.float32, k_layout)
    o = gl.zeros([TILE, V], gl.float32, v_layout)
    over = gl.zeros([TILE], gl.float32, row)
    if states_desc is not None:
        state = state_tile.reshape([K, V])
        dq = warpgroup_mma(u, state.permute((1, 0)), dq, use_acc=False, is_async=True)
        if gate_desc is not None:
            o = warpgroup_mma(q, state, o, use_acc=False, is_async=True)
            dq, o = warpgroup_mma_wait(0, deps=(dq, o))
            o = o * before
        else:
            dq = warpgroup_mma_wait(0, deps=(dq,))
        dq = dq * before
        barrier()
        for i in gl.static_range(TAKEN):
            ask_keys(i + RING, count, first, steps, at, slots, arrived, TAKEN)
        if g is not None:
            over = gl.convert_layout(gl.sum(dq * q.load(k_layout).to(gl.float32), 1), row)
    for i in range(first // STEP):
        item = TAKEN + 2 * i
        k = take(item, k_step, slots, arrived, TAKEN)
        scores = gl.zeros([TILE, STEP], gl.float32, p_layout)
        scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=False, is_async=True)
        v = take(item + 1, v_step, slots, arrived, TAKEN)
        grad = gl.zeros([TILE, STEP], gl.float32, p_layout)
        grad = warpgroup_mma(u, v.permute((1, 0)), grad, use_acc=False, is_async=True)
        if g is not None:
            up = power(by_steps, first // STEP - 1 - i, column, -1)
        scores, grad = warpgroup_mma_wait(0, deps=(scores, grad))
        if g is not None:
            grad = grad * up[None, :]
            over += gl.sum(grad * scores, 1)
            scores = scores * up[None, :]
        slant = gl.convert_layout(grad.to(dtype), to_k)
        dq = warpgroup_mma(slant, k, dq, is_async=True)
        if gate_desc is not None:
            held = gl.convert_layout(scores.to(dtype), to_v)
            o = warpgroup_mma(held, v, o, is_async=True)
            dq, o, slant, held = warpgroup_mma_wait(0, deps=(dq, o, slant, held))
        else:
            dq, slant = warpgroup_mma_wait(0, deps=(dq, slant))
        barrier()
        ask_keys(item + RING, count, first, steps, at, slots, arrived, TAKEN)
        ask_keys(item + 1 + RING, count, first, steps, at, slots, arrived, TAKEN)
    if g is not None:
        dq = dq * power(by_rows, tile, gl.SliceLayout(1, k_layout), 1)[:, None]
        if gate_desc is not None:
            o = o * power(by_rows, tile, gl.SliceLayout(1, v_layout), 1)[:, None]
        over = over * power(by_rows, tile, row, 1)
    for i in gl.static_range(TILE // STEP):
        item = TAKEN + 2 * (first // STEP + i)
        k = take(item, k_step, slots, arrived, TAKEN)
        scores = gl.zeros([TILE, STEP], gl.float32, p_layout)
        scores = warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=False, is_async=True)
        v = take(item + 1, v_step, slots, arrived, TAKEN)
        grad = gl.zeros([TILE, STEP], gl.float32, p_layout)
        grad = warpgroup_mma(u, v.permute((1, 0)), grad, use_acc=False, is_async=True)
        scores, grad = warpgroup_mma_wait(0, deps=(scores, grad))
        m = gl.arange(0, TILE, row)[:, None]
        n = i * STEP + gl.arange(0, STEP, column)[None, :]
        if g is not None:
            grad = grad * between(by_rows, tile, by_steps, first // STEP + i, p_layout, 1)
            over += gl.sum(gl.where(m > n, grad * scores, 0.0), 1)
        slant = gl.convert_layout(gl.where(m >= n, grad, 0.0).to(dtype), to_k)
        dq = warpgroup_mma(slant, k, dq, is_async=True)
        if gate_desc is not None:
            # decays again rather than kept
            if g is not None:
                scores = scores * between(by_rows, tile, by_steps, first // STEP + i, p_layout, 1)
            held = gl.convert_layout(gl.where(m >= n, scores, 0.0).to(dtype), to_v)
            o = warpgroup_mma(held, v, o, is_async=True)
            dq, o, slant, held = warpgroup_mma_wait(0, deps=(dq, o, slant, held))
        else:
            dq, slant = warpgroup_mma_wait(0, deps=(dq, slant))
        if i < TILE // STEP - 1:
            barrier()
            ask_keys(item + RING, count, first, steps, at, slots, arrived, TAKEN)
            ask_keys(item + 1 + RING, count, first, steps, at, slots, arrived, TAKEN)
    if g is not None:
        of_rows = first + gl.arange(0, TILE, row)
        gl.store(rows + (start + of_rows) * HEADS + head, over * scale, mask=of_rows < size)
    # every warp is through with what is owned
    barrier()
    q.store((dq * scale).to(dtype))
    if gate_desc is not None:
        _, slope = activate(gate_tile.reshape([TILE, V]).load(v_layout).to(gl.float32), SIGMOID)
        o = o * scale * slope * given_tile.reshape([TILE, V]).load(v_layout).to(gl.float32)
        u.store(o.to(dtype))
    fence_async_shared()
    barrier()
    tma_store(grad_q_desc, [batch, token + first, head, 0], q_tile)
    if gate_desc is not None:
        tma_store(grad_gate_desc, [batch, token + first, head, 0], u_tile)
    tma_store_wait(0)


@gluon.jit
def ask_queries(item, first, end, steps, at, slots, arrived):
    """Of steps from the first on: queries, the output's gradient and its gate in turn."""
    q_step, grad_o_step, gate_step = steps
    batch, token, head = at
    EACH: gl.constexpr = 2 if gate_step is None else 3
    t = first + item // EACH
    place = token + t * slots.shape[2]
    if t < end:
        if item % EACH == 0:
            fetch(item, q_step, [batch, place, head, 0], slots, arrived)
        elif item % EACH == 1:
            fetch(item, grad_o_step, [batch, place, head, 0], slots, arrived)
        else:
            if gate_step is not None:
                fetch(item, gate_step, [batch, place, head, 0], slots, arrived)


@gluon.jit
def take_queries(item, steps, slots, arrived, SIGMOID: gl.constexpr):
    """Waits for the items of a step; returns queries and the gradient of the output before its gate."""
    q_step, grad_o_step, gate_step = steps
    q = take(item, q_step, slots, arrived, 0)
    u = take(item + 1, grad_o_step, slots, arrived, 0)
    if gate_step is not None:
        through_gate(u, take(item + 2, gate_step, slots, arrived, 0), u, SIGMOID)
    return q, u


@gluon.jit
def weigh(x, by_rows, tile, by_steps, t, layout: gl.constexpr, DECAYS: gl.constexpr, OWN: gl.constexpr):
    """Pairs, keys down and queries across, times the decays between them; 0 where the query is the earlier."""
    if DECAYS:
        if OWN:
            x = x * between(by_rows, tile, by_steps, t, layout, -1)
        else:
            x = x * power(by_rows, tile, gl.SliceLayout(1, layout), -1)[:, None]
            x = x * power(by_steps, t, gl.SliceLayout(0, layout), 1)[None, :]
    if OWN:
        s = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, layout))[:, None]
        m = t * x.shape[1] + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
        x = gl.where(m >= s, x, 0.0)
    return x


@gluon.jit
def add_pairs(k, v, q, u, dk, dv, over, by_rows, tile, by_steps, t, DECAYS: gl.constexpr, OWN: gl.constexpr):
    """Adds a step's queries to the gradients of a tile of keys and values, and to M's columns."""
    dtype: gl.constexpr = k.dtype
    STEP: gl.constexpr = q.shape[0]
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, k.shape[1], 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, v.shape[1], 16])
    scores = gl.zeros([TILE, STEP], gl.float32, p_layout)
    scores = warpgroup_mma(k, q.permute((1, 0)), scores, use_acc=False, is_async=True)
    grad = gl.zeros([TILE, STEP], gl.float32, p_layout)
    grad = warpgroup_mma(v, u.permute((1, 0)), grad, use_acc=False, is_async=True)
    scores, grad = warpgroup_mma_wait(0, deps=(scores, grad))
    grad = weigh(grad, by_rows, tile, by_steps, t, p_layout, DECAYS, OWN)
    if DECAYS:
        products = grad * scores
        if OWN:
            s = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, p_layout))[:, None]
            m = t * STEP + gl.arange(0, STEP, gl.SliceLayout(0, p_layout))[None, :]
            products = gl.where(m > s, products, 0.0)
        over += gl.sum(products, 1)
    slant = gl.convert_layout(grad.to(dtype), gl.DotOperandLayout(0, k_layout, 2))
    dk = warpgroup_mma(slant, q, dk, is_async=True)
    # decays again rather than kept
    scores = weigh(scores, by_rows, tile, by_steps, t, p_layout, DECAYS, OWN)
    held = gl.convert_layout(scores.to(dtype), gl.DotOperandLayout(0, v_layout, 2))
    dv = warpgroup_mma(held, u, dv, is_async=True)
    dv, dk, held, slant = warpgroup_mma_wait(0, deps=(dv, dk, held, slant))
    # every warp is through with the queries
    barrier()
    return dk, dv, over


@gluon.jit
def keys_and_values(
    descs, steps, memory, at, g, columns, scale, start, size, HEADS: gl.constexpr, tile,
    CHUNK: gl.constexpr, SIGMOID: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, and M's columns."""
    k_desc, v_desc, grad_k_desc, grad_v_desc = descs
    q_step, _, gate_step = steps
    arrived, sums = memory
    batch, token, head = at
    dtype: gl.constexpr = k_desc.dtype
    STEP: gl.constexpr = q_step.block_type.shape[1]
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    EACH: gl.constexpr = 2 if gate_step is None else 3
    OWNED: gl.constexpr = 2 * (TILE // STEP)
    RING: gl.constexpr = SLOTS - OWNED
    p_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    row: gl.constexpr = gl.SliceLayout(1, p_layout)
    first = tile * TILE // STEP
    end = gl.cdiv(size, STEP)
    slots = gl.allocate_shared_memory(dtype, [RING, 1, STEP, 1, max(K, V)], q_step.layout)
    k_tile = gl.allocate_shared_memory(dtype, k_desc.block_type.shape, k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, v_desc.block_type.shape, v_desc.layout)
    here = arrived.index(SLOTS)
    mbarrier.expect(here, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma_load(k_desc, [batch, token + tile * TILE, head, 0], here, k_tile)
    tma_load(v_desc, [batch, token + tile * TILE, head, 0], here, v_tile)
    for i in gl.static_range(RING):
        ask_queries(i, first, end, steps, at, slots, arrived)
    by_rows = by_tiles(sums, TILE)
    by_steps = by_tiles(sums, STEP)
    if g is not None:
        sum_decays(sums, load_decays(g, start, size, head, HEADS, CHUNK), (tile + 1) * TILE, CHUNK)
        barrier()
    k = k_tile.reshape([TILE, K])
    v = v_tile.reshape([TILE, V])
    dk = gl.zeros([TILE, K], gl.float32, k_layout)
    dv = gl.zeros([TILE, V], gl.float32, v_layout)
    over = gl.zeros([TILE], gl.float32, row)
    mbarrier.wait(here, 0)
    for t in range(first, gl.minimum(first + TILE // STEP, end)):
        q, u = take_queries((t - first) * EACH, steps, slots, arrived, SIGMOID)
        dk, dv, over = add_pairs(k, v, q, u, dk, dv, over, by_rows, tile, by_steps, t, g is not None, True)
        for i in gl.static_range(EACH):
            ask_queries((t - first) * EACH + i + RING, first, end, steps, at, slots, arrived)
    for t in range(first + TILE // STEP, end):
        q, u = take_queries((t - first) * EACH, steps, slots, arrived, SIGMOID)
        dk, dv, over = add_pairs(k, v, q, u, dk, dv, over, by_rows, tile, by_steps, t, g is not None, False)
        for i in gl.static_range(EACH):
            ask_queries((t - first) * EACH + i + RING, first, end, steps, at, slots, arrived)
    if g is not None:
        of_rows = tile * TILE + gl.arange(0, TILE, row)
        gl.store(columns + (start + of_rows) * HEADS + head, over * scale, mask=of_rows < size)
    k.store((dk * scale).to(dtype))
    v.store((dv * scale).to(dtype))
    fence_async_shared()
    barrier()
    tma_store(grad_k_desc, [batch, token + tile * TILE, head, 0], k_tile)
    tma_store(grad_v_desc, [batch, token + tile * TILE, head, 0], v_tile)
    tma_store_wait(0)


@gluon.jit
def entering_states(
    grad_states_desc, steps, memory, at, entered, g, scale, start, size, HEADS: gl.constexpr,
    CHUNK: gl.constexpr, SIGMOID: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The gradient of the state that enters the chunk."""
    q_step, grad_o_step, gate_step = steps
    arrived, sums = memory
    dtype: gl.constexpr = q_step.dtype
    STEP: gl.constexpr = q_step.block_type.shape[1]
    K: gl.constexpr = q_step.block_type.shape[3]
    V: gl.constexpr = grad_o_step.block_type.shape[3]
    EACH: gl.constexpr = 2 if gate_step is None else 3
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    write_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    end = gl.cdiv(size, STEP)
    slots = gl.allocate_shared_memory(dtype, [SLOTS, 1, STEP, 1, max(K, V)], q_step.layout)
    for i in gl.static_range(SLOTS):
        ask_queries(i, 0, end, steps, at, slots, arrived)
    if g is not None:
        sum_decays(sums, load_decays(g, start, size, at[2], HEADS, CHUNK), None, CHUNK)
        barrier()
    ds = gl.zeros([K, V], gl.float32, s_layout)
    for t in range(end):
        q, u = take_queries(t * EACH, steps, slots, arrived, SIGMOID)
        turned = q.permute((1, 0)).load(write_layout)
        if g is not None:
            enter = power(by_tiles(sums, STEP), t, gl.SliceLayout(0, write_layout), 1)
            turned = (turned.to(gl.float32) * enter[None, :]).to(dtype)
        ds = warpgroup_mma(turned, u, ds, is_async=True)
        ds, turned = warpgroup_mma_wait(0, deps=(ds, turned))
        fence_async_shared()
        barrier()
        for i in gl.static_range(EACH):
            ask_queries(t * EACH + i + SLOTS, 0, end, steps, at, slots, arrived)
    state = reinterpret(slots, dtype, [1, K, V], grad_states_desc.layout)
    state.reshape([K, V]).store((ds * scale).to(dtype))
    fence_async_shared()
    barrier()
    tma_store(grad_states_desc, [entered, 0, 0], state)
    tma_store_wait(0)
