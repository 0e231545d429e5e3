"""Device code of the gradients inside chunks, in Triton, where a chunk takes several tiles of steps.

do is the gradient of the output before its gate. With D the decays between steps, P = (Q K^T) D on and below the
diagonal, and e the decay from the chunk's start: dP = do V^T, dA = dP D on and below the diagonal, and

    o = scale (P V + e Q S)    dq = scale (dA K + e do S^T)    dk = scale dA^T Q    dv = scale P^T do
    dS = scale (e Q)^T do      do = activation(gate) grad_o    dgate = activation'(gate) o grad_o

A step's log decay takes part in every pair whose window it lies in: with M = scale P dP, its gradient is the sum over
later steps of the chunk, its own included, of M's rows (and of the state's part) less M's columns. Both come from the
same products, so what cancels between them cancels to float32's last bits.

One launch, in which each tile of a chunk has a program for its queries and one for its keys and values, and the state
one a tile of it: they run at about the same time and share what they read in the L2 cache. A program serves all value
heads of a query head, so that gradients of queries and keys are sums in registers. Decays are formed as in the forward
pass. Then `decays` sums M's rows and columns.
"""

import triton
import triton.language as tl

from .forward import activate, between, log_decays


@triton.jit
def of_program(programs, length, chunk, chunks, groups):
    """Of a program: its number among the `programs` of a chunk and query head, that chunk's first step of all, its
    size and its number of all, and the query head."""
    program = tl.program_id(0)
    group = program // programs % groups
    number = program // programs // groups % chunks
    batch = (program // programs // groups // chunks).to(tl.int64)
    size = tl.minimum(chunk, length - number * chunk)
    return program % programs, batch * length + number * chunk, size, batch * chunks + number, group


@triton.jit
def slope_of(gate, SIGMOID: tl.constexpr):
    """The derivative of the activation."""
    sigmoid = tl.sigmoid(gate)
    return sigmoid * (1 - sigmoid) if SIGMOID else sigmoid * (1 + gate * (1 - sigmoid))


@triton.jit
def load_gradient(grad_o, gate, offset, live, SIGMOID: tl.constexpr):
    """do, in the dtype of grad_o, the inputs'."""
    do = tl.load(grad_o + offset, mask=live, other=0.0)
    if gate is not None:
        opening = tl.load(gate + offset, mask=live, other=0.0).to(tl.float32)
        do = (do.to(tl.float32) * activate(opening, SIGMOID)).to(do.dtype)
    return do


@triton.jit
def behind_each(g, m, heads, size, BLOCK: tl.constexpr):
    """Of each of BLOCK steps m the log decay of the next, 0 for that behind the last: their sums from the end are those
    from each step, its own decay left out."""
    return log_decays(g + (m + 1) * heads, (tl.arange(0, BLOCK) + 1 < BLOCK) & (m + 1 < size))


@triton.jit(do_not_specialize=["length", "chunk", "chunks", "heads"])
def gradients(
    q, k, v, g, states, gate, grad_o, grad_q, grad_k, grad_v, grad_states, grad_gate, rows, columns, scale,
    length, chunk, chunks, heads, ratio, keys, values,
    SIGMOID: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grad_q, grad_k [B, T, groups, K], grad_v, grad_gate [B, T, H, V], grad_states [B, chunks, H, K, V] in tiles of
    BLOCK_N x BLOCK_N, and M's rows and columns [B, T, H], both without the diagonal."""
    groups = heads // ratio
    tiles = tl.cdiv(chunk, BLOCK)
    programs = 2 * tiles
    if states is not None:
        programs += tl.cdiv(keys, BLOCK_N) * tl.cdiv(values, BLOCK_N)
    program, start, size, number, group = of_program(programs, length, chunk, chunks, groups)
    # each pointer at the chunk's first step, of the first value head
    head = group * ratio
    q += (start * groups + group) * keys
    k += (start * groups + group) * keys
    v += (start * heads + head) * values
    grad_o += (start * heads + head) * values
    if g is not None:
        g += start * heads + head
    if states is not None:
        states += (number * heads + head) * keys * values
    if gate is not None:
        gate += (start * heads + head) * values
    if program < tiles:
        # the last tile has the most to do: it starts first
        tile = tiles - 1 - program
        if tile * BLOCK < size:
            if g is not None:
                rows += start * heads + head
            if gate is not None:
                grad_gate += (start * heads + head) * values
            grad_q += (start * groups + group) * keys
            queries(
                q, k, v, g, states, gate, grad_o, grad_q, grad_gate, rows, scale, tile, size, heads, ratio, keys,
                values, SIGMOID, PRECISION, BLOCK, BLOCK_K, BLOCK_V, BLOCK_N, STAGES,
            )  # fmt: skip
    elif program < 2 * tiles:
        tile = program - tiles
        if tile * BLOCK < size:
            if g is not None:
                columns += start * heads + head
            grad_k += (start * groups + group) * keys
            grad_v += (start * heads + head) * values
            keys_and_values(
                q, k, v, g, gate, grad_o, grad_k, grad_v, columns, scale, tile, size, heads, ratio, keys, values,
                SIGMOID, PRECISION, BLOCK, BLOCK_K, BLOCK_V, STAGES,
            )  # fmt: skip
    elif states is not None:
        grad_states += (number * heads + head) * keys * values
        entering_states(
            q, g, gate, grad_o, grad_states, scale, program - 2 * tiles, size, heads, ratio, keys, values,
            SIGMOID, PRECISION, BLOCK, BLOCK_N, STAGES,
        )  # fmt: skip


@triton.jit
def queries(
    q, k, v, g, states, gate, grad_o, grad_q, grad_gate, rows, scale, tile, size, heads, ratio, keys, values,
    SIGMOID: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grad_q, grad_gate and M's rows of a tile: over all keys up to its own."""
    groups = heads // ratio
    own, c, n = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    m = tile * BLOCK + own
    live, tall, wide = m < size, c < keys, n < values
    narrow, broad = live[:, None] & tall[None, :], live[:, None] & wide[None, :]
    to_keys = own[:, None] * (groups * keys) + c[None, :]
    to_values = own[:, None] * (heads * values) + n[None, :]
    key_tile, value_tile = BLOCK * groups * keys, BLOCK * heads * values
    query = tl.load(q + tile * key_tile + to_keys, mask=narrow, other=0.0)
    acc = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    for _ in range(ratio):
        do = load_gradient(grad_o, gate, tile * value_tile + to_values, broad, SIGMOID)
        within = tl.zeros([BLOCK], tl.float32)
        if g is not None:
            decays = log_decays(g + m * heads, live)
            within = tl.cumsum(decays, 0)
        o = tl.zeros([BLOCK, BLOCK_V], tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        passed = tl.zeros([], tl.float32)
        for back in tl.range(0, tile, num_stages=STAGES):
            earlier = tile - 1 - back
            key = tl.load(k + earlier * key_tile + to_keys, mask=tall[None, :], other=0.0)
            value = tl.load(v + earlier * value_tile + to_values, mask=wide[None, :], other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
            grad = tl.dot(do, tl.trans(value), input_precision=PRECISION)
            if g is not None:
                behind = behind_each(g, earlier * BLOCK + own, heads, size, BLOCK)
                weight = tl.exp2(within)[:, None] * tl.exp2(passed + tl.cumsum(behind, 0, reverse=True))[None, :]
                passed += tl.sum(behind, 0) + log_decays(g + earlier * BLOCK * heads, True)
                grad *= weight
                sums += tl.sum(grad * scores, 1)
                scores *= weight
            if gate is not None:
                o = tl.dot(scores.to(value.dtype), value, o, input_precision=PRECISION)
            acc = tl.dot(grad.to(key.dtype), key, acc, input_precision=PRECISION)
        key = tl.load(k + tile * key_tile + to_keys, mask=narrow, other=0.0)
        value = tl.load(v + tile * value_tile + to_values, mask=broad, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        grad = tl.dot(do, tl.trans(value), input_precision=PRECISION)
        before = own[:, None] > own[None, :]
        if g is not None:
            weight = between(decays)
            grad *= weight
            sums += tl.sum(tl.where(before, grad * scores, 0.0), 1)
            scores *= weight
        scores = tl.where(own[:, None] >= own[None, :], scores, 0.0)
        grad = tl.where(own[:, None] >= own[None, :], grad, 0.0)
        if gate is not None:
            o = tl.dot(scores.to(value.dtype), value, o, input_precision=PRECISION)
        acc = tl.dot(grad.to(key.dtype), key, acc, input_precision=PRECISION)
        if states is not None:
            enter = tl.exp2(passed + within)
            read = tl.zeros([BLOCK, BLOCK_K], tl.float32)
            for base in tl.range(0, values, BLOCK_N):
                u = base + tl.arange(0, BLOCK_N)
                some = u < values
                state = tl.load(
                    states + c[:, None] * values + u[None, :], mask=tall[:, None] & some[None, :], other=0.0
                )
                at = m[:, None] * (heads * values) + u[None, :]
                part = load_gradient(grad_o, gate, at, live[:, None] & some[None, :], SIGMOID)
                read = tl.dot(part, tl.trans(state.to(part.dtype)), read, input_precision=PRECISION)
            read *= enter[:, None]
            sums += tl.sum(read * query.to(tl.float32), 1)
            acc += read
            if gate is not None:
                found = tl.zeros([BLOCK, BLOCK_V], tl.float32)
                for base in tl.range(0, keys, BLOCK_N):
                    u = base + tl.arange(0, BLOCK_N)
                    some = u < keys
                    state = tl.load(
                        states + u[:, None] * values + n[None, :], mask=some[:, None] & wide[None, :], other=0.0
                    )
                    at = m[:, None] * (groups * keys) + u[None, :]
                    part = tl.load(q + at, mask=live[:, None] & some[None, :], other=0.0)
                    found = tl.dot(part, state.to(part.dtype), found, input_precision=PRECISION)
                o += found * enter[:, None]
            states += keys * values
        if gate is not None:
            # read again rather than kept
            opening = tl.load(gate + tile * value_tile + to_values, mask=broad, other=0.0).to(tl.float32)
            given = tl.load(grad_o + tile * value_tile + to_values, mask=broad, other=0.0).to(tl.float32)
            o *= given * slope_of(opening, SIGMOID) * scale
            tl.store(grad_gate + tile * value_tile + to_values, o.to(grad_gate.dtype.element_ty), mask=broad)
            gate += values
            grad_gate += values
        if g is not None:
            tl.store(rows + m * heads, sums * scale, mask=live)
            g += 1
            rows += 1
        v += values
        grad_o += values
    acc *= scale
    tl.store(grad_q + tile * key_tile + to_keys, acc.to(grad_q.dtype.element_ty), mask=narrow)


@triton.jit
def keys_and_values(
    q, k, v, g, gate, grad_o, grad_k, grad_v, columns, scale, tile, size, heads, ratio, keys, values,
    SIGMOID: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """grad_k, grad_v and M's columns of a tile: over all queries from its own on. Tiles of pairs lie transposed, keys
    down and queries across."""
    groups = heads // ratio
    own, c, n = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    s = tile * BLOCK + own
    live, tall, wide = s < size, c < keys, n < values
    narrow, broad = live[:, None] & tall[None, :], live[:, None] & wide[None, :]
    to_keys = own[:, None] * (groups * keys) + c[None, :]
    to_values = own[:, None] * (heads * values) + n[None, :]
    key_tile, value_tile = BLOCK * groups * keys, BLOCK * heads * values
    key = tl.load(k + tile * key_tile + to_keys, mask=narrow, other=0.0)
    acc = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    for _ in range(ratio):
        value = tl.load(v + tile * value_tile + to_values, mask=broad, other=0.0)
        query = tl.load(q + tile * key_tile + to_keys, mask=narrow, other=0.0)
        do = load_gradient(grad_o, gate, tile * value_tile + to_values, broad, SIGMOID)
        scores = tl.dot(key, tl.trans(query), input_precision=PRECISION)
        grad = tl.dot(value, tl.trans(do), input_precision=PRECISION)
        sums = tl.zeros([BLOCK], tl.float32)
        if g is not None:
            weight = tl.trans(between(log_decays(g + s * heads, live)))
            grad *= weight
            sums += tl.sum(tl.where(own[None, :] > own[:, None], grad * scores, 0.0), 1)
            scores *= weight
            leaving = tl.exp2(tl.cumsum(behind_each(g, s, heads, size, BLOCK), 0, reverse=True))
        scores = tl.where(own[None, :] >= own[:, None], scores, 0.0)
        grad = tl.where(own[None, :] >= own[:, None], grad, 0.0)
        acc_v = tl.dot(scores.to(do.dtype), do, input_precision=PRECISION)
        acc = tl.dot(grad.to(query.dtype), query, acc, input_precision=PRECISION)
        passed = tl.zeros([], tl.float32)
        for later in tl.range(tile + 1, tl.cdiv(size, BLOCK), num_stages=STAGES):
            m = later * BLOCK + own
            old = m < size
            query = tl.load(q + later * key_tile + to_keys, mask=old[:, None] & tall[None, :], other=0.0)
            do = load_gradient(grad_o, gate, later * value_tile + to_values, old[:, None] & wide[None, :], SIGMOID)
            scores = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            grad = tl.dot(value, tl.trans(do), input_precision=PRECISION)
            if g is not None:
                decays = log_decays(g + m * heads, old)
                weight = leaving[:, None] * tl.exp2(passed + tl.cumsum(decays, 0))[None, :]
                passed += tl.sum(decays, 0)
                grad *= weight
                sums += tl.sum(grad * scores, 1)
                scores *= weight
            acc_v = tl.dot(scores.to(do.dtype), do, acc_v, input_precision=PRECISION)
            acc = tl.dot(grad.to(query.dtype), query, acc, input_precision=PRECISION)
        acc_v *= scale
        tl.store(grad_v + tile * value_tile + to_values, acc_v.to(grad_v.dtype.element_ty), mask=broad)
        if g is not None:
            tl.store(columns + s * heads, sums * scale, mask=live)
            g += 1
            columns += 1
        if gate is not None:
            gate += values
        v += values
        grad_o += values
        grad_v += values
    acc *= scale
    tl.store(grad_k + tile * key_tile + to_keys, acc.to(grad_k.dtype.element_ty), mask=narrow)


@triton.jit
def entering_states(
    q, g, gate, grad_o, grad_states, scale, tile, size, heads, ratio, keys, values,
    SIGMOID: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grad_states of a tile of BLOCK_N x BLOCK_N."""
    groups = heads // ratio
    across = tl.cdiv(values, BLOCK_N)
    own = tl.arange(0, BLOCK)
    c = tile // across * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
    tall, wide = c < keys, n < values
    for _ in range(ratio):
        acc = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
        passed = tl.zeros([], tl.float32)
        for base in tl.range(0, size, BLOCK, num_stages=STAGES):
            m = base + own
            live = m < size
            query = tl.load(
                q + m[:, None] * (groups * keys) + c[None, :], mask=live[:, None] & tall[None, :], other=0.0
            )
            at = m[:, None] * (heads * values) + n[None, :]
            do = load_gradient(grad_o, gate, at, live[:, None] & wide[None, :], SIGMOID)
            if g is not None:
                decays = log_decays(g + m * heads, live)
                enter = tl.exp2(passed + tl.cumsum(decays, 0))
                passed += tl.sum(decays, 0)
                query = (query.to(tl.float32) * enter[:, None]).to(query.dtype)
            acc = tl.dot(tl.trans(query), do, acc, input_precision=PRECISION)
        acc *= scale
        tl.store(
            grad_states + c[:, None] * values + n[None, :],
            acc.to(grad_states.dtype.element_ty),
            mask=tall[:, None] & wide[None, :],
        )
        if g is not None:
            g += 1
        if gate is not None:
            gate += values
        grad_o += values
        grad_states += keys * values


@triton.jit(do_not_specialize=["length", "chunk", "chunks", "heads"])
def decays(rows, columns, grad_g, length, chunk, chunks, heads, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr):
    """grad_g [B, T, H], of a chunk and BLOCK_H heads: sums from the chunk's end of what each step's sum gets."""
    _, start, size, _, block = of_program(1, length, chunk, chunks, tl.cdiv(heads, BLOCK_H))
    m, head = tl.arange(0, BLOCK_C), block * BLOCK_H + tl.arange(0, BLOCK_H)
    at = (start + m)[:, None] * heads + head[None, :]
    live = (m < size)[:, None] & (head < heads)[None, :]
    change = tl.load(rows + at, mask=live, other=0.0).to(tl.float64)
    change -= tl.load(columns + at, mask=live, other=0.0).to(tl.float64)
    change = tl.cumsum(change, 0, reverse=True)
    tl.store(grad_g + at, change.to(grad_g.dtype.element_ty), mask=live)
