"""The diagonal scan over real channels on Hopper, in Gluon: h_t = a_t h_{t-1} + x_t and its gradients.

A thread takes one or two channels of a sequence through consecutive steps, as the plain loop does. Where channels are
few, groups of warps share a tile: each takes a stretch of time from a state of zero, which tells what the stretch does
to a state, then again from the state that enters it. The tiles of the next steps are on their way into shared memory
meanwhile, copied 16 bytes at a time.

Sizes and strides are compiled in: as parts of instructions they take no registers, of which 32 states need many.
"""

from typing import NamedTuple

from holdfast.kernels.diagonal.triton.real import first_entry, piece_bounds
from holdfast.kernels.lib.gluon.compat import aggregate, async_copy, copy_to_shared, gl, gluon
from holdfast.planner.models.diagonal.hopper import ROWS as _ROWS

# steps between two saved states, and of a stretch of the backward pass
ROWS = gl.constexpr(_ROWS)


@aggregate
class Columns:
    """A block's channels from `first` on, of CHANNELS, and how many GROUPS of warps share its tiles."""

    first: gl.tensor
    CHANNELS: gl.constexpr
    GROUPS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, first, CHANNELS, GROUPS):
        self.first = first
        self.CHANNELS = gl.constexpr(CHANNELS)
        self.GROUPS = gl.constexpr(GROUPS)


@aggregate
class Form:
    """How a tile is read and written: numbers from step to step, whether a is a logarithm, the layout of a row."""

    CHANNELS: gl.constexpr
    LOG: gl.constexpr
    ROW: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, CHANNELS, LOG, ROW):
        self.CHANNELS = gl.constexpr(CHANNELS)
        self.LOG = gl.constexpr(LOG)
        self.ROW = gl.constexpr(ROW)


class Tile(NamedTuple):
    """Gates and inputs of a tile, in shared memory."""

    gates: gl.shared_memory_descriptor
    inputs: gl.shared_memory_descriptor


class GradTile(NamedTuple):
    """Gates, inputs and gradients of outputs of a tile, in shared memory."""

    gates: gl.shared_memory_descriptor
    inputs: gl.shared_memory_descriptor
    grads: gl.shared_memory_descriptor


class Exchange(NamedTuple):
    """What each group does to a state, h -> product h + offset: [GROUPS, BLOCK] each, in shared memory."""

    products: gl.shared_memory_descriptor
    offsets: gl.shared_memory_descriptor


class Outputs(NamedTuple):
    """Where a group's states go, and the saved ones or None."""

    o: gl.tensor
    saved: gl.tensor


class Grads(NamedTuple):
    """Where a group's gradients of x and a go."""

    x: gl.tensor
    a: gl.tensor


class Extent(NamedTuple):
    """A thread's group, how many of the tile's steps there are, whether its channels are there."""

    group: gl.tensor
    left: gl.tensor
    here: gl.tensor


@gluon.jit
def gate_of(a, LOG: gl.constexpr):
    if LOG:
        return gl.exp(a.to(gl.float32))
    else:
        return a.to(gl.float32)


