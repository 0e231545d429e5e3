"""mLSTM's gates in one launch: the decay, write strength and floor of MatrixCall, by a max-plus scan in float64.

m_t = max(logsigmoid(f_t) + m_{t-1}, i_t). Affine maps of the max-plus algebra compose, so that a block of tokens is one
associative scan; its gradient is a scan of affine maps in the other direction.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.common.triton_launch import launch

from .triton_sweep import span

BLOCK = 512


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def max_plus(shift, best, next_shift, next_best):
    return shift + next_shift, tl.maximum(best + next_shift, next_best)


@triton.jit
def affine(slope, value, next_slope, next_value):
    return slope * next_slope, next_value + next_slope * value


@triton.jit
def mlstm_gates(
    i_ptr, f_ptr, entry_ptr, cu_seqlens, m_ptr, g_ptr, beta_ptr, floor_ptr, last_ptr, T, H, largest,
    i_batch, i_step, i_head, f_batch, f_step, f_head, EXPONENTIAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence and head. entry, last [N, H]: m before and after; m, g, beta, floor: contiguous [B, T, H]."""
    head = (tl.program_id(0) % H).to(tl.int64)
    n = tl.program_id(0) // H
    batch, first, end = span(n, cu_seqlens, T, T, 1)
    batch = batch.to(tl.int64)
    carry = tl.zeros([], tl.float64)
    if entry_ptr is not None:
        carry = tl.load(entry_ptr + n * H + head).to(tl.float64)
    for start in range(first, end, BLOCK):
        step = start + tl.arange(0, BLOCK)
        live = step < end
        at = (batch * T + step) * H + head
        i = tl.load(i_ptr + batch * i_batch + step * i_step + head * i_head, mask=live, other=0.0).to(tl.float64)
        f = tl.load(f_ptr + batch * f_batch + step * f_step + head * f_head, mask=live, other=0.0).to(tl.float64)
        log_f = log_sigmoid(f)
        if EXPONENTIAL:
            # past the end, m stays
            shift, best = tl.associative_scan((tl.where(live, log_f, 0.0), tl.where(live, i, -1e300)), 0, max_plus)
            here = tl.maximum(carry + shift, best)
            tl.store(m_ptr + at, here, mask=live)
            # what a neighbouring thread has just written
            tl.debug_barrier()
            before = tl.load(m_ptr + at - H, mask=live & (step > start), other=0.0)
            before = tl.where(step == start, carry, before)
            carry = tl.max(tl.where(step == tl.minimum(start + BLOCK, end) - 1, here, float("-inf")), 0)
            g = log_f + before - here
            beta = tl.exp(i - here)
            floor = tl.exp(tl.minimum(-here, largest))
        else:
            g = log_f
            beta = 1.0 / (1.0 + tl.exp(-i))
            floor = tl.full([BLOCK], 1.0, tl.float64)
        tl.store(g_ptr + at, g.to(tl.float32), mask=live)
        tl.store(beta_ptr + at, beta.to(tl.float32), mask=live)
        tl.store(floor_ptr + at, floor.to(tl.float32), mask=live)
    tl.store(last_ptr + n * H + head, carry.to(tl.float32))


