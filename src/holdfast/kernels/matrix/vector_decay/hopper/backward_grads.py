"""Vector decay on Hopper: the gradients of q, k and the log decays, of all chunks at once.

With S the state before a chunk, dS the gradient of the state after it, and W = scale dO V^T:
    dq_t = scale (decay to t) S do_t + sum over s <= t of W_ts beta_s k_s (decay from s to t), and dk likewise.
A warp has 16 tokens, a thread all of them in two channels (token_layout.py). Pairs of tokens of one warp are summed one
by one in float32: a sum over earlier tokens takes one factor of their decay after the other, as Horner's rule does.
Pairs of tokens of different warps meet at their level, as in intra_operands.py, on tensor cores.

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
    BLOCK_TOKENS,
    BLOCKS,
    CHUNK_LAYOUT,
    HALF,
    MMA_BLOCK_LAYOUT,
    TOKEN_LAYOUT,
    decays_around_block,
    decays_of,
    intra_block_product,
    join_tokens,
    load_block_decays,
    split_tokens,
)

_WGMMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_ROW = gl.constexpr(gl.BlockedLayout([1, 16], [1, 32], [4, 1], [1, 0]))
# conflict-free for accumulators and for whole rows
_STAGED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _load_weights(tile, i: gl.constexpr):
    """Load row i of each warp's 16 x 16 weights, one by one, [4, 1] each."""
    rows = tile.slice(BLOCKS * i, BLOCKS, 0).load(_ROW)
    parts = (gl.permute(gl.reshape(rows, [BLOCKS, 1, 2, 2, 2, 2]), (0, 1, 5, 4, 3, 2)),)
    for level in gl.static_range(4):
        finer = ()
        for j in gl.static_range(1 << level):
            first, second = gl.split(parts[j])
            finer = finer + (first, second)
        parts = finer
    found = ()
    for j in gl.static_range(BLOCK_TOKENS):
        found = found + (gl.convert_layout(parts[j], TOKEN_LAYOUT),)
    return found


@gluon.jit
def _load_tokens(tile):
    """Load a tile [64, 64] by tokens."""
    return split_tokens(tile.load(CHUNK_LAYOUT))


