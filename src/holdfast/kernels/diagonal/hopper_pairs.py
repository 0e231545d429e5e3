"""Device code of the rotational scan on Hopper, in Gluon: h_t = a_t e^(i theta_t) h_{t-1} + x_t and its gradients.

As in hopper_channels.py, a thread takes one pair of channels through all steps. Gates wait for no state: all threads of
a block compute those of a whole tile at once, and hand them over through shared memory. There are more threads than
pairs: all groups of warps walk through the steps alike. Forward, one of them writes; backward, each finishes and writes
the gradients of steps of its own.
"""

from holdfast.kernels.common.gluon import async_copy, gl, gluon
from holdfast.planner.models.diagonal_hopper import ROWS as _ROWS

from .hopper_channels import copy
from .triton_channels import first_entry, span
from .triton_pairs import load_state, store_state, turn, unpack

ROWS = gl.constexpr(_ROWS)
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def instruction(TEXT: gl.constexpr, x):
    """What a PTX instruction of one operand makes of x."""
    return gl.inline_asm_elementwise(TEXT, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def advance(gr, gi, hr, hi, ur, ui):
    """g h + u, in four fused multiply-adds: 0 - gi, which Triton makes of a minus sign, would be an addition more."""
    less = instruction("neg.f32 $0, $1;", gi)
    return gl.fma(gr, hr, gl.fma(less, hi, ur)), gl.fma(gi, hr, gl.fma(gr, hi, ui))


@gluon.jit
def pack(real, imaginary, ELEMENT: gl.constexpr):
    """The inverse of unpack, rounded to ELEMENT: one instruction for both."""
    TEXT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $1, $2;" if gl.bfloat16 == ELEMENT else "cvt.rn.f16x2.f32 $0, $1, $2;"
    return gl.inline_asm_elementwise(TEXT, "=r,f,f", [imaginary, real], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def quick_turn(theta):
    """cos(theta) and sin(theta) to about 5e-7, by the hardware's own, of theta less a multiple of 2 pi."""
    turns = gl.fma(theta, 0.15915494309189535, 12582912.0) - 12582912.0
    r = gl.fma(turns, -6.2831854820251465, theta)
    r = gl.fma(turns, 1.7484555e-7, r)
    return instruction("cos.approx.ftz.f32 $0, $1;", r), instruction("sin.approx.ftz.f32 $0, $1;", r)


@gluon.jit
def turned(sizes, angles, real, imaginary, layout: gl.constexpr):
    """Leaves the gates of a tile in shared memory; returns their cosines and sines."""
    size = sizes.load(layout).to(gl.float32)
    theta = angles.load(layout)
    if theta.dtype.primitive_bitwidth == 16:
        # what rounded them is a thousand times as far off
        cosine, sine = quick_turn(theta.to(gl.float32))
    else:
        cosine, sine = turn(theta)
    real.store(size * cosine)
    imaginary.store(size * sine)
    return cosine, sine


@gluon.jit
def walk(
    gates,
    words,
    hr,
    hi,
    o,
    pairs: gl.constexpr,
    left,
    here,
    ELEMENT: gl.constexpr,
    row: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """h through the steps of a tile, all of them if WHOLE; writes each to o."""
    real, imaginary = gates
    for j in gl.static_range(ROWS):
        ur, ui = unpack(words.slice(j, 1).load(row), ELEMENT)
        fr, fi = advance(real.slice(j, 1).load(row), imaginary.slice(j, 1).load(row), hr, hi, ur, ui)
        if WHOLE:
            live = here
            hr, hi = fr, fi
        else:
            live = here & (j < left)
            hr, hi = gl.where(j < left, fr, hr), gl.where(j < left, fi, hi)
        gl.store(o + j * pairs, pack(hr, hi, ELEMENT), mask=live)
    return hr, hi


@gluon.jit(do_not_specialize=["length"])
def forward(
    a,
    theta,
    x,
    o,
    initial,
    final,
    entries,
    bounds,
    length,
    pairs: gl.constexpr,
    a_row,
    a_step: gl.constexpr,
    theta_row,
    theta_step: gl.constexpr,
    x_row,
    x_step: gl.constexpr,
    ELEMENT: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """hopper_channels.forward; x and o are words of one pair each, states interleave real and imaginary parts."""
    WARPS: gl.constexpr = BLOCK // 32
    row_layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps() // WARPS, WARPS], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    across = gl.cdiv(pairs, BLOCK)
    _, row, sequence, begin, start, stop = span(bounds, length, length, 1, across)
    first = gl.program_id(0) % across * BLOCK
    d = first + gl.arange(0, BLOCK, gl.SliceLayout(0, row_layout))[None, :]
    here = d < pairs
    hr, hi = gl.zeros([1, BLOCK], gl.float32, row_layout), gl.zeros([1, BLOCK], gl.float32, row_layout)
    if initial is not None:
        hr, hi = load_state(initial + 2 * (sequence * pairs + d), here)
    if entries is not None:
        entries += 2 * (first_entry(row, sequence, begin, start, length, ROWS) * pairs + d)
    a += row * a_row + start * a_step
    theta += row * theta_row + start * theta_step
    x += row * x_row + start * x_step
    o += (row * length + start) * pairs + d
    sizes = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, ROWS, BLOCK], _PLAIN)
    angles = gl.allocate_shared_memory(theta.dtype.element_ty, [STAGES, ROWS, BLOCK], _PLAIN)
    words = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, ROWS, BLOCK], _PLAIN)
    real = gl.allocate_shared_memory(gl.float32, [ROWS, BLOCK], _PLAIN)
    imaginary = gl.allocate_shared_memory(gl.float32, [ROWS, BLOCK], _PLAIN)
    total = (stop - start).to(gl.int32)
    for stage in gl.static_range(STAGES - 1):
        copy(sizes.index(stage), a, a_step, total - stage * ROWS, first, pairs)
        copy(angles.index(stage), theta, theta_step, total - stage * ROWS, first, pairs)
        copy(words.index(stage), x, x_step, total - stage * ROWS, first, pairs)
        async_copy.commit_group()
        a += ROWS * a_step
        theta += ROWS * theta_step
        x += ROWS * x_step
    slot = 0
    for tile in range(gl.cdiv(total, ROWS)):
        left = total - tile * ROWS
        if entries is not None:
            store_state(entries, hr, hi, here)
            entries += 2 * pairs
        async_copy.wait_group(STAGES - 2)
        free = slot - 1 if slot > 0 else STAGES - 1
        copy(sizes.index(free), a, a_step, left - (STAGES - 1) * ROWS, first, pairs)
        copy(angles.index(free), theta, theta_step, left - (STAGES - 1) * ROWS, first, pairs)
        copy(words.index(free), x, x_step, left - (STAGES - 1) * ROWS, first, pairs)
        async_copy.commit_group()
        a += ROWS * a_step
        theta += ROWS * theta_step
        x += ROWS * x_step
        turned(sizes.index(slot), angles.index(slot), real, imaginary, flat)
        gates = (real, imaginary)
        if left >= ROWS:
            hr, hi = walk(gates, words.index(slot), hr, hi, o, pairs, left, here, ELEMENT, row_layout, True)
        else:
            hr, hi = walk(gates, words.index(slot), hr, hi, o, pairs, left, here, ELEMENT, row_layout, False)
        o += ROWS * pairs
        slot = slot + 1 if slot + 1 < STAGES else 0
    store_state(final + 2 * (sequence * pairs + d), hr, hi, here)


