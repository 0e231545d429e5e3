"""The scan over a sequence's segments: from what each adds to the state to what enters it."""

import triton
import triton.language as tl


@triton.jit
def segment_scan(
    states_ptr, decay_ptr, first_ptr, last_ptr, H, size,
    SEGMENTS: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn the states that segments end in, started from zero, into those that enter them, in place.

    Grid (B * H, blocks of BLOCK of a state's `size` cells).
    states: float32 [B, SEGMENTS, H, size]. decay: [B, SEGMENTS, H], log2 of each segment's, or None.
    first, last: [B, H, size], the state before the first segment and after the last, or None.
    """
    row = tl.program_id(0)
    batch = (row // H).to(tl.int64)
    head = row % H
    cell = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < size
    at = (batch * H + head) * size + cell
    if first_ptr is None:
        state = tl.zeros([BLOCK], tl.float32)
    else:
        state = tl.load(first_ptr + at, mask=inside, other=0.0)
    for i in tl.range(0, SEGMENTS, num_stages=4):
        if REVERSE:
            n = batch * SEGMENTS + SEGMENTS - 1 - i
        else:
            n = batch * SEGMENTS + i
        place = states_ptr + (n * H + head) * size + cell
        local = tl.load(place, mask=inside, other=0.0)
        tl.store(place, state, mask=inside)
        if decay_ptr is not None:
            state *= tl.exp2(tl.load(decay_ptr + n * H + head))
        state += local
    if last_ptr is not None:
        tl.store(last_ptr + at, state, mask=inside)
