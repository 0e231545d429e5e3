"""Device code of step sizes and log decays: a program takes tokens of all heads."""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.sigmoid import log_sigmoid


@triton.jit
def tokens_at(tile, count, length, heads, x_batch, x_step, x_head, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Of a tile of tokens: offsets in [B, T, H] of these strides and in a contiguous one, and what is inside."""
    h = tl.arange(0, BLOCK_H)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    inside = (token < count)[:, None] & (h < heads)[None, :]
    at = (token // length).to(tl.int64) * x_batch + (token % length).to(tl.int64) * x_step
    at = at[:, None] + h.to(tl.int64)[None, :] * x_head
    return at, token.to(tl.int64)[:, None] * heads + h[None, :], inside


@triton.jit
def before_softplus(dt, bias, at, inside, h, heads):
    """dt and its bias, in float32."""
    step = tl.load(dt + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        step += tl.load(bias + h, mask=h < heads, other=0.0).to(tl.float32)[None, :]
    return step


@triton.jit
def rate_of(A, h, heads, LOG: tl.constexpr):
    """A of each head, [1, BLOCK_H]."""
    rate = tl.load(A + h, mask=h < heads, other=0.0).to(tl.float32)
    if LOG:
        rate = -tl.exp(rate)
    return rate[None, :]


@triton.jit
def ssd_steps_forward(
    dt, A, bias, step, g, count, length, heads, dt_batch, dt_step, dt_head,
    SOFTPLUS: tl.constexpr, LOG: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """step and g [B, T, H], contiguous float32. count: of tokens."""
    h = tl.arange(0, BLOCK_H)
    at, to, inside = tokens_at(tl.program_id(0), count, length, heads, dt_batch, dt_step, dt_head, TOKENS, BLOCK_H)
    size = before_softplus(dt, bias, at, inside, h, heads)
    if SOFTPLUS:
        size = -log_sigmoid(-size)
    tl.store(step + to, size, mask=inside)
    tl.store(g + to, size * rate_of(A, h, heads, LOG), mask=inside)
