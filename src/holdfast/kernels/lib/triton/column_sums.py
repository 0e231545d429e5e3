"""The sum of what programs have added up each, in the same order in every run."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# of a tile; few columns, so that a sum of a head's width has many programs
ROWS, COLUMNS, WARPS = 256, 8, 4


@triton.jit
def column_sums(parts, out, count, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (blocks of columns,). out [size] of parts [count, size] float32, contiguous."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = column < size
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & here[None, :]
        total += tl.load(parts + row.to(tl.int64)[:, None] * size + column[None, :], mask=inside, other=0.0)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=here)


def of_parts(parts: Tensor, out: Tensor) -> tuple[Any, ...]:
    """Return the arguments of a launch of column_sums: parts [count, ...] float32, out [...] of any dtype, contiguous.

    out has at least one number.
    """
    size = out.numel()
    return (-(-size // COLUMNS),), (parts, out), (parts.shape[0], size), {"ROWS": ROWS, "BLOCK": COLUMNS}, WARPS
