"""Layouts of registers and of shared memory that several kernels take."""

from .compat import gl, gluon
from .reduce import shuffle_swap

TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


@gluon.constexpr_function
def vectorized_row_layout(rows, columns):
    """Return a layout of 16 rows a warp: a thread has two, and in each eights of neighbouring columns."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *([0, 32 << i] for i in range((columns // 32).bit_length() - 1))]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    warps = [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, columns])


@gluon.jit
def to_vectorized_rows(x):
    """Return a 16-bit accumulator [rows, columns], 16 rows a warp, in the layout vectorized_row_layout."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    gl.static_assert(rows == 16 * gl.num_warps())
    # of 32 columns which half, which eight of it; of these the lane's half and place in it; the pair
    x = gl.reshape(x, [rows, columns // 32, 2, 2, 2, 2, 2])
    low, high = gl.split(gl.permute(x, (0, 1, 2, 4, 5, 6, 3)))
    low, high = shuffle_swap(low, high, 1)
    low, high = gl.split(gl.permute(gl.join(low, high), (0, 1, 3, 4, 5, 6, 2)))
    low, high = shuffle_swap(low, high, 2)
    x = gl.reshape(gl.permute(gl.join(low, high), (0, 1, 2, 3, 6, 5, 4)), [rows, columns])
    # the same numbers in each thread, in their order
    return gl.convert_layout(x, vectorized_row_layout(rows, columns), assert_trivial=True)
