"""mLSTM's gates: the decay, write strength and floor of MatrixCall, by sums and maxima over tokens in float64.

m_t = max(logsigmoid(f_t) + m_{t-1}, i_t). With a_t the sum of logsigmoid(f) up to t, m_t - a_t is the running maximum
of i_t - a_t; its gradient is a scan of affine maps in the other direction. A head's tokens are far apart in the gates
and side by side in what is made of them: one launch in tiles of tokens and heads turns them over, another scans.
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
# of a tile that is turned over
TOKENS, HEADS = 64, 16
# a smaller logsigmoid forgets all the same, and sums of such numbers still tell the others apart
_LEAST = tl.constexpr(-1e6)
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
def larger(a, b):
    # no maximum, which would look for a NaN, at eight instructions
    return tl.where(a > b, a, b)


@triton.jit
def affine(slope, value, next_slope, next_value):
    return slope * next_slope, next_value + next_slope * value


@triton.jit
def _tile(T, H, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """Batch, tokens [TOKENS, 1], heads [1, HEADS], where they are within, and their places in [B, H, T]."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    return batch, token, head, (token < T) & (head < H), (batch * H + head) * T + token


@triton.jit
def mlstm_gates(
    i_ptr, f_ptr, g_ptr, beta_ptr, floor_ptr, entry_ptr, last_ptr, T, H, sequences,
    i_batch, i_step, i_head, f_batch, f_step, f_head,
    EXPONENTIAL: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of T, blocks of H, B). g, beta, floor: contiguous [B, H, T]; EXPONENTIAL: logsigmoid(f) and i.

    entry, last [sequences, H]: m before and after, which without EXPONENTIAL are the same; entry None for 0.
    """
    batch, token, head, live, at = _tile(T, H, TOKENS, HEADS)
    i = tl.load(i_ptr + batch * i_batch + token * i_step + head * i_head, mask=live, other=0.0).to(tl.float32)
    f = tl.load(f_ptr + batch * f_batch + token * f_step + head * f_head, mask=live, other=0.0).to(tl.float32)
    tl.store(g_ptr + at, log_sigmoid(f), mask=live)
    if EXPONENTIAL:
        tl.store(beta_ptr + at, i, mask=live)
    else:
        tl.store(beta_ptr + at, sigmoid(i), mask=live)
        tl.store(floor_ptr + at, tl.full([TOKENS, HEADS], 1.0, tl.float32), mask=live)
        if tl.program_id(0) == 0:
            for n in range(tl.program_id(2), sequences, tl.num_programs(2)):
                m = tl.zeros([1, HEADS], tl.float32)
                if entry_ptr is not None:
                    m = tl.load(entry_ptr + n * H + head, mask=head < H, other=0.0)
                tl.store(last_ptr + n * H + head, m, mask=head < H)


@triton.jit
def mlstm_stabilizer(
    entry_ptr, cu_seqlens, share_ptr, g_ptr, beta_ptr, floor_ptr, last_ptr, T, H, largest, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence and head: logsigmoid(f) and i become g and beta where they stand, contiguous [B, H, T] all.

    entry, last [N, H]: m before and after. share: what m_{t-1} has of m_t's gradient.
    """
    head = (tl.program_id(0) % H).to(tl.int64)
    n = tl.program_id(0) // H
    batch, first, end = span(n, cu_seqlens, T, T, 1)
    of_head = (batch.to(tl.int64) * H + head) * T
    # m before a block
    carry = tl.zeros([], tl.float64)
    if entry_ptr is not None:
        carry = tl.load(entry_ptr + n * H + head).to(tl.float64)
    for start in range(first, end, BLOCK):
        step = start + tl.arange(0, BLOCK)
        live = step < end
        at = of_head + step
        log_f = tl.load(g_ptr + at, mask=live, other=0.0).to(tl.float64)
        # a maximum would hide a NaN
        log_f = tl.where(log_f < _LEAST, _LEAST, log_f)
        i = tl.load(beta_ptr + at, mask=live, other=float("-inf")).to(tl.float64)
        i_before = tl.load(beta_ptr + at - 1, mask=live & (step > start), other=float("-inf")).to(tl.float64)
        total = tl.cumsum(log_f, 0)
        # m_{t-1} and i_t, both less the sum of log decays up to where they are
        before = larger(tl.associative_scan(i_before - (total - log_f), 0, larger), carry)
        # no difference of numbers that are not equal is 0 in float32
        gain = (i - total - before).to(tl.float32)
        here = tl.where(gain > 0.0, i, before + total)
        # a NaN is in all of them
        g = tl.where(gain <= 0.0, 0.0, -gain)
        beta = tl.exp(tl.where(gain > 0.0, 0.0, gain))
        share = tl.where(gain > 0.0, 0.0, tl.where(gain == 0.0, 0.5, 1.0))
        carry = tl.sum(tl.where(step == tl.minimum(start + BLOCK, end) - 1, here, 0.0), 0)
        # what a neighbouring thread reads has been read
        tl.debug_barrier()
        tl.store(g_ptr + at, g, mask=live)
        tl.store(beta_ptr + at, beta, mask=live)
        tl.store(floor_ptr + at, exp_of(tl.where(-here > largest, largest, -here)), mask=live)
        tl.store(share_ptr + at, share, mask=live)
    tl.store(last_ptr + n * H + head, carry.to(tl.float32))


