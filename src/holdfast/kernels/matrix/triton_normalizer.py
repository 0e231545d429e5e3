"""What the backward pass of a normalised output needs beside the sweeps: weights of do and of the added column."""

import triton
import triton.language as tl


@triton.jit
def normalizer_gradient(
    norm_ptr, floor_ptr, across_ptr, weight_ptr, add_ptr, grad_floor_ptr, eps, count,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With y = num / m and m = max(|norm|, floor) + eps: 1 / m, and the gradients of norm and of floor.

    across [SPLITS, count]: parts of do . y. Equal arguments of the maximum share its gradient, as in PyTorch.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    across = tl.zeros([BLOCK], tl.float32)
    part = at
    for _ in tl.static_range(SPLITS):
        across += tl.load(across_ptr + part, mask=inside, other=0.0)
        part += count
    norm = tl.load(norm_ptr + at, mask=inside, other=0.0)
    floor = tl.load(floor_ptr + at, mask=inside, other=1.0)
    size = tl.abs(norm)
    weight = 1.0 / (tl.maximum(size, floor) + eps)
    grad = -across * weight
    share = tl.where(size > floor, 1.0, tl.where(size == floor, 0.5, 0.0))
    sign = tl.where(norm > 0, 1.0, tl.where(norm < 0, -1.0, 0.0))
    tl.store(weight_ptr + at, weight, mask=inside)
    tl.store(add_ptr + at, grad * share * sign, mask=inside)
    tl.store(grad_floor_ptr + at, grad * (1.0 - share), mask=inside)
