"""Vector decay on Hopper: gradients of queries, keys and log decays, of all chunks at once.

With S the state before a chunk, dS the gradient of the one after it, u that of the output, and W = scale U V^T:
    dq_t = scale (decay to t) S u_t + sum over s <= t of W_ts beta_s k_s (decay from s to t), and dk likewise.
A warp has 16 tokens, a thread all of them in two channels (token_layout.py). Pairs of tokens of one warp are
summed one by one in float32: a sum over earlier tokens takes one factor of their decay after the other, as Horner's
rule does. Pairs of different warps meet at their level, as in intra_operands.py, by tensor cores.

A log decay's gradient sums what crosses its token: pairs of tokens, what comes from before the chunk, what goes behind
it, and both at once. No sum takes away what another rounded has added, so that the gradient at a strong decay stands
beside large ones; pairs of one warp, which are differences, are not rounded.
"""
# ruff: noqa: RUF005 - Gluon does not compile starred expressions

from holdfast.kernels.lib.gluon.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from holdfast.kernels.lib.gluon.decay import CHUNK
from holdfast.kernels.lib.gluon.sequence import packed_chunk
from holdfast.kernels.lib.gluon.tails import zero_tail_rows

from .token_layout import (
    BLOCKS,
    FLAT,
    HALF,
    MMA_BLOCKS,
    NEAR,
    TOKENS,
    around,
    decays_of,
    near_product,
    of_blocks,
    tile_of,
    tokens_of,
)

_WGMMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_ROW = gl.constexpr(gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0]))
# conflict-free for accumulators and for whole rows
_STAGED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _weights(tile, i: gl.constexpr):
    """Row i of every warp's 16 x 16 weights, one by one, [4, 1] each."""
    whole = tile.slice(BLOCKS * i, BLOCKS, 0).load(_ROW)
    parts = (gl.permute(gl.reshape(whole, [BLOCKS, 1, 2, 2, 2, 2]), (0, 1, 5, 4, 3, 2)),)
    for level in gl.static_range(4):
        finer = ()
        for j in gl.static_range(1 << level):
            first, second = gl.split(parts[j])
            finer = finer + (first, second)
        parts = finer
    found = ()
    for j in gl.static_range(NEAR):
        found = found + (gl.convert_layout(parts[j], TOKENS),)
    return found


@gluon.jit
def _token(tile):
    return tokens_of(tile.load(FLAT))


