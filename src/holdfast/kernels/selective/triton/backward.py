"""Gradients of the selective scan in Triton, chunk by chunk from the last to the first.

The states inside a chunk are computed again from the one before it, which the forward pass left. The gradient of the
state goes from chunk to chunk through memory, [N, D] float32, as the state does in the forward pass. Sums that programs
share (B and C over channels, A, D and dt_bias over sequences) are left as float32 parts, which are added in one order.
"""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.sequence import sequence_bounds
from holdfast.kernels.lib.triton.sigmoid import sigmoid

from .tile import (
    channel_coords,
    first_place,
    load_group,
    load_tokens,
    over_channels,
    over_numbers,
    scan_grads,
    scan_states,
    step_sizes,
    token_of,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def selective_bwd(
    x, dt, rate, B, C, D, z, dt_bias, dy, d_final, entries, dx, ddt, dz, d_initial, carried, dA, dB, dC, dD, dbias,
    cu_seqlens, T, channels, group_channels, N, size,
    x_batch, x_step, dt_batch, dt_step, z_batch, z_step, dy_batch, dy_step,
    SOFTPLUS: tl.constexpr, CHUNK: tl.constexpr, PADDED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (sequences * groups * blocks,), blocks of channels of a group.

    x, dt, rate, B, C, D, z, dt_bias, cu_seqlens: as of selective_fwd; entries as it left them
    dy [B, T, D], strides; d_final [sequences, D, N] float32 or None
    dx, ddt, dz [B, T, D], written; dz None without z
    d_initial [sequences, D, N] float32, written
    carried [sequences, N, D] float32, written: the state's gradient between chunks
    dA [sequences, N, D] float32, written: each sequence's part
    dB, dC [blocks, places, G, PADDED, CHUNK] float32, written: each block's part; size: of one block's
    dD, dbias [sequences, D] float32, written: each sequence's part
    """
    mine = channel_coords(channels, group_channels, BLOCK_D)
    sequence, group, d, here = mine.sequence, mine.group, mine.d, mine.here
    batch, first, end = sequence_bounds(sequence, cu_seqlens, T, T, 1)
    row, number = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    chunks = (end - first + CHUNK - 1) // CHUNK
    # the last chunk's tokens
    past = (chunks - 1) * CHUNK
    x += batch * x_batch + (first + past) * x_step
    dt += batch * dt_batch + (first + past) * dt_step
    dy += batch * dy_batch + (first + past) * dy_step
    groups = channels // group_channels
    place = first_place(sequence, cu_seqlens, first, T, CHUNK) + chunks - 1
    group_offset = (place * groups + group) * (PADDED * CHUNK)
    chunk_stride = groups * (PADDED * CHUNK)
    block_offset = mine.block.to(tl.int64) * size
    if z is not None:
        z += batch * z_batch + (first + past) * z_step
        dz += (batch * T + first + past) * channels
    dx += (batch * T + first + past) * channels
    ddt += (batch * T + first + past) * channels
    entries += (place + sequence) * N * channels
    own = sequence * channels * N
    carried += own
    dA += own
    skip, bias = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    if D is not None:
        skip = tl.load(D + d, mask=here, other=0.0).to(tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + d, mask=here, other=0.0).to(tl.float32)
    skip_sums, bias_sums = tl.zeros([CHUNK, BLOCK_D], tl.float32), tl.zeros([CHUNK, BLOCK_D], tl.float32)
    for n0 in tl.range(0, N, BLOCK_N, num_stages=1):
        n = n0 + number
        inside = (n < N)[:, None] & here[None, :]
        at = n[:, None] * channels + d[None, :]
        d_state = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        tl.store(dA + at, d_state, mask=inside)
        if d_final is not None:
            d_state = tl.load(d_final + own + d[None, :] * N + n[:, None], mask=inside, other=0.0)
        tl.store(carried + at, d_state, mask=inside)
    # read ahead, as in the forward pass; a sequence of no tokens has none before its first
    left = tl.where(past >= 0, end - first - past, 0)
    inputs = load_tokens(x, row, x_step, d, row < left, here)
    delta, softplus_grad = step_sizes(load_tokens(dt, row, dt_step, d, row < left, here), bias, row < left, SOFTPLUS)
    while past >= 0:
        # what other threads of the program have stored
        tl.debug_barrier()
        live = row < left
        tokens = live[:, None] & here[None, :]
        out = load_tokens(dy, row, dy_step, d, live, here)
        gate, grad = out, out
        if z is not None:
            gate = load_tokens(z, row, z_step, d, live, here)
            grad = out * gate * sigmoid(gate)
        written = delta * inputs
        read = tl.zeros([CHUNK, BLOCK_N, BLOCK_D], tl.float32)
        d_written = tl.zeros([CHUNK, BLOCK_N, BLOCK_D], tl.float32)
        d_delta = tl.zeros([CHUNK, BLOCK_N, BLOCK_D], tl.float32)
        for n0 in tl.range(0, N, BLOCK_N, num_stages=1):
            n = n0 + number
            at = n[:, None] * channels + d[None, :]
            inside = (n < N)[:, None] & here[None, :]
            state = tl.load(entries + at, mask=inside, other=0.0)
            d_state = tl.load(carried + at, mask=inside, other=0.0)
            rate_sums = tl.load(dA + at, mask=inside, other=0.0)
            rates = tl.load(rate + at, mask=inside, other=0.0)
            writes = load_group(B + group_offset, row, n, CHUNK)
            reads = load_group(C + group_offset, row, n, CHUNK)
            decay = tl.exp2(delta[:, None, :] * rates[None])
            after, before = scan_states(decay, written[:, None, :] * writes[:, :, None], state, row)
            if z is not None:
                read += after * reads[:, :, None]
            d_after, passed = scan_grads(decay, grad[:, None, :] * reads[:, :, None], d_state, row, CHUNK)
            pairs = block_offset + group_offset + n[:, None] * CHUNK + row[None, :]
            tl.store(dC + pairs, over_channels(grad[:, None, :] * after, CHUNK, BLOCK_N, BLOCK_D))
            tl.store(dB + pairs, over_channels(written[:, None, :] * d_after, CHUNK, BLOCK_N, BLOCK_D))
            d_written += d_after * writes[:, :, None]
            # of the decays' logarithms
            d_log = passed * before
            d_delta += d_log * rates[None]
            tl.store(dA + at, rate_sums + tl.sum(d_log * delta[:, None, :], 0), mask=inside)
            tl.store(carried + at, token_of(passed, row, 0), mask=inside)
        d_write = over_numbers(d_written, CHUNK, BLOCK_N, BLOCK_D)
        d_size = (over_numbers(d_delta, CHUNK, BLOCK_N, BLOCK_D) * LN2 + d_write * inputs) * softplus_grad
        d_input = d_write * delta + skip[None, :] * grad
        skip_sums += grad * inputs
        bias_sums += tl.where(live[:, None], d_size, 0.0)
        at = row[:, None] * channels + d[None, :]
        tl.store(dx + at, d_input.to(dx.dtype.element_ty), mask=tokens)
        tl.store(ddt + at, d_size.to(ddt.dtype.element_ty), mask=tokens)
        if z is not None:
            opened = sigmoid(gate)
            ungated = over_numbers(read, CHUNK, BLOCK_N, BLOCK_D) + skip[None, :] * inputs
            d_gate = out * ungated * opened * (1.0 + gate * (1.0 - opened))
            tl.store(dz + at, d_gate.to(dz.dtype.element_ty), mask=tokens)
            z -= CHUNK * z_step
            dz -= CHUNK * channels
        x -= CHUNK * x_step
        dt -= CHUNK * dt_step
        dy -= CHUNK * dy_step
        dx -= CHUNK * channels
        ddt -= CHUNK * channels
        group_offset -= chunk_stride
        entries -= N * channels
        past -= CHUNK
        # chunks before the last are whole; before the first there is none
        left = left * 0 + tl.where(past >= 0, CHUNK, 0)
        inputs = load_tokens(x, row, x_step, d, row < left, here)
        delta, softplus_grad = step_sizes(
            load_tokens(dt, row, dt_step, d, row < left, here), bias, row < left, SOFTPLUS
        )
    tl.debug_barrier()
    for n0 in tl.range(0, N, BLOCK_N, num_stages=1):
        n = n0 + number
        inside = (n < N)[:, None] & here[None, :]
        d_state = tl.load(carried + n[:, None] * channels + d[None, :], mask=inside, other=0.0)
        tl.store(d_initial + own + d[None, :] * N + n[:, None], d_state, mask=inside)
    tl.store(dD + sequence * channels + d, tl.sum(skip_sums, 0), mask=here)
    tl.store(dbias + sequence * channels + d, tl.sum(bias_sums, 0), mask=here)
