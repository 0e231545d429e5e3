"""mLSTM's gates in one launch: the decay, write strength and floor of MatrixCall, by a max-plus scan in float64.

m_t = max(logsigmoid(f_t) + m_{t-1}, i_t). Affine maps of the max-plus algebra compose, so that a block of tokens is one
associative scan; its gradient is a scan of affine maps in the other direction.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.common.triton_launch import launch

from .triton_sweep import span

# tokens of one scan: all that most sequences have, so that nothing waits for the one before
BLOCK = 2048
# below it exp is 0 in float32
_LOG_ZERO = tl.constexpr(-200.0)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def log_sigmoid(x):
    small = tl.exp(-tl.abs(x))
    sum_ = 1.0 + small
    # log(1 + small), right to float32 where 1 + small is not
    log = tl.where(sum_ == 1.0, small, tl.log(sum_) * (small / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0)))
    return tl.minimum(x, 0.0) - log


@triton.jit
def sigmoid(x):
    # of a number that is never large
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, small) / (1.0 + small)


@triton.jit
def exp_of(x):
    """exp of a float64 in float32, right to its last digits: a float64's own would take longer than all else."""
    log = tl.where(x < _LOG_ZERO, _LOG_ZERO, x) * _LOG2E
    whole = tl.floor(log + 0.5)
    return tl.exp2((log - whole).to(tl.float32)) * tl.exp2(whole.to(tl.float32))


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
    """One sequence and head. entry, last [N, H]: m before and after; m, g, beta, floor: contiguous [B, H, T]."""
    head = (tl.program_id(0) % H).to(tl.int64)
    n = tl.program_id(0) // H
    batch, first, end = span(n, cu_seqlens, T, T, 1)
    batch = batch.to(tl.int64)
    i_ptr += batch * i_batch + head * i_head
    f_ptr += batch * f_batch + head * f_head
    carry = tl.zeros([], tl.float64)
    if entry_ptr is not None:
        carry = tl.load(entry_ptr + n * H + head).to(tl.float64)
    for start in range(first, end, BLOCK):
        step = start + tl.arange(0, BLOCK)
        live = step < end
        at = (batch * H + head) * T + step
        i = tl.load(i_ptr + step * i_step, mask=live, other=0.0).to(tl.float32)
        f = tl.load(f_ptr + step * f_step, mask=live, other=0.0).to(tl.float32)
        log_f = log_sigmoid(f)
        if EXPONENTIAL:
            # float64: stabilised decays are differences of numbers that may be large beside them
            log_f, i = log_f.to(tl.float64), i.to(tl.float64)
            # past the end, m stays
            shift, best = tl.associative_scan((tl.where(live, log_f, 0.0), tl.where(live, i, -1e300)), 0, max_plus)
            here = tl.maximum(carry + shift, best)
            tl.store(m_ptr + at, here, mask=live)
            # what a neighbouring thread has just written
            tl.debug_barrier()
            before = tl.load(m_ptr + at - 1, mask=live & (step > start), other=0.0)
            before = tl.where(step == start, carry, before)
            carry = tl.max(tl.where(step == tl.minimum(start + BLOCK, end) - 1, here, float("-inf")), 0)
            g = (log_f + before - here).to(tl.float32)
            beta = exp_of(i - here)
            floor = exp_of(tl.minimum(-here, largest))
        else:
            g = log_f
            beta = sigmoid(i)
            floor = tl.full([BLOCK], 1.0, tl.float32)
        tl.store(g_ptr + at, g, mask=live)
        tl.store(beta_ptr + at, beta, mask=live)
        tl.store(floor_ptr + at, floor, mask=live)
    tl.store(last_ptr + n * H + head, carry.to(tl.float32))


