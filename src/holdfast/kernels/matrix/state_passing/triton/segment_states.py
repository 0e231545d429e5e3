"""The state that each segment of a sequence ends in if it starts from zero.

Few sequences fill a GPU only if each is cut. A scan over the segments (segment_scan.py) and a pass a segment follow.
That is exact: a segment that starts from S ends in exp(sum of g) S + (the state that it ends in from zero).
"""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.decay import log_decay_cumsum
from holdfast.kernels.lib.triton.sequence import sequence_bounds
from holdfast.kernels.lib.triton.tiles import NARROW, load_tile, split_hi_lo_rows


@triton.jit
def triton_segment_states(
    k_ptr, v_ptr, g_ptr, source_ptr, source_add_ptr, last_ptr, decay_ptr,
    T, H, segment, scale, k_batch, k_step, k_head, v_batch, v_step, v_head,
    state_size, state_k, state_v, state_add,
    K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, SEGMENTS: tl.constexpr, STAGES: tl.constexpr,
    REVERSE: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Find the state after each segment, started from zero, and log2 of the segment's decay.

    Grid (splits of v's columns * H * B * SEGMENTS). k [B, T, H / K_GROUP, WIDTH] and v [B, T, H / V_GROUP, COLUMNS], by
    strides. g, source, source_add: float32 [B, T, H], as in scalar_decay_single_pass; each may be None.
    last: float32 [B * SEGMENTS, H, ...], by the strides state_k over WIDTH and state_v over COLUMNS, with ADD the added
    column's from state_add on. decay: float32 [B * SEGMENTS, H], with g.
    """
    SPLITS: tl.constexpr = (COLUMNS + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    split = program % SPLITS
    head = (program // SPLITS) % H
    n = (program // SPLITS) // H
    batch, first, end = sequence_bounds(n, None, T, segment, SEGMENTS)
    batch = batch.to(tl.int64)
    head = head.to(tl.int64)
    steps = tl.arange(0, CHUNK)
    rows = tl.arange(0, BLOCK_K)
    columns = split * BLOCK_V + tl.arange(0, BLOCK_V)
    k_ptr += batch * k_batch + (head // K_GROUP) * k_head
    v_ptr += batch * v_batch + (head // V_GROUP) * v_head

    state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    added = tl.zeros([NARROW, BLOCK_V], tl.float32)
    decay = tl.zeros([], tl.float32)
    count = tl.cdiv(end - first, CHUNK).to(tl.int32)
    for i in tl.range(0, count, num_stages=STAGES):
        if REVERSE:
            start = first + (count - 1 - i) * CHUNK
        else:
            start = first + i * CHUNK
        live = steps < end - start
        at = (batch * T + start + steps) * H + head
        k = load_tile(k_ptr + start * k_step, steps, rows, k_step, live, WIDTH, WIDTH == BLOCK_K)
        v = load_tile(v_ptr + start * v_step, steps, columns, v_step, live, COLUMNS, COLUMNS % BLOCK_V == 0)
        weight = live.to(tl.float32)
        if source_ptr is not None:
            weight = tl.load(source_ptr + at, mask=live, other=0.0)
        if ADD:
            weight_add = live.to(tl.float32)
            if source_add_ptr is not None:
                weight_add = tl.load(source_add_ptr + at, mask=live, other=0.0)
        if g_ptr is not None:
            here, total, _ = log_decay_cumsum(g_ptr, at, live, REVERSE, WIDE)
            to_end = tl.exp2((total - here).to(tl.float32))
            weight *= to_end
            whole = tl.exp2(total.to(tl.float32))
            state *= whole
            if ADD:
                weight_add *= to_end
                added *= whole
            # a longer sum is zero too, and stays exact in float32
            decay = tl.maximum(decay + total.to(tl.float32), -1e6)
        if REVERSE:
            weight *= scale
        if ADD:
            if REVERSE:
                weight_add *= scale
            added = tl.dot(split_hi_lo_rows(weight_add, v), v, added, input_precision=PRECISION)
        written = (tl.trans(v).to(tl.float32) * weight[None, :]).to(v.dtype)
        state = tl.dot(written, k, state, input_precision=PRECISION)

    at = (n.to(tl.int64) * H + head) * state_size
    mask = (columns < COLUMNS)[:, None] & (rows < WIDTH)[None, :]
    tl.store(last_ptr + at + columns[:, None] * state_v + rows[None, :] * state_k, state, mask=mask)
    if ADD:
        tl.store(last_ptr + at + state_add + columns * state_v, tl.sum(added, 0), mask=columns < COLUMNS)
    if g_ptr is not None:
        tl.store(decay_ptr + n * H + head, decay, mask=split == 0)
