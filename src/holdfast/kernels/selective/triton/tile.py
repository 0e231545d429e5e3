"""A tile of a selective scan: CHUNK tokens of BLOCK_D channels, and of the state BLOCK_N numbers a channel at a time.

In a tile [CHUNK, BLOCK_N, BLOCK_D] channels are side by side in the lanes of a warp, numbers of state are spread over
the warps, and a thread has all tokens: what the compiler makes of a scan over the first axis is a chain of
multiply-adds in registers.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.linear_scan import combine
from holdfast.kernels.lib.triton.sigmoid import log_sigmoid, sigmoid


class Channels(NamedTuple):
    """A program's sequence, group and block in it; its channels [BLOCK_D], and which of them there are."""

    sequence: tl.tensor
    group: tl.tensor
    block: tl.tensor
    d: tl.tensor
    here: tl.tensor


@triton.jit
def channel_coords(channels, group_channels, BLOCK_D: tl.constexpr):
    """Return the program's channels."""
    # one axis: the others end at 65535
    program = tl.program_id(0)
    blocks = tl.cdiv(group_channels, BLOCK_D)
    across = (channels // group_channels) * blocks
    group = program % across // blocks
    block = program % blocks
    inside = block * BLOCK_D + tl.arange(0, BLOCK_D)
    return Channels(
        sequence=(program // across).to(tl.int64),
        group=group,
        block=block,
        d=group * group_channels + inside,
        here=inside < group_channels,
    )


@triton.jit
def first_place(n, cu_seqlens, first, T, CHUNK: tl.constexpr):
    """Return the place of the n-th sequence's first chunk, as chunk_coords has them."""
    if cu_seqlens is not None:
        return first // CHUNK + n
    return n * tl.cdiv(T, CHUNK)


@triton.jit
def load_tokens(base, row, stride, d, live, here):
    """Load [CHUNK, BLOCK_D] in float32; zeros past the end of the sequence and of the channels."""
    at = base + row[:, None] * stride + d[None, :]
    return tl.load(at, mask=live[:, None] & here[None, :], other=0.0).to(tl.float32)


@triton.jit
def step_sizes(dt, bias, live, SOFTPLUS: tl.constexpr):
    """Return delta [CHUNK, BLOCK_D], 0 past the end, and what its gradient is multiplied by for that of dt."""
    size = dt + bias[None, :]
    softplus_grad = tl.full(size.shape, 1.0, tl.float32)
    if SOFTPLUS:
        softplus_grad = sigmoid(size)
        size = -log_sigmoid(-size)
    return tl.where(live[:, None], size, 0.0), softplus_grad


@triton.jit
def load_group(laid, row, n, CHUNK: tl.constexpr):
    """Load [CHUNK, BLOCK_N] of B or C as chunk_prepare has laid them out."""
    return tl.load(laid + n[None, :] * CHUNK + row[:, None])


@triton.jit
def scan_states(decay, write, state, row):
    """Return the states after each token and before it, [CHUNK, BLOCK_N, BLOCK_D], from state before the first."""
    is_first = (row == 0)[:, None, None]
    write = tl.where(is_first, write + decay * state[None], write)
    ones, zeros = tl.full(write.shape, 1.0, tl.float32), tl.zeros(write.shape, tl.float32)
    found = tl.associative_scan((decay, write, ones, zeros), 0, combine)
    return found[1], tl.where(is_first, state[None], found[3])


@triton.jit
def scan_grads(decay, read, d_state, row, CHUNK: tl.constexpr):
    """Return the gradients of each token's state, and what each hands to the state before it: decay times that.

    read: what a token's output adds to its state's gradient. d_state: the gradient of the last state, from behind.
    """
    is_last = (row == CHUNK - 1)[:, None, None]
    passed = decay * read
    passed = tl.where(is_last, passed + decay * d_state[None], passed)
    ones, zeros = tl.full(passed.shape, 1.0, tl.float32), tl.zeros(passed.shape, tl.float32)
    # a scan in reverse exchanges numbers between lanes, whatever its axis; to turn registers round costs nothing
    values = (tl.flip(decay, 0), tl.flip(passed, 0), ones, zeros)
    found = tl.associative_scan(values, 0, combine)
    return read + tl.where(is_last, d_state[None], tl.flip(found[3], 0)), tl.flip(found[1], 0)


@triton.jit
def token_of(x, row, which):
    """Return the token `which` of x [CHUNK, BLOCK_N, BLOCK_D]."""
    return tl.sum(tl.where((row == which)[:, None, None], x, 0.0), 0)


@triton.jit
def _halve(x, TOKENS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Add up halves of the last axis of x [TOKENS, ROWS, LANES]; return [TOKENS / 2, 2 ROWS, LANES / 2].

    Each half of the lanes goes on with one half of the tokens.
    """
    added = tl.sum(tl.reshape(x, [TOKENS, ROWS, 2, LANES // 2]), 2)
    halves = tl.permute(tl.reshape(added, [2, TOKENS // 2, ROWS, LANES // 2]), (1, 2, 3, 0))
    early, late = tl.split(halves)
    is_early = (tl.arange(0, 2) == 0)[None, None, :, None]
    both = tl.where(is_early, early[:, :, None, :], late[:, :, None, :])
    return tl.reshape(both, [TOKENS // 2, 2 * ROWS, LANES // 2])


@triton.jit
def over_channels(x, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sum x [CHUNK, BLOCK_N, BLOCK_D] over channels; return [BLOCK_N, CHUNK].

    By halves of the lanes, with half of the tokens each time: a sum by itself exchanges every token five times.
    """
    tl.static_assert(CHUNK <= 16 and CHUNK <= BLOCK_D)
    if CHUNK >= 16:
        x = _halve(x, 16, BLOCK_N * CHUNK // 16, BLOCK_D * 16 // CHUNK)
    if CHUNK >= 8:
        x = _halve(x, 8, BLOCK_N * CHUNK // 8, BLOCK_D * 8 // CHUNK)
    if CHUNK >= 4:
        x = _halve(x, 4, BLOCK_N * CHUNK // 4, BLOCK_D * 4 // CHUNK)
    x = _halve(x, 2, BLOCK_N * CHUNK // 2, BLOCK_D * 2 // CHUNK)
    return tl.reshape(tl.sum(x, 2), [BLOCK_N, CHUNK])


@triton.jit
def over_numbers(x, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sum x [CHUNK, BLOCK_N, BLOCK_D] over numbers of state; return [CHUNK, BLOCK_D].

    By pairs that come into one thread: a sum by itself writes each number to shared memory and exchanges it twice.
    """
    x = tl.permute(x, (0, 2, 1))
    if BLOCK_N >= 4:
        first, second = tl.split(tl.reshape(x, [CHUNK, BLOCK_D, BLOCK_N // 2, 2]))
        x = first + second
    first, second = tl.split(x)
    return first + second
