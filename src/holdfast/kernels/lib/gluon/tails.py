"""The rows of a last tile that belong to the next packed sequence or to none."""

from .compat import barrier, fence_async_shared, gl, gluon, mbarrier
from .decay import CHUNK


@gluon.jit
def zero_tail_rows(tile, rows):
    """Zero the rows of a tile [1, 64, 1, width] from `rows` on, which are another sequence's."""
    width: gl.constexpr = tile.shape[3]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    x = tile.reshape([CHUNK, width]).load(layout)
    tile.reshape([CHUNK, width]).store(gl.where((row < rows)[:, None], x, gl.zeros([CHUNK, width], x.dtype, layout)))


@gluon.jit
def store_tail(tile, ptr, stride, rows, columns):
    """Store the first rows and columns of a tile [1, 64, 1, width], a row every `stride` elements."""
    width: gl.constexpr = tile.shape[3]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    column = gl.arange(0, width, gl.SliceLayout(0, layout))
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(gl.int64)[:, None] * stride + column[None, :]
    gl.store(ptr + at, tile.reshape([CHUNK, width]).load(layout), mask=inside)


@gluon.jit
def _zero_tail_loop(tile, rows):
    """Do as zero_tail_rows, eight rows at a time: a warp that loads has few registers."""
    width: gl.constexpr = tile.shape[3]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, 8, gl.SliceLayout(1, layout))
    for start in gl.static_range(0, CHUNK, 8):
        if rows < start + 8:
            part = tile.reshape([CHUNK, width]).slice(start, 8)
            x = part.load(layout)
            part.store(gl.where((start + row < rows)[:, None], x, gl.zeros([8, width], x.dtype, layout)))


@gluon.jit
def zero_tail_tiles(tiles, rows, copied, loaded):
    """Wait for tiles that end in another sequence, zero that one's rows, and hand the tiles on.

    Multiplied with 0, a NaN would stay one.
    """
    mbarrier.wait(copied, 0)
    count: gl.constexpr = len(tiles)
    for i in gl.static_range(count):
        _zero_tail_loop(tiles[i], rows)
    fence_async_shared()
    barrier()
    mbarrier.arrive(loaded, count=1)
