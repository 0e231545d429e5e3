"""Gradients of SSD's step sizes and log decays, which are computed again."""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.sigmoid import log_sigmoid, sigmoid

from .forward import Strides, before_softplus, rate_of, token_offsets


@triton.jit
def ssd_steps_bwd(
    dt, A, bias, dstep, dg, ddt, parts, count, length, heads, dt_batch, dt_step, dt_head, ddt_batch, ddt_step, ddt_head,
    SOFTPLUS: tl.constexpr, LOG: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Grid (p,). Program n takes tiles n, n + p and so on: the same sums in the same order in every run.

    dt [B, T, H], strides; A [H]; bias [H] or None; dstep, dg [B, T, H], contiguous
    ddt [B, T, H], by strides, written
    parts [2, p, H] float32, written: what each program adds up for A and for the bias, for `ssd_steps_sums`
    """
    part, programs = tl.program_id(0), tl.num_programs(0)
    h = tl.arange(0, BLOCK_H)
    rate = rate_of(A, h, heads, LOG)
    rate_sums = tl.zeros([TOKENS, BLOCK_H], tl.float32)
    bias_sums = tl.zeros([TOKENS, BLOCK_H], tl.float32)
    for tile in tl.range(part, tl.cdiv(count, TOKENS), programs):
        at, source, inside = token_offsets(
            tile, count, length, heads, Strides(batch=dt_batch, step=dt_step, head=dt_head), TOKENS, BLOCK_H
        )
        size = before_softplus(dt, bias, at, inside, h, heads)
        decay = tl.load(dg + source, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(dstep + source, mask=inside, other=0.0).to(tl.float32) + decay * rate
        if SOFTPLUS:
            gradient *= sigmoid(size)
            size = -log_sigmoid(-size)
        rate_sums += decay * size
        bias_sums += gradient
        to = token_offsets(
            tile, count, length, heads, Strides(batch=ddt_batch, step=ddt_step, head=ddt_head), TOKENS, BLOCK_H
        )
        tl.store(ddt + to.strided, gradient.to(ddt.dtype.element_ty), mask=inside)
    if LOG:
        # the gradient of the logarithm of -A
        rate_sums *= rate
    row = part.to(tl.int64) * heads + h
    tl.store(parts + row, tl.sum(rate_sums, 0), mask=h < heads)
    tl.store(parts + programs * heads + row, tl.sum(bias_sums, 0), mask=h < heads)


@triton.jit
def ssd_steps_sums(parts, dA, dbias, count, heads, BLOCK_H: tl.constexpr, ROWS: tl.constexpr):
    """Grid (2,). The first program adds up dA, the second dbias.

    parts [2, count, H] float32
    dA [H], dbias [H] or None, written
    """
    which = tl.program_id(0)
    h = tl.arange(0, BLOCK_H)[None, :]
    total = tl.zeros([ROWS, BLOCK_H], tl.float32)
    for first in tl.range(0, count, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        at = (which * count + row) * heads + h
        total += tl.load(parts + at, mask=(row < count) & (h < heads), other=0.0)
    found = tl.sum(total, 0)
    head = tl.arange(0, BLOCK_H)
    if which == 0:
        tl.store(dA + head, found.to(dA.dtype.element_ty), mask=head < heads)
    elif dbias is not None:
        tl.store(dbias + head, found.to(dbias.dtype.element_ty), mask=head < heads)
