"""Device code of the gradients inside chunks, in Triton: three kernels, for queries, for keys and values, for states.

do is the gradient of the output before its gate. With D the decays between steps, S = Q K^T and P = S D, all below and
on the diagonal, and e the decay from the chunk's start: dP = scale do V^T, dS = dP D, and

    dq = dS K + scale e do S0^T      dk = dS^T Q      dv = scale P^T do      dS0 = scale (e Q)^T do

A step's log decay takes part in every pair whose window it lies in: with M = P dP, its gradient is the sum over later
steps, its own included, of M's rows (and of the state's part) less M's columns. Both come from the same products, so
what cancels between them cancels to float32's last bits.

high and low are the sums of base-2 log decays from the chunk's start, split as in the forward pass.
"""

import triton
import triton.language as tl

from .triton_intra_chunk_forward import place


@triton.jit
def load_sums(high, low, offset, live):
    return tl.load(high + offset, mask=live, other=0.0), tl.load(low + offset, mask=live, other=0.0)


@triton.jit
def decayed(later_high, later_low, earlier_high, earlier_low):
    return tl.exp2((later_high - earlier_high) + (later_low - earlier_low))


@triton.jit
def queries(
    q,
    k,
    v,
    high,
    low,
    states,
    grad_o,
    grad_q,
    grad_rows,
    scale,
    length,
    chunk,
    chunks,
    heads,
    groups,
    keys,
    values,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """grad_q [B, T, H, K], a gradient for every value head, and grad_rows [B, T, H], M's rows without the diagonal."""
    tile, start, size, head, group, entered = place(tl.cdiv(chunk, BLOCK), length, chunk, chunks, heads, groups)
    first = tile * BLOCK
    if first >= size:
        return
    own, c, n = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    m = first + own
    rows, tall, wide = m < size, c < keys, n < values
    q += (start * groups + group) * keys
    k += (start * groups + group) * keys
    v += (start * heads + head) * values
    grad_o += (start * heads + head) * values
    high += start * heads + head
    low += start * heads + head
    query = tl.load(q + m[:, None] * (groups * keys) + c[None, :], mask=rows[:, None] & tall[None, :], other=0.0)
    do = tl.load(grad_o + m[:, None] * (heads * values) + n[None, :], mask=rows[:, None] & wide[None, :], other=0.0)
    later_high, later_low = load_sums(high, low, m * heads, rows)
    acc = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    if states is not None:
        states += entered * keys * values
        for base in tl.range(0, values, BLOCK_N):
            u = base + tl.arange(0, BLOCK_N)
            some = u < values
            state = tl.load(states + c[:, None] * values + u[None, :], mask=tall[:, None] & some[None, :], other=0.0)
            part = tl.load(
                grad_o + m[:, None] * (heads * values) + u[None, :], mask=rows[:, None] & some[None, :], other=0.0
            )
            acc = tl.dot(part, tl.trans(state.to(part.dtype)), acc, input_precision=PRECISION)
        acc *= scale * tl.exp2(later_high + later_low)[:, None]
        sums += tl.sum(acc * query.to(tl.float32), 1)
    for base in tl.range(0, first + BLOCK, BLOCK):
        s = base + own
        live = s < size
        key = tl.load(k + s[:, None] * (groups * keys) + c[None, :], mask=live[:, None] & tall[None, :], other=0.0)
        value = tl.load(v + s[:, None] * (heads * values) + n[None, :], mask=live[:, None] & wide[None, :], other=0.0)
        earlier_high, earlier_low = load_sums(high, low, s * heads, live)
        decay = decayed(later_high[:, None], later_low[:, None], earlier_high[None, :], earlier_low[None, :])
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        grad = tl.dot(do, tl.trans(value), input_precision=PRECISION) * scale
        grad = tl.where(m[:, None] >= s[None, :], grad * decay, 0.0)
        sums += tl.sum(tl.where(m[:, None] > s[None, :], grad * scores, 0.0), 1)
        acc = tl.dot(grad.to(key.dtype), key, acc, input_precision=PRECISION)
    grad_q += (start * heads + head) * keys + m[:, None] * (heads * keys) + c[None, :]
    tl.store(grad_q, acc.to(grad_q.dtype.element_ty), mask=rows[:, None] & tall[None, :])
    tl.store(grad_rows + start * heads + head + m * heads, sums, mask=rows)


@triton.jit
def keys_and_values(
    q,
    k,
    v,
    high,
    low,
    grad_o,
    grad_k,
    grad_v,
    grad_columns,
    scale,
    length,
    chunk,
    chunks,
    heads,
    groups,
    keys,
    values,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """grad_k [B, T, H, K], one for every value head, grad_v [B, T, H, V], and grad_columns [B, T, H], M's columns."""
    tile, start, size, head, group, _ = place(tl.cdiv(chunk, BLOCK), length, chunk, chunks, heads, groups)
    first = tile * BLOCK
    if first >= size:
        return
    own, c, n = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    s = first + own
    rows, tall, wide = s < size, c < keys, n < values
    q += (start * groups + group) * keys
    k += (start * groups + group) * keys
    v += (start * heads + head) * values
    grad_o += (start * heads + head) * values
    high += start * heads + head
    low += start * heads + head
    key = tl.load(k + s[:, None] * (groups * keys) + c[None, :], mask=rows[:, None] & tall[None, :], other=0.0)
    value = tl.load(v + s[:, None] * (heads * values) + n[None, :], mask=rows[:, None] & wide[None, :], other=0.0)
    earlier_high, earlier_low = load_sums(high, low, s * heads, rows)
    acc_k = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    acc_v = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for base in tl.range(first, size, BLOCK):
        m = base + own
        live = m < size
        query = tl.load(q + m[:, None] * (groups * keys) + c[None, :], mask=live[:, None] & tall[None, :], other=0.0)
        do = tl.load(grad_o + m[:, None] * (heads * values) + n[None, :], mask=live[:, None] & wide[None, :], other=0.0)
        later_high, later_low = load_sums(high, low, m * heads, live)
        # transposed: keys down, queries across
        decay = decayed(later_high[None, :], later_low[None, :], earlier_high[:, None], earlier_low[:, None])
        decay = tl.where((m[None, :] >= s[:, None]) & live[None, :], decay, 0.0) * scale
        scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * decay
        grad = tl.dot(value, tl.trans(do), input_precision=PRECISION)
        acc_v = tl.dot(scores.to(do.dtype), do, acc_v, input_precision=PRECISION)
        sums += tl.sum(tl.where(m[None, :] > s[:, None], grad * scores, 0.0), 1)
        acc_k = tl.dot((grad * decay).to(query.dtype), query, acc_k, input_precision=PRECISION)
    grad_k += (start * heads + head) * keys + s[:, None] * (heads * keys) + c[None, :]
    tl.store(grad_k, acc_k.to(grad_k.dtype.element_ty), mask=rows[:, None] & tall[None, :])
    grad_v += (start * heads + head) * values + s[:, None] * (heads * values) + n[None, :]
    tl.store(grad_v, acc_v.to(grad_v.dtype.element_ty), mask=rows[:, None] & wide[None, :])
    tl.store(grad_columns + start * heads + head + s * heads, sums, mask=rows)


@triton.jit
def entering_states(
    q,
    high,
    low,
    grad_o,
    grad_states,
    scale,
    length,
    chunk,
    chunks,
    heads,
    groups,
    keys,
    values,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """grad_states [B, chunks, H, K, V], in tiles of BLOCK_N x BLOCK_N."""
    across = tl.cdiv(values, BLOCK_N)
    tiles = across * tl.cdiv(keys, BLOCK_N)
    tile, start, size, head, group, entered = place(tiles, length, chunk, chunks, heads, groups)
    own = tl.arange(0, BLOCK)
    c = tile // across * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
    tall, wide = c < keys, n < values
    q += (start * groups + group) * keys
    grad_o += (start * heads + head) * values
    high += start * heads + head
    low += start * heads + head
    acc = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    for base in tl.range(0, size, BLOCK):
        m = base + own
        live = m < size
        query = tl.load(q + m[:, None] * (groups * keys) + c[None, :], mask=live[:, None] & tall[None, :], other=0.0)
        do = tl.load(grad_o + m[:, None] * (heads * values) + n[None, :], mask=live[:, None] & wide[None, :], other=0.0)
        later_high, later_low = load_sums(high, low, m * heads, live)
        query = (query.to(tl.float32) * (scale * tl.exp2(later_high + later_low))[:, None]).to(do.dtype)
        acc = tl.dot(tl.trans(query), do, acc, input_precision=PRECISION)
    grad_states += entered * keys * values + c[:, None] * values + n[None, :]
    tl.store(grad_states, acc.to(grad_states.dtype.element_ty), mask=tall[:, None] & wide[None, :])
