"""Device code of the diagonal scan over real channels on Hopper, in Gluon: h_t = a_t h_{t-1} + x_t and its gradients.

A thread takes one or two channels of a sequence through all of its steps, as the plain loop does: nothing passes
between threads. The tiles of the next steps are on their way into shared memory meanwhile, copied 16 bytes at a time.

Sizes and strides are compiled in: as parts of instructions they take no registers, of which 32 states need many.
"""

from holdfast.kernels.common.gluon import async_copy, copy_to_shared, gl, gluon
from holdfast.planner.models.diagonal_hopper import ROWS as _ROWS

from .triton_channels import first_entry, span

# steps between two states that are kept, and of a tile of the backward pass
ROWS = gl.constexpr(_ROWS)


@gluon.jit
def gate_of(a, LOG: gl.constexpr):
    if LOG:
        return gl.exp(a.to(gl.float32))
    else:
        return a.to(gl.float32)


@gluon.jit
def copy(tile, source, step: gl.constexpr, left, first, channels: gl.constexpr):
    """Starts the copy of a tile, whose first step is at source; of its steps, the first `left` are there."""
    EACH: gl.constexpr = 128 // tile.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = tile.shape[1] // EACH // gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // ACROSS, ACROSS], [1, gl.num_warps()], [1, 0])
    t = gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    d = first + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    here = (t < left)[:, None] & (d < channels)[None, :]
    copy_to_shared(tile, source + (t[:, None] * step + d[None, :]), mask=here)


