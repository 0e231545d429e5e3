"""Device code of the gradients inside chunks, in Triton, where one tile holds a chunk: all of them in one launch.

The equations are those of backward_tiled.py. A program reads everything of a chunk and query head once, and what is not
an input or a gradient stays on the chip, the sums for the log decays included.
"""

import triton
import triton.language as tl

from .backward_tiled import activation_grad, chunk_coords, load_do
from .forward import causal_decay, load_log_decays


@triton.jit(do_not_specialize=["length", "chunk", "chunks", "heads"])
def intra_chunk_bwd_single_tile(
    q, k, v, g, states, gate, grad_o, dq, dk, dv, dg, dstates, dgate, scale,
    length, chunk, chunks, heads, ratio, keys, values,
    SIGMOID: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid (chunks * B * groups,). Arguments are those of `intra_chunk_bwd`, and dg [B, T, H] is written here."""
    groups = heads // ratio
    coords = chunk_coords(1, length, chunk, chunks, groups)
    start, size, number, group = coords.start, coords.size, coords.chunk, coords.group
    # each pointer at the chunk's first step, of the first value head
    head = group * ratio
    q += (start * groups + group) * keys
    k += (start * groups + group) * keys
    v += (start * heads + head) * values
    grad_o += (start * heads + head) * values
    dq += (start * groups + group) * keys
    dk += (start * groups + group) * keys
    dv += (start * heads + head) * values
    if g is not None:
        g += start * heads + head
        dg += start * heads + head
    if states is not None:
        states += (number * heads + head) * keys * values
        dstates += (number * heads + head) * keys * values
    if gate is not None:
        gate += (start * heads + head) * values
        dgate += (start * heads + head) * values
    own, c, n = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    live, in_keys, in_values = own < size, c < keys, n < values
    key_mask, value_mask = live[:, None] & in_keys[None, :], live[:, None] & in_values[None, :]
    at_keys = own[:, None] * (groups * keys) + c[None, :]
    at_values = own[:, None] * (heads * values) + n[None, :]
    at_states, inside = c[:, None] * values + n[None, :], in_keys[:, None] & in_values[None, :]
    query = tl.load(q + at_keys, mask=key_mask, other=0.0)
    key = tl.load(k + at_keys, mask=key_mask, other=0.0)
    acc_q = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    acc_k = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    # value heads one after another: loading ahead would take buffers that the plan does not count
    for _ in tl.range(0, ratio, num_stages=1):
        value = tl.load(v + at_values, mask=value_mask, other=0.0)
        do = load_do(grad_o, gate, at_values, value_mask, SIGMOID)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        grad = tl.dot(do, tl.trans(value), input_precision=PRECISION)
        if g is not None:
            decays = load_log_decays(g + own * heads, live)
            weight = causal_decay(decays)
            grad *= weight
            pairs = tl.where(own[:, None] > own[None, :], grad * scores, 0.0)
            change = tl.sum(pairs, 1) - tl.sum(tl.trans(pairs), 1)
            scores *= weight
        p = tl.where(own[:, None] >= own[None, :], scores, 0.0).to(value.dtype)
        da = tl.where(own[:, None] >= own[None, :], grad, 0.0).to(key.dtype)
        acc_v = tl.dot(tl.trans(p), do, input_precision=PRECISION) * scale
        tl.store(dv + at_values, acc_v.to(dv.dtype.element_ty), mask=value_mask)
        acc_k = tl.dot(tl.trans(da), query, acc_k, input_precision=PRECISION)
        acc_q = tl.dot(da, key, acc_q, input_precision=PRECISION)
        if gate is not None:
            o = tl.dot(p, value, input_precision=PRECISION)
        if states is not None:
            enter = tl.exp2(tl.cumsum(decays, 0)) if g is not None else tl.full([BLOCK], 1.0, tl.float32)
            decayed_query = (query.to(tl.float32) * enter[:, None]).to(query.dtype)
            acc_s = tl.dot(tl.trans(decayed_query), do, input_precision=PRECISION) * scale
            tl.store(dstates + at_states, acc_s.to(dstates.dtype.element_ty), mask=inside)
            state = tl.load(states + at_states, mask=inside, other=0.0).to(query.dtype)
            read = tl.dot(do, tl.trans(state), input_precision=PRECISION) * enter[:, None]
            acc_q += read
            if g is not None:
                change += tl.sum(read * query.to(tl.float32), 1)
            if gate is not None:
                o += tl.dot(query, state, input_precision=PRECISION) * enter[:, None]
            states += keys * values
            dstates += keys * values
        if g is not None:
            total = tl.cumsum(change.to(tl.float64) * scale, 0, reverse=True)
            tl.store(dg + own * heads, total.to(dg.dtype.element_ty), mask=live)
            g += 1
            dg += 1
        if gate is not None:
            # read again rather than kept
            gate_in = tl.load(gate + at_values, mask=value_mask, other=0.0).to(tl.float32)
            given = tl.load(grad_o + at_values, mask=value_mask, other=0.0).to(tl.float32)
            o *= given * activation_grad(gate_in, SIGMOID) * scale
            tl.store(dgate + at_values, o.to(dgate.dtype.element_ty), mask=value_mask)
            gate += values
            dgate += values
        v += values
        grad_o += values
        dv += values
    acc_q *= scale
    acc_k *= scale
    tl.store(dq + at_keys, acc_q.to(dq.dtype.element_ty), mask=key_mask)
    tl.store(dk + at_keys, acc_k.to(dk.dtype.element_ty), mask=key_mask)
