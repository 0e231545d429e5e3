"""The single pass: one program goes over a sequence chunk by chunk with the state in its registers.

The operator of MatrixCall, a_t = exp(g_t) and s over the tokens up to t, with S the state that enters the chunk,

    o_t = w_t (sum_s (decay from s to t) c_s (q_t . k_s) v_s + (decay to t) S^T q_t)

is its own derivative with the roles permuted, so that one kernel serves all passes:

    pass  q   k   v   direction  c (source)  w (output)  after
    o     q   k   v   forward    beta        1           1 / normaliser
    dq    do  v   k   forward    beta        1 / norm.   1
    dk    v   do  q   reverse    1 / norm.   1           beta
    dv    k   q   do  reverse    1 / norm.   1           beta

The state is held transposed, [V, K], as the accumulator of the product that updates it; rounded, its registers are the
left operand of the product that reads it. Programs of one head split the columns of v, and each forms q . k again.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.decay import log_decay_cumsum, log_decay_cumsum_in_parts
from holdfast.kernels.lib.triton.normalizer import denominator_floor
from holdfast.kernels.lib.triton.sequence import sequence_bounds
from holdfast.kernels.lib.triton.tiles import NARROW, as_first_row, load_tile, split_hi_lo_rows

# rows and columns of a state whose products of float32 operands are exact: a sum of so few terms may all but cancel, of
# which three TF32 products a product, as larger ones take, leave eight times as much
EXACT = tl.constexpr(16)


class States(NamedTuple):
    """A state [V, K], and the added column's [NARROW, V]: its sum over rows is [V]. 0.0 where there is none."""

    state: tl.tensor
    added: tl.tensor


@triton.jit
def wait_for_product(x):
    """Return x, a product, once it is there.

    Triton 3.6 may leave a product running into the loop's next turn with no more buffers than loads ahead, and then
    copies of later chunks reach its operands (tests/pipelined_buffers.py finds that). What looks at x waits for it.
    """
    return tl.where(x == x, x, float("nan"))


@triton.jit
def save_state(states, place, columns, rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr):
    """Store a state, rounded, and beside it the added column's."""
    inside = (columns < COLUMNS)[:, None] & (rows < WIDTH)[None, :]
    tl.store(place + columns[:, None] * WIDTH + rows[None, :], states.state.to(place.dtype.element_ty), mask=inside)
    if ADD:
        x = tl.sum(states.added, 0).to(place.dtype.element_ty)
        tl.store(place + COLUMNS * WIDTH + columns, x, mask=columns < COLUMNS)


@triton.jit
def store_state_product(
    states, saved, products, columns, rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr
):
    """Store the product of a state's gradient and a saved state, by v's columns."""
    inside = (columns < COLUMNS)[:, None] & (rows < WIDTH)[None, :]
    x = tl.load(saved + columns[:, None] * WIDTH + rows[None, :], mask=inside, other=0.0)
    # in two parts of the saved state's width, which take fewer registers on their way to where it is
    high = states.state.to(saved.dtype.element_ty)
    low = (states.state - high.to(tl.float32)).to(saved.dtype.element_ty)
    product = tl.sum(high.to(tl.float32) * x.to(tl.float32), 1)
    product += tl.sum(low.to(tl.float32) * x.to(tl.float32), 1)
    if ADD:
        x_add = tl.load(saved + COLUMNS * WIDTH + columns, mask=columns < COLUMNS, other=0.0)
        product += tl.sum(states.added, 0) * x_add.to(tl.float32)
    # the sum of them to one number, after other products, fails to compile for sm_100
    tl.store(products + tl.arange(0, columns.shape[0]), product)