@gluon.jit
def advance(
    gates,
    inputs,
    h,
    o,
    channels: gl.constexpr,
    left,
    here,
    LOG: gl.constexpr,
    row: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """h through the steps of a tile, all of them if WHOLE; writes each to o."""
    STEPS: gl.constexpr = gates.shape[0]
    for j in gl.static_range(STEPS):
        gate = gate_of(gates.slice(j, 1).load(row), LOG)
        following = gate * h + inputs.slice(j, 1).load(row).to(gl.float32)
        if WHOLE:
            live = here
            h = following
        else:
            live = here & (j < left)
            h = gl.where(j < left, following, h)
        gl.store(o + j * channels, h.to(o.dtype.element_ty), mask=live)
    return h


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
    channels: gl.constexpr,
    a_row,
    a_step: gl.constexpr,
    x_row,
    x_step: gl.constexpr,
    LOG: gl.constexpr,
    BLOCK: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """States o [B, T, D], the last of each sequence in final [N, D], every ROWS-th in entries; tiles of STEPS steps."""
    EACH: gl.constexpr = BLOCK // (32 * gl.num_warps())
    row_layout: gl.constexpr = gl.BlockedLayout([1, EACH], [1, 32], [1, gl.num_warps()], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    across = gl.cdiv(channels, BLOCK)
    _, row, sequence, begin, start, stop = span(bounds, length, length, 1, across)
    first = gl.program_id(0) % across * BLOCK
    d = first + gl.arange(0, BLOCK, gl.SliceLayout(0, row_layout))[None, :]
    here = d < channels
    h = gl.zeros([1, BLOCK], gl.float32, row_layout)
    if initial is not None:
        h = gl.load(initial + sequence * channels + d, mask=here, other=0.0)
    if entries is not None:
        entries += first_entry(row, sequence, begin, start, length, ROWS) * channels + d
    a += row * a_row + start * a_step
    x += row * x_row + start * x_step
    o += (row * length + start) * channels + d
    gates = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, STEPS, BLOCK], plain)
    inputs = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, STEPS, BLOCK], plain)
    total = (stop - start).to(gl.int32)
    for stage in gl.static_range(STAGES - 1):
        copy(gates.index(stage), a, a_step, total - stage * STEPS, first, channels)
        copy(inputs.index(stage), x, x_step, total - stage * STEPS, first, channels)
        async_copy.commit_group()
        a += STEPS * a_step
        x += STEPS * x_step
    slot = 0
    for tile in range(gl.cdiv(total, STEPS)):
        left = total - tile * STEPS
        if entries is not None:  # noqa: SIM102 - known while compiling
            if tile % (ROWS // STEPS) == 0:
                gl.store(entries, h, mask=here)
                entries += channels
        async_copy.wait_group(STAGES - 2)
        free = slot - 1 if slot > 0 else STAGES - 1
        copy(gates.index(free), a, a_step, left - (STAGES - 1) * STEPS, first, channels)
        copy(inputs.index(free), x, x_step, left - (STAGES - 1) * STEPS, first, channels)
        async_copy.commit_group()
        a += STEPS * a_step
        x += STEPS * x_step
        if left >= STEPS:
            h = advance(gates.index(slot), inputs.index(slot), h, o, channels, left, here, LOG, row_layout, True)
        else:
            h = advance(gates.index(slot), inputs.index(slot), h, o, channels, left, here, LOG, row_layout, False)
        o += STEPS * channels
        slot = slot + 1 if slot + 1 < STAGES else 0
    gl.store(final + sequence * channels + d, h, mask=here)


@gluon.jit
def retrace(
    gates,
    inputs,
    grads,
    h,
    c,
    grad_x,
    grad_a,
    channels: gl.constexpr,
    left,
    here,
    LOG: gl.constexpr,
    row: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """The states of a tile again from h, which enters it, then c_t = a_t dh_t from its last step to its first."""
    history = ()
    for j in gl.static_range(ROWS):
        history += (h,)
        gate = gate_of(gates.slice(j, 1).load(row), LOG)
        h = gate * h + inputs.slice(j, 1).load(row).to(gl.float32)
    for j in gl.static_range(ROWS - 1, -1, -1):
        gate = gate_of(gates.slice(j, 1).load(row), LOG)
        dh = grads.slice(j, 1).load(row).to(gl.float32) + c
        before = gate * dh
        da = (before if LOG else dh) * history[j]
        if WHOLE:
            live = here
            c = before
        else:
            live = here & (j < left)
            c = gl.where(j < left, before, c)
        gl.store(grad_x + j * channels, dh.to(grad_x.dtype.element_ty), mask=live)
        gl.store(grad_a + j * channels, da.to(grad_a.dtype.element_ty), mask=live)
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
    channels: gl.constexpr,
    a_row,
    a_step: gl.constexpr,
    x_row,
    x_step: gl.constexpr,
    grad_row,
    grad_step: gl.constexpr,
    LOG: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """From the last tile to the first: dh_t = dy_t + c_{t+1}, dx_t = dh_t, da_t = dh_t h_{t-1}."""
    EACH: gl.constexpr = BLOCK // (32 * gl.num_warps())
    row_layout: gl.constexpr = gl.BlockedLayout([1, EACH], [1, 32], [1, gl.num_warps()], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    across = gl.cdiv(channels, BLOCK)
    _, row, sequence, begin, start, stop = span(bounds, length, length, 1, across)
    first = gl.program_id(0) % across * BLOCK
    d = first + gl.arange(0, BLOCK, gl.SliceLayout(0, row_layout))[None, :]
    here = d < channels
    total = (stop - start).to(gl.int32)
    tiles = gl.cdiv(total, ROWS)
    left = total - (tiles - 1) * ROWS
    last = start + (tiles - 1) * ROWS
    entries += (first_entry(row, sequence, begin, start, length, ROWS) + tiles - 1) * channels + d
    a += row * a_row + last * a_step
    x += row * x_row + last * x_step
    grad_o += row * grad_row + last * grad_step
    grad_x += (row * length + last) * channels + d
    grad_a += (row * length + last) * channels + d
    c = gl.zeros([1, BLOCK], gl.float32, row_layout)
    if grad_final is not None:
        c = gl.load(grad_final + sequence * channels + d, mask=here, other=0.0)
    gates = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, ROWS, BLOCK], plain)
    inputs = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, ROWS, BLOCK], plain)
    grads = gl.allocate_shared_memory(grad_o.dtype.element_ty, [STAGES, ROWS, BLOCK], plain)
    for stage in gl.static_range(STAGES - 1):
        some = (left if stage == 0 else ROWS) if stage < tiles else 0
        copy(gates.index(stage), a, a_step, some, first, channels)
        copy(inputs.index(stage), x, x_step, some, first, channels)
        copy(grads.index(stage), grad_o, grad_step, some, first, channels)
        async_copy.commit_group()
        a -= ROWS * a_step
        x -= ROWS * x_step
        grad_o -= ROWS * grad_step
    h = gl.load(entries, mask=here & (tiles > 0), other=0.0)
    slot = 0
    for turn in range(tiles):
        entries -= channels
        # for the next turn: right behind its load, a state would be waited for
        earlier = gl.load(entries, mask=here & (turn + 1 < tiles), other=0.0)
        async_copy.wait_group(STAGES - 2)
        free = slot - 1 if slot > 0 else STAGES - 1
        some = ROWS if turn + STAGES - 1 < tiles else 0
        copy(gates.index(free), a, a_step, some, first, channels)
        copy(inputs.index(free), x, x_step, some, first, channels)
        copy(grads.index(free), grad_o, grad_step, some, first, channels)
        async_copy.commit_group()
        a -= ROWS * a_step
        x -= ROWS * x_step
        grad_o -= ROWS * grad_step
        tile = (gates.index(slot), inputs.index(slot), grads.index(slot))
        if turn == 0:
            c = retrace(*tile, h, c, grad_x, grad_a, channels, left, here, LOG, row_layout, False)
        else:
            c = retrace(*tile, h, c, grad_x, grad_a, channels, left, here, LOG, row_layout, True)
        grad_x -= ROWS * channels
        grad_a -= ROWS * channels
        h = earlier
        slot = slot + 1 if slot + 1 < STAGES else 0
    gl.store(grad_initial + sequence * channels + d, c, mask=here)
