"""mLSTM's gates: log decay, beta and stabiliser of MatrixCall, from pre-activations, and their gradients.

A head's tokens are far apart in the pre-activations and side by side in what is made of them: launches in tiles of
tokens and heads transpose them. Sigmoid gating, one launch a pass, is here; exponential gating, two, is in
stabilizer.py and stabilizer_grad.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.lib.triton.sigmoid import log_sigmoid, sigmoid
from holdfast.kernels.runtime.launch import has_pdl, launch
from holdfast.kernels.varlen import placed

from .stabilizer import mlstm_stabilizer, mlstm_stabilizer_maps
from .stabilizer_grad import mlstm_stabilizer_bwd, mlstm_stabilizer_bwd_maps

# of a tile that is transposed
TOKENS, HEADS = 64, 16
# of exponential gating: tokens of a segment, threads and heads of a tile at most, tiles whose maps are joined at once
SEGMENT, THREADS, TILES = 8, 256, 32


@dataclass(frozen=True, slots=True)
class Cotangents:
    """Gradients of g, beta, m [B, T, H] and of the last m [N, H]; those of m may be None, for 0."""

    dg: Tensor
    dbeta: Tensor
    dm: Tensor | None
    dlast: Tensor | None


@triton.jit
def _tile(T, H, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """Return batch, tokens [TOKENS, 1], heads [1, HEADS], which are there, and their offsets in [B, H, T]."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    return batch, token, head, (token < T) & (head < H), (batch * H + head) * T + token


@triton.jit
def mlstm_sigmoid_gates(
    i_ptr, f_ptr, g_ptr, beta_ptr, m_ptr, entry_ptr, last_ptr, T, H, sequences,
    i_batch, i_step, i_head, f_batch, f_step, f_head, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of T, blocks of H, B).

    i, f [B, T, H], strides
    g, beta, m [B, H, T] float32, contiguous, written; m is 0
    entry, last [sequences, H] float32: m before and, written, after, which are the same; entry None for 0
    """
    batch, token, head, live, at = _tile(T, H, TOKENS, HEADS)
    i = tl.load(i_ptr + batch * i_batch + token * i_step + head * i_head, mask=live, other=0.0).to(tl.float32)
    f = tl.load(f_ptr + batch * f_batch + token * f_step + head * f_head, mask=live, other=0.0).to(tl.float32)
    tl.store(g_ptr + at, log_sigmoid(f), mask=live)
    tl.store(beta_ptr + at, sigmoid(i), mask=live)
    tl.store(m_ptr + at, tl.zeros([TOKENS, HEADS], tl.float32), mask=live)
    if tl.program_id(0) == 0:
        for n in range(tl.program_id(2), sequences, tl.num_programs(2)):
            m = tl.zeros([1, HEADS], tl.float32)
            if entry_ptr is not None:
                m = tl.load(entry_ptr + n * H + head, mask=head < H, other=0.0)
            tl.store(last_ptr + n * H + head, m, mask=head < H)


@triton.jit
def mlstm_sigmoid_gates_bwd(
    i_ptr, f_ptr, dg_ptr, dbeta_ptr, di_ptr, df_ptr, T, H,
    i_batch, i_step, i_head, f_batch, f_step, f_head, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of T, blocks of H, B).

    i, f [B, T, H], strides; dg, dbeta [B, H, T] float32, contiguous
    di, df [B, T, H], contiguous, written
    """
    batch, token, head, live, at = _tile(T, H, TOKENS, HEADS)
    f = tl.load(f_ptr + batch * f_batch + token * f_step + head * f_head, mask=live, other=0.0).to(tl.float32)
    df = tl.load(dg_ptr + at, mask=live, other=0.0) * sigmoid(-f)
    di = tl.load(dbeta_ptr + at, mask=live, other=0.0)
    i = tl.load(i_ptr + batch * i_batch + token * i_step + head * i_head, mask=live, other=0.0).to(tl.float32)
    open = sigmoid(i)
    di *= open * (1.0 - open)
    out = (batch * T + token) * H + head
    tl.store(di_ptr + out, di.to(di_ptr.dtype.element_ty), mask=live)
    tl.store(df_ptr + out, df.to(df_ptr.dtype.element_ty), mask=live)


