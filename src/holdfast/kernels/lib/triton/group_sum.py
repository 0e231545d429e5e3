"""Gradients of q and k that several heads share: a sum over the heads of a group, of both in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.runtime.launch import launch

# a thread reads 16 bytes of each head; the most heads whose reads wait at a time
WARPS, LANE_BYTES, IN_FLIGHT = 4, 16, 8


@triton.jit
def _sum(parts, out, rows, GROUP: tl.constexpr, K: tl.constexpr, IN_FLIGHT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # by rows, so that numbers beside each other are seen to be inside together
    row = at // K
    inside = row < rows
    first = parts + at + row * ((GROUP - 1) * K)
    total = tl.zeros([BLOCK], tl.float32)
    for heads in tl.range(0, GROUP, IN_FLIGHT):
        for i in tl.static_range(IN_FLIGHT):
            live = inside & (heads + i < GROUP)
            total += tl.load(first + (heads + i) * K, mask=live, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def group_sum(
    q_parts, k_parts, q_out, k_out, rows, GROUP: tl.constexpr, K: tl.constexpr, IN_FLIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out [rows, K] of parts [rows, GROUP, K], contiguous, in float32, one head after the other, rounded once.

    Grid (blocks of out's numbers, 2): of q and of k.
    """
    if tl.program_id(1) == 0:
        _sum(q_parts, q_out, rows, GROUP, K, IN_FLIGHT, BLOCK)
    else:
        _sum(k_parts, k_out, rows, GROUP, K, IN_FLIGHT, BLOCK)


def sum_over_groups(dq: Tensor, dk: Tensor, into_q: Tensor, into_k: Tensor) -> None:
    """Fill into_q and into_k [B, T, Hq, K] with the sums of dq's and of dk's heads [B, T, H, K] that share one.

    All are contiguous. dq and dk have one dtype, and what they go into has one.
    """
    keys, rows = into_q.shape[3], into_q.shape[:3].numel()
    if not rows:
        return
    group = dq.shape[2] // into_q.shape[2]
    constants = launch_constants(group, keys, dq.dtype)
    blocks = (-(-rows * keys // constants["BLOCK"]), 2)
    launch(group_sum, blocks, (dq, dk, into_q, into_k), (rows,), constants, WARPS)


def launch_constants(group: int, keys: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the kernel's constants, for parts of a dtype: rounds of as many heads as each other, as far as they go."""
    in_flight = -(-group // -(-group // IN_FLIGHT))
    block = 32 * WARPS * LANE_BYTES // dtype.itemsize
    return {"GROUP": group, "K": keys, "IN_FLIGHT": in_flight, "BLOCK": block}


def ungroup(dq: Tensor, dk: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return dq and dk [B, T, H, K], contiguous, summed over heads that share one of `heads`, or as they are."""
    if dq.shape[2] == heads:
        return dq, dk
    shape = (*dq.shape[:2], heads, dq.shape[3])
    into_q, into_k = (torch.empty(shape, dtype=x.dtype, device=x.device) for x in (dq, dk))
    sum_over_groups(dq, dk, into_q, into_k)
    return into_q, into_k
