"""One sweep over a sequence on Hopper: the additive recurrence with one decay a key channel, its state in registers.

    S = diag(exp(g_t)) S + beta_t k_t v_t^T;  o_t = scale S^T q_t.

A block owns a (batch, head) and walks over chunks of 64 tokens. Eight warps turn each chunk's queries, keys and log
decays into operands (intra_operands.py), a chunk ahead of the eight that multiply (forward_mma.py). Who has
read a tile has the chunk that takes its place copied in by TMA (forward_loads.py). Products are transposed:
    O^T = S^T Q^T + V^T P^T;  S^T = S^T decays + V^T K.
Backward in time, with do for v and queries and keys exchanged, the same is the gradient of the state, and that of v.

A packed sequence is walked over by itself, its chunks as lib/gluon/sequence.py counts them. Where its last one ends in
another sequence those that weigh make 0 of the rows that would reach it: of what is written, of values and log decays.
"""

from holdfast.kernels.lib.gluon.compat import barrier, fence_async_shared, gl, gluon, mbarrier
from holdfast.kernels.lib.gluon.decay import CHUNK
from holdfast.kernels.lib.gluon.sequence import packed_sequence
from holdfast.kernels.lib.gluon.tails import zero_tail_rows

from .forward_loads import PAIR, STAGES, fetch_keys, fetch_values, token_of
from .forward_mma import multiply
from .intra_operands import PARTS, fetch_decays, weigh
from .token_layout import HALF


