"""Device code of the scan of states between chunks, in Triton: h_g = exp(decay_g) (h_{g-1} - W_g Y_g^T h_{g-1}) + u_g.

A program owns a tile of the K x V state of one head in registers and goes over the chunks. Without W and Y, rows and
columns are independent: the tile may be any part of the state, and GROUP chunks are loaded before the first is used.
With them, columns alone are independent: the tile has all K rows, and what the next chunks need is on its way while
this one computes.

To repeat the plain loop bit for bit, products and sums are rounded apart (launches turn fused multiply-adds off) and
the exponential is CUDA's own.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

# the interpreter has no libdevice
INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def exp(x):
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def sequence_bounds(bounds, chunks, heads, tiles):
    """Return a program's tile of `tiles`, head and sequence, and where the sequence starts and ends in chunks."""
    # one axis: the others end at 65535
    program = tl.program_id(0)
    tile, head = program % tiles, program // tiles % heads
    sequence = (program // tiles // heads).to(tl.int64)
    if bounds is None:
        start, stop = sequence * chunks, (sequence + 1) * chunks
    else:
        start, stop = tl.load(bounds + sequence).to(tl.int64), tl.load(bounds + sequence + 1).to(tl.int64)
    return tile, head, sequence, start, stop


@triton.jit
def load_decay(decay, place, k, inside, live, keys, SCALAR: tl.constexpr):
    """Load the log decay of the chunk and head `place`, one or one a row; 0 where the chunk is not live."""
    if SCALAR:
        return tl.load(decay + place, mask=live, other=0.0).to(tl.float32)
    else:
        return tl.load(decay + place * keys + k, mask=inside & live, other=0.0).to(tl.float32)


@triton.jit
def state_decay(log_decay, SCALAR: tl.constexpr):
    """Return exp(log_decay), in the shape that multiplies a state."""
    if SCALAR:
        return exp(log_decay)
    else:
        return exp(log_decay)[:, None]


@triton.jit
def load_factor(factor, place, k, inside, keys, RANK: tl.constexpr, BLOCK_R: tl.constexpr):
    """Load W or Y [.., K, RANK] of the chunk and head `place`, zeros beyond."""
    i = tl.arange(0, BLOCK_R)
    return tl.load(
        factor + (place * keys + k[:, None]) * RANK + i[None, :],
        mask=inside[:, None] & (i < RANK)[None, :],
        other=0.0,
    )


@triton.jit
def column(factor, number, BLOCK_R: tl.constexpr):
    """Return one column of a factor as [rows, 1], in float32: a sum over columns, all but one of them zero."""
    chosen = tl.arange(0, BLOCK_R)[None, :] == number
    return tl.sum(tl.where(chosen, factor, 0.0).to(tl.float32), 1)[:, None]


@triton.jit
def inter_chunk_fwd(
    states,
    decay,
    o,
    initial,
    final,
    bounds,
    chunks,
    heads,
    keys,
    values,
    SCALAR: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid (ceil(K / BLOCK_K) * ceil(V / BLOCK_V) * H * N,).

    states   [B, G, H, K, V]
    decay    [B, G, H], or [B, G, H, K] unless SCALAR
    o        [B, G, H, K, V], written: the state after each chunk
    initial  [N, H, K, V], or None
    final    [N, H, K, V], written: the last state of each sequence, or None
    bounds   [N + 1], the first chunks of packed sequences and the number of all, or None
    """
    across = tl.cdiv(values, BLOCK_V)
    tile, head, sequence, start, stop = sequence_bounds(bounds, chunks, heads, across * tl.cdiv(keys, BLOCK_K))
    k = tile // across * BLOCK_K + tl.arange(0, BLOCK_K)
    v = tile % across * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = k < keys
    here = inside[:, None] & (v < values)[None, :]
    element = k[:, None] * values + v[None, :]
    size = keys * values
    own = (sequence * heads + head) * size + element
    h = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if initial is not None:
        h = tl.load(initial + own, mask=here, other=0.0)
    for first in tl.range(start, stop, GROUP):
        decays, additions = (), ()
        for j in tl.static_range(GROUP):
            place = (first + j) * heads + head
            live = first + j < stop
            decays += (load_decay(decay, place, k, inside, live, keys, SCALAR),)
            additions += (tl.load(states + place * size + element, mask=here & live, other=0.0),)
        for j in tl.static_range(GROUP):
            place = (first + j) * heads + head
            h = state_decay(decays[j], SCALAR) * h + additions[j].to(tl.float32)
            tl.store(o + place * size + element, h.to(o.dtype.element_ty), mask=here & (first + j < stop))
    if final is not None:
        tl.store(final + own, h, mask=here)


@triton.jit
def dot_float32(x, factor):
    """Return x @ factor to float32's precision: by three bfloat16 parts of x, or by TF32 parts of both."""
    if factor.dtype == tl.bfloat16:
        first = x.to(tl.bfloat16)
        rest = x - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(first, factor, tl.dot(second, factor, tl.dot(third, factor)))
    else:
        return tl.dot(x, factor.to(tl.float32), input_precision="tf32x3")


@triton.jit
def inter_chunk_low_rank_fwd(
    states,
    decay,
    W,
    Y,
    o,
    initial,
    final,
    bounds,
    chunks,
    heads,
    keys,
    values,
    SCALAR: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Do what `inter_chunk_fwd` does with W and Y [B, G, H, K, RANK]; BLOCK_K covers all rows.

    Grid (ceil(V / BLOCK_V) * H * N,). The state is held transposed: as the first operand of a product a sum of tensor
    cores needs no shuffle.
    """
    tile, head, sequence, start, stop = sequence_bounds(bounds, chunks, heads, tl.cdiv(values, BLOCK_V))
    k = tl.arange(0, BLOCK_K)
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = k < keys
    here = inside[:, None] & (v < values)[None, :]
    element = k[:, None] * values + v[None, :]
    size = keys * values
    own = (sequence * heads + head) * size + element
    h = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if initial is not None:
        h = tl.trans(tl.load(initial + own, mask=here, other=0.0))
    following = load_decay(decay, start * heads + head, k, inside, start < stop, keys, SCALAR)
    for g in tl.range(start, stop, num_stages=STAGES):
        place = g * heads + head
        addition = tl.load(states + place * size + element, mask=here, other=0.0)
        left = load_factor(W, place, k, inside, keys, RANK, BLOCK_R)
        right = load_factor(Y, place, k, inside, keys, RANK, BLOCK_R)
        scale = exp(following)
        following = load_decay(decay, place + heads, k, inside, g + 1 < stop, keys, SCALAR)
        h -= dot_float32(dot_float32(h, right), tl.trans(left))
        h = (scale if SCALAR else scale[None, :]) * h + tl.trans(addition).to(tl.float32)
        tl.store(o + place * size + element, tl.trans(h).to(o.dtype.element_ty), mask=here)
    if final is not None:
        tl.store(final + own, tl.trans(h), mask=here)


@triton.jit
def inter_chunk_bwd(
    decay,
    W,
    Y,
    history,
    do,
    initial,
    dfinal,
    dstates,
    ddecay,
    dW,
    dY,
    dinitial,
    bounds,
    chunks,
    heads,
    keys,
    values,
    places,
    SCALAR: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Go from the last chunk to the first, with P = h - W Y^T h of the state h before a chunk and dP = exp(decay) dh_g:
    du_g = dh_g, dh = dP - Y W^T dP, ddecay_g = sum of dP P, dW = -dP (Y^T h)^T, dY = -h (W^T dP)^T.

    Grid (ceil(K / BLOCK_K) * ceil(V / BLOCK_V) * H * N,). RANK 0: without W and Y; BLOCK_K then need not cover all
    rows. `places` is B G H. Sums over rows or columns that several programs share are left in parts.

    decay, W, Y, initial, bounds  as in the forward pass
    history   [B, G, H, K, V], float32: the state after each chunk
    do        [B, G, H, K, V], or None
    dfinal    [N, H, K, V], float32, or None
    dstates   [B, G, H, K, V], written
    ddecay    [parts, *decay's shape], float32, written
    dW, dY    [parts, B, G, H, K, RANK], float32, written
    dinitial  [N, H, K, V], float32, written
    """
    across = tl.cdiv(values, BLOCK_V)
    tile, head, sequence, start, stop = sequence_bounds(bounds, chunks, heads, across * tl.cdiv(keys, BLOCK_K))
    k = tile // across * BLOCK_K + tl.arange(0, BLOCK_K)
    v = tile % across * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = k < keys
    here = inside[:, None] & (v < values)[None, :]
    element = k[:, None] * values + v[None, :]
    size = keys * values
    own = (sequence * heads + head) * size + element
    # programs that share a row are apart in v alone, those that share a head's scalar decay in k too
    part = (tile % across).to(tl.int64)
    shared = tile.to(tl.int64) if SCALAR else part
    carried = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if dfinal is not None:
        carried = tl.load(dfinal + own, mask=here, other=0.0)
    entry = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if initial is not None:
        entry = tl.load(initial + own, mask=here, other=0.0)
    for iteration in tl.range(0, stop - start, num_stages=STAGES):
        g = stop - 1 - iteration
        place = g * heads + head
        before = tl.load(history + (place - heads) * size + element, mask=here & (g > start), other=0.0)
        before = tl.where(g > start, before, entry)
        dh = carried
        if do is not None:
            dh += tl.load(do + place * size + element, mask=here, other=0.0).to(tl.float32)
        tl.store(dstates + place * size + element, dh.to(dstates.dtype.element_ty), mask=here)
        projected = before
        carried = state_decay(load_decay(decay, place, k, inside, True, keys, SCALAR), SCALAR) * dh
        if RANK > 0:
            left = load_factor(W, place, k, inside, keys, RANK, BLOCK_R)
            right = load_factor(Y, place, k, inside, keys, RANK, BLOCK_R)
            returned = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
            for i in tl.static_range(RANK):
                w, y = column(left, i, BLOCK_R), column(right, i, BLOCK_R)
                read = tl.sum(y * before, 0)
                written = tl.sum(w * carried, 0)
                projected -= w * read[None, :]
                returned += y * written[None, :]
                row = ((part * places + place) * keys + k) * RANK + i
                tl.store(dW + row, -tl.sum(carried * read[None, :], 1), mask=inside)
                tl.store(dY + row, -tl.sum(before * written[None, :], 1), mask=inside)
        change = tl.sum(carried * projected, 1)
        if RANK > 0:
            carried -= returned
        if SCALAR:
            tl.store(ddecay + shared * places + place, tl.sum(change, 0))
        else:
            tl.store(ddecay + (shared * places + place) * keys + k, change, mask=inside)
    if dinitial is not None:
        tl.store(dinitial + own, carried, mask=here)
