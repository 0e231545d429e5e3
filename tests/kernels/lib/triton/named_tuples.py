"""A Triton kernel that hands named tuples and an aggregate to a function: interpreted and compiled."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from holdfast.kernels.lib.triton.compat import aggregate


@aggregate
class Width:
    """Numbers of a row and of a tile's rows."""

    COLUMNS: tl.constexpr
    ROWS: tl.constexpr

    @triton.constexpr_function
    def __init__(self, COLUMNS, ROWS):
        self.COLUMNS = tl.constexpr(COLUMNS)
        self.ROWS = tl.constexpr(ROWS)


class Rows(NamedTuple):
    """Where rows are, and what is added to them, if anything."""

    source: tl.tensor
    bias: tl.tensor


class Tokens(NamedTuple):
    """Some rows of those."""

    rows: Rows
    steps: tl.tensor
    live: tl.tensor


@triton.jit
def _load(tokens, width):
    rows = tokens.rows
    columns = tl.arange(0, width.COLUMNS)
    at = tokens.steps[:, None] * width.COLUMNS + columns[None, :]
    x = tl.load(rows.source + at, mask=tokens.live[:, None], other=0)
    if rows.bias is not None:
        x += tl.load(rows.bias + columns)[None, :]
    return x


@triton.jit
def sum_rows(source, bias, out, count, WIDTH: tl.constexpr):
    """out [WIDTH]: the sum of source's rows, [count, WIDTH], taken by fours; bias [WIDTH] for each of these rows."""
    width = Width(WIDTH, 4)
    steps = tl.arange(0, width.ROWS)
    tokens = Tokens(rows=Rows(source=source, bias=bias), steps=steps, live=steps < count)
    total = tl.zeros([WIDTH], tl.float32)
    for _ in range(tl.cdiv(count, width.ROWS)):
        total += tl.sum(_load(tokens, width), 0)
        steps = tokens.steps + width.ROWS
        tokens = Tokens(rows=tokens.rows, steps=steps, live=steps < count)
    tl.store(out + tl.arange(0, WIDTH), total)


def interpreted():
    source, bias, out = torch.randn(6, 8), torch.randn(8), torch.empty(8)
    sum_rows[(1,)](source, None, out, 6, WIDTH=8)
    assert torch.allclose(out, source.sum(0), atol=1e-5)
    sum_rows[(1,)](source, bias, out, 6, WIDTH=8)
    assert torch.allclose(out, source.sum(0) + 8 * bias, atol=1e-5)
    print("all checked")
