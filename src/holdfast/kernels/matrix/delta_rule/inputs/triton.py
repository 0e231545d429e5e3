"""What a layer does to the delta rule's inputs before the kernel, in one launch a pass.

Queries and keys of length 1, the log decay of Mamba-2's gate and the sigmoid of the write strength:
q / sqrt(|q|^2 + 1e-6), -exp(A_log) softplus(g + dt_bias), sigmoid(beta) or twice that. In float32 throughout; the
backward pass forms all of it again, so that nothing beside the inputs is kept.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.lib.triton.sigmoid import log_sigmoid, sigmoid
from holdfast.kernels.runtime.launch import launch
from holdfast.recurrences.delta_rule import L2_EPS

# elements of a tile, 16 a thread
TILE, WARPS = 2048, 4
# blocks that sum the gradients of A_log and dt_bias, each the same tokens in every run
PARTS = 128


@triton.jit
def places(token, T, batch, step):
    """Where tokens of [B, T, H] begin."""
    return (token // T).to(tl.int64) * batch + (token % T).to(tl.int64) * step


@triton.jit
def rows_of(tile, T, H, x_batch, x_step, x_head, ROWS: tl.constexpr):
    """The rows of a tile of [B, T, H, D], and where those of a tensor with these strides start."""
    # fewer than 2^31 rows: a division of 64 bits takes longer than a row's memory
    rows = tile * ROWS + tl.arange(0, ROWS)
    token = rows // H
    return rows.to(tl.int64), places(token, T, x_batch, x_step) + (rows % H).to(tl.int64) * x_head


@triton.jit
def load_rows(x_ptr, at, rows, columns, count, D: tl.constexpr):
    inside = (rows < count)[:, None] & (columns < D)[None, :]
    return tl.load(x_ptr + at[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(x_ptr, rows, columns, count, x, D: tl.constexpr):
    """Into a contiguous tensor."""
    inside = (rows < count)[:, None] & (columns < D)[None, :]
    tl.store(x_ptr + rows[:, None] * D + columns[None, :], x.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def normalize(x_ptr, y_ptr, tile, count, T, H, batch, step, head, eps, D: tl.constexpr, BLOCK_D: tl.constexpr,
              ROWS: tl.constexpr):  # fmt: skip
    columns = tl.arange(0, BLOCK_D)
    rows, at = rows_of(tile, T, H, batch, step, head, ROWS)
    x = load_rows(x_ptr, at, rows, columns, count, D)
    store_rows(y_ptr, rows, columns, count, x * tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None], D)


@triton.jit
def normalize_gradient(x_ptr, dy_ptr, dx_ptr, tile, count, T, H, batch, step, head, dy_batch, dy_step, dy_head, eps,
                       D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    columns = tl.arange(0, BLOCK_D)
    rows, at = rows_of(tile, T, H, batch, step, head, ROWS)
    x = load_rows(x_ptr, at, rows, columns, count, D)
    rows, at = rows_of(tile, T, H, dy_batch, dy_step, dy_head, ROWS)
    dy = load_rows(dy_ptr, at, rows, columns, count, D)
    inverse = tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]
    y = x * inverse
    store_rows(dx_ptr, rows, columns, count, inverse * (dy - y * tl.sum(dy * y, 1)[:, None]), D)


@triton.jit
def forward(
    q_ptr, k_ptr, g_ptr, beta_ptr, rate_ptr, bias_ptr, y_ptr, z_ptr, decay_ptr, strength_ptr,
    tiles, B, T, Hq, H, eps, largest, q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The first `tiles` programs take rows of q and k, where y, z [B, T, Hq, D] are wanted; the others tokens of gates.

    decay, strength: float32 [B, T, H], None where not wanted. largest: of a strength.
    """
    program = tl.program_id(0)
    if program < tiles:
        if y_ptr is not None:
            count = B * T * Hq
            normalize(q_ptr, y_ptr, program, count, T, Hq, q_b, q_t, q_h, eps, D, BLOCK_D, ROWS)
            normalize(k_ptr, z_ptr, program, count, T, Hq, k_b, k_t, k_h, eps, D, BLOCK_D, ROWS)
    else:
        heads = tl.arange(0, BLOCK_H)
        token = (program - tiles) * TOKENS + tl.arange(0, TOKENS)
        inside = (token < B * T)[:, None] & (heads < H)[None, :]
        to = token.to(tl.int64)[:, None] * H + heads[None, :]
        if decay_ptr is not None:
            at = places(token, T, g_b, g_t)[:, None] + heads.to(tl.int64)[None, :] * g_h
            g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                g += tl.load(bias_ptr + heads, mask=heads < H, other=0.0).to(tl.float32)[None, :]
            rate = tl.exp(tl.load(rate_ptr + heads, mask=heads < H, other=0.0).to(tl.float32))
            tl.store(decay_ptr + to, rate[None, :] * log_sigmoid(-g), mask=inside)
        if strength_ptr is not None:
            at = places(token, T, beta_b, beta_t)[:, None] + heads.to(tl.int64)[None, :] * beta_h
            beta = tl.load(beta_ptr + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(strength_ptr + to, largest * sigmoid(beta), mask=inside)


@triton.jit
def backward(
    q_ptr, k_ptr, g_ptr, beta_ptr, rate_ptr, bias_ptr, dy_ptr, dz_ptr, ddecay_ptr, dstrength_ptr,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, parts_ptr,
    tiles, B, T, Hq, H, eps, largest, q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    dy_b, dy_t, dy_h, dz_b, dz_t, dz_h, dg_b, dg_t, dbeta_b, dbeta_t, rest,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The gradients, by the same programs. ddecay, dstrength: contiguous [B, T, H]; dq and dk contiguous, dg and dbeta
    with heads side by side, and behind dbeta's `rest` columns of zeros.

    parts: float32 [2, p, H], what each of the p programs of the gates adds up for A_log and for dt_bias.
    """
    program = tl.program_id(0)
    if program < tiles:
        if dq_ptr is not None:
            count = B * T * Hq
            normalize_gradient(q_ptr, dy_ptr, dq_ptr, program, count, T, Hq, q_b, q_t, q_h, dy_b, dy_t, dy_h, eps, D,
                               BLOCK_D, ROWS)  # fmt: skip
            normalize_gradient(k_ptr, dz_ptr, dk_ptr, program, count, T, Hq, k_b, k_t, k_h, dz_b, dz_t, dz_h, eps, D,
                               BLOCK_D, ROWS)  # fmt: skip
    else:
        heads = tl.arange(0, BLOCK_H)
        part, parts = program - tiles, tl.num_programs(0) - tiles
        if dg_ptr is not None:
            rate = tl.exp(tl.load(rate_ptr + heads, mask=heads < H, other=0.0).to(tl.float32))[None, :]
            rate_sums = tl.zeros([TOKENS, BLOCK_H], tl.float32)
            bias_sums = tl.zeros([TOKENS, BLOCK_H], tl.float32)
        for tile in tl.range(part, tl.cdiv(B * T, TOKENS), parts):
            token = tile * TOKENS + tl.arange(0, TOKENS)
            inside = (token < B * T)[:, None] & (heads < H)[None, :]
            to = token.to(tl.int64)[:, None] * H + heads[None, :]
            if dg_ptr is not None:
                at = places(token, T, g_b, g_t)[:, None] + heads.to(tl.int64)[None, :] * g_h
                g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
                if bias_ptr is not None:
                    g += tl.load(bias_ptr + heads, mask=heads < H, other=0.0).to(tl.float32)[None, :]
                ddecay = tl.load(ddecay_ptr + to, mask=inside, other=0.0).to(tl.float32) * rate
                dg = -ddecay * sigmoid(g)
                rate_sums += ddecay * log_sigmoid(-g)
                bias_sums += dg
                at = places(token, T, dg_b, dg_t)[:, None] + heads[None, :]
                tl.store(dg_ptr + at, dg.to(dg_ptr.dtype.element_ty), mask=inside)
            if dbeta_ptr is not None:
                at = places(token, T, beta_b, beta_t)[:, None] + heads.to(tl.int64)[None, :] * beta_h
                open_ = sigmoid(tl.load(beta_ptr + at, mask=inside, other=0.0).to(tl.float32))
                dbeta = tl.load(dstrength_ptr + to, mask=inside, other=0.0).to(tl.float32)
                dbeta *= largest * open_ * (1.0 - open_)
                at = places(token, T, dbeta_b, dbeta_t)[:, None] + heads[None, :]
                wide = (token < B * T)[:, None] & (heads < H + rest)[None, :]
                tl.store(dbeta_ptr + at, dbeta.to(dbeta_ptr.dtype.element_ty), mask=wide)
        if dg_ptr is not None:
            at = part.to(tl.int64) * H + heads
            tl.store(parts_ptr + at, tl.sum(rate_sums, 0), mask=heads < H)
            tl.store(parts_ptr + parts * H + at, tl.sum(bias_sums, 0), mask=heads < H)


def _shape(q: Tensor, gates: Tensor | None, wants_rows: bool, rest: int = 0) -> tuple[int, int, int, dict[str, int]]:
    """Programs of rows, tiles of tokens, heads of the gates, and constants. rest: columns behind the heads."""
    batch, length, query_heads, width = q.shape
    heads = 1 if gates is None else gates.shape[2]
    block, block_heads = triton.next_power_of_2(width), triton.next_power_of_2(heads + rest)
    rows, tokens = max(1, TILE // block), max(1, TILE // (4 * block_heads))
    tiles = -(-batch * length * query_heads // rows) if wants_rows else 0
    constants = {"D": width, "BLOCK_D": block, "ROWS": rows, "BLOCK_H": block_heads, "TOKENS": tokens}
    return tiles, 0 if gates is None else -(-batch * length // tokens), heads, constants


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def run_forward(inputs: Inputs, norm: bool, largest: float) -> tuple[Tensor | None, ...]:
    """q and k of length 1, the log decay and the strength in float32, all contiguous; None for what is not asked for.

    inputs: q, k, and as far as they are given g and beta [B, T, H], A_log and dt_bias [H].
    """
    q, k, g, beta, rate, bias = (_dense(inputs[0]), _dense(inputs[1]), *inputs[2:])
    tiles, blocks, heads, constants = _shape(q, beta if g is None else g, norm)
    y, z = (torch.empty(q.shape, dtype=q.dtype, device=q.device) if norm else None for _ in range(2))
    decay, strength = (
        None if x is None else torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (g, beta)
    )
    if q.shape[0] * q.shape[1]:
        tensors = (q, k, g, beta, rate, bias, y, z, decay, strength)
        numbers = (tiles, *q.shape[:3], heads, L2_EPS, largest, *(s for x in (q, k, g, beta) for s in _strides(x)))
        launch(forward, (tiles + blocks,), tensors, numbers, constants, WARPS)
    return y, z, decay, strength


def run_backward(
    inputs: Inputs, norm: bool, largest: float, grads: Any, into: tuple[Tensor | None, Tensor] | None = None
) -> tuple[Tensor | None, ...]:
    """Gradients of inputs, in their dtypes, of those of what run_forward returned; None for what was not given.

    into: where those of g and beta will be, parts [B, T, H] and [B, T, H or more] of a wider tensor; what is beyond
    beta's heads becomes 0.
    """
    q, k, g, beta, rate, bias = (_dense(inputs[0]), _dense(inputs[1]), *inputs[2:])
    rest = 0 if into is None else into[1].shape[2] - beta.shape[2]
    tiles, blocks, heads, constants = _shape(q, beta if g is None else g, norm, rest)
    dy, dz = (_dense(x) if norm else None for x in grads[:2])
    ddecay, dstrength = (None if x is None else grad.contiguous() for x, grad in ((g, grads[2]), (beta, grads[3])))
    dq, dk = (torch.empty(q.shape, dtype=q.dtype, device=q.device) if norm else None for _ in range(2))
    dg, dbeta = into or (None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (g, beta))
    sums = min(PARTS, blocks)
    parts = None if g is None else torch.empty(2, sums, heads, dtype=torch.float32, device=q.device)
    if q.shape[0] * q.shape[1]:
        tensors = (q, k, g, beta, rate, bias, dy, dz, ddecay, dstrength, dq, dk, dg, dbeta, parts)
        strides = (s for x in (q, k, g, beta, dy, dz) for s in _strides(x))
        steps = (s for x in (dg, dbeta) for s in _strides(x)[:2])
        numbers = (tiles, *q.shape[:3], heads, L2_EPS, largest, *strides, *steps, rest)
        launch(backward, (tiles + sums,), tensors, numbers, constants, WARPS)
    drate = dbias = None
    if parts is not None:
        drate, dbias = parts.sum(1)
        drate, dbias = drate.to(rate.dtype), None if bias is None else dbias.to(bias.dtype)
    return dq, dk, dg, dbeta, drate, dbias
