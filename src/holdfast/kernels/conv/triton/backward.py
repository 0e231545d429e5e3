"""The short convolution's backward pass: the input of the activation is computed again."""

from typing import NamedTuple

import triton
import triton.language as tl

from .tile import (
    Inputs,
    blocks_of,
    channels_of,
    convolved,
    inverse_length,
    shifted,
    taps_of,
    times_sigmoid,
    tokens_of,
    window_of,
)


class Edge(NamedTuple):
    """Addresses [1, BLOCK] at a sequence's start: inputs, those before it, gradients of outputs, of both states."""

    x: tl.tensor
    initial: tl.tensor
    dy: tl.tensor
    dfinal: tl.tensor
    dinitial: tl.tensor


class Steps(NamedTuple):
    """From one token to the next in x, in dy and in states."""

    x: tl.tensor
    dy: tl.tensor
    channels: tl.tensor


class Block(NamedTuple):
    """Which channels are there, and whether they are a head that is normalised."""

    here: tl.tensor
    is_head: tl.tensor


@triton.jit
def before_activation(z, dy, is_head, SILU: tl.constexpr, K: tl.constexpr):
    """Return the gradient of z from that of its activation, which is normalised if is_head."""
    dz = dy.to(tl.float32)
    y = z
    if SILU:
        open_ = times_sigmoid(1.0, z)
        y = z * open_
    if K > 0:  # noqa: SIM102 - known while compiling
        if is_head:
            # two sums that do not wait for each other
            inverse, along = inverse_length(y, is_head), tl.sum(dz * y, 1)[:, None]
            dz = inverse * (dz - inverse * inverse * along * y)
    if SILU:
        dz *= open_ * (1.0 + z * (1.0 - open_))
    return dz


@triton.jit
def earliest(taps, later, dz, W: tl.constexpr):
    """Return the gradient of the input W - 1 tokens before one whose gradient is dz; later: dz of those between."""
    dx = taps[0] * dz
    for j in tl.static_range(W - 1):
        dx += taps[W - 1 - j] * later[j]
    return dx


@triton.jit
def last_gradient(dfinal, at, left, stored, channels, W: tl.constexpr):
    """Load what dfinal [1, BLOCK] adds to the gradient of an input: at an offset of the last W - 1 before left."""
    held = at - left + (W - 1)
    return tl.load(dfinal + held * channels, mask=(held >= 0) & stored, other=0.0)


@triton.jit
def initial_gradient(taps, edge, count, block, steps, SILU: tl.constexpr, W: tl.constexpr, K: tl.constexpr):
    """Store dinitial [W - 1, D] of a sequence of count tokens, which reaches its first W - 1 outputs."""
    here = block.here
    zero = tl.zeros([1, 1], tl.int32)
    source = Inputs(x=edge.x, initial=edge.initial)
    window = window_of(source, zero, zero, count, here, steps.x, steps.channels, W)
    grads = ()
    for t in tl.static_range(W - 1):
        inside = (t < count) & here
        now = tl.load(edge.x + t * steps.x, mask=inside, other=0.0).to(tl.float32)
        dy_now = tl.load(edge.dy + t * steps.dy, mask=inside, other=0.0)
        grads += (before_activation(convolved(taps, window, now, W), dy_now, block.is_head, SILU, K),)
        window = shifted(window, now, W)
    for i in tl.static_range(W - 1):
        total = tl.zeros_like(grads[0])
        for t in tl.static_range(i + 1):
            total += taps[i - t] * grads[t]
        if edge.dfinal is not None:
            total += last_gradient(edge.dfinal, i - (W - 1), count, here, steps.channels, W)
        tl.store(edge.dinitial + i * steps.channels, total, mask=here)