@triton.jit
def scalar_decay_single_pass(
    q_ptr, k_ptr, v_ptr, o_ptr, x_ptr,
    g_ptr, source_ptr, source_add_ptr, output_ptr, output_add_ptr, after_ptr, m_ptr,
    first_ptr, last_ptr, saved_ptr,
    rows_ptr, products_ptr, full_ptr, norm_ptr,
    cu_seqlens, T, H, segment, scale, eps, tokens, saved_offset, products_size,
    q_batch, q_step, q_head, k_batch, k_step, k_head, v_batch, v_step, v_head, x_batch, x_step, x_head,
    state_size, state_k, state_v, state_add,
    QK_GROUP: tl.constexpr, VX_GROUP: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, SEGMENTS: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr,
    REVERSE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One pass over one sequence, or segment of one, one head and one block of v's columns.

    Grid (splits of v's columns * H * sequences * SEGMENTS).

    read:
        q, k    [B, T, H / QK_GROUP, WIDTH], by strides; BLOCK_K >= WIDTH covers a row
        v, x    [B, T, H / VX_GROUP, COLUMNS], by strides; x or None
        g       float32 [B, T, H]: log decays; or None
        source, output, after
                float32 [B, T, H]: c, w and what outputs are multiplied with at last; 1 where None
        source_add, output_add
                as these; with ADD they are one more column of k and of q, whose state is [V]
        m       float32 [B, T, H], or None. With it (forward only) o is divided by max(|scale n . q|, exp(-m)) + eps
        first   float32 [N, H, ...]: the state that enters, by its strides state_k over WIDTH and state_v over COLUMNS;
                state_add is where the added column, or the normaliser, starts; or None for 0
    written:
        o       [B, T, H, COLUMNS], or None
        last    as first: the state that leaves; or None
        norm    float32 [B, T, H], with m: n . q
        rows    float32 [splits, B, T, H], with x: x . o. Without m of what the state holds alone, and forward [splits,
                3, B, T, H], of pairs inside the chunk too: of float32 operands those that lead from a token or one
                before it to one behind it, of others by the token that reads and by the one that writes. The log
                decay's gradient is theirs (decay_grad.py), and that of products
        full    float32 [splits, B, T, H]: x . o / after, diagonal and all; or None
        saved   the state before every KEEP-th chunk and the last, rounded but where no sequence is longer than a
                chunk, written forward, read in reverse; or None.
                Sequence n's chunks are first // CHUNK + 2 n on, and so are its saved states, in KEEP chunks for one
        products
                float32 [splits, products_size] of [saved state, H, BLOCK_V], in reverse; or None
    """
    # float32 inputs, whose log decays are summed in float64
    WIDE: tl.constexpr = v_ptr.dtype.element_ty == tl.float32
    PRECISION: tl.constexpr = "ieee" if WIDTH <= EXACT and COLUMNS <= EXACT else "tf32x3"
    NORMALIZE: tl.constexpr = m_ptr is not None
    # n . q may cancel to 1e-5 of its terms, which float32 sums of log decays in one part leave
    IN_PARTS: tl.constexpr = NORMALIZE and not WIDE and g_ptr is not None
    # states saved as they are, beside rounded operands: no sequence is longer than a chunk
    ALONE: tl.constexpr = saved_ptr is not None and saved_ptr.dtype.element_ty == tl.float32 and not WIDE
    SPLITS: tl.constexpr = (COLUMNS + BLOCK_V - 1) // BLOCK_V
    EVEN_K: tl.constexpr = WIDTH == BLOCK_K
    EVEN_V: tl.constexpr = COLUMNS % BLOCK_V == 0
    program = tl.program_id(0)
    split = program % SPLITS
    head = (program // SPLITS) % H
    n = (program // SPLITS) // H
    batch, first, end = sequence_bounds(n, cu_seqlens, T, segment, SEGMENTS)
    n = n.to(tl.int64)
    batch = batch.to(tl.int64)
    head = head.to(tl.int64)

    steps = tl.arange(0, CHUNK)
    rows = tl.arange(0, BLOCK_K)
    columns = split * BLOCK_V + tl.arange(0, BLOCK_V)
    # [s, t]: which sources a token reads, itself aside
    if REVERSE:
        reads = steps[:, None] >= steps[None, :]
    else:
        reads = steps[:, None] <= steps[None, :]
    itself = steps[:, None] == steps[None, :]

    q_ptr += batch * q_batch + (head // QK_GROUP) * q_head
    k_ptr += batch * k_batch + (head // QK_GROUP) * k_head
    v_ptr += batch * v_batch + (head // VX_GROUP) * v_head
    if x_ptr is not None:
        x_ptr += batch * x_batch + (head // VX_GROUP) * x_head
    out_rows = split.to(tl.int64) * tokens * H

    state_at = (n * H + head) * state_size
    state_shift = columns[:, None] * state_v + rows[None, :] * state_k
    state_mask = (columns < COLUMNS)[:, None] & (rows < WIDTH)[None, :]
    if first_ptr is None:
        state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    else:
        state = tl.load(first_ptr + state_at + state_shift, mask=state_mask, other=0.0)
    # the state of the added column, and the normaliser's
    if ADD:
        added = tl.zeros([NARROW, BLOCK_V], tl.float32)
        if first_ptr is not None:
            place = first_ptr + state_at + state_add + columns * state_v
            added = as_first_row(tl.load(place, mask=columns < COLUMNS, other=0.0))
    if NORMALIZE:
        norm = tl.zeros([NARROW, BLOCK_K], tl.float32)
        if first_ptr is not None:
            place = first_ptr + state_at + state_add + rows * state_k
            norm = as_first_row(tl.load(place, mask=rows < WIDTH, other=0.0))

    count = tl.cdiv(end - first, CHUNK).to(tl.int32)
    if saved_ptr is not None:
        slot = ((batch * T + first) // (KEEP * CHUNK) + 2 * n) * H + head
        saved_ptr += slot * saved_offset
    if not ADD:
        added = 0.0
    if not REVERSE and saved_ptr is not None:
        save_state(States(state=state, added=added), saved_ptr, columns, rows, COLUMNS, WIDTH, ADD)
    if products_ptr is not None:
        products_ptr += split * products_size + slot * BLOCK_V
        # of the state before the last chunk: what that leaves of it may be less than rounding of what it writes
        before = saved_ptr + tl.cdiv(count - 1, KEEP) * H * saved_offset
        left = products_ptr + tl.cdiv(count, KEEP) * H * BLOCK_V
        store_state_product(States(state=state, added=added), before, left, columns, rows, COLUMNS, WIDTH, ADD)
    for i in tl.range(0, count, num_stages=STAGES):
        if REVERSE:
            chunk = count - 1 - i
        else:
            chunk = i
        start = first + chunk * CHUNK
        live = steps < (end - start).to(tl.int32)
        # the rest of an address is 32 bits a token, so that addresses take few registers
        token = (batch * T + start) * H + head
        at = steps * H
        q = load_tile(q_ptr + start * q_step, steps, rows, q_step, live, WIDTH, EVEN_K)
        k = load_tile(k_ptr + start * k_step, steps, rows, k_step, live, WIDTH, EVEN_K)
        v = load_tile(v_ptr + start * v_step, steps, columns, v_step, live, COLUMNS, EVEN_V)

        # with the gradient behind the chunk, or, of rounded numbers, before it: decay_grad.py
        if products_ptr is not None and WIDE:  # noqa: SIM102 (compile time, then run time)
            if chunk % KEEP == 0:
                entry = (chunk // KEEP) * H
                left = products_ptr + entry * BLOCK_V
                store_state_product(
                    States(state=state, added=added),
                    saved_ptr + entry * saved_offset,
                    left,
                    columns,
                    rows,
                    COLUMNS,
                    WIDTH,
                    ADD,
                )
        if x_ptr is not None:
            x = load_tile(x_ptr + start * x_step, steps, columns, x_step, live, COLUMNS, EVEN_V)
        if NORMALIZE:
            # here, where little else is in registers
            high = norm.to(q.dtype)
            inner = tl.dot(high, tl.trans(q), input_precision=PRECISION)
            if not WIDE:
                # n . q may cancel to little of its terms, which rounding n once would drown
                low = (norm - high.to(tl.float32)).to(q.dtype)
                inner = tl.dot(low, tl.trans(q), inner, input_precision=PRECISION)
            inner = scale * tl.sum(inner, 0)
        # [s, t]: the weight of a source for the token that reads it
        p = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
        if source_ptr is not None:
            source = tl.load(source_ptr + token + at, mask=live, other=0.0)
            if not IN_PARTS:
                p *= source[:, None]
        if output_ptr is not None:
            output = tl.load(output_ptr + token + at, mask=live, other=0.0)
            p *= output[None, :]
        if ADD:
            source_add = live.to(tl.float32)
            if source_add_ptr is not None:
                source_add = tl.load(source_add_ptr + token + at, mask=live, other=0.0)
            output_add = live.to(tl.float32)
            if output_add_ptr is not None:
                output_add = tl.load(output_add_ptr + token + at, mask=live, other=0.0)
            p += (scale * source_add)[:, None] * output_add[None, :]
        if g_ptr is not None:
            if IN_PARTS:
                here, fine, total, fine_total = log_decay_cumsum_in_parts(g_ptr + token, at, live)
                to_end = tl.exp2(total - here + (fine_total - fine))
                whole = tl.exp2(total + fine_total)
                # the fine parts of the decays from a source are in its weight, those to a token come last
                p *= (source * tl.exp2(-fine) if source_ptr is not None else tl.exp2(-fine))[:, None]
            else:
                here, total, _ = log_decay_cumsum(g_ptr + token, at, live, REVERSE, WIDE)
                to_end = tl.exp2((total - here).to(tl.float32))
                whole = tl.exp2(total.to(tl.float32))
            to_here = tl.exp2(here.to(tl.float32))
            # masked before the exponential, whose argument is positive on the other side
            p *= tl.exp2(tl.where(reads, (here[None, :] - here[:, None]).to(tl.float32), float("-inf")))
        else:
            p = tl.where(reads, p, 0.0)

        if NORMALIZE:
            within = tl.sum(p, 0)

        # rounded here, before more is in registers
        weights = p.to(v.dtype)
        o = tl.dot(state.to(q.dtype), tl.trans(q), input_precision=PRECISION)
        if ALONE:
            # all of dg may be what is read of this state
            low = (state - state.to(q.dtype).to(tl.float32)).to(q.dtype)
            o = tl.dot(low, tl.trans(q), o, input_precision=PRECISION)
        if output_ptr is not None:
            o *= output[None, :]
        if ADD:
            o += tl.sum(added, 0)[:, None] * output_add[None, :]
        # in reverse the scale is in the state, which is the gradient of the state
        decayed = 1.0 if REVERSE else scale
        if g_ptr is not None:
            decayed = (to_here if REVERSE else scale * to_here)[None, :]
        # <S, dS> changes by exactly what is read, if that is of numbers rounded as the reverse sweep writes them
        CONSISTENT: tl.constexpr = not (REVERSE or NORMALIZE or ADD or ALONE)
        if x_ptr is None or not CONSISTENT:
            o *= decayed
        if x_ptr is not None:
            # x . o, through the state and inside the chunk. The product with 1 puts x where o is.
            placed = tl.dot(tl.trans(x), itself.to(x.dtype), input_precision=PRECISION)
            if CONSISTENT:
                through = tl.sum((placed * decayed).to(x.dtype).to(tl.float32) * o, 0)
                o *= decayed
            else:
                through = tl.sum(placed * o, 0)
            pairs = p * tl.dot(v, tl.trans(x), input_precision=PRECISION)
            if REVERSE or NORMALIZE:
                along = through + tl.sum(pairs, 0)
            else:
                apart = tl.where(itself, 0.0, pairs)
                by_token = rows_ptr + 3 * out_rows + token + at
                tl.store(by_token, through, mask=live)
                if WIDE:
                    # a sum of pairs that all pass the next token's decay errs by what that leaves of them
                    over = tl.where(steps[:, None] < steps[None, :], tl.cumsum(apart, 0), 0.0)
                    tl.store(by_token + tokens * H, tl.sum(over, 1), mask=live)
                else:
                    # by the later token of each pair and by the earlier one: of the same numbers
                    tl.store(by_token + tokens * H, tl.sum(apart, 0), mask=live)
                    tl.store(by_token + 2 * tokens * H, tl.sum(apart, 1), mask=live)
        o = tl.dot(tl.trans(v), weights, o, input_precision=PRECISION)

        if NORMALIZE:
            if g_ptr is not None:
                inner *= to_here
            inner += within
            if IN_PARTS:
                to_token = tl.exp2(fine)
                inner *= to_token
            floor = denominator_floor(tl.load(m_ptr + token + at, mask=live, other=0.0))
            share = 1.0 / (tl.maximum(tl.abs(inner), floor) + eps)
            if IN_PARTS:
                share *= to_token
            o *= share[None, :]
            tl.store(norm_ptr + token + at, inner, mask=live & (split == 0))
            if rows_ptr is not None:
                tl.store(rows_ptr + (out_rows + token) + at, along * share, mask=live)
        else:
            if after_ptr is not None:
                after = tl.load(after_ptr + token + at, mask=live, other=0.0)
                o *= after[None, :]
            if full_ptr is not None:
                tl.store(full_ptr + (out_rows + token) + at, along, mask=live)
            if REVERSE and rows_ptr is not None:
                if after_ptr is not None:
                    through *= after
                tl.store(rows_ptr + (out_rows + token) + at, through, mask=live)
        if o_ptr is not None:
            o_at = (
                o_ptr + ((batch * T + start) * H + head) * COLUMNS + (steps * H * COLUMNS)[:, None] + columns[None, :]
            )
            tl.store(o_at, tl.trans(o.to(o_ptr.dtype.element_ty)), mask=live[:, None] & (columns < COLUMNS)[None, :])

        write = live.to(tl.float32)
        if source_ptr is not None:
            write = source
        if g_ptr is not None:
            write *= to_end
            state *= whole
        if REVERSE:
            write *= scale
        if ADD:
            write_add = source_add
            if REVERSE:
                write_add *= scale
            if g_ptr is not None:
                write_add *= to_end
                added *= whole
            added = tl.dot(split_hi_lo_rows(write_add, v), v, added, input_precision=PRECISION)
        if NORMALIZE:
            if g_ptr is not None:
                norm *= whole
            norm = tl.dot(split_hi_lo_rows(write, k), k, norm, input_precision=PRECISION)
        written = (tl.trans(v).to(tl.float32) * write[None, :]).to(v.dtype)
        state = tl.dot(written, k, state, input_precision=PRECISION)
        if NORMALIZE or ADD:
            state = wait_for_product(state)

        if not REVERSE and saved_ptr is not None:  # noqa: SIM102 (compile time, then run time)
            if (chunk == count - 2) | ((chunk % KEEP == KEEP - 1) & (chunk < count - 1)):
                entry = saved_ptr + tl.cdiv(chunk + 1, KEEP) * H * saved_offset
                save_state(States(state=state, added=added), entry, columns, rows, COLUMNS, WIDTH, ADD)
        if products_ptr is not None and not WIDE:  # noqa: SIM102
            if chunk % KEEP == 0:
                entry = (chunk // KEEP) * H
                left = products_ptr + entry * BLOCK_V
                store_state_product(
                    States(state=state, added=added),
                    saved_ptr + entry * saved_offset,
                    left,
                    columns,
                    rows,
                    COLUMNS,
                    WIDTH,
                    ADD,
                )

    if last_ptr is not None:
        tl.store(last_ptr + state_at + state_shift, state, mask=state_mask)
        if ADD:
            tl.store(last_ptr + state_at + state_add + columns * state_v, tl.sum(added, 0), mask=columns < COLUMNS)
        if NORMALIZE:
            place = last_ptr + state_at + state_add + rows * state_k
            tl.store(place, tl.sum(norm, 0), mask=(rows < WIDTH) & (split == 0))
