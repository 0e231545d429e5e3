"""The states of a sequence from chunk to chunk, in registers, and outputs, from what chunk_prepare.py has left."""

import triton
import triton.language as tl

from .decay import CHUNK
from .slots import folded_state_offsets, sequence_bounds, state_offsets


@triton.jit
def gla_chunk_fwd(
    q_decayed_ptr, k_decayed_ptr, v_ptr, scores_ptr, chunk_decay_ptr, out_ptr, initial_ptr, final_ptr,
    saved_ptr, cu_seqlens,
    T, v_batch, v_head,
    H: tl.constexpr, V_STEP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
    REVERSE: tl.constexpr, FOLDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one sequence, head and block of v's columns. Grid (ceil(COLUMNS / BLOCK_V) * H * N,).

    Forward, out = scores v + q_decayed S, then S = chunk_decay S + k_decayed^T v. In reverse, from the last chunk, the
    caller exchanges q_decayed and k_decayed and gives do for v: with scores^T, S is the gradient of the state, and out
    that of v.

    q_decayed, k_decayed, chunk_decay, scores  as `gla_chunk_prepare` writes them
    v               [B, T, H, COLUMNS]
    out             [B, T, H, COLUMNS], written, or None
    initial, final  [N, H, WIDTH, COLUMNS]: S before and after, or None
    saved           written: S as it enters each chunk, at state_offsets, or at folded_state_offsets if FOLDED; or None
    cu_seqlens      [N + 1], or None
    """
    SPLITS: tl.constexpr = (COLUMNS + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    head = (program // SPLITS % H).to(tl.int64)
    n = (program // SPLITS // H).to(tl.int64)
    columns = program % SPLITS * BLOCK_V + tl.arange(0, BLOCK_V)
    batch, first, end, slot = sequence_bounds(n, cu_seqlens, T)
    rows = tl.arange(0, BLOCK_K)
    steps = tl.arange(0, CHUNK)
    in_keys, in_values = rows < WIDTH, columns < COLUMNS
    v_ptr += batch * v_batch + head * v_head

    # transposed, so that its registers, rounded, are the left operand of the product that reads it
    state_at = (n * H + head) * WIDTH * COLUMNS + columns[:, None] + (rows * COLUMNS)[None, :]
    mask = in_values[:, None] & in_keys[None, :]
    if initial_ptr is None:
        state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    else:
        state = tl.load(initial_ptr + state_at, mask=mask, other=0.0)
    count = tl.cdiv(end - first, CHUNK).to(tl.int32)
    for i in tl.range(0, count, num_stages=STAGES):
        if REVERSE:
            chunk = count - 1 - i
        else:
            chunk = i
        start = first + chunk * CHUNK
        live = steps < (end - start).to(tl.int32)
        token = (batch * T + start) * H + head
        chunk_decay = tl.load(chunk_decay_ptr + ((slot + chunk) * H + head) * WIDTH + rows, mask=in_keys, other=0.0)
        at = token * WIDTH + (steps * H * WIDTH)[:, None] + rows[None, :]
        k_decayed = tl.load(k_decayed_ptr + at, mask=live[:, None] & in_keys[None, :], other=0.0)
        v = tl.load(v_ptr + start * V_STEP + (steps * V_STEP)[:, None] + columns[None, :],
                    mask=live[:, None] & in_values[None, :], other=0.0)  # fmt: skip
        state_operand = state.to(v.dtype)
        if saved_ptr is not None:
            if FOLDED:
                at_saved = folded_state_offsets(columns, rows, token, H, WIDTH)
            else:
                at_saved = state_offsets(columns, rows, slot + chunk, head, H, WIDTH, COLUMNS)
            tl.store(saved_ptr + at_saved, state_operand, mask=mask)
        if out_ptr is not None:
            q_decayed = tl.load(q_decayed_ptr + at, mask=live[:, None] & in_keys[None, :], other=0.0)
            at_scores = token * CHUNK + (steps * H * CHUNK)[:, None] + steps[None, :]
            scores = tl.load(scores_ptr + at_scores, mask=live[:, None], other=0.0)
            if not REVERSE:
                scores = tl.trans(scores)
            out = tl.dot(state_operand, tl.trans(q_decayed), input_precision=PRECISION)
            out = tl.dot(tl.trans(v), scores, out, input_precision=PRECISION)
            at_out = token * COLUMNS + (steps * H * COLUMNS)[:, None] + columns[None, :]
            tl.store(
                out_ptr + at_out, tl.trans(out.to(out_ptr.dtype.element_ty)), mask=live[:, None] & in_values[None, :]
            )
        state *= chunk_decay[None, :]
        state = tl.dot(tl.trans(v), k_decayed, state, input_precision=PRECISION)
    if final_ptr is not None:
        tl.store(final_ptr + state_at, state, mask=mask)
