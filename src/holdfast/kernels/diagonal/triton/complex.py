"""The rotational scan, in Triton: h_t = a_t e^(i theta_t) h_{t-1} + x_t on pairs, and its gradients.

The scan of real.py over complex numbers. The two halves of a pair are neighbours in memory, so x and h are
read and written as words of one pair each, as wide as the loads of a and theta, and taken apart in registers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.kernels.lib.triton.sincos import reduced_cos_sin

from .real import first_entry, piece_bounds


class TileStates(NamedTuple):
    """Real and imaginary parts of the state after a tile, of those before its segments, of the product of its gates."""

    after: tl.tuple
    initial: tl.tuple
    product: tl.tuple


@triton.jit
def unpack(word, ELEMENT: tl.constexpr):
    """Split a word that holds a pair into its real and imaginary part, in float32."""
    if ELEMENT.primitive_bitwidth == 32:
        return word.to(tl.int32).to(tl.float32, bitcast=True), (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        low, high = word.to(tl.int16).to(ELEMENT, bitcast=True), (word >> 16).to(tl.int16).to(ELEMENT, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def pack(real, imaginary, ELEMENT: tl.constexpr):
    """Invert unpack, rounding to ELEMENT."""
    if ELEMENT.primitive_bitwidth == 32:
        low, high = real.to(tl.int32, bitcast=True).to(tl.int64), imaginary.to(tl.int32, bitcast=True).to(tl.int64)
        return (low & 0xFFFFFFFF) | (high << 32)
    else:
        low = real.to(ELEMENT).to(tl.int16, bitcast=True).to(tl.int32)
        high = imaginary.to(ELEMENT).to(tl.int16, bitcast=True).to(tl.int32)
        return (low & 0xFFFF) | (high << 16)


@triton.jit
def cos_sin(theta):
    """Return cos(theta) and sin(theta) to about 1e-7, for angles up to 2^20.

    Beside 3 * 2^22 a float32 has no fraction left: adding that rounds, and leaves the integer in the lowest bits. The
    multiple of pi/2 is subtracted from theta in three parts of which fused multiply-adds lose nothing (Cody, Waite).
    """
    shifted = tl.fma(theta, 0.6366197723675814, 12582912.0)
    quarters = shifted - 12582912.0
    r = tl.fma(quarters, -1.5707962512969971, theta)
    r = tl.fma(quarters, -7.5497894158615964e-08, r)
    r = tl.fma(quarters, -5.3903029534742384e-15, r)
    return reduced_cos_sin(r, shifted.to(tl.int32, bitcast=True))


@triton.jit
def times(ar, ai, br, bi):
    """Return (ar + i ai) (br + i bi)."""
    return ar * br - ai * bi, ai * br + ar * bi


@triton.jit
def combine(pr, pi, xr, xi, qr, qi, yr, yi, Pr, Pi, Xr, Xi, Qr, Qi, Yr, Yi):
    """Do what real.py's combine does, over complex numbers; small letters come first in time."""
    nr, ni = times(Pr, Pi, pr, pi)
    hr, hi = times(Pr, Pi, xr, xi)
    mr, mi = times(Qr, Qi, pr, pi)
    gr, gi = times(Qr, Qi, xr, xi)
    return nr, ni, hr + Xr, hi + Xi, mr, mi, gr + Yr, gi + Yi


@triton.jit
def load_state(pointer, mask):
    """Load pairs of a float32 state: real and imaginary parts."""
    return tl.load(pointer, mask=mask, other=0.0), tl.load(pointer + 1, mask=mask, other=0.0)


@triton.jit
def store_state(pointer, real, imaginary, mask):
    tl.store(pointer, real, mask=mask)
    tl.store(pointer + 1, imaginary, mask=mask)


@triton.jit
def at_row(row, real, imaginary):
    """Return the row of both parts [segments, pairs] where `row` holds."""
    return tl.sum(tl.where(row, real, 0.0), 0), tl.sum(tl.where(row, imaginary, 0.0), 0)


@triton.jit
def multiply_add(gr, gi, hr, hi, xr, xi):
    """Return g h + x."""
    real, imaginary = times(gr, gi, hr, hi)
    return real + xr, imaginary + xi


@triton.jit
def tile_states(gates_r, gates_i, words, hr, hi, ELEMENT: tl.constexpr, SHAPE: tl.constexpr):
    """Return a tile's TileStates from the state (hr, hi) before it."""
    segment = tl.arange(0, SHAPE[0])[:, None]
    ones, zeros = tl.full(SHAPE, 1.0, tl.float32), tl.zeros(SHAPE, tl.float32)
    pr, pi, xr, xi = ones, zeros, zeros, zeros
    for j in tl.static_range(len(words)):
        ur, ui = unpack(words[j], ELEMENT)
        xr, xi = multiply_add(gates_r[j], gates_i[j], xr, xi, ur, ui)
        pr, pi = times(gates_r[j], gates_i[j], pr, pi)
    values = (pr, pi, xr, xi, ones, zeros, zeros, zeros)
    pr, pi, xr, xi, qr, qi, yr, yi = tl.associative_scan(values, 0, combine)
    lr, li = multiply_add(pr, pi, hr[None, :], hi[None, :], xr, xi)
    er, ei = multiply_add(qr, qi, hr[None, :], hi[None, :], yr, yi)
    last = segment == SHAPE[0] - 1
    return TileStates(after=at_row(last, lr, li), initial=(er, ei), product=at_row(last, pr, pi))


