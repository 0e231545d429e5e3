"""Step sizes and log decays of SSD: a program takes tokens of all heads."""

from typing import NamedTuple

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.sigmoid import log_sigmoid


class Strides(NamedTuple):
    """Of a tensor [B, T, H]."""

    batch: tl.tensor
    step: tl.tensor
    head: tl.tensor


class TokenOffsets(NamedTuple):
    """A tile's offsets in a tensor [B, T, H] of given strides and in a contiguous one, and which are inside."""

    strided: tl.tensor
    dense: tl.tensor
    inside: tl.tensor


@triton.jit
def token_offsets(tile, count, length, heads, strides, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return a tile's TokenOffsets."""
    h = tl.arange(0, BLOCK_H)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    inside = (token < count)[:, None] & (h < heads)[None, :]
    at = (token // length).to(tl.int64) * strides.batch + (token % length).to(tl.int64) * strides.step
    at = at[:, None] + h.to(tl.int64)[None, :] * strides.head
    return TokenOffsets(strided=at, dense=token.to(tl.int64)[:, None] * heads + h[None, :], inside=inside)


@triton.jit
def before_softplus(dt, bias, at, inside, h, heads):
    """Return dt plus its bias, in float32."""
    step = tl.load(dt + at, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        step += tl.load(bias + h, mask=h < heads, other=0.0).to(tl.float32)[None, :]
    return step


@triton.jit
def rate_of(A, h, heads, LOG: tl.constexpr):
    """Return A of each head, [1, BLOCK_H]."""
    rate = tl.load(A + h, mask=h < heads, other=0.0).to(tl.float32)
    if LOG:
        rate = -tl.exp(rate)
    return rate[None, :]


@triton.jit
def ssd_steps_fwd(
    dt, A, bias, step, g, count, length, heads, dt_batch, dt_step, dt_head,
    SOFTPLUS: tl.constexpr, LOG: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens,).

    dt [B, T, H], strides; A [H]; bias [H] or None
    step, g [B, T, H] float32, contiguous, written: step sizes and log decays
    count: tokens of all sequences
    """
    h = tl.arange(0, BLOCK_H)
    at, to, inside = token_offsets(
        tl.program_id(0), count, length, heads, Strides(batch=dt_batch, step=dt_step, head=dt_head), TOKENS, BLOCK_H
    )
    size = before_softplus(dt, bias, at, inside, h, heads)
    if SOFTPLUS:
        size = -log_sigmoid(-size)
    tl.store(step + to, size, mask=inside)
    tl.store(g + to, size * rate_of(A, h, heads, LOG), mask=inside)
