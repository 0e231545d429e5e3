"""Products of tokens' rows, u . o: what a division's gradient is made of."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.runtime.launch import launch

_TOKENS = 16


@triton.jit
def _inner(
    u_ptr, o_ptr, out_ptr, T, u_batch, u_step, u_head, o_batch, o_step, o_head,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, H, B). out: [B, H, T]."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, BLOCK)
    inside = (tokens < T)[:, None] & (columns < WIDTH)[None, :]
    batch, head, step = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64), tokens.to(tl.int64)
    u_ptr += batch * u_batch + head * u_head
    o_ptr += batch * o_batch + head * o_head
    u = tl.load(u_ptr + step[:, None] * u_step + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    o = tl.load(o_ptr + step[:, None] * o_step + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    row = (batch * tl.num_programs(1) + head) * T
    tl.store(out_ptr + row + step, tl.sum(u * o, 1), mask=tokens < T)


def inner(u: Tensor, o: Tensor) -> Tensor:
    """u . o in float32, [B, H, T], of [B, T, H, V] whose last axis is dense."""
    batch, length, heads, width = u.shape
    out = torch.empty(batch, heads, length, dtype=torch.float32, device=u.device)
    numbers = (length, *u.stride()[:3], *o.stride()[:3])
    constants = {"WIDTH": width, "BLOCK": max(16, triton.next_power_of_2(width)), "TOKENS": _TOKENS}
    launch(_inner, (-(-length // _TOKENS), heads, batch), (u, o, out), numbers, constants, 4)
    return out