@triton.jit
def mlstm_gates_gradient(
    i_ptr, f_ptr, entry_ptr, cu_seqlens, m_ptr, dg_ptr, dbeta_ptr, dfloor_ptr, dlast_ptr,
    di_ptr, df_ptr, dentry_ptr, later_ptr,
    T, H, largest, i_batch, i_step, i_head, f_batch, f_step, f_head,
    EXPONENTIAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of mlstm_gates, from the last token to the first.

    dg, dbeta, dfloor and later, for the use of this kernel, in float64: contiguous [B, H, T]. di, df: contiguous
    [B, T, H]. dlast and dentry [N, H], or None.
    """
    head = (tl.program_id(0) % H).to(tl.int64)
    n = tl.program_id(0) // H
    batch, first, end = span(n, cu_seqlens, T, T, 1)
    batch = batch.to(tl.int64)
    entry = tl.zeros([], tl.float64)
    if entry_ptr is not None:
        entry = tl.load(entry_ptr + n * H + head).to(tl.float64)
    i_ptr += batch * i_batch + head * i_head
    f_ptr += batch * f_batch + head * f_head
    # the gradient of m before the tokens that come later, by their decay
    carry = tl.zeros([], tl.float64)
    if dlast_ptr is not None:
        carry = tl.load(dlast_ptr + n * H + head).to(tl.float64)
    blocks = tl.cdiv(end - first, BLOCK)
    for done in range(blocks):
        start = first + (blocks - 1 - done) * BLOCK
        step = start + tl.arange(0, BLOCK)
        live = step < end
        at = (batch * H + head) * T + step
        i = tl.load(i_ptr + step * i_step, mask=live, other=0.0).to(tl.float32)
        f = tl.load(f_ptr + step * f_step, mask=live, other=0.0).to(tl.float32)
        dg = tl.load(dg_ptr + at, mask=live, other=0.0)
        dbeta = tl.load(dbeta_ptr + at, mask=live, other=0.0)
        if EXPONENTIAL:
            here = tl.load(m_ptr + at, mask=live, other=0.0)
            before = tl.load(m_ptr + at - 1, mask=live & (step > first), other=0.0)
            before = tl.where(step == first, entry, before)
            dfloor = tl.load(dfloor_ptr + at, mask=live, other=0.0)
            dfloor *= tl.where(-here < largest, exp_of(tl.minimum(-here, largest)), 0.0)
            fresh = i.to(tl.float64)
            dbeta *= exp_of(fresh - here)
            # the share of the maximum's gradient that m_{t-1} has; equal arguments have a half each
            recurrent = log_sigmoid(f).to(tl.float64) + before
            share = tl.where(recurrent > fresh, 1.0, tl.where(recurrent == fresh, 0.5, 0.0)).to(tl.float64)
            dg, dbeta = dg.to(tl.float64), dbeta.to(tl.float64)
            # what m_t has beside the decay of the token after it; past the end, nothing
            direct = -(dg + dbeta + dfloor.to(tl.float64))
            slope, value = tl.associative_scan(
                (tl.where(live, share, 1.0), tl.where(live, share * direct + dg, 0.0)), 0, affine, reverse=True
            )
            dlog_f = value + slope * carry
            tl.store(later_ptr + at, dlog_f, mask=live)
            # what a neighbouring thread has just written
            tl.debug_barrier()
            after = tl.load(later_ptr + at + 1, mask=live & (step + 1 < tl.minimum(start + BLOCK, end)), other=0.0)
            after = tl.where(step + 1 < tl.minimum(start + BLOCK, end), after, carry)
            di = dbeta + (1.0 - share) * (after + direct)
            carry = tl.sum(tl.where(step == start, dlog_f, 0.0), 0)
        else:
            open = sigmoid(i)
            di = dbeta * open * (1.0 - open)
            dlog_f = dg
        df = dlog_f.to(tl.float32) * sigmoid(-f)
        out = (batch * T + step) * H + head
        tl.store(di_ptr + out, di.to(di_ptr.dtype.element_ty), mask=live)
        tl.store(df_ptr + out, df.to(df_ptr.dtype.element_ty), mask=live)
    if dentry_ptr is not None:
        tl.store(dentry_ptr + n * H + head, carry.to(tl.float32))


# past it the quotient by exp(-m) is 0 to rounding
LARGEST = 88.7228 - 1.0


def _on_device(cu_seqlens: Tensor | None, device: torch.device) -> Tensor | None:
    """The offsets as the kernels read them."""
    return None if cu_seqlens is None else cu_seqlens.to(device).contiguous()


def _shape(length: int, exponential: bool) -> tuple[dict[str, Any], int]:
    """Constants of a launch, and warps."""
    block = min(BLOCK, triton.next_power_of_2(max(length, 32)))
    return {"EXPONENTIAL": exponential, "BLOCK": block}, max(1, block // 128)


def by_head(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised, of x's [B, T, H], a head's tokens side by side: what reads and writes one head finds them so."""
    return torch.empty(x.shape[0], x.shape[2], x.shape[1], dtype=dtype, device=x.device).transpose(1, 2)


def _by_head(x: Tensor | None) -> Tensor | None:
    """x [B, T, H] as the kernel reads it."""
    return None if x is None else x.transpose(1, 2).contiguous()


def forward(
    i: Tensor, f: Tensor, entry: Tensor | None, cu_seqlens: Tensor | None, exponential: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """g, beta, floor [B, T, H] and the last m [N, H] in float32; m [B, T, H] in float64, empty unless exponential.

    entry: the first m [N, H], None for 0. Each head's tokens are side by side in memory.
    """
    sequences = i.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    g, beta, floor = (by_head(i) for _ in range(3))
    last = torch.empty(sequences, i.shape[2], dtype=torch.float32, device=i.device)
    m = by_head(i, torch.float64) if exponential else torch.empty(0, dtype=torch.float64, device=i.device)
    if last.numel():
        offsets = _on_device(cu_seqlens, i.device)
        tensors = (i, f, entry, offsets, m, g, beta, floor, last)
        constants, warps = _shape(i.shape[1], exponential)
        numbers = (*i.shape[1:], LARGEST, *i.stride(), *f.stride())
        launch(mlstm_gates, (last.numel(),), tensors, numbers, constants, warps)
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
    dlast: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of i and f [B, T, H] in their dtypes, and of entry [N, H] in float32. dlast: None for 0."""
    di, df = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (i, f))
    sequences = i.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dentry = None if entry is None else torch.empty(sequences, i.shape[2], dtype=torch.float32, device=i.device)
    if sequences * i.shape[2]:
        offsets, later = _on_device(cu_seqlens, i.device), torch.empty_like(m)
        given = (*(_by_head(x) for x in (dg, dbeta, dfloor)), None if dlast is None else dlast.contiguous())
        tensors = (i, f, entry, offsets, m, *given, di, df, dentry, later)
        constants, warps = _shape(i.shape[1], exponential)
        numbers = (*i.shape[1:], LARGEST, *i.stride(), *f.stride())
        launch(mlstm_gates_gradient, (sequences * i.shape[2],), tensors, numbers, constants, warps)
    return di, df, dentry