@gluon.jit
def load_tile(tile, source, step: gl.constexpr, left, columns):
    """Start the copy of a tile whose first step is at source, and of whose steps the first `left` are there.

    A tile is GROUPS stretches of time, one step of each after the other: row r is of stretch r % GROUPS.
    """
    GROUPS: gl.constexpr = columns.GROUPS
    EACH: gl.constexpr = 128 // tile.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = min(32, tile.shape[1] // EACH)
    WIDE: gl.constexpr = tile.shape[1] // EACH // ACROSS
    layout: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // ACROSS, ACROSS], [gl.num_warps() // WIDE, WIDE], [1, 0])
    r = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    t = r % GROUPS * (tile.shape[0] // GROUPS) + r // GROUPS
    d = columns.first + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    here = (t < left)[:, None] & (d < columns.CHANNELS)[None, :]
    copy_to_shared(tile, source + (t[:, None] * step + d[None, :]), mask=here)


@gluon.jit
def load_tiles(tiles, sources, steps: gl.constexpr, at, slot, left, columns):
    """Start the copies of all tensors' tiles whose first step is `at`, in 64 bits, as one group."""
    for k in gl.static_range(len(tiles)):
        load_tile(tiles[k].index(slot), sources[k] + at * steps[k], steps[k], left, columns)
    async_copy.commit_group()


@gluon.jit
def group_scan(exchange, p, u, h, group, row: gl.constexpr, REVERSE: gl.constexpr):
    """Return the state before each group and the one after all, from what each does, h -> p h + u, and h before all."""
    products, offsets = exchange
    GROUPS: gl.constexpr = group.shape[0]
    products.store(p)
    offsets.store(u)
    initial = u
    FIRST: gl.constexpr = GROUPS - 1 if REVERSE else 0
    for at in gl.static_range(FIRST, GROUPS - 1 - FIRST + (-1 if REVERSE else 1), -1 if REVERSE else 1):
        initial = gl.where(group == at, h, initial)
        h = products.slice(at, 1).load(row) * h + offsets.slice(at, 1).load(row)
    return initial, h


@gluon.jit
def group_map(gates, inputs, group, left, row: gl.constexpr, FULL: gl.constexpr):
    """Return what each group's steps do to a state: the product of the gates, and where a state of zero gets."""
    GROUPS: gl.constexpr = group.shape[0]
    BLOCK: gl.constexpr = inputs.shape[1]
    p = gl.full([GROUPS, BLOCK], 1.0, gl.float32, row)
    u = gl.zeros([GROUPS, BLOCK], gl.float32, row)
    for j in gl.static_range(len(gates)):
        following = gates[j] * u + inputs.slice(j * GROUPS, GROUPS).load(row).to(gl.float32)
        if FULL:
            p, u = p * gates[j], following
        else:
            live = group * len(gates) + j < left
            p, u = gl.where(live, p * gates[j], p), gl.where(live, following, u)
    return p, u


@gluon.jit
def tile_fwd(tile, exchange, h, outputs, extent, saves, form, FULL: gl.constexpr):
    """Take h through a tile, all of whose steps are there if FULL, and store each state in o.

    Stores the state before a group's steps too, where `saves`. Returns the state after the tile, and that after the
    last step of each group.
    """
    gates, inputs = tile
    o, saved = outputs
    group, left, here = extent
    CHANNELS: gl.constexpr = form.CHANNELS
    row: gl.constexpr = form.ROW
    GROUPS: gl.constexpr = group.shape[0]
    STEPS: gl.constexpr = inputs.shape[0] // GROUPS
    factors = ()
    for j in gl.static_range(STEPS):
        factors += (gate_of(gates.slice(j * GROUPS, GROUPS).load(row), form.LOG),)
    if GROUPS > 1:
        p, u = group_map(factors, inputs, group, left, row, FULL)
        own, h = group_scan(exchange, p, u, h, group, row, False)
    else:
        own = h
    if saved is not None:
        gl.store(saved, own, mask=here & saves)
    for j in gl.static_range(STEPS):
        following = factors[j] * own + inputs.slice(j * GROUPS, GROUPS).load(row).to(gl.float32)
        if FULL:
            live = here
            own = following
        else:
            live = here & (group * STEPS + j < left)
            own = gl.where(group * STEPS + j < left, following, own)
        gl.store(o + j * CHANNELS, own.to(o.dtype.element_ty), mask=live)
    if GROUPS == 1:
        h = own
    return h, own


@gluon.jit(do_not_specialize=["length"])
def diagonal_real_fwd_sm90(
    a,
    x,
    o,
    initial,
    final,
    entries,
    bounds,
    length,
    a_row,
    x_row,
    channels: gl.constexpr,
    a_step: gl.constexpr,
    x_step: gl.constexpr,
    LOG: gl.constexpr,
    BLOCK: gl.constexpr,
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (N * blocks of channels,), N sequences. A tile is STEPS steps of each of GROUPS groups of warps.

    a, x [B, T, D], strides of rows and steps
    o [B, T, D], written: the states
    initial [N, D] float32 or None; final [N, D] float32, written
    entries [rows, D] float32 or None, written: every ROWS-th state (first_entry)
    bounds [N + 1] or None: where packed sequences begin
    """
    WARPS: gl.constexpr = gl.num_warps() // GROUPS
    EACH: gl.constexpr = BLOCK // (32 * WARPS)
    TILE: gl.constexpr = GROUPS * STEPS
    row_layout: gl.constexpr = gl.BlockedLayout([1, EACH], [1, 32], [GROUPS, WARPS], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    across = gl.cdiv(channels, BLOCK)
    piece = piece_bounds(bounds, length, length, 1, across)
    row, start, stop = piece.row, piece.start, piece.stop
    first = gl.program_id(0) % across * BLOCK
    d = first + gl.arange(0, BLOCK, gl.SliceLayout(0, row_layout))[None, :]
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, row_layout))[:, None]
    here = d < channels
    h = gl.zeros([1, BLOCK], gl.float32, row_layout)
    if initial is not None:
        h = gl.load(initial + piece.sequence * channels + d, mask=here, other=0.0)
    if entries is not None:
        entries += first_entry(row, piece.sequence, piece.begin, start, length, ROWS) * channels
        entries += group * STEPS // ROWS * channels + d
    o += (row * length + start) * channels + (group * (STEPS * channels) + d)
    gates = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, TILE, BLOCK], plain)
    inputs = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, TILE, BLOCK], plain)
    products = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK], plain)
    offsets = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK], plain)
    exchange = Exchange(products=products, offsets=offsets)
    columns = Columns(first, channels, GROUPS)
    total = (stop - start).to(gl.int32)
    tiles, sources = (gates, inputs), (a + row * a_row, x + row * x_row)
    steps: gl.constexpr = (a_step, x_step)
    for stage in gl.static_range(STAGES - 1):
        load_tiles(tiles, sources, steps, start + stage * TILE, stage, total - stage * TILE, columns)
    slot = 0
    last = h + gl.zeros([GROUPS, BLOCK], gl.float32, row_layout)
    for tile in range(gl.cdiv(total, TILE)):
        left = total - tile * TILE
        async_copy.wait_group(STAGES - 2)
        free = slot - 1 if slot > 0 else STAGES - 1
        prefetch_steps = (STAGES - 1) * TILE
        load_tiles(tiles, sources, steps, start + tile * TILE + prefetch_steps, free, left - prefetch_steps, columns)
        saves = (tile * TILE + group * STEPS) % ROWS == 0
        given = Tile(gates=gates.index(slot), inputs=inputs.index(slot))
        outputs = Outputs(o=o, saved=entries)
        extent = Extent(group=group, left=left, here=here)
        if left >= TILE:
            h, last = tile_fwd(given, exchange, h, outputs, extent, saves, Form(channels, LOG, row_layout), True)
        else:
            saves = saves & (group * STEPS < left)
            h, last = tile_fwd(given, exchange, h, outputs, extent, saves, Form(channels, LOG, row_layout), False)
        if entries is not None:
            entries += ((tile + 1) * TILE // ROWS - tile * TILE // ROWS) * channels
        o += TILE * channels
        slot = slot + 1 if slot + 1 < STAGES else 0
    ending = (total - 1) % TILE // STEPS if total > 0 else 0
    gl.store(final + piece.sequence * channels + (d + 0 * group), last, mask=here & (group == ending))


@gluon.jit
def tile_bwd(tile, exchange, h, c, outputs, extent, form, FULL: gl.constexpr):
    """Find a tile's states again from those that enter its groups, then c_t = a_t dh_t from its last step on."""
    gates, inputs, grads = tile
    grad_x, grad_a = outputs
    group, left, here = extent
    CHANNELS: gl.constexpr = form.CHANNELS
    LOG: gl.constexpr = form.LOG
    row: gl.constexpr = form.ROW
    GROUPS: gl.constexpr = group.shape[0]
    STEPS: gl.constexpr = gates.shape[0] // GROUPS
    BLOCK: gl.constexpr = gates.shape[1]
    history = ()
    for j in gl.static_range(STEPS):
        history += (h,)
        gate = gate_of(gates.slice(j * GROUPS, GROUPS).load(row), LOG)
        h = gate * h + inputs.slice(j * GROUPS, GROUPS).load(row).to(gl.float32)
    if GROUPS > 1:
        p = gl.full([GROUPS, BLOCK], 1.0, gl.float32, row)
        u = gl.zeros([GROUPS, BLOCK], gl.float32, row)
        for j in gl.static_range(STEPS - 1, -1, -1):
            gate = gate_of(gates.slice(j * GROUPS, GROUPS).load(row), LOG)
            before = gate * (grads.slice(j * GROUPS, GROUPS).load(row).to(gl.float32) + u)
            if FULL:
                p, u = p * gate, before
            else:
                live = group * STEPS + j < left
                p, u = gl.where(live, p * gate, p), gl.where(live, before, u)
        own, c = group_scan(exchange, p, u, c, group, row, True)
    else:
        own = c
    for j in gl.static_range(STEPS - 1, -1, -1):
        gate = gate_of(gates.slice(j * GROUPS, GROUPS).load(row), LOG)
        dh = grads.slice(j * GROUPS, GROUPS).load(row).to(gl.float32) + own
        before = gate * dh
        da = (before if LOG else dh) * history[j]
        if FULL:
            live = here
            own = before
        else:
            live = here & (group * STEPS + j < left)
            own = gl.where(group * STEPS + j < left, before, own)
        gl.store(grad_x + j * CHANNELS, dh.to(grad_x.dtype.element_ty), mask=live)
        gl.store(grad_a + j * CHANNELS, da.to(grad_a.dtype.element_ty), mask=live)
    if GROUPS == 1:
        c = own
    return c


@gluon.jit(do_not_specialize=["length"])
def diagonal_real_bwd_sm90(
    a,
    x,
    grad_o,
    grad_a,
    grad_x,
    grad_final,
    grad_initial,
    entries,
    bounds,
    length,
    a_row,
    x_row,
    grad_row,
    channels: gl.constexpr,
    a_step: gl.constexpr,
    x_step: gl.constexpr,
    grad_step: gl.constexpr,
    LOG: gl.constexpr,
    BLOCK: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (N * blocks of channels,). Last tile first: dh_t = do_t + c_{t+1}, dx_t = dh_t, da_t = dh_t h_{t-1}.

    a, x, grad_o [B, T, D], strides of rows and steps
    grad_a, grad_x [B, T, D], written
    grad_final [N, D] float32 or None; grad_initial [N, D] float32, written
    entries: states that the forward kernel saved
    bounds [N + 1] or None: where packed sequences begin
    """
    WARPS: gl.constexpr = gl.num_warps() // GROUPS
    EACH: gl.constexpr = BLOCK // (32 * WARPS)
    TILE: gl.constexpr = GROUPS * ROWS
    row_layout: gl.constexpr = gl.BlockedLayout([1, EACH], [1, 32], [GROUPS, WARPS], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    across = gl.cdiv(channels, BLOCK)
    piece = piece_bounds(bounds, length, length, 1, across)
    row, start, stop = piece.row, piece.start, piece.stop
    first = gl.program_id(0) % across * BLOCK
    d = first + gl.arange(0, BLOCK, gl.SliceLayout(0, row_layout))[None, :]
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, row_layout))[:, None]
    here = d < channels
    total = (stop - start).to(gl.int32)
    count = gl.cdiv(total, TILE)
    left = total - (count - 1) * TILE
    last = start + (count - 1) * TILE
    entries += (first_entry(row, piece.sequence, piece.begin, start, length, ROWS) + (count - 1) * GROUPS) * channels
    entries += group * channels + d
    grad_x += (row * length + last) * channels + (group * (ROWS * channels) + d)
    grad_a += (row * length + last) * channels + (group * (ROWS * channels) + d)
    c = gl.zeros([1, BLOCK], gl.float32, row_layout)
    if grad_final is not None:
        c = gl.load(grad_final + piece.sequence * channels + d, mask=here, other=0.0)
    gates = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, TILE, BLOCK], plain)
    inputs = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, TILE, BLOCK], plain)
    grads = gl.allocate_shared_memory(grad_o.dtype.element_ty, [STAGES, TILE, BLOCK], plain)
    products = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK], plain)
    offsets = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK], plain)
    exchange = Exchange(products=products, offsets=offsets)
    columns = Columns(first, channels, GROUPS)
    tiles, sources = (gates, inputs, grads), (a + row * a_row, x + row * x_row, grad_o + row * grad_row)
    steps: gl.constexpr = (a_step, x_step, grad_step)
    for stage in gl.static_range(STAGES - 1):
        some = (left if stage == 0 else TILE) if stage < count else 0
        load_tiles(tiles, sources, steps, last - stage * TILE, stage, some, columns)
    h = gl.load(entries, mask=here & (group * ROWS < left) & (count > 0), other=0.0)
    slot = 0
    for back in range(count):
        entries -= GROUPS * channels
        # for the next iteration: right behind its load, a state would be waited for
        earlier = gl.load(entries, mask=here & (group >= 0) & (back + 1 < count), other=0.0)
        async_copy.wait_group(STAGES - 2)
        free = slot - 1 if slot > 0 else STAGES - 1
        some = TILE if back + STAGES - 1 < count else 0
        load_tiles(tiles, sources, steps, last - (back + STAGES - 1) * TILE, free, some, columns)
        tile = GradTile(gates=gates.index(slot), inputs=inputs.index(slot), grads=grads.index(slot))
        outputs = Grads(x=grad_x, a=grad_a)
        extent = Extent(group=group, left=left, here=here)
        if back == 0:
            c = tile_bwd(tile, exchange, h, c, outputs, extent, Form(channels, LOG, row_layout), False)
        else:
            c = tile_bwd(tile, exchange, h, c, outputs, extent, Form(channels, LOG, row_layout), True)
        grad_x -= TILE * channels
        grad_a -= TILE * channels
        h = earlier
        slot = slot + 1 if slot + 1 < STAGES else 0
    gl.store(grad_initial + piece.sequence * channels + d, c, mask=here)
