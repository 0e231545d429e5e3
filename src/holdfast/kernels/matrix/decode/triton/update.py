"""A few tokens of decoding on a pool of states: each cell is read once, goes through the tokens, and is written."""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.slots import store_state

from .step import update_state


@triton.jit
def load_row(base, at, rows, inside):
    """Load a token's row in float32, 0 where it is not inside."""
    return tl.load(base + at + rows, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def matrix_decode_pool(
    q_ptr, k_ptr, e_ptr, v_ptr, g_ptr, beta_ptr, divisor_ptr, o_ptr, pool_ptr, slots_ptr, next_ptr, accepted_ptr,
    H, slots, scale, pool_slot, q_batch, q_token, k_batch, k_token, e_batch, e_token, v_batch, v_token,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, ERASE_GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, VECTOR: tl.constexpr, DELTA: tl.constexpr,
    ERASE_BEFORE_DECAY: tl.constexpr, KEYS_LAST: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Grid (B * H * blocks of V's columns,): TOKENS steps of MatrixCall.

    q, k [B, TOKENS, H / GROUP, K], e [B, TOKENS, H / ERASE_GROUP, K], v [B, TOKENS, H, V], strides of two axes
    g [B, TOKENS, H] or, with VECTOR, [B, TOKENS, H, K], beta [B, TOKENS, H], contiguous; e, g and beta may be None
    divisor [B, TOKENS, H] float32, contiguous, of the outputs, or None
    o [B, TOKENS, H, V], written; 0 for a sequence without a slot
    pool [slots, H, K, V] or, with KEYS_LAST, [slots, H, V, K], a stride between slots; any floating dtype
    slots [B]: where a sequence's state is; next [B], or [B, TOKENS] with EACH: where it goes. What is no slot is
        neither read nor written. accepted [B] or None: after how many tokens it goes there, by default all
    """
    SPLITS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    split = tl.program_id(0) % SPLITS
    head = ((tl.program_id(0) // SPLITS) % H).to(tl.int64)
    batch = ((tl.program_id(0) // SPLITS) // H).to(tl.int64)
    rows = tl.arange(0, BLOCK_K)
    columns = split * BLOCK_V + tl.arange(0, BLOCK_V)
    in_rows = rows < K
    in_columns = columns < V
    slot = tl.load(slots_ptr + batch).to(tl.int64)
    is_there = (slot >= 0) & (slot < slots)
    inside = in_rows[:, None] & in_columns[None, :] & is_there
    if KEYS_LAST:
        cells = columns[None, :] * K + rows[:, None]
    else:
        cells = rows[:, None] * V + columns[None, :]
    pool = pool_ptr + head * (K * V)
    state = tl.load(pool + slot * pool_slot + cells, mask=inside, other=0.0).to(tl.float32)
    if accepted_ptr is not None:
        accepted = tl.load(accepted_ptr + batch)
        following = tl.load(next_ptr + batch)
        store_state(pool, following, slots, pool_slot, cells, state, inside & (accepted == 0))
    for token in tl.static_range(TOKENS):
        place = (batch * TOKENS + token) * H + head
        q = load_row(q_ptr + batch * q_batch + token * q_token, (head // GROUP) * K, rows, in_rows)
        k = load_row(k_ptr + batch * k_batch + token * k_token, (head // GROUP) * K, rows, in_rows)
        v = load_row(v_ptr + batch * v_batch + token * v_token, head * V, columns, in_columns)
        e = k
        if e_ptr is not None:
            e = load_row(e_ptr + batch * e_batch + token * e_token, (head // ERASE_GROUP) * K, rows, in_rows)
        decay = tl.full([BLOCK_K], 1.0, tl.float32)
        if g_ptr is not None:
            if VECTOR:
                decay = tl.exp(load_row(g_ptr, place * K, rows, in_rows))
            else:
                decay *= tl.exp(tl.load(g_ptr + place).to(tl.float32))
        beta = 1.0
        if beta_ptr is not None:
            beta = tl.load(beta_ptr + place).to(tl.float32)
        state = update_state(state, k, e, v, decay, beta, DELTA, ERASE_BEFORE_DECAY)
        o = scale * tl.sum(state * q[:, None], 0)
        if divisor_ptr is not None:
            o /= tl.load(divisor_ptr + place)
        o = tl.where(is_there, o, 0.0)
        tl.store(o_ptr + place * V + columns, o.to(o_ptr.dtype.element_ty), mask=in_columns)
        # as if it had been stored and read, so that several tokens are several steps
        state = state.to(pool.dtype.element_ty).to(tl.float32)
        if EACH:
            following = tl.load(next_ptr + batch * TOKENS + token)
            store_state(pool, following, slots, pool_slot, cells, state, inside)
        elif accepted_ptr is not None:
            store_state(pool, following, slots, pool_slot, cells, state, inside & (accepted == token + 1))
        elif token == TOKENS - 1:
            store_state(pool, tl.load(next_ptr + batch), slots, pool_slot, cells, state, inside)
