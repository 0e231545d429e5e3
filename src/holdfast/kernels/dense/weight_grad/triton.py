"""The sum over tokens that forms dR, and the sum of its parts."""

import triton
import triton.language as tl


@triton.jit
def dense_weight_grad(
    dg,
    h,
    initial,
    reset,
    out,
    tokens,
    length,
    gates,
    heads,
    part,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    INITIAL: tl.constexpr,
    RESET: tl.constexpr,
):
    """Sum dg h_{t-1}^T over a part of the tokens. Programs: (gates * heads, tiles, parts).

    reads   dg      [B, T, G, H, WIDTH]
            h       [B, T, H, WIDTH], the state after each step
            initial [B, H, WIDTH], read if INITIAL
            reset   [B, T], uint8, read if RESET
    writes  out     [parts, G, H, WIDTH, WIDTH], float32
    """
    head = tl.program_id(0) % heads
    gate = tl.program_id(0) // heads
    across = (WIDTH + COLUMNS - 1) // COLUMNS
    rows = tl.program_id(1) // across * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) % across * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.program_id(2) * part
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for offset in range(0, part, TOKENS):
        token = start + offset + tl.arange(0, TOKENS)
        inside = (token < tokens) & (offset + tl.arange(0, TOKENS) < part)
        first = token % length == 0
        place = ((token.to(tl.int64) * gates + gate) * heads + head) * WIDTH
        left = tl.load(dg + place[:, None] + rows[None], mask=inside[:, None] & (rows < WIDTH)[None], other=0.0)
        if RESET:
            inside = inside & (tl.load(reset + token, mask=inside, other=1) == 0)
        place = ((token.to(tl.int64) - 1) * heads + head) * WIDTH
        valid = (inside & ~first)[:, None] & (columns < WIDTH)[None]
        right = tl.load(h + place[:, None] + columns[None], mask=valid, other=0.0)
        if INITIAL:
            place = (token // length * heads + head).to(tl.int64) * WIDTH
            valid = (inside & first)[:, None] & (columns < WIDTH)[None]
            initial_state = tl.load(initial + place[:, None] + columns[None], mask=valid, other=0.0)
            right += initial_state.to(right.dtype)
        sums = tl.dot(tl.trans(left), right, sums)
    place = ((tl.program_id(2).to(tl.int64) * gates + gate) * heads + head) * WIDTH * WIDTH
    inside = (rows < WIDTH)[:, None] & (columns < WIDTH)[None]
    tl.store(out + place + rows[:, None] * WIDTH + columns[None], sums, mask=inside)


@triton.jit
def dense_sum_partials(parts, out, others, other, count, size, other_count, other_size, BLOCK: tl.constexpr):
    """out[i] = sum over k of parts[k, i], in order, parts [count, size] float32, out [size]; and other of others."""
    block, first = tl.program_id(0), tl.cdiv(size, BLOCK)
    if block < first:
        _add(parts, out, count, size, block * BLOCK + tl.arange(0, BLOCK))
    else:
        _add(others, other, other_count, other_size, (block - first) * BLOCK + tl.arange(0, BLOCK))


@triton.jit
def _add(parts, out, count, size, at):
    total = tl.load(parts + at, mask=at < size, other=0.0)
    for k in range(1, count):
        total += tl.load(parts + k * tl.cast(size, tl.int64) + at, mask=at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)
