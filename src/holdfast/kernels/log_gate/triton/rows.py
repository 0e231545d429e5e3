"""A gate's log decay and its gradient: a program takes rows of D channels, which are contiguous."""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.sigmoid import log_sigmoid, sigmoid


@triton.jit
def log_gate_fwd(
    x, bias, g, count, share, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Grid (tiles of rows,). g = share log(sigmoid(x + bias)).

    x [count, D], bias [D]
    g [count, D] float32, written
    """
    d = tl.arange(0, BLOCK)[None, :]
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    inside = (rows < count) & (d < D)
    at = rows.to(tl.int64) * D + d
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(g + at, share * log_sigmoid(value), mask=inside)


@triton.jit
def log_gate_bwd(
    x, bias, dg, dx, parts, count, share, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Grid (p,). Program n takes tiles n, n + p and so on: sums in the same order in every run.

    x, dg [count, D], bias [D]
    dx [count, D], written
    parts [p, D] float32, written: what each program adds up for the bias
    """
    column = tl.arange(0, BLOCK)
    d = column[None, :]
    offset = tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (rows < count) & (d < D)
        at = rows.to(tl.int64) * D + d
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + offset
        gradient = share * tl.load(dg + at, mask=inside, other=0.0).to(tl.float32) * sigmoid(-value)
        sums += gradient
        tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=inside)
    to = tl.program_id(0).to(tl.int64) * D + column
    tl.store(parts + to, tl.sum(sums, 0), mask=column < D)