@gluon.jit(do_not_specialize=["T", "H", "qk_group", "g_group", "v_group"])
def gla_sweep(
    k_desc,
    q_desc,
    g_desc,
    v_desc,
    o_desc,
    kept_desc,
    beta_ptr,
    start_ptr,
    end_ptr,
    cu_ptr,
    o_ptr,
    sums_ptr,
    T,
    H,
    qk_group,
    g_group,
    v_group,
    scale,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
    REVERSE: gl.constexpr,
    ADDS: gl.constexpr,
    LEAVES: gl.constexpr,
):
    """Grid (B * H,), or (N * H,) of packed sequences.

    q, k: [B, T, H / qk_group, KEYS], g: float32 [B, T, H / g_group, KEYS], v: [B, T, H / v_group, VALUES], o: [B, T, H,
    VALUES], by descriptors of blocks [1, 64, 1, columns], of g 64 columns.
    kept: S as each chunk reads it, rounded, [B, 64 chunks, H, K V / 64] of blocks [1, 64, 1, 64], or None, K and V the
    widths of tiles. Its columns are [K / 64, V / 64, 64], and a row is that of one of each 64 values.
    beta: float32 [B, T, H], or None for 1. start, end: S before and after the sweep, float32 [B, H, KEYS, VALUES], or
    None. cu: [N + 1], where packed sequences begin and end, or None; with it, o: the output's pointer, for chunks that
    end in another sequence, N for B in states, and kept's chunks T // 64 + N, sequence n's from begin // 64 + n on.
    sums, ADDS, LEAVES: of a state in slices of K, as in scalar_decay/hopper/forward.py.
    """
    K: gl.constexpr = k_desc.block_type.shape[3]
    V: gl.constexpr = v_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # keys and queries of a chunk, side by side: when they have been read, a state that is kept takes their place
    qk_tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, 1, CHUNK, 1, K], k_desc.layout)
    g_tiles = gl.allocate_shared_memory(gl.float32, [K // HALF, 1, CHUNK, 1, HALF], g_desc.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [PAIR, 1, CHUNK, 1, V], v_desc.layout)
    p_tile = gl.allocate_shared_memory(dtype, [CHUNK, CHUNK], flat)
    near_tile = gl.allocate_shared_memory(gl.float32, [8, 16, 16], PARTS)
    # each by itself: between stores into parts of one the compiler has all warps wait for each other
    met_tiles = (
        gl.allocate_shared_memory(dtype, [K // HALF, CHUNK, HALF], flat),
        gl.allocate_shared_memory(dtype, [K // HALF, CHUNK, HALF], flat),
    )
    totals = gl.allocate_shared_memory(gl.float32, [4, HALF], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    # a chunk is weighed when the one before the last has been multiplied
    decays = gl.allocate_shared_memory(gl.float32, [PAIR * K // HALF, HALF], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if beta_ptr is None:
        strengths: gl.constexpr = None
    else:
        strengths = gl.allocate_shared_memory(gl.float32, [PAIR, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    qk_come = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_come = gl.allocate_shared_memory(gl.int64, [PAIR, 1], mbarrier.MBarrierLayout())
    g_come = gl.allocate_shared_memory(gl.int64, [K // HALF, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    met_read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(met_read, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(qk_come.index(i), count=1)
        mbarrier.init(weighed.index(i), count=1)
    for i in gl.static_range(PAIR):
        mbarrier.init(v_come.index(i), count=1)
    for i in gl.static_range(K // HALF):
        mbarrier.init(g_come.index(i), count=1)
    fence_async_shared()
    barrier()

    # what those that multiply leave to those that weigh
    registers: gl.constexpr = 160 if V == HALF else 136 if K == HALF else 112
    if cu_ptr is None:
        count = gl.cdiv(T, CHUNK)
        batch = gl.program_id(0) // H
        aside: gl.constexpr = None
    else:
        chunk0, shift, end = packed_sequence(cu_ptr, gl.program_id(0) // H, T)
        count = gl.cdiv(end, CHUNK) - chunk0
        batch = gl.program_id(0) * 0
        # where its tokens begin, how far that is from its chunks, where they end
        aside = (chunk0 * CHUNK + shift, shift, end + shift)
    head = gl.program_id(0) % H
    walk = (batch, count, aside)
    keys = (q_desc, k_desc, qk_tiles, qk_come, head // qk_group)
    values = (v_desc, v_tiles, v_come, head // v_group)
    for half in gl.static_range(K // HALF):
        mbarrier.expect(g_come.index(half), g_desc.block_type.nbytes, pred=count > 0)
        fetch_decays(g_desc, g_tiles, g_come, half, (batch, token_of(0, walk, REVERSE), head // g_group, count > 0))
    for i in gl.static_range(STAGES - 1):
        mbarrier.expect(qk_come.index(i), 2 * k_desc.block_type.nbytes, pred=i < count)
        fetch_keys(keys, walk, i, i, REVERSE)
    mbarrier.expect(v_come.index(0), v_desc.block_type.nbytes, pred=count > 0)
    fetch_values(values, walk, 0, 0, REVERSE)
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    keys,
                    values,
                    met_tiles,
                    p_tile,
                    near_tile,
                    decays,
                    strengths,
                    weighed,
                    met_read,
                    o_desc,
                    kept_desc,
                    start_ptr,
                    end_ptr,
                    o_ptr,
                    cu_ptr,
                    sums_ptr,
                    T,
                    H,
                    walk,
                    scale,
                    KEYS,
                    VALUES,
                    REVERSE,
                    ADDS,
                    LEAVES,
                ),
            ),
            (
                _weigh,
                (
                    qk_tiles,
                    g_tiles,
                    v_tiles,
                    met_tiles,
                    near_tile,
                    totals,
                    decays,
                    strengths,
                    qk_come,
                    g_come,
                    v_come,
                    weighed,
                    met_read,
                    g_desc,
                    beta_ptr,
                    T,
                    H,
                    g_group,
                    walk,
                    scale,
                    REVERSE,
                ),
            ),
        ],
        [8],
        [registers],
    )


@gluon.jit
def _weigh(
    qk_tiles,
    g_tiles,
    v_tiles,
    met_tiles,
    near_tile,
    totals,
    decays,
    strengths,
    qk_come,
    g_come,
    v_come,
    weighed,
    met_read,
    g_desc,
    beta_ptr,
    T,
    H,
    g_group,
    walk,
    scale,
    REVERSE: gl.constexpr,
):
    """Turns each chunk that has come into operands."""
    K: gl.constexpr = qk_tiles.shape[4]
    _, count, aside = walk
    batch = gl.program_id(0) // H if aside is None else gl.program_id(0) * 0
    head = gl.program_id(0) % H
    stage = 0
    phase = 0
    for i in range(count):
        following = (batch, token_of(i + 1, walk, REVERSE), head // g_group, i + 1 < count)
        if beta_ptr is None:
            beta: gl.constexpr = None
            strength: gl.constexpr = None
        else:
            token = token_of(i, walk, REVERSE)
            beta = _strengths_of(beta_ptr, (batch * T).to(gl.int64), token, T if aside is None else aside[2], H, head)
            strength = strengths.index(i % PAIR)
        mbarrier.wait(qk_come.index(stage), phase)
        if aside is not None:
            rows = aside[2] - token_of(i, walk, REVERSE)
            if rows < CHUNK:
                zero_tail_rows(qk_tiles.index(2 * stage + (1 if REVERSE else 0)), rows)
                for half in gl.static_range(K // HALF):
                    mbarrier.wait(g_come.index(half), i % 2)
                    zero_tail_rows(g_tiles.index(half), rows)
                # until then who multiplies may still wait for the values that were there two chunks ago
                mbarrier.wait(met_read, (i + 1) % 2)
                mbarrier.wait(v_come.index(i % PAIR), (i // PAIR) % 2)
                zero_tail_rows(v_tiles.index(i % PAIR), rows)
                fence_async_shared()
                barrier()
        k = qk_tiles.index(2 * stage).reshape([CHUNK, K])
        q = qk_tiles.index(2 * stage + 1).reshape([CHUNK, K])
        weigh(
            q, k, g_tiles, g_come, i % 2, met_tiles, near_tile, totals, decays, beta, strength, met_read, scale,
            g_desc, following,
        )  # fmt: skip
        mbarrier.arrive(weighed.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _strengths_of(ptr, corner, token, end, H, head):
    """Those of a chunk's tokens, [64], 0 from `end` on."""
    tokens = token + gl.arange(0, CHUNK, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return gl.load(ptr + ((corner + tokens) * H + head), mask=tokens < end, other=0.0)
