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
    H,
    segments,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B * H, blocks of BLOCK columns).

    local: float32 [B, segments - 1, H, KEYS, VALUES], transition: [B, segments - 1, H, KEYS, KEYS], of all segments but
    the last. first: [B, H, KEYS, VALUES], the state before the sequence, or None. enter: that before each segment,
    [B, segments, H, KEYS, VALUES]. WIDE: KEYS, rounded up to a power of two.
    """
    batch = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    key = tl.arange(0, WIDE)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cell = key[:, None] * VALUES + column[None, :]
    inside = (key < KEYS)[:, None] & (column < VALUES)[None, :]
    square = (key < KEYS)[:, None] & (key < KEYS)[None, :]
    pair = tl.program_id(0).to(tl.int64) * (KEYS * VALUES)
    local_ptr += (batch * (segments - 1) * H + head) * (KEYS * VALUES)
    transition_ptr += (batch * (segments - 1) * H + head) * (KEYS * KEYS)
    enter_ptr += (batch * segments * H + head) * (KEYS * VALUES)
    entries = key[:, None] * KEYS + key[None, :]
    pair = tl.program_id(0).to(tl.int64) * (KEYS * VALUES)
    if first_ptr is None:
        # nothing enters the first segment, and what leaves it is what it adds
        state = tl.zeros([WIDE, BLOCK], tl.float32)
        tl.store(enter_ptr + cell, state, mask=inside)
        state = tl.load(local_ptr + cell, mask=inside, other=0.0)
        begin: tl.constexpr = 1
    else:
        state = tl.load(first_ptr + pair + cell, mask=inside, other=0.0)
        begin: tl.constexpr = 0
    row = (begin * H).to(tl.int64)
    ahead = tl.minimum(begin, segments - 2).to(tl.int64) * H * (KEYS * KEYS)
    transition = tl.load(transition_ptr + ahead + entries, mask=square, other=0.0)
    for segment in range(begin, segments - 1):
        # loaded ahead: a store keeps the compiler from doing so
        ahead = tl.minimum(segment + 1, segments - 2).to(tl.int64) * H * (KEYS * KEYS)
        transition_next = tl.load(transition_ptr + ahead + entries, mask=square, other=0.0)
        local = tl.load(local_ptr + row * (KEYS * VALUES) + cell, mask=inside, other=0.0)
        tl.store(enter_ptr + row * (KEYS * VALUES) + cell, state, mask=inside)
        state = tl.dot(transition, state, local, input_precision="tf32x3")
        transition = transition_next
        row += H
    tl.store(enter_ptr + row * (KEYS * VALUES) + cell, state, mask=inside)
