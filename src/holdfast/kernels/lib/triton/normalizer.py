"""What a normalised output is divided by, a token's gates in its unit, and what its backward pass needs beside the
sweeps: weights of do and of the added column."""

from typing import NamedTuple

import triton
import triton.language as tl

from .sigmoid import sigmoid

# its exponential is the largest floor: past it the quotient is 0 to rounding, and inf would spoil its gradient
LARGEST_EXPONENT = tl.constexpr(88.7228 - 1.0)


class StabilizedGates(NamedTuple):
    """Of a head's token: log decay and write strength in its unit exp(m), the least divisor, and m afterwards."""

    log_decay: tl.tensor
    beta: tl.tensor
    floor: tl.tensor
    m: tl.tensor


@triton.jit
def denominator_floor(m):
    """Return exp(-m), the least that an output is divided by."""
    return tl.exp(tl.where(-m > LARGEST_EXPONENT, LARGEST_EXPONENT, -m))


@triton.jit
def stabilized_gates(i, log_f, m, EXPONENTIAL: tl.constexpr):
    """Return a token's StabilizedGates from its input gate i, its forget gate's logarithm and the m before it."""
    if EXPONENTIAL:
        after = tl.maximum(log_f + m, i)
        # float64: differences of numbers that may be large beside them
        drop = (log_f.to(tl.float64) + m - after).to(tl.float32)
        return StabilizedGates(log_decay=drop, beta=tl.exp(i - after), floor=denominator_floor(after), m=after)
    return StabilizedGates(log_decay=log_f, beta=sigmoid(i), floor=1.0, m=m)


@triton.jit
def quotient_grad(across, norm, m, eps):
    """Return 1 / d and the gradients of norm and of m, for y = num / d with d = max(|norm|, exp(-m)) + eps.

    across: do . y. Equal arguments of the maximum share its gradient, as in PyTorch. Of m that of MatrixCall's.
    """
    floor = denominator_floor(m)
    size = tl.abs(norm)
    inverse = 1.0 / (tl.maximum(size, floor) + eps)
    grad = -across * inverse
    share = tl.where(size > floor, 1.0, tl.where(size == floor, 0.5, 0.0))
    sign = tl.where(norm > 0, 1.0, tl.where(norm < 0, -1.0, 0.0))
    return inverse, grad * share * sign, grad * eps


@triton.jit
def normalizer_grad(
    norm_ptr, m_ptr, across_ptr, weight_ptr, add_ptr, grad_m_ptr, eps, count,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """quotient_grad of across [SPLITS, count], in parts, norm and m [count]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    across = tl.zeros([BLOCK], tl.float32)
    part = at
    for _ in tl.static_range(SPLITS):
        across += tl.load(across_ptr + part, mask=inside, other=0.0)
        part += count
    norm = tl.load(norm_ptr + at, mask=inside, other=0.0)
    m = tl.load(m_ptr + at, mask=inside, other=0.0)
    weight, add, grad_m = quotient_grad(across, norm, m, eps)
    tl.store(weight_ptr + at, weight, mask=inside)
    tl.store(add_ptr + at, add, mask=inside)
    tl.store(grad_m_ptr + at, grad_m, mask=inside)