@triton.jit
def conv_bwd(
    x, weight, bias, initial, dy, dk, dv, dfinal, dx, dinitial, parts, bounds,
    length, sequences, search, channels, heads, x_row, x_step, dy_row, dy_step, dx_row, dx_step,
    SILU: tl.constexpr, W: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr,
    STEPS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of all sequences * blocks of channels,). A thread goes over W - 1 tokens beyond its own as well,
    which its own inputs reach.

    x [B, T, D], strides of rows and steps; weight [D, W]; bias [D] or None; initial [N, W - 1, D] float32 or None
    dy [B, T, D], with dk and dv None; or dy of the first half of the heads, dk of the others and dv of all further
        channels, each contiguous
    dfinal [N, W - 1, D] float32 or None
    dx [B, T, D], written
    dinitial [N, W - 1, D] float32 or None, written
    parts [tiles, W or W + 1, D] float32, written: what each tile of tokens adds to the gradients of the taps and, where
        there is one, of the bias, for `conv_sums`
    bounds [N + 1] or None: offsets of packed sequences
    """
    LENGTH: tl.constexpr = STEPS * CHUNKS
    SUMS: tl.constexpr = W if bias is None else W + 1
    across = blocks_of(channels, heads, K, BLOCK)
    place = tl.program_id(0) // across
    row, sequence, start, stop, tile = tokens_of(place, bounds, length, sequences, search, SEGMENTS * LENGTH)
    block = tl.program_id(0) % across
    is_head = block < heads
    d, own = channels_of(block, channels, heads, K, BLOCK)
    here = own[None, :]
    first = start + tile * (SEGMENTS * LENGTH)
    begin, left = (start - first).to(tl.int32), (stop - first).to(tl.int32)
    x += row * x_row + first * x_step + d[None, :]
    if dv is None:
        dy += row * dy_row + first * dy_step + d[None, :]
    else:
        half = heads // 2 * K
        dy = tl.where(is_head, tl.where(block < heads // 2, dy, dk), dv)
        before = tl.where(is_head, tl.where(block < heads // 2, 0, half), 2 * half)
        dy_step = tl.where(is_head, half, channels - 2 * half)
        dy += (row * length + first) * dy_step + (d - before)[None, :]
    dx += row * dx_row + first * dx_step + d[None, :]
    held = sequence * (W - 1) * channels + d[None, :]
    if initial is not None:
        initial += held
    if dfinal is not None:
        dfinal += held
    taps = taps_of(weight, bias, d, own, W)
    if dinitial is not None:  # noqa: SIM102
        if tile == 0:
            edge = Edge(x=x, initial=initial, dy=dy, dfinal=dfinal, dinitial=dinitial + held)
            steps = Steps(x=x_step, dy=dy_step, channels=channels)
            initial_gradient(taps, edge, left, Block(here=here, is_head=is_head), steps, SILU, W, K)
    offset = tl.arange(0, SEGMENTS)[:, None] * LENGTH
    window = window_of(Inputs(x=x, initial=initial), offset, begin, left, here, x_step, channels, W)
    later, sums = (), ()
    for _ in tl.static_range(W - 1):
        later += (tl.zeros([SEGMENTS, BLOCK], tl.float32),)
    for _ in tl.static_range(SUMS):
        sums += (tl.zeros([SEGMENTS, BLOCK], tl.float32),)
    chunks = tl.maximum(tl.minimum(tl.cdiv(left, STEPS), CHUNKS), 0)
    # copies of two chunks are on their way while one is worked on
    for chunk in tl.range(0, chunks, num_stages=3):
        at = offset + chunk * STEPS
        inputs, grads = (), ()
        for j in tl.static_range(STEPS):
            inside = (at + j < left) & here
            inputs += (tl.load(x + (at + j) * x_step, mask=inside, other=0.0),)
            grads += (tl.load(dy + (at + j) * dy_step, mask=inside, other=0.0),)
        for j in tl.static_range(STEPS):
            now = inputs[j].to(tl.float32)
            dz = before_activation(convolved(taps, window, now, W), grads[j], is_head, SILU, K)
            added = ()
            for i in tl.static_range(W - 1):
                added += (sums[i] + dz * window[i],)
            added += (sums[W - 1] + dz * now,)
            if bias is not None:
                added += (sums[W] + dz,)
            sums = added
            to = at + (j - (W - 1))
            stored = (to >= offset) & (to < left) & here
            gradient = earliest(taps, later, dz, W)
            if dfinal is not None:
                gradient += last_gradient(dfinal, to, left, stored, channels, W)
            tl.store(dx + to * dx_step, gradient.to(dx.dtype.element_ty), mask=stored)
            window, later = shifted(window, now, W), shifted(later, dz, W)
    for j in tl.static_range(W - 1):
        at = offset + chunks * STEPS + j
        inside = (at < left) & here
        now = tl.load(x + at * x_step, mask=inside, other=0.0).to(tl.float32)
        dy_now = tl.load(dy + at * dy_step, mask=inside, other=0.0)
        dz = before_activation(convolved(taps, window, now, W), dy_now, is_head, SILU, K)
        to = at - (W - 1)
        stored = (to >= offset) & (to < left) & here
        gradient = earliest(taps, later, dz, W)
        if dfinal is not None:
            gradient += last_gradient(dfinal, to, left, stored, channels, W)
        tl.store(dx + to * dx_step, gradient.to(dx.dtype.element_ty), mask=stored)
        window, later = shifted(window, now, W), shifted(later, dz, W)
    parts += place.to(tl.int64) * SUMS * channels + d
    for j in tl.static_range(SUMS):
        tl.store(parts + j * channels, tl.sum(sums[j], 0), mask=own)


@triton.jit
def conv_sums(parts, dweight, dbias, count, channels, W: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Grid (blocks of channels, W or W + 1). Sums in the same order in every run.

    parts [count, W or W + 1, D] float32
    dweight [D, W], dbias [D] or None, written
    """
    SUMS: tl.constexpr = W if dbias is None else W + 1
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1)
    here = d < channels
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, count, ROWS):
        place = (first + tl.arange(0, ROWS))[:, None]
        at = (place.to(tl.int64) * SUMS + j) * channels + d[None, :]
        total += tl.load(parts + at, mask=(place < count) & here[None, :], other=0.0)
    found = tl.sum(total, 0)
    if j < W:
        tl.store(dweight + d * W + j, found.to(dweight.dtype.element_ty), mask=here)
    elif dbias is not None:
        tl.store(dbias + d, found.to(dbias.dtype.element_ty), mask=here)
