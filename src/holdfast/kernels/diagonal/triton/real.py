"""The diagonal scan over real channels, in Triton: h_t = a_t h_{t-1} + x_t and its gradients.

A program owns BLOCK channels of one piece of a sequence and goes over it in tiles of SEGMENTS x STEPS steps; the next
tile is on its way through shared memory while it works on one. Each thread has STEPS consecutive steps of some channels
in registers: it reduces them to (product of gates, state from zero), one scan over the SEGMENTS finds the state that
enters each, and the steps run again from that. So a and x are read once, loads are as wide as the channels allow, and
nothing but the state of BLOCK channels passes from tile to tile.

Steps beyond the end have gate 1 and input 0, which leave the state as it is.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.linear_scan import combine


class Piece(NamedTuple):
    """A piece, its batch row and sequence; the first step of the sequence, and of the piece; the step behind it."""

    number: tl.tensor
    row: tl.tensor
    sequence: tl.tensor
    begin: tl.tensor
    start: tl.tensor
    stop: tl.tensor


@triton.jit
def piece_bounds(bounds, length, piece_length, per_row, across):
    """Return this program's piece; `across` programs share one."""
    # one axis: the others end at 65535
    piece = (tl.program_id(0) // across).to(tl.int64)
    if bounds is None:
        row, begin = piece // per_row, piece * 0
        sequence = row
        start = (piece % per_row) * piece_length
        stop = tl.minimum(start + piece_length, length)
    else:
        row, sequence = piece * 0, piece
        start = tl.load(bounds + piece).to(tl.int64)
        stop = tl.load(bounds + piece + 1).to(tl.int64)
        begin = start
    return Piece(number=piece, row=row, sequence=sequence, begin=begin, start=start, stop=stop)


@triton.jit
def first_entry(row, sequence, begin, start, length, ROWS: tl.constexpr):
    """Return the row of `entries` that holds the state before step `start`; every sequence has rows of its own."""
    return (row * length + begin) // ROWS + sequence + (start - begin) // ROWS


@triton.jit
def gate_of(a, LOG: tl.constexpr):
    if LOG:
        return tl.exp(a.to(tl.float32))
    else:
        return a.to(tl.float32)


@triton.jit
def row_of(at, x):
    """Return the row of x where `at` holds."""
    return tl.sum(tl.where(at, x, 0.0), 0)


@triton.jit
def diagonal_real_fwd(
    a,
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
    channels,
    a_row,
    a_step,
    x_row,
    x_step,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (pieces * blocks of channels,).

    a, x [B, T, D], strides of rows and steps
    o [B, T, D], written: the states; None: only final and product are wanted
    initial, final [pieces, D] float32: the states before and, written, after each piece; initial may be None
    product [pieces, D] float32 or None, written: the product of all gates of each piece
    entries [rows, D] float32 or None, written: the states that enter each tile (first_entry)
    bounds [N + 1] or None: where packed sequences begin
    """
    ROWS: tl.constexpr = SEGMENTS * STEPS
    NO_GATE: tl.constexpr = 0.0 if LOG else 1.0
    across = tl.cdiv(channels, BLOCK)
    piece = piece_bounds(bounds, length, piece_length, per_row, across)
    row, start, stop = piece.row, piece.start, piece.stop
    d = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    here = d < channels
    segment = tl.arange(0, SEGMENTS)[:, None]
    a += row * a_row + d[None, :]
    x += row * x_row + d[None, :]
    state = tl.zeros([BLOCK], tl.float32)
    if initial is not None:
        state = tl.load(initial + piece.number * channels + d, mask=here, other=0.0)
    total = tl.full([BLOCK], 1.0, tl.float32)
    if entries is not None:
        entries += first_entry(row, piece.sequence, piece.begin, start, length, ROWS) * channels + d
    if o is not None:
        o += row * length * channels + d[None, :]
    for tile in tl.range(0, tl.cdiv(stop - start, ROWS), num_stages=STAGES):
        steps = start + tile * ROWS + segment * STEPS
        gates, inputs = (), ()
        for j in tl.static_range(STEPS):
            mask = (steps + j < stop) & here[None, :]
            gates += (tl.load(a + (steps + j) * a_step, mask=mask, other=NO_GATE),)
            inputs += (tl.load(x + (steps + j) * x_step, mask=mask, other=0.0),)
        ones, zeros = tl.full([SEGMENTS, BLOCK], 1.0, tl.float32), tl.zeros([SEGMENTS, BLOCK], tl.float32)
        p, h = ones, zeros
        for j in tl.static_range(STEPS):
            gate = gate_of(gates[j], LOG)
            h = gate * h + inputs[j].to(tl.float32)
            p *= gate
        p, h, q, y = tl.associative_scan((p, h, ones, zeros), 0, combine)
        if entries is not None:
            tl.store(entries + tile * channels, state, mask=here)
        last = segment == SEGMENTS - 1
        leaving = row_of(last, p * state[None, :] + h)
        h = q * state[None, :] + y
        state = leaving
        if product is not None:
            total *= row_of(last, p)
        if o is not None:
            for j in tl.static_range(STEPS):
                mask = (steps + j < stop) & here[None, :]
                h = gate_of(gates[j], LOG) * h + inputs[j].to(tl.float32)
                tl.store(o + (steps + j) * channels, h.to(o.dtype.element_ty), mask=mask)
    tl.store(final + piece.number * channels + d, state, mask=here)
    if product is not None:
        tl.store(product + piece.number * channels + d, total, mask=here)


@triton.jit
def diagonal_real_bwd(
    a,
    x,
    grad_o,
    grad_a,
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
    channels,
    a_row,
    a_step,
    x_row,
    x_step,
    grad_row,
    grad_step,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (pieces * blocks of channels,). Last tile first, with c_t = a_t dh_t:

        dh_t = do_t + c_{t+1}, dx_t = dh_t, da_t = dh_t h_{t-1}.

    With entries, the states of a tile are computed again from the one that enters it, in the order of the forward pass
    and so with its bits. Without, x is the forward's output itself, which is exact. Without grad_x, only grad_initial
    and product are found.

    a, x, grad_o [B, T, D], strides of rows and steps
    grad_a, grad_x [B, T, D], written, or None
    initial [N, D], grad_final [pieces, D] float32, or None
    grad_initial [pieces, D] float32, written: c of each piece's first step
    product [pieces, D] float32 or None, written: the product of all gates of each piece
    entries: what diagonal_real_fwd left there, or None
    bounds [N + 1] or None: where packed sequences begin
    """
    ROWS: tl.constexpr = SEGMENTS * STEPS
    NO_GATE: tl.constexpr = 0.0 if LOG else 1.0
    across = tl.cdiv(channels, BLOCK)
    piece = piece_bounds(bounds, length, piece_length, per_row, across)
    row, start, stop = piece.row, piece.start, piece.stop
    d = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    here = d < channels
    segment = tl.arange(0, SEGMENTS)[:, None]
    a += row * a_row + start * a_step + d[None, :]
    x += row * x_row + start * x_step + d[None, :]
    grad_o += row * grad_row + start * grad_step + d[None, :]
    if entries is not None:
        entries += first_entry(row, piece.sequence, piece.begin, start, length, ROWS) * channels + d
    if grad_x is not None:
        grad_x += (row * length + start) * channels + d[None, :]
        grad_a += (row * length + start) * channels + d[None, :]
    before = tl.zeros([BLOCK], tl.float32)
    if initial is not None:
        before = tl.load(initial + piece.sequence * channels + d, mask=here, other=0.0)
    carry = tl.zeros([BLOCK], tl.float32)
    if grad_final is not None:
        carry = tl.load(grad_final + piece.number * channels + d, mask=here, other=0.0)
    total = tl.full([BLOCK], 1.0, tl.float32)
    ones, zeros = tl.full([SEGMENTS, BLOCK], 1.0, tl.float32), tl.zeros([SEGMENTS, BLOCK], tl.float32)
    tiles = tl.cdiv(stop - start, ROWS)
    for back in tl.range(0, tiles, num_stages=STAGES):
        tile = tiles - 1 - back
        past = tile * ROWS
        left = (stop - start - past).to(tl.int32)
        # the first of the tile's steps that has a step of its sequence before it
        second = tl.where(start + past > piece.begin, 0, 1)
        gates, grads, inputs = (), (), ()
        for j in tl.static_range(STEPS):
            step = segment * STEPS + j
            mask = (step < left) & here[None, :]
            gates += (tl.load(a + past * a_step + step * a_step, mask=mask, other=NO_GATE),)
            grads += (tl.load(grad_o + past * grad_step + step * grad_step, mask=mask, other=0.0),)
            if grad_x is not None:
                if entries is not None:
                    inputs += (tl.load(x + past * x_step + step * x_step, mask=mask, other=0.0),)
                else:
                    earlier = mask & (step >= second)
                    inputs += (tl.load(x + past * x_step + (step - 1) * x_step, mask=earlier, other=0.0),)
        history = ()
        if grad_x is not None:
            if entries is not None:
                p, h = ones, zeros
                for j in tl.static_range(STEPS):
                    gate = gate_of(gates[j], LOG)
                    h = gate * h + inputs[j].to(tl.float32)
                    p *= gate
                p, h, q, y = tl.associative_scan((p, h, ones, zeros), 0, combine)
                state = tl.load(entries + tile * channels, mask=here, other=0.0)
                h = q * state[None, :] + y
                for j in tl.static_range(STEPS):
                    history += (h,)
                    h = gate_of(gates[j], LOG) * h + inputs[j].to(tl.float32)
            else:
                for j in tl.static_range(STEPS):
                    step = segment * STEPS + j
                    history += (tl.where(step >= second, inputs[j].to(tl.float32), before[None, :]),)
        p, c = ones, zeros
        for j in tl.static_range(STEPS - 1, -1, -1):
            gate = gate_of(gates[j], LOG)
            c = gate * (grads[j].to(tl.float32) + c)
            p *= gate
        p, c, q, y = tl.associative_scan((p, c, ones, zeros), 0, combine, reverse=True)
        leaving = row_of(segment == 0, p * carry[None, :] + c)
        c = q * carry[None, :] + y
        carry = leaving
        if product is not None:
            total *= row_of(segment == 0, p)
        if grad_x is not None:
            for j in tl.static_range(STEPS - 1, -1, -1):
                step = segment * STEPS + j
                mask = (step < left) & here[None, :]
                gate = gate_of(gates[j], LOG)
                dh = grads[j].to(tl.float32) + c
                c = gate * dh
                tl.store(grad_x + past * channels + step * channels, dh.to(grad_x.dtype.element_ty), mask=mask)
                da = (c if LOG else dh) * history[j]
                tl.store(grad_a + past * channels + step * channels, da.to(grad_a.dtype.element_ty), mask=mask)
    if grad_initial is not None:
        tl.store(grad_initial + piece.number * channels + d, carry, mask=here)
    if product is not None:
        tl.store(product + piece.number * channels + d, total, mask=here)