def _on_device(cu_seqlens: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the offsets as the kernels read them."""
    return None if cu_seqlens is None else placed(cu_seqlens, device)


def _tiles(x: Tensor) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return grid and constants of a launch in tiles of x [B, T, H]."""
    batch, length, heads = x.shape
    return (triton.cdiv(length, TOKENS), triton.cdiv(heads, HEADS), batch), {"TOKENS": TOKENS, "HEADS": HEADS}


def _segments(x: Tensor) -> tuple[tuple[int, int, int], dict[str, Any], int]:
    """Return grid, constants and warps of a launch in segments of x [B, T, H]."""
    batch, length, heads = x.shape
    columns = min(HEADS, triton.next_power_of_2(heads))
    rows = min(THREADS // columns, triton.next_power_of_2(triton.cdiv(length, SEGMENT)))
    grid = (triton.cdiv(length, SEGMENT * rows), triton.cdiv(heads, columns), batch)
    constants = {"TOKENS": SEGMENT, "SEGMENTS": rows, "HEADS": columns, "PDL": has_pdl(x.device)}
    return grid, constants, max(1, rows * columns // 32)


def _maps(grid: tuple[int, int, int], constants: dict[str, Any], x: Tensor, dtype: torch.dtype) -> Tensor:
    """Make room for two numbers of each segment of x [B, T, H]."""
    return torch.empty(2, x.shape[0], grid[0] * constants["SEGMENTS"], x.shape[2], dtype=dtype, device=x.device)


def by_head(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make a tensor of x's shape [B, T, H], uninitialised, with a head's tokens side by side."""
    _, length, heads = x.shape
    return torch.empty_strided(x.shape, (length * heads, 1, length), dtype=dtype, device=x.device)


def _by_head(x: Tensor) -> Tensor:
    """Return x [B, T, H] as the kernels read it."""
    return x.transpose(1, 2).contiguous()


def forward(
    i: Tensor, f: Tensor, entry: Tensor | None, cu_seqlens: Tensor | None, exponential: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return g, beta, m [B, T, H] and the last m [N, H] in float32.

    entry: the first m [N, H], None for 0. Each head's tokens are side by side in memory. With exponential gating a zero
    of g has a sign, which the backward pass reads (mlstm_stabilizer).
    """
    sequences = i.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    g, beta, m = (by_head(i) for _ in range(3))
    last = torch.empty(sequences, i.shape[2], dtype=torch.float32, device=i.device)
    numbers = (*i.shape[1:], sequences, *i.stride(), *f.stride())
    if not i.numel():
        last.zero_() if entry is None else last.copy_(entry)
    elif exponential:
        grid, constants, warps = _segments(i)
        offsets, maps = _on_device(cu_seqlens, i.device), _maps(grid, constants, i, torch.float64)
        tensors = (i, f, entry, offsets, last, maps)
        launch(mlstm_stabilizer_maps, grid, tensors, numbers, constants, warps)
        tensors = (i, f, entry, offsets, g, beta, m, last, maps)
        pdl, constants = constants["PDL"], constants | {"TILES": TILES}
        launch(mlstm_stabilizer, grid, tensors, numbers, constants, warps, pdl)
    else:
        grid, constants = _tiles(i)
        launch(mlstm_sigmoid_gates, grid, (i, f, g, beta, m, entry, last), numbers, constants, 4)
    return g, beta, m, last


def backward(
    i: Tensor,
    f: Tensor,
    entry: Tensor | None,
    cu_seqlens: Tensor | None,
    exponential: bool,
    g: Tensor,
    beta: Tensor,
    cotangents: Cotangents,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of i and f [B, T, H] in their dtypes, and of entry [N, H] in float32.

    g, beta: as forward returned them.
    """
    dlast = cotangents.dlast
    di, df = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (i, f))
    sequences = i.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dentry = None if entry is None else torch.empty(sequences, i.shape[2], dtype=torch.float32, device=i.device)
    if dentry is not None and not (exponential and i.numel()):
        dentry.zero_() if dlast is None else dentry.copy_(dlast)
    dg, dbeta = _by_head(cotangents.dg), _by_head(cotangents.dbeta)
    if exponential and i.numel():
        grid, constants, warps = _segments(i)
        offsets, maps = _on_device(cu_seqlens, i.device), _maps(grid, constants, i, torch.float32)
        dlast = None if dlast is None else dlast.contiguous()
        share = torch.empty(i.shape, dtype=torch.bfloat16, device=i.device)
        value, of_i, of_f = (torch.empty(i.shape, dtype=torch.float32, device=i.device) for _ in range(3))
        numbers = (*i.shape[1:], sequences)
        dm = None if cotangents.dm is None else _by_head(cotangents.dm)
        tensors = (offsets, _by_head(g), _by_head(beta), dg, dbeta, dm, dlast, dentry, share, value, of_i, of_f, maps)
        launch(mlstm_stabilizer_bwd_maps, grid, tensors, numbers, constants, warps)
        tensors = (f, share, value, of_i, of_f, offsets, dlast, di, df, dentry, maps)
        pdl, constants = constants["PDL"], constants | {"TILES": TILES}
        launch(mlstm_stabilizer_bwd, grid, tensors, (*numbers, *f.stride()), constants, warps, pdl)
    elif i.numel():
        grid, constants = _tiles(i)
        numbers = (*i.shape[1:], *i.stride(), *f.stride())
        launch(mlstm_sigmoid_gates_bwd, grid, (i, f, dg, dbeta, di, df), numbers, constants, 4)
    return di, df, dentry
