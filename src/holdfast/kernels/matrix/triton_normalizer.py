"""What the backward pass of a normalised output needs beside the sweeps: weights of do and of the added column."""

import triton
import triton.language as tl


@triton.jit
def of_quotient(across, norm, floor, eps):
    """1 / m, and the gradients of norm and of floor, of y = num / m with m = max(|norm|, floor) + eps.

    across: do . y. Equal arguments of the maximum share its gradient, as in PyTorch.
    """
    size = tl.abs(norm)
    inverse = 1.0 / (tl.maximum(size, floor) + eps)
    grad = -across * inverse
    share = tl.where(size > floor, 1.0, tl.where(size == floor, 0.5, 0.0))
    sign = tl.where(norm > 0, 1.0, tl.where(norm < 0, -1.0, 0.0))
    return inverse, grad * share * sign, grad * (1.0 - share)


@triton.jit
def normalizer_gradient(
    norm_ptr, floor_ptr, across_ptr, weight_ptr, add_ptr, grad_floor_ptr, eps, count,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """of_quotient of across [SPLITS, count], in parts, norm and floor [count]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    across = tl.zeros([BLOCK], tl.float32)
    part = at
    for _ in tl.static_range(SPLITS):
        across += tl.load(across_ptr + part, mask=inside, other=0.0)
        part += count
    norm = tl.load(norm_ptr + at, mask=inside, other=0.0)
    floor = tl.load(floor_ptr + at, mask=inside, other=1.0)
    weight, add, grad_floor = of_quotient(across, norm, floor, eps)
    tl.store(weight_ptr + at, weight, mask=inside)
    tl.store(add_ptr + at, add, mask=inside)
    tl.store(grad_floor_ptr + at, grad_floor, mask=inside)
