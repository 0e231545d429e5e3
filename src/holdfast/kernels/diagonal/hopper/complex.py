"""The rotational scan on Hopper, in Gluon: h_t = a_t e^(i theta_t) h_{t-1} + x_t and its gradients.

As in real.py, groups of warps share a tile, and a thread takes a pair of channels through a stretch of it; the gates of
its stretch, which it needs more than once, it has in registers.
"""

from typing import NamedTuple

from holdfast.kernels.diagonal.triton.complex import cos_sin, load_state, store_state, unpack
from holdfast.kernels.diagonal.triton.real import first_entry, piece_bounds
from holdfast.kernels.lib.gluon.compat import aggregate, async_copy, gl, gluon
from holdfast.planner.models.diagonal.hopper import ROWS as _ROWS

from .real import Columns, Extent, Outputs, load_tiles

ROWS = gl.constexpr(_ROWS)
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@aggregate
class Form:
    """How a tile is read and written: words from step to step, a word's parts, the layout of a row."""

    PAIRS: gl.constexpr
    ELEMENT: gl.constexpr
    ROW: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, PAIRS, ELEMENT, ROW):
        self.PAIRS = gl.constexpr(PAIRS)
        self.ELEMENT = gl.constexpr(ELEMENT)
        self.ROW = gl.constexpr(ROW)


class Tile(NamedTuple):
    """Sizes and angles of the gates, and inputs as words of one pair each: a tile, in shared memory."""

    sizes: gl.shared_memory_descriptor
    angles: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor


class GradTile(NamedTuple):
    """A Tile, and gradients of outputs as words."""

    sizes: gl.shared_memory_descriptor
    angles: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor
    grads: gl.shared_memory_descriptor


class Grads(NamedTuple):
    """Where a group's gradients of a, theta and x go."""

    a: gl.tensor
    theta: gl.tensor
    x: gl.tensor


class Gate(NamedTuple):
    """A gate's size, real and imaginary part."""

    size: gl.tensor
    real: gl.tensor
    imag: gl.tensor


class Complex(NamedTuple):
    """Complex numbers by their parts."""

    real: gl.tensor
    imag: gl.tensor


