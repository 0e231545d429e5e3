"""Tiles of a tensor that may end before the tile does."""

import triton
import triton.language as tl

# Rows of the narrowest product: the added column's state and the normaliser's are the first of so many, the rest 0. As
# columns of a product they are wgmma's, and ptxas forgets to set the descriptors of some: see
# docs/notes/compilers.md#uniform-register-never-set.
NARROW = tl.constexpr(16)


@triton.jit
def load_tile(base, steps, columns, stride, live, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Load [tokens, columns] of one head; zero past the end of the sequence and past WIDTH."""
    at = base + steps[:, None] * stride + columns[None, :]
    if EVEN:
        return tl.load(at, mask=live[:, None], other=0.0)
    return tl.load(at, mask=live[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def as_first_row(x):
    """Return x [n] as the first row of [NARROW, n], the rest zeros."""
    return tl.where(tl.arange(0, NARROW)[:, None] == 0, x[None, :], 0.0)


@triton.jit
def split_hi_lo_rows(x, like):
    """Return [NARROW, n] of x [n] in the dtype of `like`: x rounded, what that leaves, what both leave, and zeros.

    Their sum errs by 2^-25 in bfloat16, where x rounded once errs by 2^-9.
    """
    row = tl.arange(0, NARROW)[:, None]
    high = x.to(like.dtype)
    left = x - high.to(tl.float32)
    low = left.to(like.dtype)
    lowest = tl.where(row == 2, (left - low.to(tl.float32)).to(like.dtype)[None, :], tl.zeros_like(low)[None, :])
    return tl.where(row == 0, high[None, :], tl.where(row == 1, low[None, :], lowest))
