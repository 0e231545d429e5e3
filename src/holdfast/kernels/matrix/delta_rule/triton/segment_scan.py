"""The scan over a sequence's segments under the delta rule: S = transition S + local, from segment to segment.

A segment's transition is what it multiplies the state before it with, [K, K]; local what it adds to it. Each product
waits for the one before it; columns of the state are independent. The state's gradient goes back through the segments
likewise, by the transitions transposed.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "H", "segments", "segment_chunks", "local_rows", "transition_rows"])
def delta_rule_segment_scan(
    local_ptr,
    transition_ptr,
    first_ptr,
    enter_ptr,
    cu_ptr,
    T,
    H,
    segments,
    segment_chunks,
    local_rows,
    transition_rows,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BACK: tl.constexpr,
):
    """Grid (B * H, blocks of BLOCK columns), or (N * H, blocks) of packed sequences.

    local: float32 [B, local_rows, H, KEYS, VALUES], transition: [B, transition_rows, H, KEYS, KEYS], of all segments
    but perhaps the last. first: [B, H, KEYS, VALUES], the state before the sequence, or None. enter: that before each
    segment, [B, segments, H, KEYS, VALUES]. WIDE: KEYS, rounded up to a power of two. BACK: first and enter are of the
    state's gradient, after the sequence and after each segment; local and transition are of all segments but perhaps
    the first. cu: [N + 1], where packed sequences begin and end, or None; with it local, transition and enter are
    [places, H, ...], as lib/gluon/sequence.py counts segments of segment_chunks, and T is how many tokens there are.
    """
    batch = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    key = tl.arange(0, WIDE)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cell = key[:, None] * VALUES + column[None, :]
    inside = (key < KEYS)[:, None] & (column < VALUES)[None, :]
    square = (key < KEYS)[:, None] & (key < KEYS)[None, :]
    if cu_ptr is None:
        enter_ptr += (batch * segments * H + head) * (KEYS * VALUES)
        local_ptr += (batch * local_rows * H + head) * (KEYS * VALUES)
        transition_ptr += (batch * transition_rows * H + head) * (KEYS * KEYS)
    else:
        begin = tl.minimum(tl.maximum(tl.load(cu_ptr + batch), 0), T)
        tokens = tl.minimum(tl.maximum(tl.load(cu_ptr + batch + 1), begin), T) - begin
        segments = tl.maximum(tl.cdiv(tokens, segment_chunks * 64), 1).to(tl.int32)
        place = (begin // (segment_chunks * 64) + batch).to(tl.int64)
        enter_ptr += (place * H + head) * (KEYS * VALUES)
        local_ptr += (place * H + head) * (KEYS * VALUES)
        transition_ptr += (place * H + head) * (KEYS * KEYS)
    if first_ptr is None:
        state = tl.zeros([WIDE, BLOCK], tl.float32)
    else:
        state = tl.load(first_ptr + tl.program_id(0).to(tl.int64) * (KEYS * VALUES) + cell, mask=inside, other=0.0)
    if cu_ptr is not None:  # noqa: SIM102 - known while compiling
        if segments == 1:
            tl.store(enter_ptr + cell, state, mask=inside)
            return
    # the segment's row, the step to the next one's, and the last row that has a transition
    row = H.to(tl.int64) * (segments - 1 if BACK else 0)
    step = -H if BACK else H
    end = H.to(tl.int64) * (1 if BACK else segments - 2)
    entries = key[None, :] * KEYS + key[:, None] if BACK else key[:, None] * KEYS + key[None, :]
    if first_ptr is None:
        # what leaves the first segment is what it adds
        tl.store(enter_ptr + row * (KEYS * VALUES) + cell, state, mask=inside)
        state = tl.load(local_ptr + row * (KEYS * VALUES) + cell, mask=inside, other=0.0)
        row += step
    transition_row = tl.maximum(row, end) if BACK else tl.minimum(row, end)
    transition = tl.load(transition_ptr + transition_row * (KEYS * KEYS) + entries, mask=square, other=0.0)
    for _ in range(1 if first_ptr is None else 0, segments - 1):
        # loaded ahead: a store keeps the compiler from doing so
        transition_row = tl.maximum(row + step, end) if BACK else tl.minimum(row + step, end)
        transition_next = tl.load(transition_ptr + transition_row * (KEYS * KEYS) + entries, mask=square, other=0.0)
        local = tl.load(local_ptr + row * (KEYS * VALUES) + cell, mask=inside, other=0.0)
        tl.store(enter_ptr + row * (KEYS * VALUES) + cell, state, mask=inside)
        state = tl.dot(transition, state, local, input_precision="tf32x3")
        transition = transition_next
        row += step
    tl.store(enter_ptr + row * (KEYS * VALUES) + cell, state, mask=inside)
