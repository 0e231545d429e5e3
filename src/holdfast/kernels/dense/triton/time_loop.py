"""The time loop of a few sequences of one head in one program: R stays in registers or shared memory.

Forward: g = x_t + R h + b, and the cell. Backward, from the last step: the cell's gradients, and R^T dg to the step
before. Tuples hold what a cell has several of, so that one kernel serves every cell.
"""

import triton
import triton.language as tl


# sizes are not compiled in: a new batch costs no compile
@triton.jit(do_not_specialize=["batch", "length", "heads"])
def dense_time_loop_forward(
    x, R, b, initial, reset, h, final, states, gates,
    batch, length, heads,
    CELL: tl.constexpr, STATES: tl.constexpr, GATES: tl.constexpr, INPUTS: tl.constexpr, RECURRENTS: tl.constexpr,
    INPUT_OF: tl.constexpr, RECURRENT_OF: tl.constexpr, SAVED: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Run the time loop of ROWS sequences of a head. Programs: (sequences / ROWS, heads).

    reads   x       [B, T, INPUTS, H, WIDTH]
            R       [RECURRENTS, H, WIDTH, WIDTH]
            b       [GATES, H, WIDTH] or None
            initial [STATES, B, H, WIDTH] or None, float32
            reset   [B, T] or None, uint8
    writes  h       [B, T, H, WIDTH]
            final   [STATES, B, H, WIDTH], float32
            states  [STATES - 1, B * T, H, PADDED] or None, float32, for the backward pass
            gates   [B * T, H, PADDED, SAVED] or None, for the backward pass
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    alive, inside = row < batch, d < WIDTH
    held = alive[:, None] & inside[None]
    first = row.to(tl.int64) * length
    weights, offsets, s = (), (), ()
    for k in tl.static_range(RECURRENTS):
        at = (k * heads + head).to(tl.int64) * WIDTH * WIDTH
        # [in, out]
        matrix = tl.load(R + at + d[None] * WIDTH + d[:, None], mask=inside[:, None] & inside[None], other=0.0)
        weights += (matrix,)
    for k in tl.static_range(GATES):
        value = tl.zeros((BLOCK,), tl.float32)
        if b is not None:
            value = tl.load(b + (k * heads + head) * WIDTH + d, mask=inside, other=0.0).to(tl.float32)
        offsets += (value,)
    state_offset = row.to(tl.int64)[:, None] * heads * WIDTH + head * WIDTH + d[None]
    plane = batch.to(tl.int64) * heads * WIDTH
    for k in tl.static_range(STATES):
        value = tl.zeros((ROWS, BLOCK), tl.float32)
        if initial is not None:
            value = tl.load(initial + k * plane + state_offset, mask=held, other=0.0)
        s += (value,)
    for t in range(length):
        if reset is not None:
            not_reset = tl.load(reset + first + t, mask=alive, other=0) == 0
            after_reset = ()
            for k in tl.static_range(STATES):
                after_reset += (tl.where(not_reset[:, None], s[k], 0.0),)
            s = after_reset
        token = first + t
        # what padding holds may be anything, NaN too
        operand = tl.where(inside[None], s[0], 0.0).to(x.dtype.element_ty)
        g = ()
        for k in tl.static_range(GATES):
            value = tl.zeros((ROWS, BLOCK), tl.float32) + offsets[k][None]
            if INPUT_OF[k] >= 0:
                source = ((token * INPUTS + INPUT_OF[k]) * heads + head) * WIDTH
                value += tl.load(x + source[:, None] + d[None], mask=held, other=0.0).to(tl.float32)
            if RECURRENT_OF[k] >= 0:
                value += tl.dot(operand, weights[RECURRENT_OF[k]])
            g += (value,)
        found = CELL(s, g)
        after = ()
        for k in tl.static_range(STATES):
            after += (tl.zeros((ROWS, BLOCK), tl.float32) + found[k],)
        s = after
        place = (token * heads + head) * WIDTH
        tl.store(h + place[:, None] + d[None], s[0].to(h.dtype.element_ty), mask=held)
        if gates is not None:
            padded = ((token * heads + head) * PADDED)[:, None] + d[None]
            for k in tl.static_range(GATES):
                tl.store(gates + padded * SAVED + k, g[k].to(gates.dtype.element_ty), mask=held)
            for k in tl.static_range(1, STATES):
                tl.store(states + (k - 1) * batch.to(tl.int64) * length * heads * PADDED + padded, s[k], mask=held)
    for k in tl.static_range(STATES):
        tl.store(final + k * plane + state_offset, s[k], mask=held)


@triton.jit(do_not_specialize=["batch", "length", "heads"])
def dense_time_loop_backward(
    R, initial, reset, h, states, gates, grad_h, grad_final, dx, extra, db, grad_initial,
    batch, length, heads, clip,
    CELL: tl.constexpr, STATES: tl.constexpr, GATES: tl.constexpr, INPUTS: tl.constexpr, RECURRENTS: tl.constexpr,
    EXTRAS: tl.constexpr, INPUT_OF: tl.constexpr, RECURRENT_OF: tl.constexpr, EXTRA_OF: tl.constexpr,
    NEEDS: tl.constexpr, SAVED: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Run the time loop from its end. Programs: (sequences / ROWS, heads). clip: the bound of R^T dg.

    reads   R, initial, reset, h, states, gates as in dense_time_loop_forward
            grad_h       [B, T, H, WIDTH] or None
            grad_final   [STATES, B, H, WIDTH] or None, float32
    writes  dx           [B, T, INPUTS, H, WIDTH]
            extra        [B, T, EXTRAS, H, WIDTH], gradients of gates that R alone feeds
            db           [programs, GATES, H, WIDTH], float32, partial sums
            grad_initial [STATES, B, H, WIDTH], float32
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    alive, inside = row < batch, d < WIDTH
    held = alive[:, None] & inside[None]
    first = row.to(tl.int64) * length
    weights, sums, carry = (), (), ()
    for k in tl.static_range(RECURRENTS):
        at = (k * heads + head).to(tl.int64) * WIDTH * WIDTH
        # [out, in]
        matrix = tl.load(R + at + d[:, None] * WIDTH + d[None], mask=inside[:, None] & inside[None], other=0.0)
        weights += (matrix,)
    state_offset = row.to(tl.int64)[:, None] * heads * WIDTH + head * WIDTH + d[None]
    plane = batch.to(tl.int64) * heads * WIDTH
    for _ in tl.static_range(GATES):
        sums += (tl.zeros((ROWS, BLOCK), tl.float32),)
    for k in tl.static_range(STATES):
        value = tl.zeros((ROWS, BLOCK), tl.float32)
        if grad_final is not None:
            value = tl.load(grad_final + k * plane + state_offset, mask=held, other=0.0)
        carry += (value,)
    for step in range(length):
        t = length - 1 - step
        token = first + t
        padded = ((token * heads + head) * PADDED)[:, None] + d[None]
        g, s, after = (), (), ()
        for k in tl.static_range(GATES):
            g += (tl.load(gates + padded * SAVED + k, mask=held, other=0.0).to(tl.float32),)
        not_reset = alive
        if reset is not None:
            not_reset = alive & (tl.load(reset + token, mask=alive, other=1) == 0)
        place = ((token * heads + head) * WIDTH)[:, None] + d[None]
        for k in tl.static_range(STATES):
            value = tl.zeros((ROWS, BLOCK), tl.float32)
            if NEEDS[k]:
                there = held & (t > 0) & not_reset[:, None]
                if k == 0:
                    value = tl.load(h + place - heads * WIDTH, mask=there, other=0.0).to(tl.float32)
                else:
                    before = states + (k - 1) * batch.to(tl.int64) * length * heads * PADDED - heads * PADDED
                    value = tl.load(before + padded, mask=there, other=0.0)
                if initial is not None:
                    there = held & (t == 0) & not_reset[:, None]
                    value += tl.load(initial + k * plane + state_offset, mask=there, other=0.0)
            s += (value,)
        for k in tl.static_range(STATES):
            value = carry[k]
            if k == 0 and grad_h is not None:
                value += tl.load(grad_h + place, mask=held, other=0.0).to(tl.float32)
            after += (value,)
        found = CELL(s, g, after)
        through = tl.zeros((ROWS, BLOCK), tl.float32)
        grown = ()
        for k in tl.static_range(GATES):
            value = tl.where(held, tl.zeros((ROWS, BLOCK), tl.float32) + found[STATES + k], 0.0)
            grown += (sums[k] + value,)
            operand = value.to(dx.dtype.element_ty)
            if INPUT_OF[k] >= 0:
                target = ((token * INPUTS + INPUT_OF[k]) * heads + head) * WIDTH
                tl.store(dx + target[:, None] + d[None], operand, mask=held)
            if EXTRA_OF[k] >= 0:
                beside = ((token * EXTRAS + EXTRA_OF[k]) * heads + head) * WIDTH
                tl.store(extra + beside[:, None] + d[None], operand, mask=held)
            if RECURRENT_OF[k] >= 0:
                through += tl.dot(operand, weights[RECURRENT_OF[k]])
        sums = grown
        through = tl.where(through > clip, clip, tl.where(through < -clip, -clip, through))
        passed = ()
        for k in tl.static_range(STATES):
            value = tl.zeros((ROWS, BLOCK), tl.float32) + found[k]
            if k == 0:
                value += through
            if reset is not None:
                value = tl.where(not_reset[:, None], value, 0.0)
            passed += (value,)
        carry = passed
    for k in tl.static_range(STATES):
        tl.store(grad_initial + k * plane + state_offset, carry[k], mask=held)
    for k in tl.static_range(GATES):
        at = ((tl.program_id(0) * GATES + k) * heads + head) * WIDTH
        tl.store(db + at + d, tl.sum(sums[k], 0), mask=inside)
