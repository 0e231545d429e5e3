"""The scan over a sequence's segments under the delta rule: S = transition S + local, from segment to segment.

A segment's transition is what it multiplies the state before it with, [K, K]; local what it adds to it. Each product
waits for the one before it; columns of the state are independent.
"""

import triton
import triton.language as tl


@triton.jit
def compose(
    local_ptr,
    transition_ptr,
    first_ptr,
    enter_ptr,
    last_ptr,
    H,
    segments,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B * H, blocks of BLOCK columns).

    local, enter: float32 [B, segments, H, KEYS, VALUES], in and out. transition: [B, segments, H, KEYS, KEYS].
    first, last: [B, H, KEYS, VALUES], the state before and after the sequence; first may be None. WIDE: KEYS, rounded
    up to a power of two.
    """
    batch = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    key = tl.arange(0, WIDE)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cell = key[:, None] * VALUES + column[None, :]
    inside = (key < KEYS)[:, None] & (column < VALUES)[None, :]
    square = (key < KEYS)[:, None] & (key < KEYS)[None, :]
    pair = tl.program_id(0).to(tl.int64) * (KEYS * VALUES)
    state = tl.zeros([WIDE, BLOCK], tl.float32)
    if first_ptr is not None:
        state = tl.load(first_ptr + pair + cell, mask=inside, other=0.0)
    for segment in range(segments):
        row = (batch * segments + segment) * H + head
        tl.store(enter_ptr + row * (KEYS * VALUES) + cell, state, mask=inside)
        local = tl.load(local_ptr + row * (KEYS * VALUES) + cell, mask=inside, other=0.0)
        entries = transition_ptr + row * (KEYS * KEYS) + key[:, None] * KEYS + key[None, :]
        transition = tl.load(entries, mask=square, other=0.0)
        state = tl.dot(transition, state, local, input_precision="tf32x3")
    tl.store(last_ptr + pair + cell, state, mask=inside)