@triton.jit
def mlstm_gates_gradient(
    i_ptr, f_ptr, entry_ptr, cu_seqlens, m_ptr, dg_ptr, dbeta_ptr, dfloor_ptr, dlast_ptr, di_ptr, df_ptr, dentry_ptr,
    T, H, largest, i_batch, i_step, i_head, f_batch, f_step, f_head,
    EXPONENTIAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of mlstm_gates, from the last token to the first; gradients are contiguous [B, T, H] and [N, H]."""
    head = (tl.program_id(0) % H).to(tl.int64)
    n = tl.program_id(0) // H
    batch, first, end = span(n, cu_seqlens, T, T, 1)
    batch = batch.to(tl.int64)
    entry = tl.zeros([], tl.float64)
    if entry_ptr is not None:
        entry = tl.load(entry_ptr + n * H + head).to(tl.float64)
    i_ptr += batch * i_batch + head * i_head
    f_ptr += batch * f_batch + head * f_head
    # the gradient of m after the block, and of m by the decay of the token after it
    carry = tl.load(dlast_ptr + n * H + head).to(tl.float64)
    blocks = tl.cdiv(end - first, BLOCK)
    for done in range(blocks):
        start = first + (blocks - 1 - done) * BLOCK
        step = start + tl.arange(0, BLOCK)
        live = step < end
        at = (batch * T + step) * H + head
        i = tl.load(i_ptr + step * i_step, mask=live, other=0.0).to(tl.float64)
        f = tl.load(f_ptr + step * f_step, mask=live, other=0.0).to(tl.float64)
        dg = tl.load(dg_ptr + at, mask=live, other=0.0).to(tl.float64)
        dbeta = tl.load(dbeta_ptr + at, mask=live, other=0.0).to(tl.float64)
        if EXPONENTIAL:
            here = tl.load(m_ptr + at, mask=live, other=0.0)
            before = tl.load(m_ptr + at - H, mask=live & (step > first), other=0.0)
            before = tl.where(step == first, entry, before)
            dfloor = tl.load(dfloor_ptr + at, mask=live, other=0.0).to(tl.float64)
            dbeta *= tl.exp(i - here)
            dfloor *= tl.where(-here < largest, tl.exp(tl.minimum(-here, largest)), 0.0)
            # shares of the maximum's gradient, of this token and of the next; equal arguments have a half each
            share = goes_back(log_sigmoid(f) + before, i)
            after = live & (step + 1 < end)
            next_i = tl.load(i_ptr + (step + 1) * i_step, mask=after, other=0.0).to(tl.float64)
            next_f = tl.load(f_ptr + (step + 1) * f_step, mask=after, other=0.0).to(tl.float64)
            next_dg = tl.load(dg_ptr + at + H, mask=after, other=0.0).to(tl.float64)
            slope = tl.where(after, goes_back(log_sigmoid(next_f) + here, next_i), 1.0)
            direct = tl.where(live, next_dg - dg - dbeta - dfloor, 0.0)
            slope, total = tl.associative_scan((slope, direct), 0, affine, reverse=True)
            total += slope * carry
            carry = tl.sum(tl.where(step == start, total, 0.0), 0)
            di = dbeta + (1.0 - share) * total
            dlog_f = dg + share * total
            if start == first:
                leaves = tl.sum(tl.where(step == first, dlog_f, 0.0), 0)
                tl.store(dentry_ptr + n * H + head, leaves.to(tl.float32))
        else:
            open = 1.0 / (1.0 + tl.exp(-i))
            di = dbeta * open * (1.0 - open)
            dlog_f = dg
        df = dlog_f / (1.0 + tl.exp(f))
        tl.store(di_ptr + at, di.to(di_ptr.dtype.element_ty), mask=live)
        tl.store(df_ptr + at, df.to(df_ptr.dtype.element_ty), mask=live)
    if (not EXPONENTIAL) | (blocks == 0):
        tl.store(dentry_ptr + n * H + head, carry.to(tl.float32))


@triton.jit
def goes_back(recurrent, fresh):
    return tl.where(recurrent > fresh, 1.0, tl.where(recurrent == fresh, 0.5, 0.0)).to(tl.float64)


# past it the quotient by exp(-m) is 0 to rounding
LARGEST = 88.7228 - 1.0


def _on_device(cu_seqlens: Tensor | None, device: torch.device) -> Tensor | None:
    """The offsets as the kernels read them."""
    return None if cu_seqlens is None else cu_seqlens.to(device).contiguous()


def forward(
    i: Tensor, f: Tensor, entry: Tensor | None, cu_seqlens: Tensor | None, exponential: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """g, beta, floor [B, T, H] and the last m [N, H] in float32; m [B, T, H] in float64, empty unless exponential."""
    sequences = i.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    g, beta, floor = (torch.empty(i.shape, dtype=torch.float32, device=i.device) for _ in range(3))
    last = torch.empty(sequences, i.shape[2], dtype=torch.float32, device=i.device)
    m = torch.empty(i.shape if exponential else (0,), dtype=torch.float64, device=i.device)
    if last.numel():
        offsets = _on_device(cu_seqlens, i.device)
        tensors = (i, f, entry, offsets, m, g, beta, floor, last)
        constants = {"EXPONENTIAL": exponential, "BLOCK": BLOCK}
        numbers = (*i.shape[1:], LARGEST, *i.stride(), *f.stride())
        launch(mlstm_gates, (last.numel(),), tensors, numbers, constants, 4)
    return g, beta, floor, last, m


def backward(
    i: Tensor,
    f: Tensor,
    entry: Tensor | None,
    cu_seqlens: Tensor | None,
    exponential: bool,
    m: Tensor,
    dg: Tensor,
    dbeta: Tensor,
    dfloor: Tensor,
    dlast: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of i and f [B, T, H] in their dtypes, and of entry [N, H] in float32."""
    di, df = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (i, f))
    dentry = torch.empty_like(dlast, memory_format=torch.contiguous_format)
    dg, dbeta, dfloor, dlast = (x.contiguous() for x in (dg, dbeta, dfloor, dlast))
    if dentry.numel():
        offsets = _on_device(cu_seqlens, i.device)
        tensors = (i, f, entry, offsets, m, dg, dbeta, dfloor, dlast, di, df, dentry)
        constants = {"EXPONENTIAL": exponential, "BLOCK": BLOCK}
        numbers = (*i.shape[1:], LARGEST, *i.stride(), *f.stride())
        launch(mlstm_gates_gradient, (dentry.numel(),), tensors, numbers, constants, 4)
    return di, df, dentry
