"""KDA's gate: the log decay of each key channel and its gradients, in float32. A program takes rows of one head.

g = -exp(A_log) softplus(x + dt_bias), or with a bound, bound sigmoid(exp(A_log) (x + dt_bias)). The backward pass forms
it again, so that nothing beside the inputs is saved.
"""

import triton
import triton.language as tl

from holdfast.kernels.lib.triton.sigmoid import log_sigmoid, sigmoid


@triton.jit
def load_gate(x, A_log, dt_bias, columns, inside, head, K: tl.constexpr):
    """Return x + dt_bias, and the head's rate exp(A_log). x: pointers [ROWS, BLOCK]."""
    value = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    if dt_bias is not None:
        value += tl.load(dt_bias + head * K + columns, mask=columns < K, other=0.0).to(tl.float32)[None, :]
    rate = 1.0
    if A_log is not None:
        rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    return value, rate


@triton.jit
def kda_gate_fwd(
    x, A_log, dt_bias, g, tokens, T, bound, x_batch, x_token, x_head,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Grid (H * tiles of ROWS tokens,).

    x        [B, T, H, K], strides, the last axis dense; tokens: B T
    A_log    [H], or None for a rate of 1
    dt_bias  [H, K], contiguous, or None
    g        [B, T, H, K], float32, contiguous, written
    bound    below 0; read if BOUNDED
    """
    head = tl.program_id(0) % H
    token = tl.program_id(0) // H * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (columns < K)[None, :]
    at = (token // T).to(tl.int64) * x_batch + (token % T).to(tl.int64) * x_token + head.to(tl.int64) * x_head
    value, rate = load_gate(x + at[:, None] + columns[None, :], A_log, dt_bias, columns, inside, head, K)
    if BOUNDED:
        found = bound * sigmoid(rate * value)
    else:
        found = rate * log_sigmoid(-value)
    to = (token.to(tl.int64) * H + head) * K
    tl.store(g + to[:, None] + columns[None, :], found, mask=inside)


@triton.jit
def kda_gate_bwd(
    x, A_log, dt_bias, dg, dx, parts, tokens, T, bound, x_batch, x_token, x_head,
    H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Grid (H * p,). Program n of a head takes tiles n, n + p and so on: sums in the same order in every run.

    x, A_log, dt_bias, tokens, bound: as in the forward kernel
    dg     [B, T, H, K], contiguous
    dx     [B, T, H, K], contiguous, written
    parts  [p, H K + H] float32, written: what each program adds up for dt_bias, and behind it for A_log
    """
    head = tl.program_id(0) % H
    part, count = tl.program_id(0) // H, tl.num_programs(0) // H
    columns = tl.arange(0, BLOCK)
    bias_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    rate_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(part, tl.cdiv(tokens, ROWS), count):
        token = tile * ROWS + tl.arange(0, ROWS)
        inside = (token < tokens)[:, None] & (columns < K)[None, :]
        at = (token // T).to(tl.int64) * x_batch + (token % T).to(tl.int64) * x_token + head.to(tl.int64) * x_head
        value, rate = load_gate(x + at[:, None] + columns[None, :], A_log, dt_bias, columns, inside, head, K)
        to = ((token.to(tl.int64) * H + head) * K)[:, None] + columns[None, :]
        gradient = tl.load(dg + to, mask=inside, other=0.0).to(tl.float32)
        if BOUNDED:
            scaled = rate * value
            gradient *= bound * sigmoid(scaled) * sigmoid(-scaled)
            of_rate = gradient * scaled
            gradient *= rate
        else:
            gradient *= rate
            of_rate = gradient * log_sigmoid(-value)
            gradient *= -sigmoid(value)
        # where the gate is wide open or shut there is no gradient, and what it is times may be infinite
        rate_sums += tl.where(gradient == 0.0, 0.0, of_rate)
        bias_sums += gradient
        tl.store(dx + to, gradient.to(dx.dtype.element_ty), mask=inside)
    row = parts + part.to(tl.int64) * (H * K + H)
    tl.store(row + head * K + columns, tl.sum(bias_sums, 0), mask=columns < K)
    tl.store(row + H * K + head, tl.sum(tl.sum(rate_sums, 1), 0))
