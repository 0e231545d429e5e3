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


@triton.jit
def output_gradient(
    u_ptr, o_ptr, norm_ptr, floor_ptr, inverse_ptr, slope_ptr, grad_floor_ptr, T, H, eps,
    u_batch, u_step, u_head, o_batch, o_step, o_head, floor_batch, floor_step, floor_head,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of T, blocks of H, B): of_quotient from u, the gradient of o, and o [B, T, H, WIDTH].

    norm, inverse, slope, grad_floor: [B, H, T].
    """
    # neighbouring heads are neighbours in memory
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0) * TOKENS + row // HEADS
    head = tl.program_id(1) * HEADS + row % HEADS
    batch = tl.program_id(2).to(tl.int64)
    live = (token < T) & (head < H)
    token = token.to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = live[:, None] & (column < WIDTH)[None, :]
    of_u = batch * u_batch + token * u_step + head * u_head
    of_o = batch * o_batch + token * o_step + head * o_head
    u = tl.load(u_ptr + of_u[:, None] + column[None, :], mask=inside, other=0.0)
    o = tl.load(o_ptr + of_o[:, None] + column[None, :], mask=inside, other=0.0)
    norm_at = (batch * H + head) * T + token
    norm = tl.load(norm_ptr + norm_at, mask=live, other=0.0)
    floor = tl.load(floor_ptr + batch * floor_batch + token * floor_step + head * floor_head, mask=live, other=1.0)
    across = tl.sum(u.to(tl.float32) * o.to(tl.float32), 1)
    inverse, slope, grad_floor = of_quotient(across, norm, floor, eps)
    tl.store(inverse_ptr + norm_at, inverse, mask=live)
    tl.store(slope_ptr + norm_at, slope, mask=live)
    tl.store(grad_floor_ptr + norm_at, grad_floor, mask=live)
