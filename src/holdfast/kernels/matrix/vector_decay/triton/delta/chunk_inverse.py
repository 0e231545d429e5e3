"""Each chunk's triangular inverse, for all chunks at once, from the products of its keys.

With L strictly lower(k k^T * decay), N = (I + L diag(beta))^-1 is found by blocks that double in width, as in
delta_rule/triton/chunk_inverse.py, which says why.
"""

import triton
import triton.language as tl

from holdfast.kernels.matrix.vector_decay.triton.decay import CHUNK, LEVELS
from holdfast.kernels.matrix.vector_decay.triton.slots import chunk_bounds


@triton.jit
def kda_chunk_inverse(
    pairs_ptr, beta_ptr, inverse_ptr, cu_seqlens, T, sequences, H: tl.constexpr, PRECISION: tl.constexpr
):
    """One program a chunk and head. Grid (slots * H,).

    pairs       float32 [B, T, H, CHUNK]: k . k with the decay between, a row a token
    beta        float32 [B, T, H], or None for 1
    inverse     [B, T, H, CHUNK], written: N - I
    cu_seqlens  [N + 1], or None
    """
    head = (tl.program_id(0) % H).to(tl.int64)
    batch, start, count = chunk_bounds(tl.program_id(0) // H, cu_seqlens, sequences, T)
    token = (batch * T + start) * H + head
    steps = tl.arange(0, CHUNK)
    live = steps < count
    dtype: tl.constexpr = inverse_ptr.dtype.element_ty
    at = token * CHUNK + (steps * H * CHUNK)[:, None] + steps[None, :]
    later = (steps[:, None] > steps[None, :]) & live[:, None]
    lower = tl.load(pairs_ptr + at, mask=later, other=0.0)
    if beta_ptr is not None:
        lower *= tl.load(beta_ptr + token + steps * H, mask=live, other=0.0)[None, :]
    identity = tl.where(steps[:, None] == steps[None, :], 1.0, 0.0)
    x = identity - tl.where(steps[:, None] // 2 == steps[None, :] // 2, lower, 0.0)
    high = lower.to(dtype)
    low = (lower - high.to(tl.float32)).to(dtype)
    for i in tl.static_range(1, LEVELS):
        # rows of the second and columns of the first block of each pair of 2^i rows
        row, column = steps[:, None] >> i, steps[None, :] >> i
        corner = (row == column + 1) & (row % 2 == 1)
        rounded = x.to(dtype)
        xc = tl.dot(rounded, tl.where(corner, high, 0.0).to(dtype), input_precision=PRECISION)
        # the small blocks hold too few numbers for their low parts to count
        if i > 2 and dtype != tl.float32:
            xc = tl.dot(rounded, tl.where(corner, low, 0.0).to(dtype), xc, input_precision=PRECISION)
        x -= tl.dot(xc.to(dtype), rounded, input_precision=PRECISION)
    tl.store(inverse_ptr + at, (x - identity).to(dtype), mask=live[:, None])