@gluon.jit
def instruction(TEXT: gl.constexpr, x):
    """Apply a PTX instruction of one operand to x."""
    return gl.inline_asm_elementwise(TEXT, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def multiply_add(gr, gi, hr, hi, ur, ui):
    """Return g h + u, in four fused multiply-adds: 0 - gi, Triton's minus sign, would be an addition more."""
    less = instruction("neg.f32 $0, $1;", gi)
    return gl.fma(gr, hr, gl.fma(less, hi, ur)), gl.fma(gi, hr, gl.fma(gr, hi, ui))


@gluon.jit
def pack(real, imaginary, ELEMENT: gl.constexpr):
    """Invert unpack, rounding to ELEMENT: one instruction for both parts."""
    TEXT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $1, $2;" if gl.bfloat16 == ELEMENT else "cvt.rn.f16x2.f32 $0, $1, $2;"
    return gl.inline_asm_elementwise(TEXT, "=r,f,f", [imaginary, real], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def approximate_cos_sin(theta):
    """Return cos(theta) and sin(theta) to about 5e-7, by the hardware's own, of theta less a multiple of 2 pi."""
    circles = gl.fma(theta, 0.15915494309189535, 12582912.0) - 12582912.0
    r = gl.fma(circles, -6.2831854820251465, theta)
    r = gl.fma(circles, 1.7484555e-7, r)
    return instruction("cos.approx.ftz.f32 $0, $1;", r), instruction("sin.approx.ftz.f32 $0, $1;", r)


@gluon.jit
def cos_sin_of(angles, GROUPS: gl.constexpr, row: gl.constexpr):
    """Return the cosine and sine of each step of each group, in registers."""
    cosines, sines = (), ()
    for j in gl.static_range(angles.shape[0] // GROUPS):
        theta = angles.slice(j * GROUPS, GROUPS).load(row)
        if theta.dtype.primitive_bitwidth == 16:
            # the rounding of 16-bit angles is a thousand times as far off
            cosine, sine = approximate_cos_sin(theta.to(gl.float32))
        else:
            cosine, sine = cos_sin(theta)
        cosines += (cosine,)
        sines += (sine,)
    return cosines, sines


@gluon.jit
def gate_of(sizes, first: gl.constexpr, cosine, sine, row: gl.constexpr):
    """Return the Gate of one step of each group."""
    size = sizes.slice(first, cosine.shape[0]).load(row).to(gl.float32)
    return Gate(size=size, real=size * cosine, imag=size * sine)


@gluon.jit
def group_scan(shared, values, hr, hi, group, row: gl.constexpr, REVERSE: gl.constexpr):
    """Return the state before each group and the one after all, from what each does, h -> p h + u, and h before all."""
    GROUPS: gl.constexpr = group.shape[0]
    for k in gl.static_range(4):
        shared[k].store(values[k])
    er, ei = values[0], values[1]
    FIRST: gl.constexpr = GROUPS - 1 if REVERSE else 0
    for at in gl.static_range(FIRST, GROUPS - 1 - FIRST + (-1 if REVERSE else 1), -1 if REVERSE else 1):
        er, ei = gl.where(group == at, hr, er), gl.where(group == at, hi, ei)
        pr, pi = shared[0].slice(at, 1).load(row), shared[1].slice(at, 1).load(row)
        hr, hi = multiply_add(pr, pi, hr, hi, shared[2].slice(at, 1).load(row), shared[3].slice(at, 1).load(row))
    return er, ei, hr, hi


@gluon.jit
def tile_fwd(tile, shared, h, outputs, extent, saves, form, FULL: gl.constexpr):
    """Do what real.py's tile_fwd does."""
    sizes, angles, words = tile
    hr, hi = h
    o, saved = outputs
    group, left, here = extent
    PAIRS: gl.constexpr = form.PAIRS
    ELEMENT: gl.constexpr = form.ELEMENT
    row: gl.constexpr = form.ROW
    GROUPS: gl.constexpr = group.shape[0]
    STEPS: gl.constexpr = words.shape[0] // GROUPS
    BLOCK: gl.constexpr = words.shape[1]
    cosines, sines = cos_sin_of(angles, GROUPS, row)
    real, imaginary = (), ()
    for j in gl.static_range(STEPS):
        gate = gate_of(sizes, j * GROUPS, cosines[j], sines[j], row)
        real += (gate.real,)
        imaginary += (gate.imag,)
    if GROUPS > 1:
        pr, pi = gl.full([GROUPS, BLOCK], 1.0, gl.float32, row), gl.zeros([GROUPS, BLOCK], gl.float32, row)
        ur, ui = gl.zeros([GROUPS, BLOCK], gl.float32, row), gl.zeros([GROUPS, BLOCK], gl.float32, row)
        for j in gl.static_range(STEPS):
            xr, xi = unpack(words.slice(j * GROUPS, GROUPS).load(row), ELEMENT)
            fr, fi = multiply_add(real[j], imaginary[j], ur, ui, xr, xi)
            qr, qi = real[j] * pr - imaginary[j] * pi, real[j] * pi + imaginary[j] * pr
            if FULL:
                ur, ui, pr, pi = fr, fi, qr, qi
            else:
                live = group * STEPS + j < left
                ur, ui = gl.where(live, fr, ur), gl.where(live, fi, ui)
                pr, pi = gl.where(live, qr, pr), gl.where(live, qi, pi)
        sr, si, hr, hi = group_scan(shared, (pr, pi, ur, ui), hr, hi, group, row, False)
    else:
        sr, si = hr, hi
    if saved is not None:
        store_state(saved, sr, si, here & saves)
    for j in gl.static_range(STEPS):
        xr, xi = unpack(words.slice(j * GROUPS, GROUPS).load(row), ELEMENT)
        fr, fi = multiply_add(real[j], imaginary[j], sr, si, xr, xi)
        if FULL:
            live = here
            sr, si = fr, fi
        else:
            live = here & (group * STEPS + j < left)
            sr, si = gl.where(group * STEPS + j < left, fr, sr), gl.where(group * STEPS + j < left, fi, si)
        gl.store(o + j * PAIRS, pack(sr, si, ELEMENT), mask=live)
    if GROUPS == 1:
        hr, hi = sr, si
    return hr, hi, sr, si


@gluon.jit(do_not_specialize=["length"])
def diagonal_complex_fwd_sm90(
    a,
    theta,
    x,
    o,
    initial,
    final,
    entries,
    bounds,
    length,
    a_row,
    theta_row,
    x_row,
    pairs: gl.constexpr,
    a_step: gl.constexpr,
    theta_step: gl.constexpr,
    x_step: gl.constexpr,
    ELEMENT: gl.constexpr,
    BLOCK: gl.constexpr,
    GROUPS: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (N * blocks of pairs,), N sequences: diagonal_real_fwd_sm90 over complex numbers.

    a, theta [B, T, D / 2], strides of rows and steps
    x, o [B, T, D / 2], words of one pair each; o is written
    initial, final [N, D], entries [rows, D]: as there, real and imaginary parts side by side
    bounds [N + 1] or None: where packed sequences begin
    """
    WARPS: gl.constexpr = gl.num_warps() // GROUPS
    TILE: gl.constexpr = GROUPS * STEPS
    row_layout: gl.constexpr = gl.BlockedLayout([1, BLOCK // (32 * WARPS)], [1, 32], [GROUPS, WARPS], [1, 0])
    across = gl.cdiv(pairs, BLOCK)
    piece = piece_bounds(bounds, length, length, 1, across)
    row, start, stop = piece.row, piece.start, piece.stop
    first = gl.program_id(0) % across * BLOCK
    d = first + gl.arange(0, BLOCK, gl.SliceLayout(0, row_layout))[None, :]
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, row_layout))[:, None]
    here = d < pairs
    hr, hi = gl.zeros([1, BLOCK], gl.float32, row_layout), gl.zeros([1, BLOCK], gl.float32, row_layout)
    if initial is not None:
        hr, hi = load_state(initial + 2 * (piece.sequence * pairs + d), here)
    if entries is not None:
        entries += 2 * (first_entry(row, piece.sequence, piece.begin, start, length, ROWS) * pairs)
        entries += 2 * (group * STEPS // ROWS * pairs + d)
    o += (row * length + start) * pairs + (group * (STEPS * pairs) + d)
    sizes = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, TILE, BLOCK], _PLAIN)
    angles = gl.allocate_shared_memory(theta.dtype.element_ty, [STAGES, TILE, BLOCK], _PLAIN)
    words = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, TILE, BLOCK], _PLAIN)
    shared = ()
    for _k in gl.static_range(4):
        shared += (gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK], _PLAIN),)
    columns = Columns(first, pairs, GROUPS)
    total = (stop - start).to(gl.int32)
    tiles, sources = (sizes, angles, words), (a + row * a_row, theta + row * theta_row, x + row * x_row)
    steps: gl.constexpr = (a_step, theta_step, x_step)
    for stage in gl.static_range(STAGES - 1):
        load_tiles(tiles, sources, steps, start + stage * TILE, stage, total - stage * TILE, columns)
    slot = 0
    lr = hr + gl.zeros([GROUPS, BLOCK], gl.float32, row_layout)
    li = hi + gl.zeros([GROUPS, BLOCK], gl.float32, row_layout)
    for tile in range(gl.cdiv(total, TILE)):
        left = total - tile * TILE
        async_copy.wait_group(STAGES - 2)
        free = slot - 1 if slot > 0 else STAGES - 1
        prefetch_steps = (STAGES - 1) * TILE
        load_tiles(tiles, sources, steps, start + tile * TILE + prefetch_steps, free, left - prefetch_steps, columns)
        saves = (tile * TILE + group * STEPS) % ROWS == 0
        given = Tile(sizes=sizes.index(slot), angles=angles.index(slot), words=words.index(slot))
        h = Complex(real=hr, imag=hi)
        outputs = Outputs(o=o, saved=entries)
        extent = Extent(group=group, left=left, here=here)
        form = Form(pairs, ELEMENT, row_layout)
        if left >= TILE:
            hr, hi, lr, li = tile_fwd(given, shared, h, outputs, extent, saves, form, True)
        else:
            saves = saves & (group * STEPS < left)
            hr, hi, lr, li = tile_fwd(given, shared, h, outputs, extent, saves, form, False)
        if entries is not None:
            entries += 2 * ((tile + 1) * TILE // ROWS - tile * TILE // ROWS) * pairs
        o += TILE * pairs
        slot = slot + 1 if slot + 1 < STAGES else 0
    ending = (total - 1) % TILE // STEPS if total > 0 else 0
    store_state(final + 2 * (piece.sequence * pairs + (d + 0 * group)), lr, li, here & (group == ending))


@gluon.jit
def tile_bwd(tile, shared, h, c, outputs, extent, form, FULL: gl.constexpr):
    """Find a tile's states again from those that enter its groups, then c_t = conj(gate_t) dh_t from its last step on.

    With z = dh conj(h), da is the real part of z e^(-i theta), dtheta a times the imaginary one.
    """
    sizes, angles, words, grads = tile
    hr, hi = h
    cr, ci = c
    grad_a, grad_theta, grad_x = outputs
    group, left, here = extent
    PAIRS: gl.constexpr = form.PAIRS
    ELEMENT: gl.constexpr = form.ELEMENT
    row: gl.constexpr = form.ROW
    GROUPS: gl.constexpr = group.shape[0]
    STEPS: gl.constexpr = words.shape[0] // GROUPS
    BLOCK: gl.constexpr = words.shape[1]
    cosines, sines = cos_sin_of(angles, GROUPS, row)
    history_r, history_i = (), ()
    for j in gl.static_range(STEPS):
        history_r += (hr,)
        history_i += (hi,)
        ur, ui = unpack(words.slice(j * GROUPS, GROUPS).load(row), ELEMENT)
        gate = gate_of(sizes, j * GROUPS, cosines[j], sines[j], row)
        hr, hi = multiply_add(gate.real, gate.imag, hr, hi, ur, ui)
    if GROUPS > 1:
        pr, pi = gl.full([GROUPS, BLOCK], 1.0, gl.float32, row), gl.zeros([GROUPS, BLOCK], gl.float32, row)
        lr, li = gl.zeros([GROUPS, BLOCK], gl.float32, row), gl.zeros([GROUPS, BLOCK], gl.float32, row)
        for j in gl.static_range(STEPS - 1, -1, -1):
            gate = gate_of(sizes, j * GROUPS, cosines[j], sines[j], row)
            gr, gi = gate.real, gate.imag
            ur, ui = unpack(grads.slice(j * GROUPS, GROUPS).load(row), ELEMENT)
            ur, ui = ur + lr, ui + li
            br, bi = gr * ur + gi * ui, gr * ui - gi * ur
            qr, qi = gr * pr + gi * pi, gr * pi - gi * pr
            if FULL:
                lr, li, pr, pi = br, bi, qr, qi
            else:
                live = group * STEPS + j < left
                lr, li = gl.where(live, br, lr), gl.where(live, bi, li)
                pr, pi = gl.where(live, qr, pr), gl.where(live, qi, pi)
        sr, si, cr, ci = group_scan(shared, (pr, pi, lr, li), cr, ci, group, row, True)
    else:
        sr, si = cr, ci
    for j in gl.static_range(STEPS - 1, -1, -1):
        ur, ui = unpack(grads.slice(j * GROUPS, GROUPS).load(row), ELEMENT)
        ur, ui = ur + sr, ui + si
        size, gr, gi = gate_of(sizes, j * GROUPS, cosines[j], sines[j], row)
        br, bi = gr * ur + gi * ui, gr * ui - gi * ur
        zr, zi = ur * history_r[j] + ui * history_i[j], ui * history_r[j] - ur * history_i[j]
        da, angle = zr * cosines[j] + zi * sines[j], size * (zi * cosines[j] - zr * sines[j])
        if FULL:
            live = here
            sr, si = br, bi
        else:
            live = here & (group * STEPS + j < left)
            sr, si = gl.where(group * STEPS + j < left, br, sr), gl.where(group * STEPS + j < left, bi, si)
        gl.store(grad_x + j * PAIRS, pack(ur, ui, ELEMENT), mask=live)
        gl.store(grad_a + j * PAIRS, da.to(grad_a.dtype.element_ty), mask=live)
        gl.store(grad_theta + j * PAIRS, angle.to(grad_theta.dtype.element_ty), mask=live)
    if GROUPS == 1:
        cr, ci = sr, si
    return cr, ci


@gluon.jit(do_not_specialize=["length"])
def diagonal_complex_bwd_sm90(
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
    a_row,
    theta_row,
    x_row,
    grad_row,
    pairs: gl.constexpr,
    a_step: gl.constexpr,
    theta_step: gl.constexpr,
    x_step: gl.constexpr,
    grad_step: gl.constexpr,
    ELEMENT: gl.constexpr,
    BLOCK: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Grid (N * blocks of pairs,): diagonal_real_bwd_sm90 over complex numbers.

    a, theta [B, T, D / 2]; x, grad_o [B, T, D / 2], words; strides of rows and steps
    grad_a, grad_theta [B, T, D / 2], grad_x [B, T, D / 2], words, written
    grad_final, grad_initial [N, D], entries, bounds: as there, real and imaginary parts side by side
    """
    WARPS: gl.constexpr = gl.num_warps() // GROUPS
    TILE: gl.constexpr = GROUPS * ROWS
    row_layout: gl.constexpr = gl.BlockedLayout([1, BLOCK // (32 * WARPS)], [1, 32], [GROUPS, WARPS], [1, 0])
    across = gl.cdiv(pairs, BLOCK)
    piece = piece_bounds(bounds, length, length, 1, across)
    row, start, stop = piece.row, piece.start, piece.stop
    first = gl.program_id(0) % across * BLOCK
    d = first + gl.arange(0, BLOCK, gl.SliceLayout(0, row_layout))[None, :]
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, row_layout))[:, None]
    here = d < pairs
    total = (stop - start).to(gl.int32)
    count = gl.cdiv(total, TILE)
    left = total - (count - 1) * TILE
    last = start + (count - 1) * TILE
    entries += 2 * ((first_entry(row, piece.sequence, piece.begin, start, length, ROWS) + (count - 1) * GROUPS) * pairs)
    entries += 2 * (group * pairs + d)
    grad_x += (row * length + last) * pairs + (group * (ROWS * pairs) + d)
    grad_a += (row * length + last) * pairs + (group * (ROWS * pairs) + d)
    grad_theta += (row * length + last) * pairs + (group * (ROWS * pairs) + d)
    cr, ci = gl.zeros([1, BLOCK], gl.float32, row_layout), gl.zeros([1, BLOCK], gl.float32, row_layout)
    if grad_final is not None:
        cr, ci = load_state(grad_final + 2 * (piece.sequence * pairs + d), here)
    sizes = gl.allocate_shared_memory(a.dtype.element_ty, [STAGES, TILE, BLOCK], _PLAIN)
    angles = gl.allocate_shared_memory(theta.dtype.element_ty, [STAGES, TILE, BLOCK], _PLAIN)
    words = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, TILE, BLOCK], _PLAIN)
    grads = gl.allocate_shared_memory(grad_o.dtype.element_ty, [STAGES, TILE, BLOCK], _PLAIN)
    shared = ()
    for _k in gl.static_range(4):
        shared += (gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK], _PLAIN),)
    columns = Columns(first, pairs, GROUPS)
    tiles = (sizes, angles, words, grads)
    sources = (a + row * a_row, theta + row * theta_row, x + row * x_row, grad_o + row * grad_row)
    steps: gl.constexpr = (a_step, theta_step, x_step, grad_step)
    for stage in gl.static_range(STAGES - 1):
        some = (left if stage == 0 else TILE) if stage < count else 0
        load_tiles(tiles, sources, steps, last - stage * TILE, stage, some, columns)
    hr, hi = load_state(entries, here & (group * ROWS < left) & (count > 0))
    slot = 0
    for back in range(count):
        entries -= 2 * GROUPS * pairs
        er, ei = load_state(entries, here & (group >= 0) & (back + 1 < count))
        async_copy.wait_group(STAGES - 2)
        free = slot - 1 if slot > 0 else STAGES - 1
        some = TILE if back + STAGES - 1 < count else 0
        load_tiles(tiles, sources, steps, last - (back + STAGES - 1) * TILE, free, some, columns)
        tile = GradTile(
            sizes=sizes.index(slot), angles=angles.index(slot), words=words.index(slot), grads=grads.index(slot)
        )
        h, c = Complex(real=hr, imag=hi), Complex(real=cr, imag=ci)
        outputs = Grads(a=grad_a, theta=grad_theta, x=grad_x)
        extent = Extent(group=group, left=left, here=here)
        form = Form(pairs, ELEMENT, row_layout)
        if back == 0:
            cr, ci = tile_bwd(tile, shared, h, c, outputs, extent, form, False)
        else:
            cr, ci = tile_bwd(tile, shared, h, c, outputs, extent, form, True)
        grad_x -= TILE * pairs
        grad_a -= TILE * pairs
        grad_theta -= TILE * pairs
        hr, hi = er, ei
        slot = slot + 1 if slot + 1 < STAGES else 0
    store_state(grad_initial + 2 * (piece.sequence * pairs + d), cr, ci, here)
