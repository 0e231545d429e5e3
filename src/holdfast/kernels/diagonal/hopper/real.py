"""Device code of the diagonal scan over real channels on Hopper, in Gluon: h_t = a_t h_{t-1} + x_t and its gradients.

A thread takes one or two channels of a sequence through consecutive steps, as the plain loop does. Where channels are
few, groups of warps share a tile: each takes a stretch of its own from a state of zero, which tells what it does to a
state, then again from the state that enters it. The tiles of the next steps are on their way into shared memory
meanwhile, copied 16 bytes at a time.

Sizes and strides are compiled in: as parts of instructions they take no registers, of which 32 states need many.
"""

from holdfast.kernels.diagonal.triton.real import first_entry, span
from holdfast.kernels.lib.gluon.compat import async_copy, copy_to_shared, gl, gluon
from holdfast.planner.models.diagonal.hopper import ROWS as _ROWS

# steps between two states that are kept, and of a stretch of the backward pass
ROWS = gl.constexpr(_ROWS)


@gluon.jit
def gate_of(a, LOG: gl.constexpr):
    if LOG:
        return gl.exp(a.to(gl.float32))
    else:
        return a.to(gl.float32)


@gluon.jit
def copy(tile, source, step: gl.constexpr, left, first, channels, GROUPS: gl.constexpr):
    """Starts the copy of a tile, whose first step is at source; of its steps, the first `left` are there.

    A tile is GROUPS stretches of time, one step of each after the other: row r is of stretch r % GROUPS.
    """
    EACH: gl.constexpr = 128 // tile.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = min(32, tile.shape[1] // EACH)
    WIDE: gl.constexpr = tile.shape[1] // EACH // ACROSS
    layout: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // ACROSS, ACROSS], [gl.num_warps() // WIDE, WIDE], [1, 0])
    r = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    t = r % GROUPS * (tile.shape[0] // GROUPS) + r // GROUPS
    d = first + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    here = (t < left)[:, None] & (d < channels)[None, :]
    copy_to_shared(tile, source + (t[:, None] * step + d[None, :]), mask=here)


@gluon.jit
def fetch(tiles, sources, steps: gl.constexpr, at, slot, left, first, channels, GROUPS: gl.constexpr):
    """Starts the copies of all tensors' tiles whose first step is `at`, in 64 bits, as one group."""
    for k in gl.static_range(len(tiles)):
        copy(tiles[k].index(slot), sources[k] + at * steps[k], steps[k], left, first, channels, GROUPS)
    async_copy.commit_group()


@gluon.jit
def compose(products, ends, p, u, h, group, row: gl.constexpr, REVERSE: gl.constexpr):
    """From what each group does to a state, h -> p h + u, and the state before all: that before each, and after all."""
    GROUPS: gl.constexpr = group.shape[0]
    products.store(p)
    ends.store(u)
    entering = u
    FIRST: gl.constexpr = GROUPS - 1 if REVERSE else 0
    for at in gl.static_range(FIRST, GROUPS - 1 - FIRST + (-1 if REVERSE else 1), -1 if REVERSE else 1):
        entering = gl.where(group == at, h, entering)
        h = products.slice(at, 1).load(row) * h + ends.slice(at, 1).load(row)
    return entering, h


@gluon.jit
def through(gates, inputs, group, left, row: gl.constexpr, WHOLE: gl.constexpr):
    """What each group's steps do to a state: the product of the gates, and where a state of zero gets."""
    GROUPS: gl.constexpr = group.shape[0]
    BLOCK: gl.constexpr = inputs.shape[1]
    p = gl.full([GROUPS, BLOCK], 1.0, gl.float32, row)
    u = gl.zeros([GROUPS, BLOCK], gl.float32, row)
    for j in gl.static_range(len(gates)):
        following = gates[j] * u + inputs.slice(j * GROUPS, GROUPS).load(row).to(gl.float32)
        if WHOLE:
            p, u = p * gates[j], following
        else:
            live = group * len(gates) + j < left
            p, u = gl.where(live, p * gates[j], p), gl.where(live, following, u)
    return p, u


@gluon.jit
def walk(
    gates,
    inputs,
    shared,
    h,
    o,
    entries,
    channels: gl.constexpr,
    group,
    left,
    here,
    kept,
    LOG: gl.constexpr,
    row: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """h through a tile, all of its steps if WHOLE; writes each to o, and to entries the state before a group, if kept.

    Returns the state after the tile, and that after the last step of each group.
    """
    GROUPS: gl.constexpr = group.shape[0]
    STEPS: gl.constexpr = inputs.shape[0] // GROUPS
    factors = ()
    for j in gl.static_range(STEPS):
        factors += (gate_of(gates.slice(j * GROUPS, GROUPS).load(row), LOG),)
    if GROUPS > 1:
        p, u = through(factors, inputs, group, left, row, WHOLE)
        own, h = compose(shared[0], shared[1], p, u, h, group, row, False)
    else:
        own = h
    if entries is not None:
        gl.store(entries, own, mask=here & kept)
    for j in gl.static_range(STEPS):
        following = factors[j] * own + inputs.slice(j * GROUPS, GROUPS).load(row).to(gl.float32)
        if WHOLE:
            live = here
            own = following
        else:
            live = here & (group * STEPS + j < left)
            own = gl.where(group * STEPS + j < left, following, own)
        gl.store(o + j * channels, own.to(o.dtype.element_ty), mask=live)
    if GROUPS == 1:
        h = own
    return h, own


@gluon.jit(do_not_specialize=["length"])
def forward(
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
    """States o [B, T, D], the last of each sequence in final [N, D], every ROWS-th in entries.

    A tile is STEPS steps of each of GROUPS groups of warps.
    """
    WARPS: gl.constexpr = gl.num_warps() // GROUPS
    EACH: gl.constexpr = BLOCK // (32 * WARPS)
    TILE: gl.constexpr = GROUPS * STEPS
    row_layout: gl.constexpr = gl.BlockedLayout([1, EACH], [1, 32], [GROUPS, WARPS], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    across = gl.cdiv(channels, BLOCK)
    _, row, sequence, begin, start, stop = span(bounds, length, length, 1, across)
    first = gl.program_id(0) % across * BLOCK
    d = first + gl.arange(0, BLOCK, gl.SliceLayout(0, row_layout))[None, :]
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, row_layout))[:, None]
    here = d < channels
    h = gl.zeros([1, BLOCK], gl.float32, row_layout)
    if initial is not None:
        h = gl.load(initial + sequence * channels + d, mask=here, other=0.0)
    if entries is not None:
        entries += first_entry(row, sequence, begin, start, length, ROWS) * channels
        entries += group * STEPS // ROWS * channels + d
    o += (row * length + start) * channels + (group * (STEPS * channels) + d)
    gates = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, TILE, BLOCK], plain)
    inputs = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, TILE, BLOCK], plain)
    products = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK], plain)
    ends = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK], plain)
    total = (stop - start).to(gl.int32)
    tiles, sources = (gates, inputs), (a + row * a_row, x + row * x_row)
    steps: gl.constexpr = (a_step, x_step)
    for stage in gl.static_range(STAGES - 1):
        fetch(tiles, sources, steps, start + stage * TILE, stage, total - stage * TILE, first, channels, GROUPS)
    slot = 0
    last = h + gl.zeros([GROUPS, BLOCK], gl.float32, row_layout)
    for tile in range(gl.cdiv(total, TILE)):
        left = total - tile * TILE
        async_copy.wait_group(STAGES - 2)
        free = slot - 1 if slot > 0 else STAGES - 1
        ahead = (STAGES - 1) * TILE
        fetch(tiles, sources, steps, start + tile * TILE + ahead, free, left - ahead, first, channels, GROUPS)
        kept = (tile * TILE + group * STEPS) % ROWS == 0
        given = (gates.index(slot), inputs.index(slot), (products, ends), h, o, entries)
        if left >= TILE:
            h, last = walk(*given, channels, group, left, here, kept, LOG, row_layout, True)
        else:
            kept = kept & (group * STEPS < left)
            h, last = walk(*given, channels, group, left, here, kept, LOG, row_layout, False)
        if entries is not None:
            entries += ((tile + 1) * TILE // ROWS - tile * TILE // ROWS) * channels
        o += TILE * channels
        slot = slot + 1 if slot + 1 < STAGES else 0
    ending = (total - 1) % TILE // STEPS if total > 0 else 0
    gl.store(final + sequence * channels + (d + 0 * group), last, mask=here & (group == ending))


@gluon.jit
def retrace(
    gates,
    inputs,
    grads,
    products,
    ends,
    h,
    c,
    grad_x,
    grad_a,
    channels: gl.constexpr,
    group,
    left,
    here,
    LOG: gl.constexpr,
    row: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """The states of a tile again from those that enter its groups, then c_t = a_t dh_t from its last step."""
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
            if WHOLE:
                p, u = p * gate, before
            else:
                live = group * STEPS + j < left
                p, u = gl.where(live, p * gate, p), gl.where(live, before, u)
        own, c = compose(products, ends, p, u, c, group, row, True)
    else:
        own = c
    for j in gl.static_range(STEPS - 1, -1, -1):
        gate = gate_of(gates.slice(j * GROUPS, GROUPS).load(row), LOG)
        dh = grads.slice(j * GROUPS, GROUPS).load(row).to(gl.float32) + own
        before = gate * dh
        da = (before if LOG else dh) * history[j]
        if WHOLE:
            live = here
            own = before
        else:
            live = here & (group * STEPS + j < left)
            own = gl.where(group * STEPS + j < left, before, own)
        gl.store(grad_x + j * channels, dh.to(grad_x.dtype.element_ty), mask=live)
        gl.store(grad_a + j * channels, da.to(grad_a.dtype.element_ty), mask=live)
    if GROUPS == 1:
        c = own
    return c


@gluon.jit(do_not_specialize=["length"])
def backward(
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
    """From the last tile to the first: dh_t = dy_t + c_{t+1}, dx_t = dh_t, da_t = dh_t h_{t-1}."""
    WARPS: gl.constexpr = gl.num_warps() // GROUPS
    EACH: gl.constexpr = BLOCK // (32 * WARPS)
    TILE: gl.constexpr = GROUPS * ROWS
    row_layout: gl.constexpr = gl.BlockedLayout([1, EACH], [1, 32], [GROUPS, WARPS], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    across = gl.cdiv(channels, BLOCK)
    _, row, sequence, begin, start, stop = span(bounds, length, length, 1, across)
    first = gl.program_id(0) % across * BLOCK
    d = first + gl.arange(0, BLOCK, gl.SliceLayout(0, row_layout))[None, :]
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, row_layout))[:, None]
    here = d < channels
    total = (stop - start).to(gl.int32)
    count = gl.cdiv(total, TILE)
    left = total - (count - 1) * TILE
    last = start + (count - 1) * TILE
    entries += (first_entry(row, sequence, begin, start, length, ROWS) + (count - 1) * GROUPS) * channels
    entries += group * channels + d
    grad_x += (row * length + last) * channels + (group * (ROWS * channels) + d)
    grad_a += (row * length + last) * channels + (group * (ROWS * channels) + d)
    c = gl.zeros([1, BLOCK], gl.float32, row_layout)
    if grad_final is not None:
        c = gl.load(grad_final + sequence * channels + d, mask=here, other=0.0)
    gates = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, TILE, BLOCK], plain)
    inputs = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, TILE, BLOCK], plain)
    grads = gl.allocate_shared_memory(grad_o.dtype.element_ty, [STAGES, TILE, BLOCK], plain)
    products = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK], plain)
    ends = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK], plain)
    tiles, sources = (gates, inputs, grads), (a + row * a_row, x + row * x_row, grad_o + row * grad_row)
    steps: gl.constexpr = (a_step, x_step, grad_step)
    for stage in gl.static_range(STAGES - 1):
        some = (left if stage == 0 else TILE) if stage < count else 0
        fetch(tiles, sources, steps, last - stage * TILE, stage, some, first, channels, GROUPS)
    h = gl.load(entries, mask=here & (group * ROWS < left) & (count > 0), other=0.0)
    slot = 0
    for turn in range(count):
        entries -= GROUPS * channels
        # for the next turn: right behind its load, a state would be waited for
        earlier = gl.load(entries, mask=here & (group >= 0) & (turn + 1 < count), other=0.0)
        async_copy.wait_group(STAGES - 2)
        free = slot - 1 if slot > 0 else STAGES - 1
        some = TILE if turn + STAGES - 1 < count else 0
        fetch(tiles, sources, steps, last - (turn + STAGES - 1) * TILE, free, some, first, channels, GROUPS)
        tile = (gates.index(slot), inputs.index(slot), grads.index(slot), products, ends)
        if turn == 0:
            c = retrace(*tile, h, c, grad_x, grad_a, channels, group, left, here, LOG, row_layout, False)
        else:
            c = retrace(*tile, h, c, grad_x, grad_a, channels, group, left, here, LOG, row_layout, True)
        grad_x -= TILE * channels
        grad_a -= TILE * channels
        h = earlier
        slot = slot + 1 if slot + 1 < STAGES else 0
    gl.store(grad_initial + sequence * channels + d, c, mask=here)
