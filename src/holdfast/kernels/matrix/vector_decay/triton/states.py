"""The sweep over a sequence's chunks with the state in registers, of what triton_gla_prepare found in them."""

import triton
import triton.language as tl

from .decay import CHUNK
from .slots import first_slot, state_places


@triton.jit
def sweep(
    read_ptr, write_ptr, v_ptr, scores_ptr, total_ptr, out_ptr, first_ptr, last_ptr, kept_ptr, cu_seqlens,
    T, v_batch, v_head,
    H: tl.constexpr, V_STEP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
    REVERSE: tl.constexpr, FOLDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sequence, head and block of v's columns.

    Forward, out = scores v + read S, then S = total S + write^T v. In reverse, from the last chunk, with read and write
    exchanged and v the output's gradient: scores^T, S the gradient of the state, out the gradient of the values.
    out [B, T, H, COLUMNS] may be None. first, last [N, H, WIDTH, COLUMNS]: S before and after. kept: S as it enters
    each chunk, where state_places says.
    """
    SPLITS: tl.constexpr = (COLUMNS + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0)
    head = (program // SPLITS % H).to(tl.int64)
    n = (program // SPLITS // H).to(tl.int64)
    columns = program % SPLITS * BLOCK_V + tl.arange(0, BLOCK_V)
    if cu_seqlens is None:
        batch = n
        first, end = n * 0, n * 0 + T
        slot = n * tl.cdiv(T, CHUNK)
    else:
        batch = n * 0
        # wrong offsets must not reach outside of the tensors
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), T)
        end = tl.minimum(tl.load(cu_seqlens + n + 1).to(tl.int64), T)
        slot = first_slot(n, first)
    rows = tl.arange(0, BLOCK_K)
    steps = tl.arange(0, CHUNK)
    wide, tall = rows < WIDTH, columns < COLUMNS
    v_ptr += batch * v_batch + head * v_head

    # transposed, so that its registers, rounded, are the left operand of the product that reads it
    state_at = (n * H + head) * WIDTH * COLUMNS + columns[:, None] + (rows * COLUMNS)[None, :]
    mask = tall[:, None] & wide[None, :]
    if first_ptr is None:
        state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    else:
        state = tl.load(first_ptr + state_at, mask=mask, other=0.0)
    count = tl.cdiv(end - first, CHUNK).to(tl.int32)
    for i in tl.range(0, count, num_stages=STAGES):
        if REVERSE:
            chunk = count - 1 - i
        else:
            chunk = i
        start = first + chunk * CHUNK
        live = steps < (end - start).to(tl.int32)
        token = (batch * T + start) * H + head
        whole = tl.load(total_ptr + ((slot + chunk) * H + head) * WIDTH + rows, mask=wide, other=0.0)
        at = token * WIDTH + (steps * H * WIDTH)[:, None] + rows[None, :]
        write = tl.load(write_ptr + at, mask=live[:, None] & wide[None, :], other=0.0)
        v = tl.load(v_ptr + start * V_STEP + (steps * V_STEP)[:, None] + columns[None, :],
                    mask=live[:, None] & tall[None, :], other=0.0)  # fmt: skip
        rounded = state.to(v.dtype)
        if kept_ptr is not None:
            place = state_places(columns, rows, slot + chunk, token, head, H, WIDTH, COLUMNS, FOLDED)
            tl.store(kept_ptr + place, rounded, mask=mask)
        if out_ptr is not None:
            read = tl.load(read_ptr + at, mask=live[:, None] & wide[None, :], other=0.0)
            place = token * CHUNK + (steps * H * CHUNK)[:, None] + steps[None, :]
            scores = tl.load(scores_ptr + place, mask=live[:, None], other=0.0)
            if not REVERSE:
                scores = tl.trans(scores)
            out = tl.dot(rounded, tl.trans(read), input_precision=PRECISION)
            out = tl.dot(tl.trans(v), scores, out, input_precision=PRECISION)
            place = token * COLUMNS + (steps * H * COLUMNS)[:, None] + columns[None, :]
            tl.store(out_ptr + place, tl.trans(out.to(out_ptr.dtype.element_ty)), mask=live[:, None] & tall[None, :])
        state *= whole[None, :]
        state = tl.dot(tl.trans(v), write, state, input_precision=PRECISION)
    if last_ptr is not None:
        tl.store(last_ptr + state_at, state, mask=mask)