@triton.jit
def mlstm_stabilizer_gradient(
    cu_seqlens, share_ptr, beta_ptr, floor_ptr, dg_ptr, dbeta_ptr, dfloor_ptr, dlast_ptr, di_ptr, dlog_f_ptr,
    dentry_ptr, T, H, largest, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of mlstm_stabilizer, from the last token to the first: di and dlog_f, contiguous [B, H, T] as all.

    g_t = log_f_t + m_{t-1} - m_t, so that of dg_t nothing is left in dlog_f_t where m_t is log_f_t + m_{t-1}: no sum
    has terms that cancel, and float32 will do.
    dlast and dentry [N, H], or None.
    """
    head = (tl.program_id(0) % H).to(tl.int64)
    n = tl.program_id(0) // H
    batch, first, end = span(n, cu_seqlens, T, T, 1)
    of_head = (batch.to(tl.int64) * H + head) * T
    least = exp_of(tl.zeros([], tl.float64) + largest)
    # the gradient of m before the tokens that come later, by their decay
    carry = tl.zeros([], tl.float32)
    if dlast_ptr is not None:
        carry = tl.load(dlast_ptr + n * H + head)
    blocks = tl.cdiv(end - first, BLOCK)
    for done in range(blocks):
        start = first + (blocks - 1 - done) * BLOCK
        step = start + tl.arange(0, BLOCK)
        live = step < end
        at = of_head + step
        share = tl.load(share_ptr + at, mask=live, other=1.0)
        floor = tl.load(floor_ptr + at, mask=live, other=0.0)
        dfloor = tl.load(dfloor_ptr + at, mask=live, other=0.0) * tl.where(floor < least, floor, 0.0)
        dbeta = tl.load(dbeta_ptr + at, mask=live, other=0.0) * tl.load(beta_ptr + at, mask=live, other=0.0)
        dg = tl.load(dg_ptr + at, mask=live, other=0.0)
        value = (1.0 - share) * dg - share * (dbeta + dfloor)
        slope, value = tl.associative_scan((share, value), 0, affine, reverse=True)
        dlog_f = value + slope * carry
        tl.store(dlog_f_ptr + at, dlog_f, mask=live)
        # what a neighbouring thread reads has been written
        tl.debug_barrier()
        inner = step + 1 < tl.minimum(start + BLOCK, end)
        later = tl.where(inner, tl.load(dlog_f_ptr + at + 1, mask=inner, other=0.0), carry)
        tl.store(di_ptr + at, share * dbeta + (1.0 - share) * (later - dg - dfloor), mask=live)
        carry = tl.sum(tl.where(step == start, dlog_f, 0.0), 0)
    if dentry_ptr is not None:
        tl.store(dentry_ptr + n * H + head, carry)


@triton.jit
def mlstm_gates_gradient(
    i_ptr, f_ptr, dlog_f_ptr, dbeta_ptr, di_ptr, df_ptr, T, H,
    i_batch, i_step, i_head, f_batch, f_step, f_head,
    EXPONENTIAL: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The gradient of mlstm_gates: di and df, contiguous [B, T, H], of dlog_f and dbeta, contiguous [B, H, T]."""
    batch, token, head, live, at = _tile(T, H, TOKENS, HEADS)
    f = tl.load(f_ptr + batch * f_batch + token * f_step + head * f_head, mask=live, other=0.0).to(tl.float32)
    df = tl.load(dlog_f_ptr + at, mask=live, other=0.0) * sigmoid(-f)
    di = tl.load(dbeta_ptr + at, mask=live, other=0.0)
    if not EXPONENTIAL:
        i = tl.load(i_ptr + batch * i_batch + token * i_step + head * i_head, mask=live, other=0.0).to(tl.float32)
        open = sigmoid(i)
        di *= open * (1.0 - open)
    out = (batch * T + token) * H + head
    tl.store(di_ptr + out, di.to(di_ptr.dtype.element_ty), mask=live)
    tl.store(df_ptr + out, df.to(df_ptr.dtype.element_ty), mask=live)


# past it the quotient by exp(-m) is 0 to rounding
LARGEST = 88.7228 - 1.0


def _on_device(cu_seqlens: Tensor | None, device: torch.device) -> Tensor | None:
    """The offsets as the kernels read them."""
    return None if cu_seqlens is None else cu_seqlens.to(device).contiguous()


def _tiles(i: Tensor, exponential: bool) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid and constants of a launch in tiles."""
    batch, length, heads = i.shape
    constants = {"EXPONENTIAL": exponential, "TOKENS": TOKENS, "HEADS": HEADS}
    return (triton.cdiv(length, TOKENS), triton.cdiv(heads, HEADS), batch), constants


def _scan(length: int) -> tuple[dict[str, Any], int]:
    """Constants of a launch that scans, and warps."""
    block = min(BLOCK, triton.next_power_of_2(max(length, 32)))
    return {"BLOCK": block}, max(1, block // 128)


def by_head(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised, of x's [B, T, H], a head's tokens side by side: what reads and writes one head finds them so."""
    _, length, heads = x.shape
    return torch.empty_strided(x.shape, (length * heads, 1, length), dtype=dtype, device=x.device)


def _by_head(x: Tensor) -> Tensor:
    """x [B, T, H] as the kernels read it."""
    return x.transpose(1, 2).contiguous()


def forward(
    i: Tensor, f: Tensor, entry: Tensor | None, cu_seqlens: Tensor | None, exponential: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """g, beta, floor [B, T, H] and the last m [N, H] in float32; share [B, T, H] (mlstm_stabilizer), empty unless
    exponential.

    entry: the first m [N, H], None for 0. Each head's tokens are side by side in memory.
    """
    sequences = i.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    g, beta, floor = (by_head(i) for _ in range(3))
    last = torch.empty(sequences, i.shape[2], dtype=torch.float32, device=i.device)
    share = by_head(i) if exponential else torch.empty(0, dtype=torch.float32, device=i.device)
    if i.numel():
        grid, constants = _tiles(i, exponential)
        numbers = (*i.shape[1:], sequences, *i.stride(), *f.stride())
        launch(mlstm_gates, grid, (i, f, g, beta, floor, entry, last), numbers, constants, 4)
    if exponential and last.numel():
        constants, warps = _scan(i.shape[1])
        tensors = (entry, _on_device(cu_seqlens, i.device), share, g, beta, floor, last)
        launch(mlstm_stabilizer, (last.numel(),), tensors, (*i.shape[1:], LARGEST), constants, warps)
    elif last.numel() and not i.numel():
        last.zero_() if entry is None else last.copy_(entry)
    return g, beta, floor, last, share


def backward(
    i: Tensor,
    f: Tensor,
    entry: Tensor | None,
    cu_seqlens: Tensor | None,
    exponential: bool,
    kept: tuple[Tensor, Tensor, Tensor],
    dg: Tensor,
    dbeta: Tensor,
    dfloor: Tensor,
    dlast: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of i and f [B, T, H] in their dtypes, and of entry [N, H] in float32.

    kept: beta, floor and share as forward returned them. dlast: None for 0.
    """
    di, df = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (i, f))
    sequences = i.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dentry = None if entry is None else torch.empty(sequences, i.shape[2], dtype=torch.float32, device=i.device)
    dlog_f, dstrength = _by_head(dg), _by_head(dbeta)
    if exponential and sequences * i.shape[2]:
        given = (*(_by_head(x) for x in kept[:2]), dlog_f, dstrength, _by_head(dfloor))
        dlog_f, dstrength = torch.empty_like(dlog_f), torch.empty_like(dstrength)
        constants, warps = _scan(i.shape[1])
        offsets = _on_device(cu_seqlens, i.device)
        dlast = None if dlast is None else dlast.contiguous()
        tensors = (offsets, _by_head(kept[2]), *given, dlast, dstrength, dlog_f, dentry)
        numbers = (*i.shape[1:], LARGEST)
        launch(mlstm_stabilizer_gradient, (sequences * i.shape[2],), tensors, numbers, constants, warps)
    elif dentry is not None:
        dentry.zero_() if dlast is None else dentry.copy_(dlast)
    if i.numel():
        grid, constants = _tiles(i, exponential)
        numbers = (*i.shape[1:], *i.stride(), *f.stride())
        launch(mlstm_gates_gradient, grid, (i, f, dlog_f, dstrength, di, df), numbers, constants, 4)
    return di, df, dentry
