"""The delta rule's triangular inverse, chunk by chunk, as a launch that runs all chunks at once.

With D(t, s) the decay from s to t and N = strictly lower(D * (K K^T)), each chunk's M = I + diag(beta) N is inverted by
blocks that double in width: where X holds the inverses of M's diagonal blocks of w rows and C the part of M between two
of them, X - X C X holds those of 2 w rows. Accuracy is that of C: rounded to bfloat16 once, as an operand, correlated
keys double the error of the whole recurrence, so C is an operand's high part and low part. X may be rounded. A product
of powers (Neumann) would diverge on such keys.
"""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.decay import log_decay_cumsum_or_zero
from holdfast.kernels.lib.triton.sequence import chunk_coords
from holdfast.kernels.lib.triton.tiles import load_tile

from .states import PRECISION


@triton.jit(do_not_specialize=["sequences", "window"])
def delta_rule_triton_chunk_inverse(
    k_ptr, g_ptr, beta_ptr, a_ptr, cu_seqlens, T, H, sequences, window, k_batch, k_step, k_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program a chunk and head.

    k: [B, T, H / GROUP, WIDTH], its last axis dense. g, beta: [B, T, H], float32, contiguous, or None for 0 and 1.
    a: [B, T, H, CHUNK], M^-1 - I, a row a token. cu_seqlens: [N + 1], where packed sequences begin and end, or None.
    """
    head = (tl.program_id(0) % H).to(tl.int64)
    place = chunk_coords(tl.program_id(0) // H, cu_seqlens, T, sequences, 0, window, CHUNK)
    batch, first, end, chunk = place[1], place[2], place[3], place[4]
    steps = tl.arange(0, CHUNK)
    start = first + chunk * CHUNK
    live = steps < (end - start).to(tl.int32)
    token, at = (batch * T + start) * H + head, steps * H
    base = k_ptr + batch * k_batch + (head // GROUP) * k_head + start * k_step
    k = load_tile(base, steps, tl.arange(0, BLOCK_K), k_step, live, WIDTH, WIDTH == BLOCK_K)
    cumsum = log_decay_cumsum_or_zero(g_ptr + token if g_ptr is not None else None, at, live, CHUNK, WIDE)[0]
    later = steps[:, None] > steps[None, :]
    causal_decay = tl.exp2(tl.where(later, (cumsum[:, None] - cumsum[None, :]).to(tl.float32), float("-inf")))
    lower = tl.dot(k, tl.trans(k), input_precision=PRECISION) * causal_decay
    if beta_ptr is not None:
        lower *= tl.load(beta_ptr + token + at, mask=live, other=0.0)[:, None]

    identity = tl.where(steps[:, None] == steps[None, :], 1.0, 0.0)
    x = identity
    x -= tl.where(steps[:, None] // 2 == steps[None, :] // 2, lower, 0.0)
    high = lower.to(k.dtype)
    low = (lower - high.to(tl.float32)).to(k.dtype)
    for i in tl.static_range(1, CHUNK.bit_length() - 1):
        # rows of the second and columns of the first block of each pair of 2^i rows
        row, column = steps[:, None] >> i, steps[None, :] >> i
        corner = (row == column + 1) & (row % 2 == 1)
        rounded = x.to(k.dtype)
        xc = tl.dot(rounded, tl.where(corner, high, 0.0).to(k.dtype), input_precision=PRECISION)
        # the small blocks hold too few numbers for their low parts to count
        if i > 2 and k.dtype != tl.float32:
            xc = tl.dot(rounded, tl.where(corner, low, 0.0).to(k.dtype), xc)
        x -= tl.dot(xc.to(k.dtype), rounded, input_precision=PRECISION)
    a_at = a_ptr + token * CHUNK + (at * CHUNK)[:, None] + steps[None, :]
    tl.store(a_at, (x - identity).to(a_ptr.dtype.element_ty), mask=live[:, None])
