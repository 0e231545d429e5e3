"""Device code of the gradients inside chunks, in Triton, where one tile holds a chunk: all of them in one launch.

The equations are those of backward_tiled.py. A program reads everything of a chunk and query head once,
and what is not an input or a gradient stays on the chip, sums for the log decay included.
"""

import triton
import triton.language as tl

from .backward_tiled import load_gradient, of_program, slope_of
from .forward import between, log_decays


@triton.jit(do_not_specialize=["length", "chunk", "chunks", "heads"])
def whole(
    q, k, v, g, states, gate, grad_o, grad_q, grad_k, grad_v, grad_g, grad_states, grad_gate, scale,
    length, chunk, chunks, heads, ratio, keys, values,
    SIGMOID: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """grad_q, grad_k [B, T, groups, K], grad_v, grad_gate [B, T, H, V], grad_g [B, T, H], grad_states
    [B, chunks, H, K, V]."""
    groups = heads // ratio
    _, start, size, number, group = of_program(1, length, chunk, chunks, groups)
    # each pointer at the chunk's first step, of the first value head
    head = group * ratio
    q += (start * groups + group) * keys
    k += (start * groups + group) * keys
    v += (start * heads + head) * values
    grad_o += (start * heads + head) * values
    grad_q += (start * groups + group) * keys
    grad_k += (start * groups + group) * keys
    grad_v += (start * heads + head) * values
    if g is not None:
        g += start * heads + head
        grad_g += start * heads + head
    if states is not None:
        states += (number * heads + head) * keys * values
        grad_states += (number * heads + head) * keys * values
    if gate is not None:
        gate += (start * heads + head) * values
        grad_gate += (start * heads + head) * values
    own, c, n = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    live, tall, wide = own < size, c < keys, n < values
    narrow, broad = live[:, None] & tall[None, :], live[:, None] & wide[None, :]
    at_keys = own[:, None] * (groups * keys) + c[None, :]
    at_values = own[:, None] * (heads * values) + n[None, :]
    at_states, inside = c[:, None] * values + n[None, :], tall[:, None] & wide[None, :]
    query = tl.load(q + at_keys, mask=narrow, other=0.0)
    key = tl.load(k + at_keys, mask=narrow, other=0.0)
    acc_q = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    acc_k = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    # value heads one after another: loading ahead would take buffers that the plan does not count
    for _ in tl.range(0, ratio, num_stages=1):
        value = tl.load(v + at_values, mask=broad, other=0.0)
        do = load_gradient(grad_o, gate, at_values, broad, SIGMOID)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        grad = tl.dot(do, tl.trans(value), input_precision=PRECISION)
        if g is not None:
            decays = log_decays(g + own * heads, live)
            weight = between(decays)
            grad *= weight
            pairs = tl.where(own[:, None] > own[None, :], grad * scores, 0.0)
            change = tl.sum(pairs, 1) - tl.sum(tl.trans(pairs), 1)
            scores *= weight
        held = tl.where(own[:, None] >= own[None, :], scores, 0.0).to(value.dtype)
        slant = tl.where(own[:, None] >= own[None, :], grad, 0.0).to(key.dtype)
        acc_v = tl.dot(tl.trans(held), do, input_precision=PRECISION) * scale
        tl.store(grad_v + at_values, acc_v.to(grad_v.dtype.element_ty), mask=broad)
        acc_k = tl.dot(tl.trans(slant), query, acc_k, input_precision=PRECISION)
        acc_q = tl.dot(slant, key, acc_q, input_precision=PRECISION)
        if gate is not None:
            o = tl.dot(held, value, input_precision=PRECISION)
        if states is not None:
            enter = tl.exp2(tl.cumsum(decays, 0)) if g is not None else tl.full([BLOCK], 1.0, tl.float32)
            entering = (query.to(tl.float32) * enter[:, None]).to(query.dtype)
            acc_s = tl.dot(tl.trans(entering), do, input_precision=PRECISION) * scale
            tl.store(grad_states + at_states, acc_s.to(grad_states.dtype.element_ty), mask=inside)
            state = tl.load(states + at_states, mask=inside, other=0.0).to(query.dtype)
            read = tl.dot(do, tl.trans(state), input_precision=PRECISION) * enter[:, None]
            acc_q += read
            if g is not None:
                change += tl.sum(read * query.to(tl.float32), 1)
            if gate is not None:
                o += tl.dot(query, state, input_precision=PRECISION) * enter[:, None]
            states += keys * values
            grad_states += keys * values
        if g is not None:
            total = tl.cumsum(change.to(tl.float64) * scale, 0, reverse=True)
            tl.store(grad_g + own * heads, total.to(grad_g.dtype.element_ty), mask=live)
            g += 1
            grad_g += 1
        if gate is not None:
            # read again rather than kept
            opening = tl.load(gate + at_values, mask=broad, other=0.0).to(tl.float32)
            given = tl.load(grad_o + at_values, mask=broad, other=0.0).to(tl.float32)
            o *= given * slope_of(opening, SIGMOID) * scale
            tl.store(grad_gate + at_values, o.to(grad_gate.dtype.element_ty), mask=broad)
            gate += values
            grad_gate += values
        v += values
        grad_o += values
        grad_v += values
    acc_q *= scale
    acc_k *= scale
    tl.store(grad_q + at_keys, acc_q.to(grad_q.dtype.element_ty), mask=narrow)
    tl.store(grad_k + at_keys, acc_k.to(grad_k.dtype.element_ty), mask=narrow)
