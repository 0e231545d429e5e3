"""mLSTM's gates, n and m on a pool of states: what a head has once, whose C several programs share out by columns.

It runs before the kernel of C, which takes log decays, strengths and divisors from it and touches neither n nor m: so
no program reads what another one writes.
"""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.normalizer import stabilized_gates
from holdfast.kernels.lib.triton.sigmoid import log_sigmoid
from holdfast.kernels.lib.triton.slots import due_slot, store_state

from .update import load_row


@triton.jit
def normalizer_decode_pool(
    q_ptr, k_ptr, i_ptr, f_ptr, n_ptr, m_ptr, g_ptr, beta_ptr, divisor_ptr, slots_ptr, next_ptr, accepted_ptr,
    H, slots, scale, eps, n_slot, m_slot, q_batch, q_token, k_batch, k_token, i_batch, i_token, f_batch, f_token,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, EXPONENTIAL: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """Grid (B * H,): TOKENS steps of n and m.

    q, k [B, TOKENS, H / GROUP, K], i, f [B, TOKENS, H], strides of two axes
    n [slots, H, K], any floating dtype, m [slots, H] float32, a stride between slots, updated
    g, beta, divisor [B, TOKENS, H] float32, written; divisor may be None, and n and m are then handed on as they are
    slots, next, accepted, EACH: as in matrix_decode_pool
    """
    head = (tl.program_id(0) % H).to(tl.int64)
    batch = (tl.program_id(0) // H).to(tl.int64)
    rows = tl.arange(0, BLOCK_K)
    in_rows = rows < K
    slot = tl.load(slots_ptr + batch).to(tl.int64)
    is_there = (slot >= 0) & (slot < slots)
    inside = in_rows & is_there
    cells = head * K + rows
    n = tl.load(n_ptr + slot * n_slot + cells, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + slot * m_slot + head, mask=is_there, other=0.0)
    # several threads may hold a channel, and all have m: they have read both before one writes
    tl.debug_barrier()
    following = due_slot(next_ptr, accepted_ptr, batch, 0, TOKENS, EACH)
    store_state(n_ptr, following, slots, n_slot, cells, n, inside)
    store_state(m_ptr, following, slots, m_slot, head, m, is_there)
    for token in tl.static_range(TOKENS):
        place = (batch * TOKENS + token) * H + head
        i = tl.load(i_ptr + batch * i_batch + token * i_token + head).to(tl.float32)
        log_f = log_sigmoid(tl.load(f_ptr + batch * f_batch + token * f_token + head).to(tl.float32))
        found = stabilized_gates(i, log_f, m, EXPONENTIAL)
        tl.store(g_ptr + place, found.log_decay)
        tl.store(beta_ptr + place, found.beta)
        if divisor_ptr is not None:
            q = load_row(q_ptr + batch * q_batch + token * q_token, (head // GROUP) * K, rows, in_rows)
            k = load_row(k_ptr + batch * k_batch + token * k_token, (head // GROUP) * K, rows, in_rows)
            # fused by name: alike in a call of one token and in one of several
            n = tl.fma(tl.zeros_like(n) + tl.exp(found.log_decay), n, found.beta * k)
            tl.store(divisor_ptr + place, tl.maximum(tl.abs(scale * tl.sum(n * q, 0)), found.floor) + eps)
            # as if it had been stored and read, so that several tokens are several steps
            n = n.to(n_ptr.dtype.element_ty).to(tl.float32)
            m = found.m
        following = due_slot(next_ptr, accepted_ptr, batch, token + 1, TOKENS, EACH)
        store_state(n_ptr, following, slots, n_slot, cells, n, inside)
        store_state(m_ptr, following, slots, m_slot, head, m, is_there)
