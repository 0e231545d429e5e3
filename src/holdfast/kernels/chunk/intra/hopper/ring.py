"""What kernels inside chunks share on Hopper: a ring of slots that TMA fills, sums of log decays, the output gate."""

from holdfast.kernels.lib.gluon.compat import gl, gluon, mbarrier, reinterpret, tma_load

# exp(-1e4) is 0 in float32; -inf would turn differences into NaN
LEAST = gl.constexpr(-1e4)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def place(PROGRAMS: gl.constexpr, HEADS: gl.constexpr, chunks):
    """Of a program: its number among the PROGRAMS of a chunk and head, the head, the chunk and the batch.

    Heads lie next to one another in memory, and so do their programs.
    """
    program = gl.program_id(0)
    both = program // (PROGRAMS * HEADS)
    batch = both // chunks
    return program % PROGRAMS, program // PROGRAMS % HEADS, both - batch * chunks, batch


@gluon.jit
def view(slots, slot, desc):
    """A slot as a tile of the descriptor's block."""
    return reinterpret(slots.index(slot), desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def fetch(item, desc, at, slots, arrived):
    """Has an item put into its slot of the ring."""
    slot = item % slots.shape[0]
    mbarrier.expect(arrived.index(slot), desc.block_type.nbytes)
    tma_load(desc, at, arrived.index(slot), view(slots, slot, desc))


@gluon.jit
def take(item, desc, slots, arrived, TAKEN: gl.constexpr):
    """Waits for an item and returns it. Something else had the first TAKEN slots of the ring in the first round."""
    slot = item % slots.shape[0]
    turn = item // slots.shape[0]
    if TAKEN > 0:
        turn -= 1 if slot < TAKEN else 0
    mbarrier.wait(arrived.index(slot), turn & 1)
    return view(slots, slot, desc).reshape([desc.block_type.shape[1], desc.block_type.shape[3]])


@gluon.jit
def load_decays(g, start, size, head, heads, chunk: gl.constexpr):
    """Base-2 log decays of a chunk, 0 behind its last step."""
    line: gl.constexpr = gl.BlockedLayout([max(chunk // (32 * gl.num_warps()), 1)], [32], [gl.num_warps()], [0])
    i = gl.arange(0, chunk, line)
    log = gl.load(g + (start + i) * heads + head, mask=i < size, other=0.0).to(gl.float32)
    return (gl.maximum(log, LEAST) * LOG2E).to(gl.float64)


@gluon.jit
def sum_decays(sums, log, end, chunk: gl.constexpr):
    """Leaves their sums from the chunk's start, less that of the first `end` steps (None: of no step), as high and low
    float32 numbers. Returns 2 to the power of what was taken off."""
    line: gl.constexpr = gl.BlockedLayout([max(chunk // (32 * gl.num_warps()), 1)], [32], [gl.num_warps()], [0])
    total = gl.associative_scan(log, 0, add)
    before = 1.0
    if end is not None:
        past = gl.sum(gl.where(gl.arange(0, chunk, line) < end, log, 0.0), 0)
        total -= past
        before = gl.exp2(past.to(gl.float32))
    high = total.to(gl.float32)
    sums.index(0).store(high)
    sums.index(1).store((total - high.to(gl.float64)).to(gl.float32))
    return before


@gluon.jit
def by_tiles(sums, steps: gl.constexpr):
    """The sums, high and low, in tiles of so many steps."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles: gl.constexpr = sums.shape[1] // steps
    return (
        reinterpret(sums.index(0), gl.float32, [tiles, steps], plain),
        reinterpret(sums.index(1), gl.float32, [tiles, steps], plain),
    )


@gluon.jit
def power(tile_sums, tile, layout: gl.constexpr, sign: gl.constexpr):
    """2 to the power of the sums of a tile, or of their opposites."""
    high, low = tile_sums
    return gl.exp2(sign * high.index(tile).load(layout) + sign * low.index(tile).load(layout))


@gluon.jit
def between(row_sums, row_tile, column_sums, column_tile, layout: gl.constexpr, sign: gl.constexpr):
    """2 to the power of the row's sum less the column's, or the other way round where sign is -1."""
    high, low = row_sums
    high_across, low_across = column_sums
    down: gl.constexpr = gl.SliceLayout(1, layout)
    across: gl.constexpr = gl.SliceLayout(0, layout)
    apart = high.index(row_tile).load(down)[:, None] - high_across.index(column_tile).load(across)[None, :]
    apart += low.index(row_tile).load(down)[:, None] - low_across.index(column_tile).load(across)[None, :]
    return gl.exp2(sign * apart)


@gluon.jit
def reciprocal(x):
    """Of numbers from 1 on, to the last bit but one; a division would scale them first."""
    TEXT: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(TEXT, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def activate(opening, SIGMOID: gl.constexpr):
    """The activation of the output gate, sigmoid or SiLU, and its derivative."""
    sigmoid = reciprocal(1.0 + gl.exp2(-LOG2E * opening))
    if SIGMOID:
        value = sigmoid
        slope = sigmoid * (1.0 - sigmoid)
    else:
        value = opening * sigmoid
        slope = sigmoid * (1.0 + opening * (1.0 - sigmoid))
    return value, slope