@gluon.jit(do_not_specialize=["T", "qk_group", "g_group", "v_group"])
def gla_gradients(
    q_desc,
    k_desc,
    g_desc,
    v_desc,
    u_desc,
    states_desc,
    ends_desc,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    beta_ptr,
    dbeta_ptr,
    cu_ptr,
    sequences,
    T,
    qk_group,
    g_group,
    v_group,
    scale,
    H: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Grid (ceil(KEYS / 64) * H, chunks, B), or (ceil(KEYS / 64) * H * chunks,) of packed sequences.

    q, k: [B, T, H / qk_group, KEYS], g: float32 [B, T, H / g_group, KEYS], by descriptors of blocks [1, 64, 1, 64];
    v, u: [B, T, H / v_group, V] and [B, T, H, V] of blocks [1, 64, 1, columns]. states, ends: the state that enters
    each chunk and the gradient of the one that leaves it, as forward.py keeps them, of blocks [1, 64, 1, 64].
    dq, dk, dg: [B, T, H, KEYS], dg in float32. ends may be in the memory of dg, or of dq if V is 64: a program reads
    its part where it then writes. beta: float32 [B, T, H], and dbeta: float32 [ceil(KEYS / 64), B, T, H], what each 64
    columns have of its gradient; or both None. cu: [N + 1], where packed sequences begin and end, or None; chunks are
    then those of lib/gluon/sequence.py.
    """
    V: gl.constexpr = v_desc.block_type.shape[3]
    SLABS: gl.constexpr = V // 64
    dtype: gl.constexpr = q_desc.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, HALF], q_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, HALF], k_desc.layout)
    g_tile = gl.allocate_shared_memory(gl.float32, [1, CHUNK, 1, HALF], g_desc.layout)
    # of values, of the output's gradient, of both states; afterwards of products
    pool = gl.allocate_shared_memory(gl.float32, [4, CHUNK, HALF], _STAGED)
    by_query = gl.allocate_shared_memory(gl.float32, [BLOCKS * NEAR, NEAR], _PLAIN)
    by_key = gl.allocate_shared_memory(gl.float32, [BLOCKS * NEAR, NEAR], _PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [4 * BLOCKS, HALF], _PLAIN)
    crossing = gl.allocate_shared_memory(gl.float32, [HALF], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if beta_ptr is not None:
        strengths = gl.allocate_shared_memory(gl.float32, [CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    pairs_come = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    own_come = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    states_come = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(pairs_come, count=1)
    mbarrier.init(own_come, count=1)
    mbarrier.init(states_come, count=1)
    fence_async_shared()
    barrier()

    halves: gl.constexpr = (KEYS + HALF - 1) // HALF
    half = gl.program_id(0) % halves
    length = T
    if cu_ptr is None:
        head = gl.program_id(0) // halves
        chunk = gl.program_id(1)
        batch = gl.program_id(2)
        token = chunk * CHUNK
    else:
        head = gl.program_id(0) // halves % H
        chunk = gl.program_id(0) // (halves * H)
        batch = gl.program_id(0) * 0
        shift, end = packed_chunk(cu_ptr, chunk, sequences, T)
        if end <= chunk * CHUNK:
            return
        token = chunk * CHUNK + shift
        T = end + shift
    v4 = reinterpret(pool.index(0), dtype, [1, CHUNK, 1, V], v_desc.layout)
    u4 = reinterpret(pool.index(1), dtype, [1, CHUNK, 1, V], u_desc.layout)
    s5 = reinterpret(pool.index(2), dtype, [SLABS, 1, CHUNK, 1, HALF], states_desc.layout)
    ds5 = reinterpret(pool.index(3), dtype, [SLABS, 1, CHUNK, 1, HALF], ends_desc.layout)
    states_width: gl.constexpr = SLABS * (states_desc.block_type.nbytes + ends_desc.block_type.nbytes)
    own_width: gl.constexpr = 2 * q_desc.block_type.nbytes + g_desc.block_type.nbytes
    # in the order of their use
    mbarrier.expect(pairs_come, v_desc.block_type.nbytes + u_desc.block_type.nbytes)
    tma_load(v_desc, [batch, token, head // v_group, 0], pairs_come, v4)
    tma_load(u_desc, [batch, token, head, 0], pairs_come, u4)
    mbarrier.expect(own_come, own_width)
    tma_load(g_desc, [batch, token, head // g_group, half * HALF], own_come, g_tile)
    tma_load(q_desc, [batch, token, head // qk_group, half * HALF], own_come, q_tile)
    tma_load(k_desc, [batch, token, head // qk_group, half * HALF], own_come, k_tile)
    mbarrier.expect(states_come, states_width)
    for slab in gl.static_range(SLABS):
        place = [batch, chunk * CHUNK, head, (half * SLABS + slab) * HALF]
        tma_load(states_desc, place, states_come, s5.index(slab))
        tma_load(ends_desc, place, states_come, ds5.index(slab))
    v = reinterpret(pool.index(0), dtype, [1, CHUNK, 1, V], v_desc.layout).reshape([CHUNK, V])
    u = reinterpret(pool.index(1), dtype, [1, CHUNK, 1, V], u_desc.layout).reshape([CHUNK, V])
    s = reinterpret(pool.index(2), dtype, [V, HALF], flat)
    ds = reinterpret(pool.index(3), dtype, [V, HALF], flat)

    # weights of pairs of one warp's tokens
    if beta_ptr is not None:
        tokens = token + gl.arange(0, CHUNK, gl.BlockedLayout([1], [32], [4], [0]))
        beta_ptr += (batch * length).to(gl.int64) * H + head
        dbeta_ptr += (half * gl.num_programs(2) + batch).to(gl.int64) * length * H + head
        strengths.store(gl.load(beta_ptr + tokens.to(gl.int64) * H, mask=tokens < T, other=0.0))
        barrier()
    mbarrier.wait(pairs_come, 0)
    if cu_ptr is not None:  # noqa: SIM102 - known while compiling
        if token + CHUNK > T:
            zero_tail_rows(v4, T - token)
            zero_tail_rows(u4, T - token)
            barrier()
    near = near_product(u, v) * scale
    weighed = near
    if beta_ptr is not None:
        by_block = reinterpret(strengths, gl.float32, [BLOCKS, NEAR], _PLAIN)
        weighed = near * by_block.load(gl.SliceLayout(1, MMA_BLOCKS))[:, None, :]
    by_query.store(gl.reshape(gl.permute(weighed, (1, 0, 2)), [BLOCKS * NEAR, NEAR]))
    by_key.store(gl.reshape(gl.permute(near, (2, 0, 1)), [BLOCKS * NEAR, NEAR]))

    # pairs of different warps, at their level
    mbarrier.wait(own_come, 0)
    if cu_ptr is not None:  # noqa: SIM102 - known while compiling
        if token + CHUNK > T:
            zero_tail_rows(g_tile, T - token)
            zero_tail_rows(q_tile, T - token)
            zero_tail_rows(k_tile, T - token)
            barrier()
    own = decays_of(tokens_of(g_tile.reshape([CHUNK, HALF]).load(FLAT)))
    to_here = (own[0],)
    to_end = (gl.full(own[0].shape, 1.0, gl.float32, TOKENS),)
    for i in gl.static_range(1, NEAR):
        to_here = to_here + (to_here[i - 1] * own[i],)
        to_end = (to_end[0] * own[NEAR - i],) + to_end
    sums.slice(0, BLOCKS, 0).store(to_here[NEAR - 1])
    barrier()
    t0, t1, t2, t3 = of_blocks(sums.slice(0, BLOCKS, 0))
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, TOKENS))[:, None]
    before, after, inward = around(block, t0, t1, t2, t3)
    odd = block % 2 == 1
    high = block >= 2
    qs = tokens_of(q_tile.reshape([CHUNK, HALF]).load(FLAT))
    ks = tokens_of(k_tile.reshape([CHUNK, HALF]).load(FLAT))
    met = ()
    met_far = ()
    for i in gl.static_range(NEAR):
        query = qs[i].to(gl.float32) * to_here[i]
        key = ks[i].to(gl.float32) * to_end[i]
        met = met + (gl.where(odd, query, key).to(dtype),)
        met_far = met_far + ((gl.where(high, query, key) * inward).to(dtype),)
    met_tiles = reinterpret(g_tile, dtype, [2, CHUNK, HALF], flat)
    met_tiles.index(0).store(tile_of(met))
    met_tiles.index(1).store(tile_of(met_far))
    fence_async_shared()
    barrier()
    w = gl.zeros([CHUNK, CHUNK], gl.float32, _WGMMA)
    w = warpgroup_mma(u, v.permute((1, 0)), w, use_acc=False, is_async=True)
    wt = gl.zeros([CHUNK, CHUNK], gl.float32, _WGMMA)
    wt = warpgroup_mma(v, u.permute((1, 0)), wt, use_acc=False, is_async=True)
    w, wt = warpgroup_mma_wait(0, deps=(w, wt))
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, _WGMMA))[:, None]
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, _WGMMA))[None, :]
    if beta_ptr is not None:
        w = w * strengths.load(gl.SliceLayout(0, _WGMMA))[None, :]
    w = gl.where(row > column, w, wt) * scale
    operand: gl.constexpr = gl.DotOperandLayout(0, _WGMMA, 2)
    sixteen = gl.convert_layout(gl.where((row ^ column) >> 4 == 1, w, 0.0).to(dtype), operand)
    thirty_two = gl.convert_layout(gl.where((row ^ column) >> 5 == 1, w, 0.0).to(dtype), operand)
    at_sixteen = gl.zeros([CHUNK, HALF], gl.float32, _WGMMA)
    at_thirty_two = gl.zeros([CHUNK, HALF], gl.float32, _WGMMA)
    sixteen, thirty_two = warpgroup_mma_wait(0, deps=(sixteen, thirty_two))
    at_sixteen = warpgroup_mma(sixteen, met_tiles.index(0), at_sixteen, use_acc=False, is_async=True)
    at_thirty_two = warpgroup_mma(thirty_two, met_tiles.index(1), at_thirty_two, use_acc=False, is_async=True)

    # what comes from before the chunk and from behind it
    mbarrier.wait(states_come, 0)
    from_state = gl.zeros([CHUNK, HALF], gl.float32, _WGMMA)
    from_end = gl.zeros([CHUNK, HALF], gl.float32, _WGMMA)
    both = gl.zeros([HALF, HALF], gl.float32, _WGMMA)
    from_state = warpgroup_mma(u, s, from_state, use_acc=False, is_async=True)
    from_end = warpgroup_mma(v, ds, from_end, use_acc=False, is_async=True)
    both = warpgroup_mma(s.permute((1, 0)), ds, both, use_acc=False, is_async=True)
    at_sixteen, at_thirty_two, sixteen, thirty_two, from_state, from_end, both = warpgroup_mma_wait(
        0, deps=(at_sixteen, at_thirty_two, sixteen, thirty_two, from_state, from_end, both)
    )
    barrier()
    pool.index(0).store(at_sixteen)
    pool.index(1).store(at_thirty_two)
    pool.index(2).store(from_state * scale)
    pool.index(3).store(from_end)
    crossing.store(gl.sum(gl.where(row == column, both, 0.0), 1))
    barrier()

    # a token after the other, from the last on: pairs of its warp, all the others, and what crosses it
    qs = tokens_of(q_tile.reshape([CHUNK, HALF]).load(FLAT))
    ks = tokens_of(k_tile.reshape([CHUNK, HALF]).load(FLAT))
    nothing = gl.zeros(own[0].shape, gl.float32, TOKENS)
    queries, keys = gl.where(odd, 1.0, 0.0), gl.where(odd, 0.0, 1.0)
    far_queries, far_keys = gl.where(high, inward, 0.0), gl.where(high, 0.0, inward)
    columns = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, TOKENS))[None, :]
    first = token + block * NEAR
    place = ((batch * T + first).to(gl.int64) * H + head) * KEYS + columns
    if beta_ptr is not None:
        of_strengths = dbeta_ptr + first.to(gl.int64) * H
    ahead, ahead_states, ahead_far, behind_ends, behind_far = nothing, nothing, nothing, nothing, nothing
    end = gl.full(own[0].shape, 1.0, gl.float32, TOKENS)
    from_states, from_ends = _token(pool.index(2)), _token(pool.index(3))
    levels, far_levels = _token(pool.index(0)), _token(pool.index(1))
    later = ()
    earlier = ()
    # beside strengths they would spill: in the place of tiles that are in registers by then
    laters = reinterpret(g_tile, gl.float32, [NEAR, BLOCKS, HALF], _PLAIN)
    earliers = (
        reinterpret(q_tile, gl.float32, [NEAR // 2, BLOCKS, HALF], _PLAIN),
        reinterpret(k_tile, gl.float32, [NEAR // 2, BLOCKS, HALF], _PLAIN),
    )
    for t in gl.static_range(NEAR - 1, -1, -1):
        to_query = _weights(by_query, t)
        to_key = _weights(by_key, t)
        q, k = qs[t].to(gl.float32), ks[t].to(gl.float32)
        state_part, end_part, far_part = from_states[t], from_ends[t], far_levels[t]
        # of earlier tokens, one factor of their decay after the other
        before_it = state_part * before + levels[t] * queries + far_part * far_queries
        for i in gl.static_range(t):
            before_it = before_it * own[i] + to_query[i] * ks[i].to(gl.float32)
        before_it = before_it * own[t]
        # of later tokens of the warp, of all others
        after_it = nothing
        for i in gl.static_range(NEAR - 1, t, -1):
            added = to_key[i] * qs[i].to(gl.float32)
            after_it = added if i == NEAR - 1 else after_it * own[i + 1] + added
        if t < NEAR - 1:
            after_it = after_it * own[t + 1]
            end = end * own[t + 1]
        back = end_part * after + levels[t] * keys + far_part * far_keys
        inside = (first + t < T) & (columns < KEYS)
        at = place + t * (H * KEYS)
        gl.store(dq_ptr + at, (before_it + to_query[t] * k).to(dtype), mask=inside)
        to_write = after_it + to_key[t] * q + end * back
        if beta_ptr is not None:
            beta = by_block.slice(t, 1, 1).load(TOKENS)
            gl.store(of_strengths + t * H, gl.sum(k * to_write, 1)[:, None], mask=first + t < T)
            to_write = to_write * beta
            k = k * beta
        gl.store(dk_ptr + at, to_write.to(dtype), mask=inside)
        ahead += before_it * q - after_it * k
        ahead_states = (ahead_states + q * state_part) * own[t]
        ahead_far = (ahead_far + q * far_part) * own[t]
        key = k * end
        behind_ends += key * end_part
        behind_far += key * far_part
        if beta_ptr is None:
            later = (ahead,) + later
            earlier = (key * back,) + earlier
        else:
            laters.index(t).store(ahead)
            earliers[t % 2].index(t // 2).store(key * back)
    sums.slice(BLOCKS, BLOCKS, 0).store(ahead_states * before)
    sums.slice(2 * BLOCKS, BLOCKS, 0).store(behind_ends * after)
    sums.slice(3 * BLOCKS, BLOCKS, 0).store(ahead_far * far_queries + behind_far * far_keys)
    barrier()
    rest = crossing.load(gl.SliceLayout(0, TOKENS))[None, :] * (t0 * t1 * t2 * t3)
    for i in gl.static_range(BLOCKS):
        rest += gl.where(block < i, sums.slice(BLOCKS + i, 1, 0).load(TOKENS), 0.0)
        rest += gl.where(block > i, sums.slice(2 * BLOCKS + i, 1, 0).load(TOKENS), 0.0)
    rest += gl.where(block == 1, sums.slice(3 * BLOCKS, 1, 0).load(TOKENS), 0.0)
    rest += gl.where(block == 2, sums.slice(3 * BLOCKS + 3, 1, 0).load(TOKENS), 0.0)
    for i in gl.static_range(NEAR):
        inside = (first + i < T) & (columns < KEYS)
        crossing_it = later[i] if beta_ptr is None else laters.index(i).load(TOKENS)
        behind_it = earlier[i] if beta_ptr is None else earliers[i % 2].index(i // 2).load(TOKENS)
        gl.store(dg_ptr + place + i * (H * KEYS), crossing_it + rest, mask=inside)
        rest += behind_it
