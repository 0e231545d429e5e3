"""The inverse that each chunk needs before the delta rule on Hopper goes over a sequence, for all chunks side by side.

With decays G summed from a chunk's start, the rows U that its tokens write beside their keys solve a triangular system,
    (I + L) U = E,  E = beta (V - exp(G) K S),  L_ij = beta_i exp(G_i - G_j) k_i . k_j for i > j,
so U = E + A E with A = (I + L)^-1 - I. A program is one warp and leaves one chunk's A.

Blocks of 16 tokens on the diagonal are inverted by doubling: with X the inverse of blocks of w tokens and L_w the part
of L that joins them in pairs, X - X L_w X is the inverse of blocks of 2 w. The blocks below the diagonal are
X_ij = -X_ii sum_k L_ik X_kj. Where L is an operand, what its rounding leaves out is another operand: without it, keys
that resemble one another cost twice the error of an exact inverse. Beside each X there is its transpose Y: with both,
every product's accumulator is the next one's operand in the registers where it is, and nothing passes through shared
memory.
"""
# ruff: noqa: RUF005 - Gluon does not compile starred expressions

from holdfast.kernels.lib.gluon.compat import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    mma_v2,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
)
from holdfast.kernels.lib.gluon.decay import CHUNK, load_decay_beta
from holdfast.kernels.lib.gluon.pdl import launch_dependents
from holdfast.kernels.lib.gluon.reduce import add
from holdfast.kernels.lib.gluon.sequence import PackedBounds, chunk_coords, packed_chunk, sequence_offset
from holdfast.kernels.lib.gluon.tails import zero_tail_rows

_BLOCK = gl.constexpr(16)
_BLOCKS = gl.constexpr(4)
_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
_LAYOUT_A = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))
_LAYOUT_B = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]), 2))


@gluon.jit
def _operand_a(x):
    """Return a rounded accumulator as a left operand."""
    return gl.convert_layout(x, _LAYOUT_A)


@gluon.jit
def _operand_b_transposed(x):
    """Return a rounded accumulator or a left operand [m, k] as the right operand [k, m], its transpose."""
    return gl.convert_layout(x.permute((1, 0)), _LAYOUT_B)


@gluon.jit
def split_hi_lo(x, dtype: gl.constexpr):
    """Return two numbers of dtype whose sum is x: x with the bits beyond dtype cut off, and the rest, rounded."""
    mask: gl.constexpr = -65536 if dtype == gl.bfloat16 else -8192
    high = (x.to(gl.int32, bitcast=True) & mask).to(gl.float32, bitcast=True)
    return high.to(dtype), (x - high).to(dtype)


@gluon.jit
def _add_product(x, y, below):
    """Return x + y below^T; below has two parts."""
    high, low = below
    return mma_v2(y, _operand_b_transposed(high), mma_v2(y, _operand_b_transposed(low), x))


@gluon.jit
def _invert(lower, dtype: gl.constexpr):
    """Return X = (I - lower)^-1 of a block, rounded, and its transpose Y. lower: strictly lower, float32."""
    row = gl.arange(0, _BLOCK, gl.SliceLayout(1, _MMA))[:, None]
    column = gl.arange(0, _BLOCK, gl.SliceLayout(0, _MMA))[None, :]
    nothing = gl.zeros([_BLOCK, _BLOCK], gl.float32, _MMA)
    unit = gl.where(row == column, nothing + 1.0, nothing)
    x = gl.where(((row ^ column) == 1) & (row > column), lower, unit)
    y = _add_product(nothing, _operand_a(unit.to(dtype)), split_hi_lo(x, dtype))
    high, low = split_hi_lo(lower, dtype)
    zero = nothing.to(dtype)
    for level in gl.static_range(1, 4):
        # the lower left quarters of blocks of 4, 8 and 16
        joins = ((row ^ column) >> level == 1) & (row > column)
        rounded = x.to(dtype)
        step = _add_product(nothing, _operand_a(y.to(dtype)), (gl.where(joins, high, zero), gl.where(joins, low, zero)))
        step = step.to(dtype)
        y = mma_v2(_operand_a(step), _operand_b_transposed(rounded), y)
        x = mma_v2(_operand_a(rounded), _operand_b_transposed(step), x)
    return x.to(dtype), y


