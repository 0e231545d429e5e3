"""The selective scan in Triton: step sizes, decays, states, reads, skip and gate in one launch.

A program has BLOCK_D channels of one sequence and goes over it in chunks of CHUNK tokens. It reads a chunk's tokens
once, then takes BLOCK_N numbers of state at a time: their decays, writes and states exist in registers alone. Between
chunks the state is in memory, [N, D] float32, where the backward pass finds it: one number for CHUNK tokens.
"""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.sequence import sequence_bounds
from holdfast.kernels.lib.triton.sigmoid import sigmoid

from .tile import channel_coords, first_place, load_group, load_tokens, over_numbers, scan_states, step_sizes, token_of


@triton.jit
def selective_fwd(
    x, dt, rate, B, C, D, z, dt_bias, y, initial, final, entries, cu_seqlens, T, channels, group_channels, N,
    x_batch, x_step, dt_batch, dt_step, z_batch, z_step,
    SOFTPLUS: tl.constexpr, KEEP: tl.constexpr, CHUNK: tl.constexpr, PADDED: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (sequences * groups * blocks,), blocks of channels of a group.

    x, dt, z [B, T, D], strides, the last axis side by side; z may be None
    B, C [places, G, PADDED, CHUNK] float32, as selective_prepare leaves them
    rate [N, D] float32: A log2(e)
    D, dt_bias [D] or None
    y [B, T, D], written
    initial or None, final [sequences, D, N] float32, final written; they may be one tensor
    entries [*, N, D] float32, written: with KEEP, a sequence behind another, the states before each chunk and the last
        one; else room for one a sequence
    cu_seqlens [sequences + 1] or None
    """
    mine = channel_coords(channels, group_channels, BLOCK_D)
    sequence, group, d, here = mine.sequence, mine.group, mine.d, mine.here
    batch, first, end = sequence_bounds(sequence, cu_seqlens, T, T, 1)
    row, number = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    x += batch * x_batch + first * x_step
    dt += batch * dt_batch + first * dt_step
    place = first_place(sequence, cu_seqlens, first, T, CHUNK)
    group_offset = (place * (channels // group_channels) + group) * (PADDED * CHUNK)
    chunk_stride = (channels // group_channels) * (PADDED * CHUNK)
    y += (batch * T + first) * channels
    if z is not None:
        z += batch * z_batch + first * z_step
    if KEEP:
        entries += (place + sequence) * N * channels
    else:
        entries += sequence * N * channels
    own = sequence * channels * N
    skip, bias = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    if D is not None:
        skip = tl.load(D + d, mask=here, other=0.0).to(tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + d, mask=here, other=0.0).to(tl.float32)
    for n0 in tl.range(0, N, BLOCK_N, num_stages=1):
        n = n0 + number
        inside = (n < N)[:, None] & here[None, :]
        state = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        if initial is not None:
            state = tl.load(initial + own + d[None, :] * N + n[:, None], mask=inside, other=0.0)
        tl.store(entries + n[:, None] * channels + d[None, :], state, mask=inside)
    left = end - first
    # the next chunk's are read while this one is worked on; and a step size that the loop carries is computed by one
    # thread, not by each that needs it
    live = row < left
    inputs = load_tokens(x, row, x_step, d, live, here)
    delta = step_sizes(load_tokens(dt, row, dt_step, d, live, here), bias, live, SOFTPLUS)[0]
    while left > 0:
        # what other threads of the program have stored
        tl.debug_barrier()
        live = row < left
        written = delta * inputs
        read = tl.zeros([CHUNK, BLOCK_N, BLOCK_D], tl.float32)
        for n0 in tl.range(0, N, BLOCK_N, num_stages=1):
            n = n0 + number
            at = n[:, None] * channels + d[None, :]
            inside = (n < N)[:, None] & here[None, :]
            state = tl.load(entries + at, mask=inside, other=0.0)
            rates = tl.load(rate + at, mask=inside, other=0.0)
            writes = load_group(B + group_offset, row, n, CHUNK)
            reads = load_group(C + group_offset, row, n, CHUNK)
            decay = tl.exp2(delta[:, None, :] * rates[None])
            after = scan_states(decay, written[:, None, :] * writes[:, :, None], state, row)[0]
            read += after * reads[:, :, None]
            following = entries + N * channels if KEEP else entries
            tl.store(following + at, token_of(after, row, CHUNK - 1), mask=inside)
        out = over_numbers(read, CHUNK, BLOCK_N, BLOCK_D) + skip[None, :] * inputs
        x += CHUNK * x_step
        dt += CHUNK * dt_step
        left -= CHUNK
        inputs = load_tokens(x, row, x_step, d, row < left, here)
        delta = step_sizes(load_tokens(dt, row, dt_step, d, row < left, here), bias, row < left, SOFTPLUS)[0]
        if z is not None:
            gate = load_tokens(z, row, z_step, d, live, here)
            out *= gate * sigmoid(gate)
            z += CHUNK * z_step
        tl.store(
            y + row[:, None] * channels + d[None, :], out.to(y.dtype.element_ty), mask=live[:, None] & here[None, :]
        )
        group_offset += chunk_stride
        y += CHUNK * channels
        if KEEP:
            entries += N * channels
    tl.debug_barrier()
    for n0 in tl.range(0, N, BLOCK_N, num_stages=1):
        n = n0 + number
        inside = (n < N)[:, None] & here[None, :]
        state = tl.load(entries + n[:, None] * channels + d[None, :], mask=inside, other=0.0)
        tl.store(final + own + d[None, :] * N + n[:, None], state, mask=inside)
