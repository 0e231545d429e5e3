"""What the kernels of a step share: a program's coordinates, the convolution, a head's state, mLSTM's gates."""

from typing import NamedTuple

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.normalizer import stabilized_gates
from holdfast.kernels.lib.triton.sigmoid import log_sigmoid, sigmoid


class ConvSource(NamedTuple):
    """A sequence's x and tail, and the convolution's weight and bias, which may be None."""

    x: tl.tensor
    tail: tl.tensor
    weight: tl.tensor
    bias: tl.tensor


class TailStrides(NamedTuple):
    """Of a tail [B, L, channels]."""

    row: tl.tensor
    step: tl.tensor
    channel: tl.tensor


class Token(NamedTuple):
    """What a token does to a head's state: q, k, decay [BLOCK_K], v [BLOCK_V], and beta."""

    q: tl.tensor
    k: tl.tensor
    v: tl.tensor
    decay: tl.tensor
    beta: tl.tensor


@triton.jit
def program_coords(H, SPLITS: tl.constexpr):
    """Return (sequence, head, block of V's columns) of this program."""
    program = tl.program_id(0)
    return (program // SPLITS // H).to(tl.int64), program // SPLITS % H, program % SPLITS


@triton.jit
def conv_silu(source, d, here, tail_step, tail_channel, W: tl.constexpr, L: tl.constexpr):
    """Return silu(conv(x)) of channels d of one sequence."""
    z = tl.load(source.x + d, mask=here, other=0.0).to(tl.float32)
    z *= tl.load(source.weight + d * W + W - 1, mask=here, other=0.0).to(tl.float32)
    if source.bias is not None:
        z += tl.load(source.bias + d, mask=here, other=0.0).to(tl.float32)
    before = source.tail + d.to(tl.int64) * tail_channel
    for j in tl.static_range(W - 1):
        held = tl.load(before + (L - W + 1 + j) * tail_step, mask=here, other=0.0).to(tl.float32)
        z += held * tl.load(source.weight + d * W + j, mask=here, other=0.0).to(tl.float32)
    return z * sigmoid(z)


@triton.jit
def state_step(state, key_step, token, rows, columns, K: tl.constexpr, V: tl.constexpr, DELTA: tl.constexpr):
    """Update a block of V's columns of a head's state [K, V], and return o of them."""
    cells = state + rows[:, None].to(tl.int64) * key_step + columns[None, :]
    inside = (rows < K)[:, None] & (columns < V)[None, :]
    S = tl.load(cells, mask=inside, other=0.0) * token.decay[:, None]
    v = token.v
    if DELTA:
        v -= tl.sum(S * token.k[:, None], 0)
    S += (token.beta * token.k)[:, None] * v[None, :]
    o = tl.sum(S * token.q[:, None], 0)
    # where a tile has fewer cells than threads, several hold a cell: all have read it before one writes it
    tl.debug_barrier()
    tl.store(cells, S, mask=inside)
    return o


@triton.jit
def load_silu(gate, at, inside):
    z = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    return z * sigmoid(z)


@triton.jit
def head_gates(gates, m, head, H, cap, EXPONENTIAL: tl.constexpr):
    """Return an mLSTM head's StabilizedGates. gates, m: of the sequence."""
    i = capped(tl.load(gates + head).to(tl.float32), cap)
    log_f = log_sigmoid(capped(tl.load(gates + H + head).to(tl.float32), cap))
    return stabilized_gates(i, log_f, tl.load(m + head), EXPONENTIAL)


@triton.jit
def capped(x, cap):
    """Return cap tanh(x / cap); x where cap is 0."""
    safe = tl.where(cap > 0, cap, 1.0)
    small = tl.exp(-2.0 * tl.abs(x) / safe)
    bent = safe * (1.0 - small) / (1.0 + small)
    return tl.where(cap > 0, tl.where(x < 0, -bent, bent), x)
