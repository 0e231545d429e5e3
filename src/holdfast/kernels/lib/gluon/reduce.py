"""Sums over the warps of a partition and over the lanes of a warp."""

from .compat import gl, gluon


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def reduce_warp_partials(parts, stage):
    """Return a chunk's row sums [CHUNK], summed over the warps that left parts of them."""
    warps: gl.constexpr = parts.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([warps, 2], [1, 32], [1, 1], [1, 0])
    whole = gl.sum(parts.index(stage).load(layout), 0)
    return gl.convert_layout(whole, gl.BlockedLayout([2], [32], [1], [0]))


@gluon.jit
def _butterfly_add(x, LANE: gl.constexpr):
    """Add a thread's pairs and those of the thread LANE away; the lower keeps the first sum, the upper the other."""
    first, second = gl.split(x)
    # one shuffle for two numbers, where a sum over rows takes two
    return gl.inline_asm_elementwise(
        """{
        .reg .pred upper;
        .reg .b32 lane, give;
        .reg .f32 keep;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, $3;
        setp.ne.u32 upper, lane, 0;
        selp.b32 give, $1, $2, upper;
        selp.f32 keep, $2, $1, upper;
        shfl.sync.bfly.b32 give, give, $3, 31, 0xffffffff;
        add.f32 $0, give, keep;
        }""",
        "=f,f,f,r",
        [first, second, LANE],
        gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def warp_column_sums(x, WARPS: gl.constexpr):
    """Return the sums over each warp's rows, [WARPS, columns], of an accumulator with its rows spread over WARPS.

    A thread has rows r and r + 8 of its warp's 16, r its lane divided by 4, and two of every 8 columns.
    """
    columns: gl.constexpr = x.shape[1]
    gl.static_assert(x.shape[0] == 16 * WARPS)
    rows = gl.sum(gl.reshape(x, [WARPS, 2, 8, columns]), 1)
    if gl.num_warps() == WARPS:
        rows = gl.reshape(rows, [WARPS, 8, columns // 64, 2, 2, 2, 8])
        rows = _butterfly_add(gl.permute(rows, (0, 1, 2, 3, 4, 6, 5)), 4)
        rows = _butterfly_add(gl.permute(rows, (0, 1, 2, 3, 5, 4)), 8)
        rows = _butterfly_add(gl.permute(rows, (0, 1, 2, 4, 3)), 16)
        # row r of the eight now holds columns 8 r to 8 r + 7
        rows = gl.permute(rows, (0, 2, 1, 3))
    else:
        # other warps have the other half of the columns
        rows = gl.reshape(rows, [WARPS, 8, columns // 32, 2, 2, 8])
        rows = _butterfly_add(gl.permute(rows, (0, 1, 2, 3, 5, 4)), 4)
        rows = _butterfly_add(gl.permute(rows, (0, 1, 2, 4, 3)), 8)
        rows = gl.sum(gl.reshape(rows, [WARPS, 2, 4, columns // 32, 8]), 1)
        rows = gl.permute(rows, (0, 2, 1, 3))
    return gl.reshape(rows, [WARPS, columns])


@gluon.jit
def shuffle_swap(low, high, LANE: gl.constexpr):
    """Swap which of two tensors of 16-bit pairs a number is in with the bit LANE of its lane's number."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred upper;
        .reg .b32 lane, give, got;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, $4;
        setp.ne.u32 upper, lane, 0;
        selp.b32 give, $2, $3, upper;
        shfl.sync.bfly.b32 got, give, $4, 31, 0xffffffff;
        selp.b32 $0, got, $2, upper;
        selp.b32 $1, $3, got, upper;
        }""",
        "=&r,=&r,r,r,r,r",
        [low, high, LANE],
        (low.dtype, high.dtype),
        is_pure=False,
        pack=2,
    )