@gluon.jit
def gradients(gates, turns, first, dr, di, hr, hi, row: gl.constexpr):
    """Of steps that lie one in each group of warps: da and dtheta, from dh and the state before. With z = dh conj(h),
    da is the real part of z e^(-i theta), dtheta the imaginary one of z conj(gate)."""
    STEPS: gl.constexpr = dr.shape[0]
    zr, zi = dr * hr + di * hi, di * hr - dr * hi
    da = zr * turns[0].slice(first, STEPS).load(row) + zi * turns[1].slice(first, STEPS).load(row)
    return da, zi * gates[0].slice(first, STEPS).load(row) - zr * gates[1].slice(first, STEPS).load(row)


@gluon.jit
def retrace(
    gates,
    turns,
    words,
    grads,
    hr,
    hi,
    cr,
    ci,
    grad_a,
    grad_theta,
    grad_x,
    pairs: gl.constexpr,
    left,
    here,
    group,
    ELEMENT: gl.constexpr,
    row: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """The states of a tile again from h, then c_t = conj(gate_t) dh_t from its last step. All groups of warps walk;
    what follows from dh_t each does for a step of its own."""
    GROUPS: gl.constexpr = group.shape[0]
    real, imaginary = gates
    history_r, history_i = (), ()
    for j in gl.static_range(ROWS):
        history_r += (hr,)
        history_i += (hi,)
        ur, ui = unpack(words.slice(j, 1).load(row), ELEMENT)
        hr, hi = advance(real.slice(j, 1).load(row), imaginary.slice(j, 1).load(row), hr, hi, ur, ui)
    for j in gl.static_range(ROWS - GROUPS, -1, -GROUPS):
        for i in gl.static_range(GROUPS - 1, -1, -1):
            ur, ui = unpack(grads.slice(j + i, 1).load(row), ELEMENT)
            ur, ui = ur + cr, ui + ci
            gr, gi = real.slice(j + i, 1).load(row), imaginary.slice(j + i, 1).load(row)
            br, bi = gr * ur + gi * ui, gr * ui - gi * ur
            if WHOLE:
                cr, ci = br, bi
            else:
                cr, ci = gl.where(j + i < left, br, cr), gl.where(j + i < left, bi, ci)
            if i == GROUPS - 1:
                dr, di, er, ei = ur, ui, history_r[j + i], history_i[j + i]
            else:
                dr, di = gl.where(group == i, ur, dr), gl.where(group == i, ui, di)
                er = gl.where(group == i, history_r[j + i], er)
                ei = gl.where(group == i, history_i[j + i], ei)
        live = here if WHOLE else here & (j + group < left)
        gl.store(grad_x + j * pairs, pack(dr, di, ELEMENT), mask=live)
        da, angle = gradients(gates, turns, j, dr, di, er, ei, row)
        gl.store(grad_a + j * pairs, da.to(grad_a.dtype.element_ty), mask=live)
        gl.store(grad_theta + j * pairs, angle.to(grad_theta.dtype.element_ty), mask=live)
    return cr, ci


@gluon.jit(do_not_specialize=["length"])
def backward(
    a,
    theta,
    x,
    grad_o,
    grad_a,
    grad_theta,
    grad_x,
    grad_final,
    grad_initial,
    entries,
    bounds,
    length,
    pairs: gl.constexpr,
    a_row,
    a_step: gl.constexpr,
    theta_row,
    theta_step: gl.constexpr,
    x_row,
    x_step: gl.constexpr,
    grad_row,
    grad_step: gl.constexpr,
    ELEMENT: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """hopper_channels.backward."""
    WARPS: gl.constexpr = BLOCK // 32
    GROUPS: gl.constexpr = gl.num_warps() // WARPS
    row_layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [GROUPS, WARPS], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    across = gl.cdiv(pairs, BLOCK)
    _, row, sequence, begin, start, stop = span(bounds, length, length, 1, across)
    first = gl.program_id(0) % across * BLOCK
    d = first + gl.arange(0, BLOCK, gl.SliceLayout(0, row_layout))[None, :]
    here = d < pairs
    total = (stop - start).to(gl.int32)
    tiles = gl.cdiv(total, ROWS)
    left = total - (tiles - 1) * ROWS
    last = start + (tiles - 1) * ROWS
    entries += 2 * ((first_entry(row, sequence, begin, start, length, ROWS) + tiles - 1) * pairs + d)
    a += row * a_row + last * a_step
    theta += row * theta_row + last * theta_step
    x += row * x_row + last * x_step
    grad_o += row * grad_row + last * grad_step
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, row_layout))[:, None]
    grad_x += (row * length + last + group) * pairs + d
    grad_a += (row * length + last + group) * pairs + d
    grad_theta += (row * length + last + group) * pairs + d
    cr, ci = gl.zeros([1, BLOCK], gl.float32, row_layout), gl.zeros([1, BLOCK], gl.float32, row_layout)
    if grad_final is not None:
        cr, ci = load_state(grad_final + 2 * (sequence * pairs + d), here)
    sizes = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, ROWS, BLOCK], _PLAIN)
    angles = gl.allocate_shared_memory(theta.dtype.element_ty, [STAGES, ROWS, BLOCK], _PLAIN)
    words = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, ROWS, BLOCK], _PLAIN)
    grads = gl.allocate_shared_memory(grad_o.dtype.element_ty, [STAGES, ROWS, BLOCK], _PLAIN)
    real = gl.allocate_shared_memory(gl.float32, [ROWS, BLOCK], _PLAIN)
    imaginary = gl.allocate_shared_memory(gl.float32, [ROWS, BLOCK], _PLAIN)
    cosines = gl.allocate_shared_memory(gl.float32, [ROWS, BLOCK], _PLAIN)
    sines = gl.allocate_shared_memory(gl.float32, [ROWS, BLOCK], _PLAIN)
    for stage in gl.static_range(STAGES - 1):
        some = (left if stage == 0 else ROWS) if stage < tiles else 0
        copy(sizes.index(stage), a, a_step, some, first, pairs)
        copy(angles.index(stage), theta, theta_step, some, first, pairs)
        copy(words.index(stage), x, x_step, some, first, pairs)
        copy(grads.index(stage), grad_o, grad_step, some, first, pairs)
        async_copy.commit_group()
        a -= ROWS * a_step
        theta -= ROWS * theta_step
        x -= ROWS * x_step
        grad_o -= ROWS * grad_step
    hr, hi = load_state(entries, here & (tiles > 0))
    slot = 0
    for back in range(tiles):
        entries -= 2 * pairs
        er, ei = load_state(entries, here & (back + 1 < tiles))
        async_copy.wait_group(STAGES - 2)
        free = slot - 1 if slot > 0 else STAGES - 1
        some = ROWS if back + STAGES - 1 < tiles else 0
        copy(sizes.index(free), a, a_step, some, first, pairs)
        copy(angles.index(free), theta, theta_step, some, first, pairs)
        copy(words.index(free), x, x_step, some, first, pairs)
        copy(grads.index(free), grad_o, grad_step, some, first, pairs)
        async_copy.commit_group()
        a -= ROWS * a_step
        theta -= ROWS * theta_step
        x -= ROWS * x_step
        grad_o -= ROWS * grad_step
        cosine, sine = turned(sizes.index(slot), angles.index(slot), real, imaginary, flat)
        cosines.store(cosine)
        sines.store(sine)
        tile = ((real, imaginary), (cosines, sines), words.index(slot), grads.index(slot))
        outputs = (grad_a, grad_theta, grad_x)
        if back == 0:
            cr, ci = retrace(*tile, hr, hi, cr, ci, *outputs, pairs, left, here, group, ELEMENT, row_layout, False)
        else:
            cr, ci = retrace(*tile, hr, hi, cr, ci, *outputs, pairs, left, here, group, ELEMENT, row_layout, True)
        grad_x -= ROWS * pairs
        grad_a -= ROWS * pairs
        grad_theta -= ROWS * pairs
        hr, hi = er, ei
        slot = slot + 1 if slot + 1 < STAGES else 0
    store_state(grad_initial + 2 * (sequence * pairs + d), cr, ci, here)
