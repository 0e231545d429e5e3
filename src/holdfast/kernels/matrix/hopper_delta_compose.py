"""The scan over a sequence's segments under the delta rule: S = transition S + local, from segment to segment.

A segment's transition is what it multiplies the state before it with, [K, K]; local what it adds to it. Each product
waits for the one before it; columns of the state are independent. The state's gradient goes back through the segments
likewise, by the transitions transposed.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["H", "segments"])
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
    BACK: tl.constexpr,
):
    """Grid (B * H, blocks of BLOCK columns).

    local: float32 [B, segments - 1, H, KEYS, VALUES], transition: [B, segments - 1, H, KEYS, KEYS], of all segments but
    the last. first: [B, H, KEYS, VALUES], the state before the sequence, or None. enter: that before each segment,
    [B, segments, H, KEYS, VALUES]. WIDE: KEYS, rounded up to a power of two. BACK: first and enter are of the state's
    gradient, after the sequence and after each segment; local is what all segments but the first add to it, and the
    last one's has in it what it makes of first.
    """
    batch = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    key = tl.arange(0, WIDE)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cell = key[:, None] * VALUES + column[None, :]
    inside = (key < KEYS)[:, None] & (column < VALUES)[None, :]
    square = (key < KEYS)[:, None] & (key < KEYS)[None, :]
    local_ptr += (batch * (segments - 1) * H + head) * (KEYS * VALUES)
    transition_ptr += (batch * (segments - 1) * H + head) * (KEYS * KEYS)
    enter_ptr += (batch * segments * H + head) * (KEYS * VALUES)
    # of a turn: rows of local, of enter and of transition, and how far the next turn's are
    row = H.to(tl.int64) * (segments - 2 if BACK else 0)
    into = H.to(tl.int64) * (segments - 1 if BACK else 0)
    step = -H if BACK else H
    entries = key[None, :] * KEYS + key[:, None] if BACK else key[:, None] * KEYS + key[None, :]
    if first_ptr is None:
        state = tl.zeros([WIDE, BLOCK], tl.float32)
    else:
        state = tl.load(first_ptr + tl.program_id(0).to(tl.int64) * (KEYS * VALUES) + cell, mask=inside, other=0.0)
    begin: tl.constexpr = 1 if first_ptr is None or BACK else 0
    if begin == 1:
        # what leaves the first segment is what it adds
        tl.store(enter_ptr + into * (KEYS * VALUES) + cell, state, mask=inside)
        state = tl.load(local_ptr + row * (KEYS * VALUES) + cell, mask=inside, other=0.0)
        row += step
        into += step
    # no further than the last segment that has a transition
    through = into if BACK else row
    end = H.to(tl.int64) * (tl.minimum(1, segments - 2) if BACK else segments - 2)
    ahead = tl.maximum(through, end) if BACK else tl.minimum(through, end)
    transition = tl.load(transition_ptr + ahead * (KEYS * KEYS) + entries, mask=square, other=0.0)
    for _ in range(begin, segments - 1):
        # loaded ahead: a store keeps the compiler from doing so
        through += step
        ahead = tl.maximum(through, end) if BACK else tl.minimum(through, end)
        transition_next = tl.load(transition_ptr + ahead * (KEYS * KEYS) + entries, mask=square, other=0.0)
        local = tl.load(local_ptr + row * (KEYS * VALUES) + cell, mask=inside, other=0.0)
        tl.store(enter_ptr + into * (KEYS * VALUES) + cell, state, mask=inside)
        state = tl.dot(transition, state, local, input_precision="tf32x3")
        transition = transition_next
        row += step
        into += step
    tl.store(enter_ptr + into * (KEYS * VALUES) + cell, state, mask=inside)