@gluon.jit(do_not_specialize=["sequences", "T", "qk_group", "g_group", "v_group"])
def gla_bwd_grads(
    q_desc,
    k_desc,
    g_desc,
    v_desc,
    do_desc,
    states_desc,
    dstates_desc,
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
    TOKEN_STEP: gl.constexpr,
    BEFORE_DECAY: gl.constexpr,
):
    """Grid (ceil(KEYS / 64) * H, chunks, B), or (ceil(KEYS / 64) * H * chunks,) for packed sequences. Read by TMA:

    q, k    [B, T, H / qk_group, KEYS], in blocks [1, 64, 1, 64]
    g       [B, T, H / g_group, KEYS], float32, in such blocks
    v, do   [B, T, H / v_group, V] and [B, T, H, V], in blocks [1, 64, 1, columns]
    states  the state before each chunk, as forward.py saves it, in blocks [1, 64, 1, 64]
    dstates the gradient of the state after each chunk, likewise; may be in the memory of dg, or of dq if V is 64: a
            block reads its part where it then writes

    beta    [B, T, H], float32, or None for 1
    cu      [N + 1], where packed sequences begin and end, or None; chunks are then those of lib/gluon/sequence.py

    Written:

    dq, dk  [B, T, H, KEYS], with TOKEN_STEP elements from token to token, known while compiling: an address for each
            token would spill
    dg      [B, T, H, KEYS], float32
    dbeta   [ceil(KEYS / 64), B, T, H], float32, a part for each 64 columns; None beside a beta of None

    With dstates of None, and no beta, queries read just before the write of their own token, and what the keys and the
    decays get is added to dk and dg. With a dq of None as well queries are keys, and what they get is added to dk. With
    BEFORE_DECAY, and dstates of None, queries read before the decay of their own token too.
    """
    V: gl.constexpr = v_desc.block_type.shape[3]
    V_SLABS: gl.constexpr = V // 64
    dtype: gl.constexpr = q_desc.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, HALF], q_desc.layout)
    k_tile = gl.allocate_shared_memory(dtype, [1, CHUNK, 1, HALF], k_desc.layout)
    g_tile = gl.allocate_shared_memory(gl.float32, [1, CHUNK, 1, HALF], g_desc.layout)
    # of v, do, the state and its gradient; afterwards of products
    pool = gl.allocate_shared_memory(gl.float32, [4, CHUNK, HALF], _STAGED)
    by_query = gl.allocate_shared_memory(gl.float32, [BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS], _PLAIN)
    by_key = gl.allocate_shared_memory(gl.float32, [BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS], _PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [4 * BLOCKS, HALF], _PLAIN)
    state_grad_dot = gl.allocate_shared_memory(gl.float32, [HALF], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if beta_ptr is not None:
        betas = gl.allocate_shared_memory(gl.float32, [CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    v_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    qkg_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    states_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(v_ready, count=1)
    mbarrier.init(qkg_ready, count=1)
    mbarrier.init(states_ready, count=1)
    fence_async_shared()
    barrier()

    k_halves: gl.constexpr = (KEYS + HALF - 1) // HALF
    half = gl.program_id(0) % k_halves
    length = T
    if cu_ptr is None:
        head = gl.program_id(0) // k_halves
        chunk = gl.program_id(1)
        batch = gl.program_id(2)
        token = chunk * CHUNK
    else:
        head = gl.program_id(0) // k_halves % H
        chunk = gl.program_id(0) // (k_halves * H)
        batch = gl.program_id(0) * 0
        shift, end = packed_chunk(cu_ptr, chunk, sequences, T)
        if end <= chunk * CHUNK:
            return
        token = chunk * CHUNK + shift
        T = end + shift
    v_tile = reinterpret(pool.index(0), dtype, [1, CHUNK, 1, V], v_desc.layout)
    do_tile = reinterpret(pool.index(1), dtype, [1, CHUNK, 1, V], do_desc.layout)
    states_tiles = reinterpret(pool.index(2), dtype, [V_SLABS, 1, CHUNK, 1, HALF], states_desc.layout)
    dstates_tiles = reinterpret(pool.index(3), dtype, [V_SLABS, 1, CHUNK, 1, HALF], states_desc.layout)
    states_bytes: gl.constexpr = V_SLABS * states_desc.block_type.nbytes
    qkg_bytes: gl.constexpr = 2 * q_desc.block_type.nbytes + g_desc.block_type.nbytes
    # in the order of their use
    mbarrier.expect(v_ready, v_desc.block_type.nbytes + do_desc.block_type.nbytes)
    tma_load(v_desc, [batch, token, head // v_group, 0], v_ready, v_tile)
    tma_load(do_desc, [batch, token, head, 0], v_ready, do_tile)
    mbarrier.expect(qkg_ready, qkg_bytes)
    tma_load(g_desc, [batch, token, head // g_group, half * HALF], qkg_ready, g_tile)
    tma_load(q_desc, [batch, token, head // qk_group, half * HALF], qkg_ready, q_tile)
    tma_load(k_desc, [batch, token, head // qk_group, half * HALF], qkg_ready, k_tile)
    mbarrier.expect(states_ready, states_bytes if dstates_desc is None else 2 * states_bytes)
    for slab in gl.static_range(V_SLABS):
        place = [batch, chunk * CHUNK, head, (half * V_SLABS + slab) * HALF]
        tma_load(states_desc, place, states_ready, states_tiles.index(slab))
        if dstates_desc is not None:
            tma_load(dstates_desc, place, states_ready, dstates_tiles.index(slab))
    v = reinterpret(pool.index(0), dtype, [1, CHUNK, 1, V], v_desc.layout).reshape([CHUNK, V])
    do = reinterpret(pool.index(1), dtype, [1, CHUNK, 1, V], do_desc.layout).reshape([CHUNK, V])
    s = reinterpret(pool.index(2), dtype, [V, HALF], flat)
    ds = reinterpret(pool.index(3), dtype, [V, HALF], flat)

    # weights of pairs of tokens of one warp
    if beta_ptr is not None:
        tokens = token + gl.arange(0, CHUNK, gl.BlockedLayout([1], [32], [4], [0]))
        beta_ptr += (batch * length).to(gl.int64) * H + head
        dbeta_ptr += (half * gl.num_programs(2) + batch).to(gl.int64) * length * H + head
        betas.store(gl.load(beta_ptr + tokens.to(gl.int64) * H, mask=tokens < T, other=0.0))
        barrier()
    mbarrier.wait(v_ready, 0)
    if cu_ptr is not None:  # noqa: SIM102 - known while compiling
        if token + CHUNK > T:
            zero_tail_rows(v_tile, T - token)
            zero_tail_rows(do_tile, T - token)
            barrier()
    intra_block = intra_block_product(do, v) * scale
    weighted = intra_block
    if beta_ptr is not None:
        by_block = reinterpret(betas, gl.float32, [BLOCKS, BLOCK_TOKENS], _PLAIN)
        weighted = intra_block * by_block.load(gl.SliceLayout(1, MMA_BLOCK_LAYOUT))[:, None, :]
    by_query.store(gl.reshape(gl.permute(weighted, (1, 0, 2)), [BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS]))
    by_key.store(gl.reshape(gl.permute(intra_block, (2, 0, 1)), [BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS]))

    # pairs of tokens of different warps, at their level
    mbarrier.wait(qkg_ready, 0)
    if cu_ptr is not None:  # noqa: SIM102 - known while compiling
        if token + CHUNK > T:
            zero_tail_rows(g_tile, T - token)
            zero_tail_rows(q_tile, T - token)
            zero_tail_rows(k_tile, T - token)
            barrier()
    own = decays_of(split_tokens(g_tile.reshape([CHUNK, HALF]).load(CHUNK_LAYOUT)))
    to_here = (own[0],)
    to_end = (gl.full(own[0].shape, 1.0, gl.float32, TOKEN_LAYOUT),)
    for i in gl.static_range(1, BLOCK_TOKENS):
        to_here = to_here + (to_here[i - 1] * own[i],)
        to_end = (to_end[0] * own[BLOCK_TOKENS - i],) + to_end
    sums.slice(0, BLOCKS, 0).store(to_here[BLOCK_TOKENS - 1])
    barrier()
    t0, t1, t2, t3 = load_block_decays(sums.slice(0, BLOCKS, 0))
    block = gl.arange(0, BLOCKS, gl.SliceLayout(1, TOKEN_LAYOUT))[:, None]
    before, after, inward = decays_around_block(block, t0, t1, t2, t3)
    odd = block % 2 == 1
    high = block >= 2
    qs = split_tokens(q_tile.reshape([CHUNK, HALF]).load(CHUNK_LAYOUT))
    ks = split_tokens(k_tile.reshape([CHUNK, HALF]).load(CHUNK_LAYOUT))
    level_16 = ()
    level_32 = ()
    for i in gl.static_range(BLOCK_TOKENS):
        query = qs[i].to(gl.float32)
        if not BEFORE_DECAY:
            query = query * to_here[i]
        elif i > 0:
            query = query * to_here[i - 1]
        key = ks[i].to(gl.float32) * to_end[i]
        level_16 = level_16 + (gl.where(odd, query, key).to(dtype),)
        level_32 = level_32 + ((gl.where(high, query, key) * inward).to(dtype),)
    level_tiles = reinterpret(g_tile, dtype, [2, CHUNK, HALF], flat)
    level_tiles.index(0).store(join_tokens(level_16))
    level_tiles.index(1).store(join_tokens(level_32))
    fence_async_shared()
    barrier()
    w_ts = gl.zeros([CHUNK, CHUNK], gl.float32, _WGMMA)
    w_ts = warpgroup_mma(do, v.permute((1, 0)), w_ts, use_acc=False, is_async=True)
    w_st = gl.zeros([CHUNK, CHUNK], gl.float32, _WGMMA)
    w_st = warpgroup_mma(v, do.permute((1, 0)), w_st, use_acc=False, is_async=True)
    w_ts, w_st = warpgroup_mma_wait(0, deps=(w_ts, w_st))
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, _WGMMA))[:, None]
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, _WGMMA))[None, :]
    if beta_ptr is not None:
        w_ts = w_ts * betas.load(gl.SliceLayout(0, _WGMMA))[None, :]
    w_ts = gl.where(row > column, w_ts, w_st) * scale
    operand: gl.constexpr = gl.DotOperandLayout(0, _WGMMA, 2)
    w_16 = gl.convert_layout(gl.where((row ^ column) >> 4 == 1, w_ts, 0.0).to(dtype), operand)
    w_32 = gl.convert_layout(gl.where((row ^ column) >> 5 == 1, w_ts, 0.0).to(dtype), operand)
    sums_16 = gl.zeros([CHUNK, HALF], gl.float32, _WGMMA)
    sums_32 = gl.zeros([CHUNK, HALF], gl.float32, _WGMMA)
    w_16, w_32 = warpgroup_mma_wait(0, deps=(w_16, w_32))
    sums_16 = warpgroup_mma(w_16, level_tiles.index(0), sums_16, use_acc=False, is_async=True)
    sums_32 = warpgroup_mma(w_32, level_tiles.index(1), sums_32, use_acc=False, is_async=True)

    # what comes from before the chunk and from behind it
    mbarrier.wait(states_ready, 0)
    from_state = gl.zeros([CHUNK, HALF], gl.float32, _WGMMA)
    from_dstate = gl.zeros([CHUNK, HALF], gl.float32, _WGMMA)
    state_products = gl.zeros([HALF, HALF], gl.float32, _WGMMA)
    from_state = warpgroup_mma(do, s, from_state, use_acc=False, is_async=True)
    if dstates_desc is not None:
        from_dstate = warpgroup_mma(v, ds, from_dstate, use_acc=False, is_async=True)
        state_products = warpgroup_mma(s.permute((1, 0)), ds, state_products, use_acc=False, is_async=True)
    sums_16, sums_32, w_16, w_32, from_state, from_dstate, state_products = warpgroup_mma_wait(
        0, deps=(sums_16, sums_32, w_16, w_32, from_state, from_dstate, state_products)
    )
    barrier()
    pool.index(0).store(sums_16)
    pool.index(1).store(sums_32)
    pool.index(2).store(from_state * scale)
    pool.index(3).store(from_dstate)
    state_grad_dot.store(gl.sum(gl.where(row == column, state_products, 0.0), 1))
    barrier()

    # token by token, from the last on: pairs of its warp, all other pairs, and what crosses it
    qs = split_tokens(q_tile.reshape([CHUNK, HALF]).load(CHUNK_LAYOUT))
    ks = split_tokens(k_tile.reshape([CHUNK, HALF]).load(CHUNK_LAYOUT))
    nothing = gl.zeros(own[0].shape, gl.float32, TOKEN_LAYOUT)
    q_factor_16, k_factor_16 = gl.where(odd, 1.0, 0.0), gl.where(odd, 0.0, 1.0)
    q_factor_32, k_factor_32 = gl.where(high, inward, 0.0), gl.where(high, 0.0, inward)
    columns = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, TOKEN_LAYOUT))[None, :]
    first = token + block * BLOCK_TOKENS
    place = (batch * T + first).to(gl.int64) * TOKEN_STEP + head * KEYS + columns
    if beta_ptr is not None:
        dbeta_at = dbeta_ptr + first.to(gl.int64) * H
    pairs_dg, states_dg, pairs_dg_32, dstates_dg, keys_dg_32 = nothing, nothing, nothing, nothing, nothing
    end = gl.full(own[0].shape, 1.0, gl.float32, TOKEN_LAYOUT)
    from_states, from_dstates = _load_tokens(pool.index(2)), _load_tokens(pool.index(3))
    parts_16, parts_32 = _load_tokens(pool.index(0)), _load_tokens(pool.index(1))
    pair_sums = ()
    behind = ()
    # beside betas they would spill: in the place of tiles that are in registers by then
    pair_sums_tile = reinterpret(g_tile, gl.float32, [BLOCK_TOKENS, BLOCKS, HALF], _PLAIN)
    behind_tiles = (
        reinterpret(q_tile, gl.float32, [BLOCK_TOKENS // 2, BLOCKS, HALF], _PLAIN),
        reinterpret(k_tile, gl.float32, [BLOCK_TOKENS // 2, BLOCKS, HALF], _PLAIN),
    )
    for t in gl.static_range(BLOCK_TOKENS - 1, -1, -1):
        to_query = _load_weights(by_query, t)
        to_key = _load_weights(by_key, t)
        q, k = qs[t].to(gl.float32), ks[t].to(gl.float32)
        state_part, dstate_part, part_32 = from_states[t], from_dstates[t], parts_32[t]
        # of earlier tokens, one factor of their decay after the other
        before_it = state_part * before + parts_16[t] * q_factor_16 + part_32 * q_factor_32
        # with BEFORE_DECAY the write just before crosses no decay, and nothing of it may be in what is taken away below
        decayed_before = before_it
        for i in gl.static_range(t):
            decayed_before = before_it * own[i]
            before_it = decayed_before + to_query[i] * ks[i].to(gl.float32)
        if not BEFORE_DECAY:
            before_it = before_it * own[t]
            decayed_before = before_it
        # of later tokens of the warp, of all others
        after_it, decayed_after = nothing, nothing
        for i in gl.static_range(BLOCK_TOKENS - 1, t, -1):
            added = to_key[i] * qs[i].to(gl.float32)
            if i == BLOCK_TOKENS - 1:
                after_it = added
            elif BEFORE_DECAY:
                decayed_after = after_it * own[i]
                after_it = decayed_after + added
            else:
                after_it = after_it * own[i + 1] + added
        if t < BLOCK_TOKENS - 1:
            if not BEFORE_DECAY:
                after_it = after_it * own[t + 1]
                decayed_after = after_it
            end = end * own[t + 1]
        back = dstate_part * after + parts_16[t] * k_factor_16 + part_32 * k_factor_32
        inside = (first + t < T) & (columns < KEYS)
        at = place + t * TOKEN_STEP
        to_write = after_it + end * back
        if dstates_desc is not None:
            gl.store(dq_ptr + at, (before_it + to_query[t] * k).to(dtype), mask=inside)
            to_write += to_key[t] * q
        elif dq_ptr is not None:
            gl.store(dq_ptr + at, before_it.to(dtype), mask=inside)
        else:
            to_write += before_it
        if beta_ptr is not None:
            beta = by_block.slice(t, 1, 1).load(TOKEN_LAYOUT)
            gl.store(dbeta_at + t * H, gl.sum(k * to_write, 1)[:, None], mask=first + t < T)
            to_write = to_write * beta
            k = k * beta
        if dstates_desc is None:
            to_write += gl.load(dk_ptr + at, mask=inside, other=0.0).to(gl.float32)
        gl.store(dk_ptr + at, to_write.to(dtype), mask=inside)
        if BEFORE_DECAY:
            pairs_dg = pairs_dg - decayed_after * k
            states_dg = states_dg * own[t] + q * state_part
            pairs_dg_32 = pairs_dg_32 * own[t] + q * part_32
        else:
            pairs_dg += decayed_before * q - decayed_after * k
            states_dg = (states_dg + q * state_part) * own[t]
            pairs_dg_32 = (pairs_dg_32 + q * part_32) * own[t]
        key = k * end
        dstates_dg += key * dstate_part
        keys_dg_32 += key * part_32
        if beta_ptr is None:
            pair_sums = (pairs_dg,) + pair_sums
            behind = (key * back,) + behind
        else:
            pair_sums_tile.index(t).store(pairs_dg)
            behind_tiles[t % 2].index(t // 2).store(key * back)
        if BEFORE_DECAY:
            pairs_dg = pairs_dg + decayed_before * q
    sums.slice(BLOCKS, BLOCKS, 0).store(states_dg * before)
    sums.slice(2 * BLOCKS, BLOCKS, 0).store(dstates_dg * after)
    sums.slice(3 * BLOCKS, BLOCKS, 0).store(pairs_dg_32 * q_factor_32 + keys_dg_32 * k_factor_32)
    barrier()
    rest = state_grad_dot.load(gl.SliceLayout(0, TOKEN_LAYOUT))[None, :] * (t0 * t1 * t2 * t3)
    for i in gl.static_range(BLOCKS):
        rest += gl.where(block < i, sums.slice(BLOCKS + i, 1, 0).load(TOKEN_LAYOUT), 0.0)
        rest += gl.where(block > i, sums.slice(2 * BLOCKS + i, 1, 0).load(TOKEN_LAYOUT), 0.0)
    rest += gl.where(block == 1, sums.slice(3 * BLOCKS, 1, 0).load(TOKEN_LAYOUT), 0.0)
    rest += gl.where(block == 2, sums.slice(3 * BLOCKS + 3, 1, 0).load(TOKEN_LAYOUT), 0.0)
    if TOKEN_STEP != H * KEYS:
        place = ((batch * T + first).to(gl.int64) * H + head) * KEYS + columns
    for i in gl.static_range(BLOCK_TOKENS):
        inside = (first + i < T) & (columns < KEYS)
        pairs_it = pair_sums[i] if beta_ptr is None else pair_sums_tile.index(i).load(TOKEN_LAYOUT)
        behind_it = behind[i] if beta_ptr is None else behind_tiles[i % 2].index(i // 2).load(TOKEN_LAYOUT)
        dg_at = dg_ptr + place + i * (H * KEYS)
        found = pairs_it + rest
        if dstates_desc is None:
            found += gl.load(dg_at, mask=inside, other=0.0)
        gl.store(dg_at, found, mask=inside)
        rest += behind_it
