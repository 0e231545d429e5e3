"""Device code of the gradients inside chunks, in Triton, where a chunk takes several tiles of steps.

do is the gradient of the output before its gate. With D the decays between steps, P = (Q K^T) D on and below the
diagonal, and e the decay from the chunk's start: dP = do V^T, dA = dP D on and below the diagonal, and

    o = scale (P V + e Q S)    dq = scale (dA K + e do S^T)    dk = scale dA^T Q    dv = scale P^T do
    dS = scale (e Q)^T do      do = activation(gate) grad_o    dgate = activation'(gate) o grad_o

A step's log decay takes part in every pair whose window it lies in: with M = scale P dP, its gradient is the sum over
later steps of the chunk, its own included, of M's rows (and of the state's part) less M's columns. Both come from the
same products, so what cancels between them cancels to float32's last bits.

One launch, in which each tile of a chunk has a program for its queries and one for its keys and values, and the state
has one for each tile of its own: they run at about the same time and share what they read in the L2 cache. A program
serves all value heads of a query head, so that dq and dk are sums in registers. Decays are formed as in the forward
pass. Then `intra_chunk_decay_grad` sums M's rows and columns.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.compat import aggregate

from .forward import activate, causal_decay, load_log_decays


class Inputs(NamedTuple):
    """Pointers at a chunk's first step, at the first value head of a query head; g, states and gate may be None."""

    q: tl.tensor
    k: tl.tensor
    v: tl.tensor
    g: tl.tensor | None
    states: tl.tensor | None
    gate: tl.tensor | None
    grad_o: tl.tensor


class QueryGrads(NamedTuple):
    """Pointers of what a program of queries writes; the last two beside a gate and decays."""

    dq: tl.tensor
    dgate: tl.tensor | None
    row_sums: tl.tensor | None


class KeyGrads(NamedTuple):
    """Pointers of what a program of keys and values writes; the last beside decays."""

    dk: tl.tensor
    dv: tl.tensor
    column_sums: tl.tensor | None


@aggregate
class Sizes:
    """Steps of the chunk, value heads, those of a query head, widths."""

    size: tl.tensor
    heads: tl.tensor
    ratio: tl.tensor | tl.constexpr
    keys: tl.tensor
    values: tl.tensor

    @triton.constexpr_function
    def __init__(self, size, heads, ratio, keys, values):
        self.size = size
        self.heads = heads
        # a 1 that was compiled in comes without its wrapper
        self.ratio = tl.constexpr(ratio) if isinstance(ratio, int) else ratio
        self.keys = keys
        self.values = values


@aggregate
class Constants:
    """What the kernel is compiled for: tiles of BLOCK steps, of the state BLOCK_N x BLOCK_N, whole widths."""

    SIGMOID: tl.constexpr
    PRECISION: tl.constexpr
    BLOCK: tl.constexpr
    BLOCK_K: tl.constexpr
    BLOCK_V: tl.constexpr
    BLOCK_N: tl.constexpr
    STAGES: tl.constexpr

    @triton.constexpr_function
    def __init__(self, SIGMOID, PRECISION, BLOCK, BLOCK_K, BLOCK_V, BLOCK_N, STAGES):
        self.SIGMOID = tl.constexpr(SIGMOID)
        self.PRECISION = tl.constexpr(PRECISION)
        self.BLOCK = tl.constexpr(BLOCK)
        self.BLOCK_K = tl.constexpr(BLOCK_K)
        self.BLOCK_V = tl.constexpr(BLOCK_V)
        self.BLOCK_N = tl.constexpr(BLOCK_N)
        self.STAGES = tl.constexpr(STAGES)


class ChunkCoords(NamedTuple):
    """A program's number among those of a chunk and query head, the chunk's first step of all, its size and its number
    of all, and the query head."""

    program: tl.tensor
    start: tl.tensor
    size: tl.tensor
    chunk: tl.tensor
    group: tl.tensor


