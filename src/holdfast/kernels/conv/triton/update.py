"""One or a few tokens of decoding: the last inputs are read once and written, in place or to another slot of a pool."""

import triton
import triton.language as tl

from .tile import convolved, shifted, taps_of, times_sigmoid


@triton.jit
def store_window(state, slot, slots, state_row, state_step, window, here, W: tl.constexpr):
    """Store the last inputs to a slot; not at all where there is no such slot."""
    slot = slot.to(tl.int64)
    here = here & (slot >= 0) & (slot < slots)
    for j in tl.static_range(W - 1):
        to = state + slot * state_row + j * state_step
        tl.store(to, window[j].to(state.dtype.element_ty), mask=here[None, :])


@triton.jit
def conv_update(
    x, weight, bias, state, y, read, write, accepted, length, channels, slots, x_row, x_step, state_row, state_step,
    SILU: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Grid (B * blocks of channels,): no program writes what another reads.

    x [B, T, D], strides of rows and steps; weight [D, W]; bias [D] or None
    y [B, T, D], written; 0 for a sequence without a slot
    state [slots, W - 1, D], updated: the last W - 1 inputs
    read [B], write [B], or [B, T] with EACH, accepted [B]: as in kernels/slots.py; with read None, a row is a slot
    """
    across = tl.cdiv(channels, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64)
    d = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    here = d < channels
    x += row * x_row + d[None, :]
    y += row * length * channels + d[None, :]
    slot = row
    if read is not None:
        slot = tl.load(read + row).to(tl.int64)
    is_there = (slot >= 0) & (slot < slots)
    state += d[None, :]
    taps = taps_of(weight, bias, d, here, W)
    window = ()
    for j in tl.static_range(W - 1):
        at = state + slot * state_row + j * state_step
        window += (tl.load(at, mask=(here & is_there)[None, :], other=0.0).to(tl.float32),)
    to = slot
    if write is not None and not EACH:
        to = tl.load(write + row).to(tl.int64)
    due = length
    if accepted is not None:
        due = tl.load(accepted + row)
        store_window(state, to, slots, state_row, state_step, window, here & is_there & (due == 0), W)
    for token in tl.range(0, length):
        now = tl.load(x, mask=here[None, :], other=0.0).to(tl.float32)
        z = convolved(taps, window, now, W)
        if SILU:
            z = times_sigmoid(z, z)
        tl.store(y, tl.where(is_there, z, 0.0).to(y.dtype.element_ty), mask=here[None, :])
        # as if it had been stored and read, so that several tokens are several steps
        window = shifted(window, now.to(state.dtype.element_ty).to(tl.float32), W)
        if EACH:
            place = tl.load(write + row * length + token)
            store_window(state, place, slots, state_row, state_step, window, here & is_there, W)
        elif accepted is not None:
            store_window(state, to, slots, state_row, state_step, window, here & is_there & (due == token + 1), W)
        x += x_step
        y += channels
    if accepted is None and not EACH:
        store_window(state, to, slots, state_row, state_step, window, here & is_there, W)
