"""Device code of the outputs inside chunks, in Triton: scores, causal decay, output product, state and gate in one.

A program owns BLOCK steps of one chunk and head and BLOCK_N of its values. Scores live in registers alone, and a
program has all of K, so that no sum over it is ever split. It works through tiles of earlier steps, nearest first, then
the state that enters the chunk, then its own steps.

Inside the program's own steps the decay between two is the exponential of a difference of sums, which would lose small
decays beside large ones in float32: the sums run in float64 and are kept as two float32 numbers, high and low. To
earlier tiles the decay splits at the first of the program's steps: a factor of the query, which is applied once after
all of them, and one of the key. Both are exponentials of sums of log decays, without a difference.
"""

import triton
import triton.language as tl

# exp(-1e4) is 0 in float32; -inf would turn differences into NaN
LEAST = tl.constexpr(-1e4)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_coords(tiles, length, chunk, chunks, heads, groups):
    """Return a program's number among the `tiles` of a chunk and head, the chunk's first step of all and its size, the
    head, the query head, and the number of the state that enters the chunk."""
    # one axis: the others end at 65535
    program = tl.program_id(0)
    number = program // tiles % chunks
    head = program // tiles // chunks % heads
    batch = (program // tiles // chunks // heads).to(tl.int64)
    size = tl.minimum(chunk, length - number * chunk)
    group = head // (heads // groups)
    return program % tiles, batch * length + number * chunk, size, head, group, (batch * chunks + number) * heads + head


@triton.jit
def load_log_decays(g, live):
    """Load log decays to base 2, 0 where not live."""
    return tl.maximum(tl.load(g, mask=live, other=0.0).to(tl.float32), LEAST) * LOG2E


@triton.jit
def causal_decay(decays):
    """Return 2 to the power of decays_{s+1} + .. + decays_t at (t, s), for s <= t."""
    total = tl.cumsum(decays.to(tl.float64), 0)
    high = total.to(tl.float32)
    low = (total - high.to(tl.float64)).to(tl.float32)
    return tl.exp2((high[:, None] - high[None, :]) + (low[:, None] - low[None, :]))


@triton.jit
def activate(gate, SIGMOID: tl.constexpr):
    """Return the activation of the output gate: sigmoid, or SiLU."""
    sigmoid = tl.sigmoid(gate)
    return sigmoid if SIGMOID else gate * sigmoid


@triton.jit(do_not_specialize=["length", "chunk", "chunks", "heads"])
def intra_chunk_fwd(
    q,
    k,
    v,
    g,
    states,
    gate,
    o,
    scale,
    length,
    chunk,
    chunks,
    heads,
    groups,
    keys,
    values,
    SIGMOID: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (ceil(chunk / BLOCK) * ceil(V / BLOCK_N) * chunks * B * H,).

    q, k    [B, T, groups, K]
    v       [B, T, H, V]
    g       [B, T, H], or None
    states  [B, chunks, H, K, V], or None: the state that enters each chunk
    gate    [B, T, H, V], or None
    o       [B, T, H, V], written
    """
    across = tl.cdiv(values, BLOCK_N)
    tiles = tl.cdiv(chunk, BLOCK)
    program, start, size, head, group, entered = tile_coords(tiles * across, length, chunk, chunks, heads, groups)
    # the last tile of a chunk has the most to do: it starts first
    tile = tiles - 1 - program // across
    if tile * BLOCK >= size:
        return
    own, c = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    n = program % across * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile * BLOCK + own
    rows, in_keys, in_values = m < size, c < keys, n < values
    key_mask, value_mask = rows[:, None] & in_keys[None, :], rows[:, None] & in_values[None, :]
    to_keys = own[:, None] * (groups * keys) + c[None, :]
    to_values = own[:, None] * (heads * values) + n[None, :]
    q += (start * groups + group) * keys
    k += (start * groups + group) * keys
    v += (start * heads + head) * values
    o += (start * heads + head) * values
    key_tile, value_tile = BLOCK * groups * keys, BLOCK * heads * values
    query = tl.load(q + tile * key_tile + to_keys, mask=key_mask, other=0.0)
    key = tl.load(k + tile * key_tile + to_keys, mask=key_mask, other=0.0)
    value = tl.load(v + tile * value_tile + to_values, mask=value_mask, other=0.0)
    if g is not None:
        g += start * heads + head
        decays = load_log_decays(g + m * heads, rows)
    if gate is not None:
        gate += (start * heads + head) * values
        gate_in = tl.load(gate + tile * value_tile + to_values, mask=value_mask, other=0.0)

    acc = tl.zeros([BLOCK, BLOCK_N], tl.float32)
    passed = tl.zeros([], tl.float32)
    for back in tl.range(0, tile, num_stages=STAGES):
        earlier = tile - 1 - back
        old_key = tl.load(k + earlier * key_tile + to_keys, mask=in_keys[None, :], other=0.0)
        old_value = tl.load(v + earlier * value_tile + to_values, mask=in_values[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(old_key), input_precision=PRECISION)
        if g is not None:
            # of the step behind each, so that the sum from the end stops short of the key's own decay
            behind = load_log_decays(g + (earlier * BLOCK + own + 1) * heads, own + 1 < BLOCK)
            scores *= tl.exp2(passed + tl.cumsum(behind, 0, reverse=True))[None, :]
            passed += tl.sum(behind, 0) + load_log_decays(g + earlier * BLOCK * heads, True)
        acc = tl.dot(scores.to(value.dtype), old_value, acc, input_precision=PRECISION)
    if states is not None:
        states += entered * keys * values
        state = tl.load(
            states + c[:, None] * values + n[None, :], mask=in_keys[:, None] & in_values[None, :], other=0.0
        )
        acc += tl.exp2(passed) * tl.dot(query, state.to(query.dtype), input_precision=PRECISION)
    if g is not None:
        acc *= tl.exp2(tl.cumsum(decays, 0))[:, None]
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if g is not None:
        scores *= causal_decay(decays)
    scores = tl.where(own[:, None] >= own[None, :], scores, 0.0)
    acc = tl.dot(scores.to(value.dtype), value, acc, input_precision=PRECISION)
    acc *= scale
    if gate is not None:
        acc *= activate(gate_in.to(tl.float32), SIGMOID)
    tl.store(o + tile * value_tile + to_values, acc.to(o.dtype.element_ty), mask=value_mask)
