"""What the kernels of the layer's end share: rows of tokens, of a block of channels each.

Strides are given in units of UNIT elements, which all of them are multiples of: so the compiler sees that 16 bytes lie
together in rows of a projection whose width is a multiple of 8 alone.
"""

import triton
import triton.language as tl


@triton.jit
def row_offsets(rows, length, x_batch, x_step, UNIT: tl.constexpr):
    """Return where tokens [ROWS] begin in a tensor [B, T, channels]: [ROWS, 1]."""
    # fewer than 2^31 tokens: a division of 64 bits takes longer than a row's memory
    at = (rows // length).to(tl.int64) * x_batch + (rows % length).to(tl.int64) * x_step
    return (at * UNIT)[:, None]


@triton.jit
def load_skip(D, d, here, P: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """Load D of channels d, [1, BLOCK]."""
    return tl.load(D + (d if PER_CHANNEL else d // P), mask=here, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_rows(x, at, d, inside):
    return tl.load(x + at + d[None, :], mask=inside, other=0.0).to(tl.float32)