@triton.jit
def diagonal_complex_fwd(
    a,
    theta,
    x,
    o,
    initial,
    final,
    product,
    entries,
    bounds,
    length,
    piece_length,
    per_row,
    pairs,
    a_row,
    a_step,
    theta_row,
    theta_step,
    x_row,
    x_step,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (pieces * blocks of pairs,): diagonal_real_fwd over complex numbers.

    a, theta [B, T, D / 2], strides of rows and steps
    x, o [B, T, D / 2], words of one pair each, whose strides count words
    initial, final, product, entries [.., D]: as there, real and imaginary parts side by side
    bounds [N + 1] or None: where packed sequences begin
    """
    ROWS: tl.constexpr = SEGMENTS * STEPS
    across = tl.cdiv(pairs, BLOCK)
    piece = piece_bounds(bounds, length, piece_length, per_row, across)
    row, start, stop = piece.row, piece.start, piece.stop
    d = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    here = d < pairs
    segment = tl.arange(0, SEGMENTS)[:, None]
    a += row * a_row + d[None, :]
    theta += row * theta_row + d[None, :]
    x += row * x_row + d[None, :]
    hr, hi = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if initial is not None:
        hr, hi = load_state(initial + 2 * (piece.number * pairs + d), here)
    tr, ti = tl.full([BLOCK], 1.0, tl.float32), tl.zeros([BLOCK], tl.float32)
    if entries is not None:
        entries += 2 * (first_entry(row, piece.sequence, piece.begin, start, length, ROWS) * pairs + d)
    if o is not None:
        o += row * length * pairs + d[None, :]
    for tile in tl.range(0, tl.cdiv(stop - start, ROWS), num_stages=STAGES):
        steps = start + tile * ROWS + segment * STEPS
        gates_r, gates_i, words = (), (), ()
        for j in tl.static_range(STEPS):
            mask = (steps + j < stop) & here[None, :]
            size = tl.load(a + (steps + j) * a_step, mask=mask, other=1.0).to(tl.float32)
            angle = tl.load(theta + (steps + j) * theta_step, mask=mask, other=0.0).to(tl.float32)
            words += (tl.load(x + (steps + j) * x_step, mask=mask, other=0),)
            cosine, sine = cos_sin(angle)
            gates_r += (size * cosine,)
            gates_i += (size * sine,)
        if entries is not None:
            store_state(entries + 2 * tile * pairs, hr, hi, here)
        found = tile_states(gates_r, gates_i, words, hr, hi, ELEMENT, (SEGMENTS, BLOCK))
        hr, hi = found.after
        if product is not None:
            tr, ti = times(found.product[0], found.product[1], tr, ti)
        if o is not None:
            er, ei = found.initial
            for j in tl.static_range(STEPS):
                mask = (steps + j < stop) & here[None, :]
                ur, ui = unpack(words[j], ELEMENT)
                er, ei = multiply_add(gates_r[j], gates_i[j], er, ei, ur, ui)
                tl.store(o + (steps + j) * pairs, pack(er, ei, ELEMENT), mask=mask)
    store_state(final + 2 * (piece.number * pairs + d), hr, hi, here)
    if product is not None:
        store_state(product + 2 * (piece.number * pairs + d), tr, ti, here)


@triton.jit
def diagonal_complex_bwd(
    a,
    theta,
    x,
    grad_o,
    grad_a,
    grad_theta,
    grad_x,
    initial,
    grad_final,
    grad_initial,
    product,
    entries,
    bounds,
    length,
    piece_length,
    per_row,
    pairs,
    a_row,
    a_step,
    theta_row,
    theta_step,
    x_row,
    x_step,
    grad_row,
    grad_step,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (pieces * blocks of pairs,): diagonal_real_bwd over complex numbers.

    c_t = conj(gate_t) dh_t, dgate_t = dh_t conj(h_{t-1}); with that rotated back by theta, its real part is da, and a
    times its imaginary part dtheta.

    a, theta [B, T, D / 2]; x, grad_o [B, T, D / 2], words; strides of rows and steps
    grad_a, grad_theta [B, T, D / 2], grad_x [B, T, D / 2], words, written, or None
    initial, grad_final, grad_initial, product, entries [.., D]: as there, real and imaginary parts side by side
    bounds [N + 1] or None: where packed sequences begin
    """
    ROWS: tl.constexpr = SEGMENTS * STEPS
    across = tl.cdiv(pairs, BLOCK)
    piece = piece_bounds(bounds, length, piece_length, per_row, across)
    row, start, stop = piece.row, piece.start, piece.stop
    d = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    here = d < pairs
    segment = tl.arange(0, SEGMENTS)[:, None]
    a += row * a_row + d[None, :]
    theta += row * theta_row + d[None, :]
    x += row * x_row + d[None, :]
    grad_o += row * grad_row + d[None, :]
    if entries is not None:
        entries += 2 * (first_entry(row, piece.sequence, piece.begin, start, length, ROWS) * pairs + d)
    if grad_x is not None:
        grad_x += row * length * pairs + d[None, :]
        grad_a += row * length * pairs + d[None, :]
        grad_theta += row * length * pairs + d[None, :]
    br, bi = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if initial is not None:
        br, bi = load_state(initial + 2 * (piece.sequence * pairs + d), here)
    cr, ci = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if grad_final is not None:
        cr, ci = load_state(grad_final + 2 * (piece.number * pairs + d), here)
    tr, ti = tl.full([BLOCK], 1.0, tl.float32), tl.zeros([BLOCK], tl.float32)
    ones, zeros = tl.full([SEGMENTS, BLOCK], 1.0, tl.float32), tl.zeros([SEGMENTS, BLOCK], tl.float32)
    tiles = tl.cdiv(stop - start, ROWS)
    for back in tl.range(0, tiles, num_stages=STAGES):
        tile = tiles - 1 - back
        steps = start + tile * ROWS + segment * STEPS
        gates_r, gates_i, cosines, sines, sizes, words, grads = (), (), (), (), (), (), ()
        for j in tl.static_range(STEPS):
            mask = (steps + j < stop) & here[None, :]
            size = tl.load(a + (steps + j) * a_step, mask=mask, other=1.0)
            angle = tl.load(theta + (steps + j) * theta_step, mask=mask, other=0.0).to(tl.float32)
            grads += (tl.load(grad_o + (steps + j) * grad_step, mask=mask, other=0),)
            if grad_x is not None:
                if entries is not None:
                    words += (tl.load(x + (steps + j) * x_step, mask=mask, other=0),)
                else:
                    words += (tl.load(x + (steps + j - 1) * x_step, mask=mask & (steps + j > piece.begin), other=0),)
            cosine, sine = cos_sin(angle)
            sizes += (size,)
            cosines += (cosine,)
            sines += (sine,)
            gates_r += (size.to(tl.float32) * cosine,)
            gates_i += (size.to(tl.float32) * sine,)
        history_r, history_i = (), ()
        if grad_x is not None:
            if entries is not None:
                hr, hi = load_state(entries + 2 * tile * pairs, here)
                er, ei = tile_states(gates_r, gates_i, words, hr, hi, ELEMENT, (SEGMENTS, BLOCK)).initial
                for j in tl.static_range(STEPS):
                    history_r += (er,)
                    history_i += (ei,)
                    ur, ui = unpack(words[j], ELEMENT)
                    er, ei = multiply_add(gates_r[j], gates_i[j], er, ei, ur, ui)
            else:
                for j in tl.static_range(STEPS):
                    ur, ui = unpack(words[j], ELEMENT)
                    history_r += (tl.where(steps + j > piece.begin, ur, br[None, :]),)
                    history_i += (tl.where(steps + j > piece.begin, ui, bi[None, :]),)
        pr, pi, xr, xi = ones, zeros, zeros, zeros
        for j in tl.static_range(STEPS - 1, -1, -1):
            ur, ui = unpack(grads[j], ELEMENT)
            xr, xi = times(gates_r[j], -gates_i[j], ur + xr, ui + xi)
            pr, pi = times(gates_r[j], -gates_i[j], pr, pi)
        values = (pr, pi, xr, xi, ones, zeros, zeros, zeros)
        pr, pi, xr, xi, qr, qi, yr, yi = tl.associative_scan(values, 0, combine, reverse=True)
        lr, li = multiply_add(pr, pi, cr[None, :], ci[None, :], xr, xi)
        er, ei = multiply_add(qr, qi, cr[None, :], ci[None, :], yr, yi)
        cr, ci = at_row(segment == 0, lr, li)
        if product is not None:
            wr, wi = at_row(segment == 0, pr, pi)
            tr, ti = times(wr, wi, tr, ti)
        if grad_x is not None:
            for j in tl.static_range(STEPS - 1, -1, -1):
                mask = (steps + j < stop) & here[None, :]
                ur, ui = unpack(grads[j], ELEMENT)
                ur, ui = ur + er, ui + ei
                er, ei = times(gates_r[j], -gates_i[j], ur, ui)
                tl.store(grad_x + (steps + j) * pairs, pack(ur, ui, ELEMENT), mask=mask)
                zr, zi = times(ur, ui, history_r[j], -history_i[j])
                zr, zi = times(zr, zi, cosines[j], -sines[j])
                tl.store(grad_a + (steps + j) * pairs, zr.to(grad_a.dtype.element_ty), mask=mask)
                angle = sizes[j].to(tl.float32) * zi
                tl.store(grad_theta + (steps + j) * pairs, angle.to(grad_theta.dtype.element_ty), mask=mask)
    if grad_initial is not None:
        store_state(grad_initial + 2 * (piece.number * pairs + d), cr, ci, here)
    if product is not None:
        store_state(product + 2 * (piece.number * pairs + d), tr, ti, here)


ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
