"""Dot products of tokens' rows, do . o: what the gradient of a division is made of."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.runtime.launch import launch

_TOKENS = 16


@triton.jit
def mlstm_row_dot(
    do_ptr, o_ptr, out_ptr, T, do_batch, do_step, do_head, o_batch, o_step, o_head,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, H, B).

    do, o [B, T, H, WIDTH], strides of the first three axes
    out [B, H, T] float32, written
    """
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, BLOCK)
    inside = (tokens < T)[:, None] & (columns < WIDTH)[None, :]
    batch, head, step = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64), tokens.to(tl.int64)
    do_ptr += batch * do_batch + head * do_head
    o_ptr += batch * o_batch + head * o_head
    do = tl.load(do_ptr + step[:, None] * do_step + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    o = tl.load(o_ptr + step[:, None] * o_step + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    row = (batch * tl.num_programs(1) + head) * T
    tl.store(out_ptr + row + step, tl.sum(do * o, 1), mask=tokens < T)


def row_dot(do: Tensor, o: Tensor) -> Tensor:
    """Return do . o in float32, [B, H, T], of [B, T, H, V] whose last axis is dense."""
    batch, length, heads, width = do.shape
    out = torch.empty(batch, heads, length, dtype=torch.float32, device=do.device)
    numbers = (length, *do.stride()[:3], *o.stride()[:3])
    constants = {"WIDTH": width, "BLOCK": max(16, triton.next_power_of_2(width)), "TOKENS": _TOKENS}
    launch(mlstm_row_dot, (-(-length // _TOKENS), heads, batch), (do, o, out), numbers, constants, 4)
    return out
