"""States of a pool, for Triton kernels: what kernels/slots.py says, without reading numbers on the host."""

import triton
import triton.language as tl


@triton.jit
def store_state(pool, slot, slots, pool_slot, cells, state, inside):
    """Store a state, rounded, to the cells of a slot; not at all where there is no such slot."""
    slot = slot.to(tl.int64)
    there = (slot >= 0) & (slot < slots)
    tl.store(pool + slot * pool_slot + cells, state.to(pool.dtype.element_ty), mask=inside & there)


@triton.jit
def due_slot(next_ptr, accepted_ptr, batch, token: tl.constexpr, TOKENS: tl.constexpr, EACH: tl.constexpr):
    """Return where a sequence's state goes after so many of its tokens; -1 for nowhere. EACH: next is [B, TOKENS]."""
    slot = tl.full([], -1, tl.int32)
    if EACH:
        if token > 0:
            slot = tl.load(next_ptr + batch * TOKENS + token - 1)
    elif accepted_ptr is not None:
        slot = tl.where(tl.load(accepted_ptr + batch) == token, tl.load(next_ptr + batch), -1)
    elif token == TOKENS:
        slot = tl.load(next_ptr + batch)
    return slot
