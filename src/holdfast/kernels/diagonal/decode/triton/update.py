"""A few tokens of decoding on a pool of states: each number is read once, goes through the tokens, and is written."""

import triton
import triton.language as tl

from holdfast.kernels.diagonal.triton.complex import cos_sin
from holdfast.kernels.lib.triton.slots import due_slot, store_state


@triton.jit
def load_wide(base, at, inside):
    """Load numbers in float32, 0 where they are not inside."""
    return tl.load(base + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rounded(x, like):
    """Round x to the dtype of a pool, as if it had been stored and read: so several tokens are several steps."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def diagonal_decode_pool(
    a_ptr, x_ptr, theta_ptr, h_ptr, pool_ptr, slots_ptr, next_ptr, accepted_ptr,
    numbers, slots, pool_slot, a_batch, a_token, x_batch, x_token, theta_batch, theta_token,
    TOKENS: tl.constexpr, LOG: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (B * blocks of numbers,): TOKENS steps of DiagonalCall on channels or, with theta, on pairs of them.

    a [B, TOKENS, numbers], theta as a or None, x [B, TOKENS, channels], strides of two axes
    h [B, TOKENS, channels], written; 0 for a sequence without a slot
    pool [slots, channels], a stride between slots, any floating dtype, updated
    slots [B]: where a sequence's state is; next [B], or [B, TOKENS] with EACH: where it goes. What is no slot is
        neither read nor written. accepted [B] or None: after how many tokens it goes there, by default all
    """
    across = tl.cdiv(numbers, BLOCK)
    batch = (tl.program_id(0) // across).to(tl.int64)
    d = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    here = d < numbers
    slot = tl.load(slots_ptr + batch).to(tl.int64)
    is_there = (slot >= 0) & (slot < slots)
    inside = here & is_there
    # of a pair the first; the second is beside it
    channels, first = numbers, d
    if theta_ptr is not None:
        channels, first = 2 * numbers, 2 * d
    real = load_wide(pool_ptr + slot * pool_slot, first, inside)
    imaginary = real
    if theta_ptr is not None:
        imaginary = load_wide(pool_ptr + slot * pool_slot, first + 1, inside)
    # several threads may hold a number of a small block: all have read it before one writes
    tl.debug_barrier()
    following = due_slot(next_ptr, accepted_ptr, batch, 0, TOKENS, EACH)
    store_state(pool_ptr, following, slots, pool_slot, first, real, inside)
    if theta_ptr is not None:
        store_state(pool_ptr, following, slots, pool_slot, first + 1, imaginary, inside)
    for token in tl.static_range(TOKENS):
        a = load_wide(a_ptr + batch * a_batch + token * a_token, d, here)
        if LOG:
            a = tl.exp(a)
        x_at = x_ptr + batch * x_batch + token * x_token
        h_at = h_ptr + (batch * TOKENS + token) * channels
        x = load_wide(x_at, first, here)
        # fused by name: alike in a call of one token and in one of several
        if theta_ptr is not None:
            cosine, sine = cos_sin(load_wide(theta_ptr + batch * theta_batch + token * theta_token, d, here))
            gate_real, gate_imaginary = a * cosine, a * sine
            after = tl.fma(gate_real, real, tl.fma(-gate_imaginary, imaginary, x))
            x = load_wide(x_at, first + 1, here)
            imaginary = tl.fma(gate_imaginary, real, tl.fma(gate_real, imaginary, x))
            real = after
            tl.store(h_at + first + 1, tl.where(is_there, imaginary, 0.0).to(h_ptr.dtype.element_ty), mask=here)
            imaginary = rounded(imaginary, pool_ptr)
        else:
            real = tl.fma(a, real, x)
        tl.store(h_at + first, tl.where(is_there, real, 0.0).to(h_ptr.dtype.element_ty), mask=here)
        real = rounded(real, pool_ptr)
        following = due_slot(next_ptr, accepted_ptr, batch, token + 1, TOKENS, EACH)
        store_state(pool_ptr, following, slots, pool_slot, first, real, inside)
        if theta_ptr is not None:
            store_state(pool_ptr, following, slots, pool_slot, first + 1, imaginary, inside)