@gluon.jit
def _load_keys(k_tiles, i: gl.constexpr):
    """Return the keys of block i as left operands, 16 of their columns each."""
    found = ()
    parts: gl.constexpr = k_tiles.shape[0] * _BLOCKS
    for part in gl.static_range(parts):
        tile = k_tiles.index(part // _BLOCKS).reshape([CHUNK, 64])
        tile = tile.slice(_BLOCK * i, _BLOCK).slice(_BLOCK * (part % _BLOCKS), _BLOCK, 1)
        found = found + (tile.load(_LAYOUT_A),)
    return found


@gluon.jit
def _place_block(a, block, j: gl.constexpr, i: gl.constexpr):
    """Store block [j, i] of A transposed."""
    a.slice(_BLOCK * j, _BLOCK).slice(_BLOCK * i, _BLOCK, 1).store(block)


@gluon.jit
def _key_products(keys, k_tiles, j: gl.constexpr):
    """Return the products of a block's keys with those of block j, or with one another where j is None."""
    x = gl.zeros([_BLOCK, _BLOCK], gl.float32, _MMA)
    parts: gl.constexpr = len(keys)
    for part in gl.static_range(parts):
        if j is None:
            others = _operand_b_transposed(keys[part])
        else:
            tile = k_tiles.index(part // _BLOCKS).reshape([CHUNK, 64])
            tile = tile.slice(_BLOCK * j, _BLOCK).slice(_BLOCK * (part % _BLOCKS), _BLOCK, 1)
            others = tile.permute((1, 0)).load(_LAYOUT_B)
        x = mma_v2(keys[part], others, x)
    return x


@gluon.jit(
    do_not_specialize=["sequences", "T", "H", "k_group", "g_b", "g_t", "g_h", "beta_b", "beta_t", "beta_h"],
    do_not_specialize_on_alignment=["g_ptr", "beta_ptr", "cu_ptr"],
)
def delta_rule_chunk_inverse(
    k_desc, g_ptr, beta_ptr, a_desc, cu_ptr, sequences, T, H, k_group, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    HALVES: gl.constexpr,
):  # fmt: skip
    """Grid (B * H, chunks), or (H * chunks, 1) of packed sequences.

    | tensor | shape | how |
    | --- | --- | --- |
    | k | [B, T, H / k_group, K] | descriptor, blocks [1, 64, 1, 64], HALVES of them a row |
    | g, beta | [B, T, H], or None for 0 and 1 | pointer, strides |
    | a | A transposed, [earlier, later]: [B * H, chunks, 64, 64] | descriptor, blocks [1, 1, 64, 64] |
    | cu | [N + 1], where packed sequences begin and end, or None | pointer |

    Of packed sequences a is [H, T // 64 + N, 64, 64], as forward.py takes it.
    """
    dtype: gl.constexpr = k_desc.dtype
    k_tiles = gl.allocate_shared_memory(dtype, [HALVES, 1, CHUNK, 1, 64], k_desc.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    cumsum = gl.allocate_shared_memory(gl.float32, [CHUNK], plain)
    betas = gl.allocate_shared_memory(gl.float32, [CHUNK], plain)
    mbarrier.init(loaded, count=1)
    fence_async_shared()
    launch_dependents()
    head = gl.program_id(0) % H
    # from the last chunk to the first: the first ones, which the next kernel reads first, are then still in the cache
    if cu_ptr is None:
        packed: gl.constexpr = None
        chunk = gl.num_programs(1) - 1 - gl.program_id(1)
    else:
        chunk = gl.num_programs(0) // H - 1 - gl.program_id(0) // H
        shift, T = packed_chunk(cu_ptr, chunk, sequences, T)
        packed = PackedBounds(shift=shift, end=T)
        if chunk * CHUNK >= T:
            return
    batch, token = chunk_coords(packed, chunk, H)
    mbarrier.expect(loaded, HALVES * k_desc.block_type.nbytes)
    for half in gl.static_range(HALVES):
        at = [batch, token, head // k_group, half * 64]
        tma_load(k_desc, at, loaded, k_tiles.index(half))

    if g_ptr is not None:
        g_ptr += sequence_offset(packed, H, g_b, g_t, g_h)
    if beta_ptr is not None:
        beta_ptr += sequence_offset(packed, H, beta_b, beta_t, beta_h)
    g, beta = load_decay_beta(g_ptr, beta_ptr, g_t, beta_t, chunk, True, T)
    cumsum.store(gl.associative_scan(g, 0, add))
    betas.store(beta)
    barrier()
    mbarrier.wait(loaded, 0)
    if cu_ptr is not None:  # noqa: SIM102 - known while compiling
        if (chunk + 1) * CHUNK > T:
            for half in gl.static_range(HALVES):
                zero_tail_rows(k_tiles.index(half), T - chunk * CHUNK)
            barrier()

    row = gl.arange(0, _BLOCK, gl.SliceLayout(1, _MMA))[:, None]
    column = gl.arange(0, _BLOCK, gl.SliceLayout(0, _MMA))[None, :]
    nothing = gl.zeros([_BLOCK, _BLOCK], gl.float32, _MMA)
    # Y of (0, 0), (1, 0), (1, 1), (2, 0) and so on: a row of blocks needs all before it, and few registers otherwise
    ys = ()
    blocks = ()
    a_tile = reinterpret(k_tiles.index(0), dtype, a_desc.block_type.shape, a_desc.layout)
    a = a_tile.reshape([CHUNK, CHUNK])
    for i in gl.static_range(_BLOCKS):
        # loads of keys stay behind it: hoisted, or kept for the next row, they would take most registers
        barrier()
        keys = _load_keys(k_tiles, i)
        later = cumsum.slice(_BLOCK * i, _BLOCK).load(gl.SliceLayout(1, _MMA))[:, None]
        minus_beta = -betas.slice(_BLOCK * i, _BLOCK).load(gl.SliceLayout(1, _MMA))[:, None]
        # a decay to a token of this row of blocks by way of its first: two factors of at most 1
        first = cumsum.slice(_BLOCK * i, 1).load(gl.SliceLayout(1, _MMA))[:, None]
        from_first = gl.exp2(later - first) * minus_beta
        first = cumsum.slice(_BLOCK * i, 1).load(gl.SliceLayout(0, _MMA))[None, :]
        below = ()
        for j in gl.static_range(i):
            earlier = cumsum.slice(_BLOCK * j, _BLOCK).load(gl.SliceLayout(0, _MMA))[None, :]
            lower = _key_products(keys, k_tiles, j) * from_first * gl.exp2(first - earlier)
            below = below + (split_hi_lo(lower, dtype),)
        earlier = cumsum.slice(_BLOCK * i, _BLOCK).load(gl.SliceLayout(0, _MMA))[None, :]
        log = gl.where(row > column, later - earlier, float("-inf"))
        own = _key_products(keys, k_tiles, None) * (gl.exp2(log) * minus_beta)
        if i == _BLOCKS - 1:
            # every key is read: A takes their place
            barrier()
            for m in gl.static_range(_BLOCKS):
                for n in gl.static_range(_BLOCKS):
                    if n <= m and m < i:
                        _place_block(a, blocks[m * (m + 1) // 2 + n], n, m)
        x, y = _invert(own, dtype)
        x = _operand_b_transposed(x)
        for j in gl.static_range(i):
            total = nothing
            for k in gl.static_range(j, i):
                total = _add_product(total, ys[k * (k + 1) // 2 + j], below[k])
            other = mma_v2(_operand_a(total.to(dtype)), x, nothing)
            ys = ys + (_operand_a(other.to(dtype)),)
            if i == _BLOCKS - 1:
                _place_block(a, other.to(dtype), j, i)
            else:
                blocks = blocks + (other.to(dtype),)
        ys = ys + (_operand_a(y.to(dtype)),)
        own = gl.where(row == column, nothing, y).to(dtype)
        if i == _BLOCKS - 1:
            _place_block(a, own, i, i)
        else:
            blocks = blocks + (own,)

    for m in gl.static_range(_BLOCKS):
        for n in gl.static_range(m + 1, _BLOCKS):
            _place_block(a, gl.zeros([_BLOCK, _BLOCK], dtype, _MMA), n, m)
    fence_async_shared()
    barrier()
    tma_store(a_desc, [batch * H + head, chunk, 0, 0], a_tile)
    tma_store_wait(0)
