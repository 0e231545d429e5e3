"""The gate warp of the Hopper kernels: a chunk's log decays and strengths become the weights of its products.

It runs ahead of the warps that multiply by as many chunks as there are stages, and loads one chunk further. Where a
sweep sums over rows, the warps that multiply leave their parts behind, and it adds them when a stage comes back.
"""

from holdfast.kernels.common.gluon import barrier, gl, gluon, mbarrier

CHUNK = gl.constexpr(64)
# vectors of a stage: cumulative log decay, weight of the state on reading and on writing, strength
TOTAL, READ, WRITE, STRENGTH = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
VECTORS = gl.constexpr(4)
_LOG2E = gl.constexpr(1.4426950408889634)
# exp(-120) is 0 in float32 already, and sums of 64 such numbers still differ exactly enough from one another
_LOG_FLOOR = gl.constexpr(-120.0)


@gluon.jit
def wait_for_launch():
    """Where the launch ahead may still run: waits until it has ended, and what it wrote is there."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_launch():
    """Lets the blocks of the launch behind start where there is room."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def rounded(x, dtype: gl.constexpr):
    """x as dtype rounds it, in float32. By pairs: the conversion of one number takes as long as eight instructions."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 both, low, high;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 low, both, 16;
            and.b32 high, both, 0xffff0000;
            mov.b32 $0, low;
            mov.b32 $1, high;
            }""",
            "=f,=f,f,f",
            [x],
            gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(dtype).to(gl.float32)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def of_head(H, b, h):
    """Where this block's batch and head begin, from their strides."""
    return (gl.program_id(0) // H).to(gl.int64) * b + (gl.program_id(0) % H).to(gl.int64) * h


@gluon.jit
def place_of(cu_ptr, T, H):
    """This block's batch, its first token and how many it has: all of a batch's T, or a packed sequence's."""
    if cu_ptr is None:
        return gl.program_id(0) // H, T * 0, T
    else:
        bounds = cu_ptr + gl.program_id(0) // H
        # offsets that are wrong must not lead out of the tensors
        begin = gl.minimum(gl.maximum(gl.load(bounds), 0), T).to(gl.int32)
        end = gl.minimum(gl.maximum(gl.load(bounds + 1), 0), T).to(gl.int32)
        return gl.program_id(0) * 0, begin, gl.maximum(end - begin, 0)


@gluon.jit
def clear_rows(tile, rows):
    """Makes 0 of a tile [1, 64, 1, width] from a row on: what of it is another sequence's."""
    width: gl.constexpr = tile.shape[3]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    x = tile.reshape([CHUNK, width]).load(layout)
    tile.reshape([CHUNK, width]).store(gl.where((row < rows)[:, None], x, gl.zeros([CHUNK, width], x.dtype, layout)))


@gluon.jit
def store_rows(tile, ptr, stride, rows, columns):
    """Writes the first rows and columns of a tile [1, 64, 1, width], a row every `stride` elements."""
    width: gl.constexpr = tile.shape[3]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // width, width // 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    column = gl.arange(0, width, gl.SliceLayout(0, layout))
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(gl.int64)[:, None] * stride + column[None, :]
    gl.store(ptr + at, tile.reshape([CHUNK, width]).load(layout), mask=inside)


@gluon.jit
def of_token(H, batch, token, b, t, h):
    """Where this block's head is at a token, from the strides."""
    return batch.to(gl.int64) * b + token.to(gl.int64) * t + (gl.program_id(0) % H).to(gl.int64) * h


@gluon.jit
def of_segment(H, axis: gl.constexpr):
    """This block's place in [B, segments, H], segments being that axis of the grid."""
    batch = (gl.program_id(0) // H).to(gl.int64)
    return (batch * gl.num_programs(axis) + gl.program_id(axis)) * H + gl.program_id(0) % H


@gluon.jit
def floored(g):
    """A natural-log decay to base 2, from where it is 0 in float32 on no less."""
    # a maximum would hide a NaN
    return gl.where(g < _LOG_FLOOR, _LOG_FLOOR, g) * _LOG2E


@gluon.jit
def load_gates(g_ptr, beta_ptr, g_t, beta_t, chunk, is_inside, T, TOKENS: gl.constexpr = 64):
    """Log decay to base 2 and strength of a chunk of TOKENS; nothing is loaded where is_inside is false."""
    g, beta = ask_gates(g_ptr, beta_ptr, g_t, beta_t, chunk, is_inside, T, TOKENS)
    return floored(g.to(gl.float32)), beta.to(gl.float32)


@gluon.jit
def ask_gates(g_ptr, beta_ptr, g_t, beta_t, chunk, is_inside, T, TOKENS: gl.constexpr = 64):
    """As load_gates, but as they are in memory: where nothing is done with them yet, nobody waits for them."""
    layout: gl.constexpr = gl.BlockedLayout([TOKENS // 32], [32], [gl.num_warps()], [0])
    tokens = chunk * TOKENS + gl.arange(0, TOKENS, layout)
    inside = (tokens < T) & is_inside
    if g_ptr is None:
        g = gl.zeros([TOKENS], gl.float32, layout)
    else:
        g = gl.load(g_ptr + tokens.to(gl.int64) * g_t, mask=inside, other=0.0)
    if beta_ptr is None:
        beta = gl.full([TOKENS], 1.0, gl.float32, layout)
    else:
        beta = gl.load(beta_ptr + tokens.to(gl.int64) * beta_t, mask=inside, other=0.0)
    return g, beta


@gluon.jit
def weigh(gates, decays, gated, stage, g, beta, scale, REVERSE: gl.constexpr):
    """Fills a stage's vectors and announces it.

    Forward in time the state is read with its decay to each token and scale, and written with the decay to the chunk's
    end and beta; backward in time it is read with the decay from the end, written with that from the start and scale.
    """
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    total = gl.associative_scan(g, 0, add)
    whole = gl.sum(g, 0)
    to_here = gl.exp2(total)
    to_end = gl.exp2(whole - total)
    gates.index(stage * VECTORS + TOTAL).store(total)
    if REVERSE:
        gates.index(stage * VECTORS + READ).store(to_end)
        gates.index(stage * VECTORS + WRITE).store(to_here * scale)
        gates.index(stage * VECTORS + STRENGTH).store(beta)
    else:
        gates.index(stage * VECTORS + READ).store(to_here * scale)
        gates.index(stage * VECTORS + WRITE).store(to_end * beta)
        gates.index(stage * VECTORS + STRENGTH).store(beta * scale)
    decays.index(stage).store(gl.full([1], 1.0, gl.float32, layout) * gl.exp2(whole))
    barrier()
    mbarrier.arrive(gated.index(stage), count=1)


@gluon.jit
def gather(parts, stage):
    """The sum over warps of what each left of a chunk's row sums, [CHUNK]."""
    warps: gl.constexpr = parts.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([warps, 2], [1, 32], [1, 1], [1, 0])
    whole = gl.sum(parts.index(stage).load(layout), 0)
    return gl.convert_layout(whole, gl.BlockedLayout([2], [32], [1], [0]))


@gluon.jit
def within(gates, stage, layout: gl.constexpr, REVERSE: gl.constexpr):
    """The decay between two tokens of a chunk, [earlier, later], or [later, earlier] if REVERSE; 0 the other way."""
    columns = gates.index(stage * VECTORS + TOTAL).load(gl.SliceLayout(0, layout))
    rows = gates.index(stage * VECTORS + TOTAL).load(gl.SliceLayout(1, layout))
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    if REVERSE:
        log = rows[:, None] - columns[None, :]
        seen = row[:, None] >= column[None, :]
    else:
        log = columns[None, :] - rows[:, None]
        seen = row[:, None] <= column[None, :]
    return gl.exp2(gl.where(seen, log, float("-inf")))


@gluon.jit
def _fold(x, LANE: gl.constexpr):
    """Adds a thread's pairs and those of the thread LANE away; the lower keeps the first sum, the upper the other."""
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
def parts_of_columns(x, WARPS: gl.constexpr):
    """Of an accumulator [rows, columns] with its rows spread over WARPS: the sum over each warp's, [WARPS, columns].

    A thread has rows r and r + 8 of its warp's 16, r its lane divided by 4, and two of every 8 columns.
    """
    columns: gl.constexpr = x.shape[1]
    gl.static_assert(x.shape[0] == 16 * WARPS)
    rows = gl.sum(gl.reshape(x, [WARPS, 2, 8, columns]), 1)
    if gl.num_warps() == WARPS:
        rows = gl.reshape(rows, [WARPS, 8, columns // 64, 2, 2, 2, 8])
        rows = _fold(gl.permute(rows, (0, 1, 2, 3, 4, 6, 5)), 4)
        rows = _fold(gl.permute(rows, (0, 1, 2, 3, 5, 4)), 8)
        rows = _fold(gl.permute(rows, (0, 1, 2, 4, 3)), 16)
        # row r of the eight now holds columns 8 r to 8 r + 7
        rows = gl.permute(rows, (0, 2, 1, 3))
    else:
        # other warps have the other half of the columns
        rows = gl.reshape(rows, [WARPS, 8, columns // 32, 2, 2, 8])
        rows = _fold(gl.permute(rows, (0, 1, 2, 3, 5, 4)), 4)
        rows = _fold(gl.permute(rows, (0, 1, 2, 4, 3)), 8)
        rows = gl.sum(gl.reshape(rows, [WARPS, 2, 4, columns // 32, 8]), 1)
        rows = gl.permute(rows, (0, 2, 1, 3))
    return gl.reshape(rows, [WARPS, columns])


@gluon.jit
def _exchange(low, high, LANE: gl.constexpr):
    """Swaps which of two tensors of 16-bit pairs a number is in with the bit LANE of its lane's number."""
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


@gluon.constexpr_function
def with_eight_columns(rows, columns):
    """Sixteen rows a warp, of which a thread has two and in each eights of neighbouring columns."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *([0, 32 << i] for i in range((columns // 32).bit_length() - 1))]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    warps = [[16 << i, 0] for i in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, columns])


@gluon.jit
def eight_columns(x):
    """A 16-bit accumulator [rows, columns], 16 rows a warp, in the layout with_eight_columns."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    gl.static_assert(rows == 16 * gl.num_warps())
    # of 32 columns which half, which eight of it; of these the lane's half and place in it; the pair
    x = gl.reshape(x, [rows, columns // 32, 2, 2, 2, 2, 2])
    low, high = gl.split(gl.permute(x, (0, 1, 2, 4, 5, 6, 3)))
    low, high = _exchange(low, high, 1)
    low, high = gl.split(gl.permute(gl.join(low, high), (0, 1, 3, 4, 5, 6, 2)))
    low, high = _exchange(low, high, 2)
    x = gl.reshape(gl.permute(gl.join(low, high), (0, 1, 2, 3, 6, 5, 4)), [rows, columns])
    # the same numbers in each thread, in their order
    return gl.convert_layout(x, with_eight_columns(rows, columns), assert_trivial=True)


@gluon.jit
def save_state(ptr, state, row, KEYS: gl.constexpr, VALUES: gl.constexpr, TURNED: gl.constexpr, LAYOUT: gl.constexpr):
    """Writes a rounded state [V, K] whose rows begin at `row`, as [VALUES, KEYS], or turned."""
    V: gl.constexpr = state.shape[0]
    K: gl.constexpr = state.shape[1]
    layout: gl.constexpr = LAYOUT if TURNED else with_eight_columns(V, K)
    rows = row + gl.arange(0, V, gl.SliceLayout(1, layout))
    columns = gl.arange(0, K, gl.SliceLayout(0, layout))
    if KEYS == K and VALUES % V == 0:
        inside: gl.constexpr = None
    else:
        inside = (rows < VALUES)[:, None] & (columns < KEYS)[None, :]
    if TURNED:
        at = columns[None, :] * VALUES + rows[:, None]
    else:
        at = rows[:, None] * KEYS + columns[None, :]
        # 16 bytes a thread, not 4
        state = eight_columns(state)
    gl.store(ptr + at, state, mask=inside)


@gluon.jit
def unknown(x):
    """x, as the compiler cannot know: what depends on it takes no registers from one turn of a loop to the next."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)
