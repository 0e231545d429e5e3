"""The backward pass's scan over a sequence's segments, of states and of their gradients.

It goes from what each segment adds (hopper/segment_states.py) to what enters it.

All of a cell's segments are loaded at once. A loop over them, which must wait for each, took about a microsecond each.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _combine(decay, add, later_decay, later_add):
    return decay * later_decay, add * later_decay + later_add


@triton.jit
def segment_scan_both_ways(
    local_ptr,
    decay_ptr,
    first_ptr,
    back_first_ptr,
    enter_ptr,
    back_last_ptr,
    H,
    size,
    segments,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B * H, blocks of BLOCK of a state's `size` cells, 2): states forward in time, then gradients backward.

    PADDED: segments, rounded up to a power of two. PDL: whether the launches before and behind may overlap it.
    local, enter: float32 [2, B, segments, H, size], in and out. decay: [B, segments, H], log2 of each segment's, or
    None. first: [B, H, size], the state before the sequence, or None; back_first, back_last: its gradient after and
    before it, or None.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    batch = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    back = tl.program_id(2)
    cell = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    step = tl.arange(0, PADDED)
    segment = tl.where(back == 1, segments - 1 - step, step)
    row = (batch * segments + segment) * H + head
    inside = (step < segments)[:, None] & (cell < size)[None, :]
    states = tl.num_programs(0).to(tl.int64) * segments * size * back
    add = tl.load(local_ptr + states + row[:, None] * size + cell[None, :], mask=inside, other=0.0)
    if decay_ptr is None:
        decay = tl.full([PADDED], 1.0, tl.float32)
    else:
        decay = tl.exp2(tl.load(decay_ptr + row, mask=step < segments, other=0.0))
    decay, after = tl.associative_scan((tl.broadcast_to(decay[:, None], [PADDED, BLOCK]), add), 0, _combine)

    pair = tl.program_id(0).to(tl.int64) * size + cell
    start = tl.zeros([BLOCK], tl.float32)
    if first_ptr is not None:
        start += tl.load(first_ptr + pair, mask=(cell < size) & (back == 0), other=0.0)
    if back_first_ptr is not None:
        start += tl.load(back_first_ptr + pair, mask=(cell < size) & (back == 1), other=0.0)
    after += decay * start[None, :]
    # what leaves a segment enters the next
    next_row = tl.where(back == 1, -H, H)
    onward = inside & (step < segments - 1)[:, None]
    tl.store(enter_ptr + states + (row + next_row)[:, None] * size + cell[None, :], after, mask=onward)
    opening = tl.where(back == 1, segments - 1, 0)
    tl.store(enter_ptr + states + ((batch * segments + opening) * H + head) * size + cell, start, mask=cell < size)
    ending = inside & (step == segments - 1)[:, None]
    if back_last_ptr is not None:
        tl.store(tl.broadcast_to((back_last_ptr + pair)[None, :], [PADDED, BLOCK]), after, mask=ending & (back == 1))