@triton.jit
def chunk_coords(programs, length, chunk, chunks, groups):
    """Return this program's coordinates, of `programs` a chunk and query head."""
    program = tl.program_id(0)
    group = program // programs % groups
    number = program // programs // groups % chunks
    batch = (program // programs // groups // chunks).to(tl.int64)
    size = tl.minimum(chunk, length - number * chunk)
    return ChunkCoords(
        program=program % programs,
        start=batch * length + number * chunk,
        size=size,
        chunk=batch * chunks + number,
        group=group,
    )


@triton.jit
def activation_grad(gate, SIGMOID: tl.constexpr):
    """Return the derivative of the gate's activation."""
    sigmoid = tl.sigmoid(gate)
    return sigmoid * (1 - sigmoid) if SIGMOID else sigmoid * (1 + gate * (1 - sigmoid))


@triton.jit
def load_do(grad_o, gate, offset, live, SIGMOID: tl.constexpr):
    """Load do, in the dtype of grad_o, which is the inputs'."""
    do = tl.load(grad_o + offset, mask=live, other=0.0)
    if gate is not None:
        gate_in = tl.load(gate + offset, mask=live, other=0.0).to(tl.float32)
        do = (do.to(tl.float32) * activate(gate_in, SIGMOID)).to(do.dtype)
    return do


@triton.jit
def load_next_log_decays(g, m, heads, size, BLOCK: tl.constexpr):
    """Load, for each of BLOCK steps m, the log decay of the next step, 0 behind the last one.

    Summed from the end they give each step's log decay to the end, its own left out.
    """
    return load_log_decays(g + (m + 1) * heads, (tl.arange(0, BLOCK) + 1 < BLOCK) & (m + 1 < size))


@triton.jit(do_not_specialize=["length", "chunk", "chunks", "heads"])
def intra_chunk_bwd(
    q, k, v, g, states, gate, grad_o, dq, dk, dv, dstates, dgate, row_sums, column_sums, scale,
    length, chunk, chunks, heads, ratio, keys, values,
    SIGMOID: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (programs * chunks * B * groups,), programs: two a tile of BLOCK steps, and one a tile of the state.

    q, k       [B, T, groups, K]
    v, gate    [B, T, H, V]; gate or None
    g          [B, T, H], or None
    states     [B, chunks, H, K, V], or None
    grad_o     [B, T, H, V]
    dq, dk     [B, T, groups, K], written
    dv, dgate  [B, T, H, V], written
    dstates    [B, chunks, H, K, V], written in tiles of BLOCK_N x BLOCK_N
    row_sums, column_sums  [B, T, H], float32, written: the sums of M's rows and columns, without the diagonal
    """
    groups = heads // ratio
    tiles = tl.cdiv(chunk, BLOCK)
    programs = 2 * tiles
    if states is not None:
        programs += tl.cdiv(keys, BLOCK_N) * tl.cdiv(values, BLOCK_N)
    program, start, size, number, group = chunk_coords(programs, length, chunk, chunks, groups)
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
    inputs = Inputs(q=q, k=k, v=v, g=g, states=states, gate=gate, grad_o=grad_o)
    sizes = Sizes(size, heads, ratio, keys, values)
    constants = Constants(SIGMOID, PRECISION, BLOCK, BLOCK_K, BLOCK_V, BLOCK_N, STAGES)
    if program < tiles:
        # the last tile has the most to do: it starts first
        tile = tiles - 1 - program
        if tile * BLOCK < size:
            if g is not None:
                row_sums += start * heads + head
            if gate is not None:
                dgate += (start * heads + head) * values
            dq += (start * groups + group) * keys
            query_grads(inputs, QueryGrads(dq=dq, dgate=dgate, row_sums=row_sums), scale, tile, sizes, constants)
    elif program < 2 * tiles:
        tile = program - tiles
        if tile * BLOCK < size:
            if g is not None:
                column_sums += start * heads + head
            dk += (start * groups + group) * keys
            dv += (start * heads + head) * values
            key_grads(inputs, KeyGrads(dk=dk, dv=dv, column_sums=column_sums), scale, tile, sizes, constants)
    elif states is not None:
        dstates += (number * heads + head) * keys * values
        state_grads(inputs, dstates, scale, program - 2 * tiles, sizes, constants)


@triton.jit
def query_grads(inputs, grads, scale, tile, sizes, constants):
    """Compute dq, dgate and the sums of M's rows of a tile, over all keys up to its own."""
    q, k, v, g, states, gate, grad_o = (
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.states, inputs.gate, inputs.grad_o,
    )  # fmt: skip
    dgate, row_sums = grads.dgate, grads.row_sums
    size, heads, keys, values = sizes.size, sizes.heads, sizes.keys, sizes.values
    groups = heads // sizes.ratio
    own, c, n = tl.arange(0, constants.BLOCK), tl.arange(0, constants.BLOCK_K), tl.arange(0, constants.BLOCK_V)
    m = tile * constants.BLOCK + own
    live, in_keys, in_values = m < size, c < keys, n < values
    key_mask, value_mask = live[:, None] & in_keys[None, :], live[:, None] & in_values[None, :]
    to_keys = own[:, None] * (groups * keys) + c[None, :]
    to_values = own[:, None] * (heads * values) + n[None, :]
    key_tile, value_tile = constants.BLOCK * groups * keys, constants.BLOCK * heads * values
    query = tl.load(q + tile * key_tile + to_keys, mask=key_mask, other=0.0)
    acc = tl.zeros([constants.BLOCK, constants.BLOCK_K], tl.float32)
    for _ in range(sizes.ratio):
        do = load_do(grad_o, gate, tile * value_tile + to_values, value_mask, constants.SIGMOID)
        within = tl.zeros([constants.BLOCK], tl.float32)
        if g is not None:
            decays = load_log_decays(g + m * heads, live)
            within = tl.cumsum(decays, 0)
        o = tl.zeros([constants.BLOCK, constants.BLOCK_V], tl.float32)
        sums = tl.zeros([constants.BLOCK], tl.float32)
        passed = tl.zeros([], tl.float32)
        for back in tl.range(0, tile, num_stages=constants.STAGES):
            earlier = tile - 1 - back
            key = tl.load(k + earlier * key_tile + to_keys, mask=in_keys[None, :], other=0.0)
            value = tl.load(v + earlier * value_tile + to_values, mask=in_values[None, :], other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision=constants.PRECISION)
            grad = tl.dot(do, tl.trans(value), input_precision=constants.PRECISION)
            if g is not None:
                behind = load_next_log_decays(g, earlier * constants.BLOCK + own, heads, size, constants.BLOCK)
                weight = tl.exp2(within)[:, None] * tl.exp2(passed + tl.cumsum(behind, 0, reverse=True))[None, :]
                passed += tl.sum(behind, 0) + load_log_decays(g + earlier * constants.BLOCK * heads, True)
                grad *= weight
                sums += tl.sum(grad * scores, 1)
                scores *= weight
            if gate is not None:
                o = tl.dot(scores.to(value.dtype), value, o, input_precision=constants.PRECISION)
            acc = tl.dot(grad.to(key.dtype), key, acc, input_precision=constants.PRECISION)
        key = tl.load(k + tile * key_tile + to_keys, mask=key_mask, other=0.0)
        value = tl.load(v + tile * value_tile + to_values, mask=value_mask, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=constants.PRECISION)
        grad = tl.dot(do, tl.trans(value), input_precision=constants.PRECISION)
        before = own[:, None] > own[None, :]
        if g is not None:
            weight = causal_decay(decays)
            grad *= weight
            sums += tl.sum(tl.where(before, grad * scores, 0.0), 1)
            scores *= weight
        scores = tl.where(own[:, None] >= own[None, :], scores, 0.0)
        grad = tl.where(own[:, None] >= own[None, :], grad, 0.0)
        if gate is not None:
            o = tl.dot(scores.to(value.dtype), value, o, input_precision=constants.PRECISION)
        acc = tl.dot(grad.to(key.dtype), key, acc, input_precision=constants.PRECISION)
        if states is not None:
            enter = tl.exp2(passed + within)
            read = tl.zeros([constants.BLOCK, constants.BLOCK_K], tl.float32)
            for base in tl.range(0, values, constants.BLOCK_N):
                u = base + tl.arange(0, constants.BLOCK_N)
                some = u < values
                state = tl.load(
                    states + c[:, None] * values + u[None, :], mask=in_keys[:, None] & some[None, :], other=0.0
                )
                at = m[:, None] * (heads * values) + u[None, :]
                part = load_do(grad_o, gate, at, live[:, None] & some[None, :], constants.SIGMOID)
                read = tl.dot(part, tl.trans(state.to(part.dtype)), read, input_precision=constants.PRECISION)
            read *= enter[:, None]
            sums += tl.sum(read * query.to(tl.float32), 1)
            acc += read
            if gate is not None:
                found = tl.zeros([constants.BLOCK, constants.BLOCK_V], tl.float32)
                for base in tl.range(0, keys, constants.BLOCK_N):
                    u = base + tl.arange(0, constants.BLOCK_N)
                    some = u < keys
                    state = tl.load(
                        states + u[:, None] * values + n[None, :], mask=some[:, None] & in_values[None, :], other=0.0
                    )
                    at = m[:, None] * (groups * keys) + u[None, :]
                    part = tl.load(q + at, mask=live[:, None] & some[None, :], other=0.0)
                    found = tl.dot(part, state.to(part.dtype), found, input_precision=constants.PRECISION)
                o += found * enter[:, None]
            states += keys * values
        if gate is not None:
            # read again rather than kept
            gate_in = tl.load(gate + tile * value_tile + to_values, mask=value_mask, other=0.0).to(tl.float32)
            given = tl.load(grad_o + tile * value_tile + to_values, mask=value_mask, other=0.0).to(tl.float32)
            o *= given * activation_grad(gate_in, constants.SIGMOID) * scale
            tl.store(dgate + tile * value_tile + to_values, o.to(dgate.dtype.element_ty), mask=value_mask)
            gate += values
            dgate += values
        if g is not None:
            tl.store(row_sums + m * heads, sums * scale, mask=live)
            g += 1
            row_sums += 1
        v += values
        grad_o += values
    acc *= scale
    tl.store(grads.dq + tile * key_tile + to_keys, acc.to(grads.dq.dtype.element_ty), mask=key_mask)


@triton.jit
def key_grads(inputs, grads, scale, tile, sizes, constants):
    """Compute dk, dv and the sums of M's columns of a tile, over all queries from its own on.

    Tiles of pairs lie transposed, keys down and queries across.
    """
    q, k, v, g, gate, grad_o = inputs.q, inputs.k, inputs.v, inputs.g, inputs.gate, inputs.grad_o
    dv, column_sums = grads.dv, grads.column_sums
    size, heads, keys, values = sizes.size, sizes.heads, sizes.keys, sizes.values
    groups = heads // sizes.ratio
    own, c, n = tl.arange(0, constants.BLOCK), tl.arange(0, constants.BLOCK_K), tl.arange(0, constants.BLOCK_V)
    s = tile * constants.BLOCK + own
    live, in_keys, in_values = s < size, c < keys, n < values
    key_mask, value_mask = live[:, None] & in_keys[None, :], live[:, None] & in_values[None, :]
    to_keys = own[:, None] * (groups * keys) + c[None, :]
    to_values = own[:, None] * (heads * values) + n[None, :]
    key_tile, value_tile = constants.BLOCK * groups * keys, constants.BLOCK * heads * values
    key = tl.load(k + tile * key_tile + to_keys, mask=key_mask, other=0.0)
    acc = tl.zeros([constants.BLOCK, constants.BLOCK_K], tl.float32)
    for _ in range(sizes.ratio):
        value = tl.load(v + tile * value_tile + to_values, mask=value_mask, other=0.0)
        query = tl.load(q + tile * key_tile + to_keys, mask=key_mask, other=0.0)
        do = load_do(grad_o, gate, tile * value_tile + to_values, value_mask, constants.SIGMOID)
        scores = tl.dot(key, tl.trans(query), input_precision=constants.PRECISION)
        grad = tl.dot(value, tl.trans(do), input_precision=constants.PRECISION)
        sums = tl.zeros([constants.BLOCK], tl.float32)
        if g is not None:
            weight = tl.trans(causal_decay(load_log_decays(g + s * heads, live)))
            grad *= weight
            sums += tl.sum(tl.where(own[None, :] > own[:, None], grad * scores, 0.0), 1)
            scores *= weight
            leaving = tl.exp2(tl.cumsum(load_next_log_decays(g, s, heads, size, constants.BLOCK), 0, reverse=True))
        scores = tl.where(own[None, :] >= own[:, None], scores, 0.0)
        grad = tl.where(own[None, :] >= own[:, None], grad, 0.0)
        acc_v = tl.dot(scores.to(do.dtype), do, input_precision=constants.PRECISION)
        acc = tl.dot(grad.to(query.dtype), query, acc, input_precision=constants.PRECISION)
        passed = tl.zeros([], tl.float32)
        for later in tl.range(tile + 1, tl.cdiv(size, constants.BLOCK), num_stages=constants.STAGES):
            m = later * constants.BLOCK + own
            old = m < size
            query = tl.load(q + later * key_tile + to_keys, mask=old[:, None] & in_keys[None, :], other=0.0)
            do = load_do(
                grad_o, gate, later * value_tile + to_values, old[:, None] & in_values[None, :], constants.SIGMOID
            )
            scores = tl.dot(key, tl.trans(query), input_precision=constants.PRECISION)
            grad = tl.dot(value, tl.trans(do), input_precision=constants.PRECISION)
            if g is not None:
                decays = load_log_decays(g + m * heads, old)
                weight = leaving[:, None] * tl.exp2(passed + tl.cumsum(decays, 0))[None, :]
                passed += tl.sum(decays, 0)
                grad *= weight
                sums += tl.sum(grad * scores, 1)
                scores *= weight
            acc_v = tl.dot(scores.to(do.dtype), do, acc_v, input_precision=constants.PRECISION)
            acc = tl.dot(grad.to(query.dtype), query, acc, input_precision=constants.PRECISION)
        acc_v *= scale
        tl.store(dv + tile * value_tile + to_values, acc_v.to(dv.dtype.element_ty), mask=value_mask)
        if g is not None:
            tl.store(column_sums + s * heads, sums * scale, mask=live)
            g += 1
            column_sums += 1
        if gate is not None:
            gate += values
        v += values
        grad_o += values
        dv += values
    acc *= scale
    tl.store(grads.dk + tile * key_tile + to_keys, acc.to(grads.dk.dtype.element_ty), mask=key_mask)


@triton.jit
def state_grads(inputs, dstates, scale, tile, sizes, constants):
    """Compute dstates of a tile of BLOCK_N x BLOCK_N."""
    q, g, gate, grad_o = inputs.q, inputs.g, inputs.gate, inputs.grad_o
    size, heads, keys, values = sizes.size, sizes.heads, sizes.keys, sizes.values
    groups = heads // sizes.ratio
    across = tl.cdiv(values, constants.BLOCK_N)
    own = tl.arange(0, constants.BLOCK)
    c = tile // across * constants.BLOCK_N + tl.arange(0, constants.BLOCK_N)
    n = tile % across * constants.BLOCK_N + tl.arange(0, constants.BLOCK_N)
    in_keys, in_values = c < keys, n < values
    for _ in range(sizes.ratio):
        acc = tl.zeros([constants.BLOCK_N, constants.BLOCK_N], tl.float32)
        passed = tl.zeros([], tl.float32)
        for base in tl.range(0, size, constants.BLOCK, num_stages=constants.STAGES):
            m = base + own
            live = m < size
            query = tl.load(
                q + m[:, None] * (groups * keys) + c[None, :], mask=live[:, None] & in_keys[None, :], other=0.0
            )
            at = m[:, None] * (heads * values) + n[None, :]
            do = load_do(grad_o, gate, at, live[:, None] & in_values[None, :], constants.SIGMOID)
            if g is not None:
                decays = load_log_decays(g + m * heads, live)
                enter = tl.exp2(passed + tl.cumsum(decays, 0))
                passed += tl.sum(decays, 0)
                query = (query.to(tl.float32) * enter[:, None]).to(query.dtype)
            acc = tl.dot(tl.trans(query), do, acc, input_precision=constants.PRECISION)
        acc *= scale
        tl.store(
            dstates + c[:, None] * values + n[None, :],
            acc.to(dstates.dtype.element_ty),
            mask=in_keys[:, None] & in_values[None, :],
        )
        if g is not None:
            g += 1
        if gate is not None:
            gate += values
        grad_o += values
        dstates += keys * values


@triton.jit(do_not_specialize=["length", "chunk", "chunks", "heads"])
def intra_chunk_decay_grad(
    row_sums, column_sums, dg, length, chunk, chunks, heads, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Write dg [B, T, H] of a chunk and BLOCK_H heads: the sums from the chunk's end of row_sums less column_sums.

    Grid (ceil(heads / BLOCK_H) * chunks * B,). row_sums, column_sums [B, T, H] are in float32.
    """
    coords = chunk_coords(1, length, chunk, chunks, tl.cdiv(heads, BLOCK_H))
    start, size, block = coords.start, coords.size, coords.group
    m, head = tl.arange(0, BLOCK_C), block * BLOCK_H + tl.arange(0, BLOCK_H)
    at = (start + m)[:, None] * heads + head[None, :]
    live = (m < size)[:, None] & (head < heads)[None, :]
    change = tl.load(row_sums + at, mask=live, other=0.0).to(tl.float64)
    change -= tl.load(column_sums + at, mask=live, other=0.0).to(tl.float64)
    change = tl.cumsum(change, 0, reverse=True)
    tl.store(dg + at, change.to(dg.dtype.element_ty), mask=live)
