"""What the outputs of a segment of a sequence add to the gradient of the state before it.

A segment's outputs are linear in that state: token t's has W_t S, where W is what hopper/forward.py finds without v,
from the identity in the state's place. So dS has the sum of W_t^T dO_t.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["sequences", "T", "H", "segment_chunks"])
def delta_rule_segment_dstates(
    w_ptr,
    do_ptr,
    local_ptr,
    cu_ptr,
    sequences,
    T,
    H,
    segment_chunks,
    do_b,
    do_t,
    do_h,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B * H, blocks of BLOCK columns, segments), or (places * H, blocks, 1) of packed sequences.

    w: [B, T, H, KEYS], contiguous. do: [B, T, H, VALUES] by its strides. local: float32 [B, segments, H, KEYS, VALUES],
    of all segments, of segment_chunks each, but a sequence's first. WIDE: KEYS, rounded up to a power of two. cu:
    [sequences + 1], where packed sequences begin and end, or None; lib/gluon/sequence.py counts their segments' places.
    """
    head = tl.program_id(0) % H
    tokens = segment_chunks * 64
    if cu_ptr is None:
        batch = (tl.program_id(0) // H).to(tl.int64)
        place = batch * tl.num_programs(2) + tl.program_id(2)
        first = 0
        begin = tl.program_id(2) * tokens
        end = tl.minimum(begin + tokens, T)
    else:
        batch = 0
        place = (tl.program_id(0) // H).to(tl.int64)
        # the last sequence whose segments do not begin behind this one
        n = 0
        behind = sequences
        while behind - n > 1:
            middle = (n + behind) // 2
            begin = tl.minimum(tl.maximum(tl.load(cu_ptr + middle), 0), T).to(tl.int32)
            n = tl.where(begin // tokens + middle > place, n, middle)
            behind = tl.where(begin // tokens + middle > place, middle, behind)
        first = tl.minimum(tl.maximum(tl.load(cu_ptr + n), 0), T).to(tl.int32)
        end = tl.minimum(tl.maximum(tl.load(cu_ptr + n + 1), 0), T).to(tl.int32)
        begin = first + (place - first // tokens - n).to(tl.int32) * tokens
        end = tl.minimum(begin + tokens, end)
    if (begin == first) | (begin >= end):
        return
    key = tl.arange(0, WIDE)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w_ptr += (batch * T * H + head) * KEYS
    do_ptr += batch * do_b + head * do_h
    total = tl.zeros([WIDE, BLOCK], tl.float32)
    for token in range(begin, end, 64):
        rows = token + tl.arange(0, 64)
        at = rows.to(tl.int64)[:, None]
        is_live = (rows < end)[:, None]
        w = tl.load(w_ptr + at * (H * KEYS) + key[None, :], mask=is_live & (key < KEYS)[None, :], other=0.0)
        do = tl.load(do_ptr + at * do_t + column[None, :], mask=is_live & (column < VALUES)[None, :], other=0.0)
        total = tl.dot(tl.trans(w), do, total)
    inside = (key < KEYS)[:, None] & (column < VALUES)[None, :]
    cell = key[:, None] * VALUES + column[None, :]
    tl.store(local_ptr + (place * H + head) * (KEYS * VALUES) + cell, total, mask=inside)
