"""What a layer does to the delta rule's inputs before the recurrence, in one launch a pass.

Queries and keys of length 1, the log decay of Mamba-2's gate and the sigmoid of beta: q / sqrt(|q|^2 + 1e-6),
-exp(A_log) softplus(g + dt_bias), sigmoid(beta) or twice that. In float32 throughout; the backward pass forms all of
it again, so that nothing beside the inputs is saved.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.lib.triton.compat import aggregate
from holdfast.kernels.lib.triton.sigmoid import log_sigmoid, sigmoid
from holdfast.kernels.runtime.launch import launch
from holdfast.recurrences.delta_rule import L2_EPS

# elements of a tile, 16 a thread
TILE, WARPS = 2048, 4
# programs that sum the gradients of A_log and dt_bias, each the same tokens in every run
PARTS = 128
_EPS = tl.constexpr(L2_EPS)


class Strided(NamedTuple):
    """Pointer to a tensor [B, T, H, D] whose last axis is dense, and its strides of batches, tokens and heads."""

    ptr: Any
    batch: Any
    token: Any
    head: Any


class Extent(NamedTuple):
    """Tokens of a batch, heads, and rows [B * T * H] of a tensor [B, T, H, D]."""

    T: Any
    H: Any
    rows: Any


@aggregate
class RowTile:
    """A tile of ROWS rows of D numbers; a power of two holds the columns."""

    D: tl.constexpr
    BLOCK_D: tl.constexpr
    ROWS: tl.constexpr

    @triton.constexpr_function
    def __init__(self, D, BLOCK_D, ROWS):
        self.D = tl.constexpr(D)
        self.BLOCK_D = tl.constexpr(BLOCK_D)
        self.ROWS = tl.constexpr(ROWS)


@triton.jit
def token_offsets(token, T, batch, step):
    """Return the offsets of tokens of [B, T, H], counted through all batches."""
    return (token // T).to(tl.int64) * batch + (token % T).to(tl.int64) * step


@triton.jit
def load_rows(ptr, at, rows, extent, shape):
    """Load the rows that begin at `at`, in float32; 0 beyond the last row and column."""
    columns = tl.arange(0, shape.BLOCK_D)
    inside = (rows < extent.rows)[:, None] & (columns < shape.D)[None, :]
    return tl.load(ptr + at[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_dense_rows(ptr, rows, x, extent, shape):
    """Store rows of a contiguous tensor."""
    columns = tl.arange(0, shape.BLOCK_D)
    inside = (rows < extent.rows)[:, None] & (columns < shape.D)[None, :]
    tl.store(ptr + rows[:, None] * shape.D + columns[None, :], x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_tile_rows(x, tile, extent, shape):
    """Return the tile's row numbers, and these rows of a strided tensor."""
    # fewer than 2^31 rows: a division of 64 bits takes longer than a row's memory
    rows = tile * shape.ROWS + tl.arange(0, shape.ROWS)
    head = (rows % extent.H).to(tl.int64) * x.head
    at = token_offsets(rows // extent.H, extent.T, x.batch, x.token) + head
    rows = rows.to(tl.int64)
    return rows, load_rows(x.ptr, at, rows, extent, shape)


@triton.jit
def normalize(x, y_ptr, tile, extent, shape):
    """Store a tile of x's rows, each divided by its length."""
    rows, values = load_tile_rows(x, tile, extent, shape)
    store_dense_rows(y_ptr, rows, values * tl.rsqrt(tl.sum(values * values, 1) + _EPS)[:, None], extent, shape)


@triton.jit
def normalize_grad(x, dy_ptr, dx_ptr, tile, extent, shape):
    """Store the gradient of a tile of x's rows, from that of `normalize`'s, contiguous."""
    rows, values = load_tile_rows(x, tile, extent, shape)
    dy = load_rows(dy_ptr, rows * shape.D, rows, extent, shape)
    inverse = tl.rsqrt(tl.sum(values * values, 1) + _EPS)[:, None]
    y = values * inverse
    store_dense_rows(dx_ptr, rows, inverse * (dy - y * tl.sum(dy * y, 1)[:, None]), extent, shape)


@triton.jit
def delta_rule_inputs_fwd(
    q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, q_out_ptr, k_out_ptr, g_out_ptr, beta_out_ptr,
    tiles, B, T, Hq, H, beta_max, q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The first `tiles` programs take ROWS rows of q and k each, the others TOKENS tokens of g and beta.

    q, k: [B, T, Hq, D], strides. g, beta: [B, T, H], strides, or None. A_log, dt_bias: [H], or None. q_out, k_out:
    [B, T, Hq, D], contiguous, or None. g_out, beta_out: [B, T, H], float32, contiguous, or None; beta_out is at most
    beta_max.
    """
    program = tl.program_id(0)
    if program < tiles:
        if q_out_ptr is not None:
            extent = Extent(T=T, H=Hq, rows=B * T * Hq)
            shape = RowTile(D, triton.next_power_of_2(D), ROWS)
            normalize(Strided(ptr=q_ptr, batch=q_b, token=q_t, head=q_h), q_out_ptr, program, extent, shape)
            normalize(Strided(ptr=k_ptr, batch=k_b, token=k_t, head=k_h), k_out_ptr, program, extent, shape)
    else:
        heads = tl.arange(0, BLOCK_H)
        token = (program - tiles) * TOKENS + tl.arange(0, TOKENS)
        inside = (token < B * T)[:, None] & (heads < H)[None, :]
        to = token.to(tl.int64)[:, None] * H + heads[None, :]
        if g_out_ptr is not None:
            at = token_offsets(token, T, g_b, g_t)[:, None] + heads.to(tl.int64)[None, :] * g_h
            g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if dt_bias_ptr is not None:
                g += tl.load(dt_bias_ptr + heads, mask=heads < H, other=0.0).to(tl.float32)[None, :]
            rate = tl.exp(tl.load(A_log_ptr + heads, mask=heads < H, other=0.0).to(tl.float32))
            tl.store(g_out_ptr + to, rate[None, :] * log_sigmoid(-g), mask=inside)
        if beta_out_ptr is not None:
            at = token_offsets(token, T, beta_b, beta_t)[:, None] + heads.to(tl.int64)[None, :] * beta_h
            beta = tl.load(beta_ptr + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(beta_out_ptr + to, beta_max * sigmoid(beta), mask=inside)


@triton.jit
def delta_rule_inputs_bwd(
    q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, dq_out_ptr, dk_out_ptr, dg_out_ptr, dbeta_out_ptr,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, parts_ptr,
    tiles, B, T, Hq, H, beta_max, q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h,
    grad_b, grad_t, rest,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Gradients of the inputs, by programs like the forward kernel's.

    q, k, g, beta, A_log, dt_bias: as there. dq_out, dk_out: [B, T, Hq, D], dg_out, dbeta_out: [B, T, H], the gradients
    of what the forward kernel stores, contiguous. dq, dk: [B, T, Hq, D], contiguous. dg, dbeta: [B, T, H], both with
    strides grad_b and grad_t and dense heads; behind dbeta's heads `rest` columns become 0. parts: [2, p, H], float32,
    the sums of each of the p programs of g and beta for A_log and for dt_bias.
    """
    program = tl.program_id(0)
    if program < tiles:
        if dq_ptr is not None:
            extent = Extent(T=T, H=Hq, rows=B * T * Hq)
            shape = RowTile(D, triton.next_power_of_2(D), ROWS)
            q = Strided(ptr=q_ptr, batch=q_b, token=q_t, head=q_h)
            normalize_grad(q, dq_out_ptr, dq_ptr, program, extent, shape)
            k = Strided(ptr=k_ptr, batch=k_b, token=k_t, head=k_h)
            normalize_grad(k, dk_out_ptr, dk_ptr, program, extent, shape)
    else:
        heads = tl.arange(0, BLOCK_H)
        part, parts = program - tiles, tl.num_programs(0) - tiles
        if dg_ptr is not None:
            rate = tl.exp(tl.load(A_log_ptr + heads, mask=heads < H, other=0.0).to(tl.float32))[None, :]
            rate_sums = tl.zeros([TOKENS, BLOCK_H], tl.float32)
            bias_sums = tl.zeros([TOKENS, BLOCK_H], tl.float32)
        for tile in tl.range(part, tl.cdiv(B * T, TOKENS), parts):
            token = tile * TOKENS + tl.arange(0, TOKENS)
            inside = (token < B * T)[:, None] & (heads < H)[None, :]
            to = token.to(tl.int64)[:, None] * H + heads[None, :]
            if dg_ptr is not None:
                at = token_offsets(token, T, g_b, g_t)[:, None] + heads.to(tl.int64)[None, :] * g_h
                g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
                if dt_bias_ptr is not None:
                    g += tl.load(dt_bias_ptr + heads, mask=heads < H, other=0.0).to(tl.float32)[None, :]
                dg_out = tl.load(dg_out_ptr + to, mask=inside, other=0.0).to(tl.float32) * rate
                dg = -dg_out * sigmoid(g)
                rate_sums += dg_out * log_sigmoid(-g)
                bias_sums += dg
                at = token_offsets(token, T, grad_b, grad_t)[:, None] + heads[None, :]
                tl.store(dg_ptr + at, dg.to(dg_ptr.dtype.element_ty), mask=inside)
            if dbeta_ptr is not None:
                at = token_offsets(token, T, beta_b, beta_t)[:, None] + heads.to(tl.int64)[None, :] * beta_h
                open_ = sigmoid(tl.load(beta_ptr + at, mask=inside, other=0.0).to(tl.float32))
                dbeta = tl.load(dbeta_out_ptr + to, mask=inside, other=0.0).to(tl.float32)
                dbeta *= beta_max * open_ * (1.0 - open_)
                at = token_offsets(token, T, grad_b, grad_t)[:, None] + heads[None, :]
                wide = (token < B * T)[:, None] & (heads < H + rest)[None, :]
                tl.store(dbeta_ptr + at, dbeta.to(dbeta_ptr.dtype.element_ty), mask=wide)
        if dg_ptr is not None:
            at = part.to(tl.int64) * H + heads
            tl.store(parts_ptr + at, tl.sum(rate_sums, 0), mask=heads < H)
            tl.store(parts_ptr + parts * H + at, tl.sum(bias_sums, 0), mask=heads < H)


def _shape(q: Tensor, gates: Tensor | None, wants_rows: bool, rest: int = 0) -> tuple[int, int, int, dict[str, int]]:
    """Programs of rows, tiles of tokens, heads of g and beta, and constants. rest: columns behind the heads."""
    batch, length, query_heads, width = q.shape
    heads = 1 if gates is None else gates.shape[2]
    block, block_heads = triton.next_power_of_2(width), triton.next_power_of_2(heads + rest)
    rows, tokens = max(1, TILE // block), max(1, TILE // (4 * block_heads))
    tiles = -(-batch * length * query_heads // rows) if wants_rows else 0
    constants = {"D": width, "ROWS": rows, "BLOCK_H": block_heads, "TOKENS": tokens}
    return tiles, 0 if gates is None else -(-batch * length // tokens), heads, constants


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def run_forward(inputs: Inputs, norm: bool, beta_max: float) -> tuple[Tensor | None, ...]:
    """Return q and k of length 1, the log decay and beta in float32, all contiguous; None for what is not asked for.

    inputs: q, k, and as far as they are given g and beta [B, T, H], A_log and dt_bias [H].
    """
    q, k, g, beta, A_log, dt_bias = (_dense(inputs[0]), _dense(inputs[1]), *inputs[2:])
    tiles, blocks, heads, constants = _shape(q, beta if g is None else g, norm)
    q_out, k_out = (torch.empty(q.shape, dtype=q.dtype, device=q.device) if norm else None for _ in range(2))
    g_out, beta_out = (
        None if x is None else torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (g, beta)
    )
    if q.shape[0] * q.shape[1]:
        tensors = (q, k, g, beta, A_log, dt_bias, q_out, k_out, g_out, beta_out)
        numbers = (tiles, *q.shape[:3], heads, beta_max, *(s for x in (q, k, g, beta) for s in _strides(x)))
        launch(delta_rule_inputs_fwd, (tiles + blocks,), tensors, numbers, constants, WARPS)
    return q_out, k_out, g_out, beta_out


def run_backward(
    inputs: Inputs, norm: bool, beta_max: float, grads: Any, into: tuple[Tensor | None, Tensor] | None = None
) -> tuple[Tensor | None, ...]:
    """Return the inputs' gradients, in their dtypes, from those of run_forward's results; None for what was not given.

    into: where the gradients of g and beta will be, parts [B, T, H] and [B, T, H or more] of one wider tensor; what is
    beyond beta's heads becomes 0.
    """
    q, k, g, beta, A_log, dt_bias = (_dense(inputs[0]), _dense(inputs[1]), *inputs[2:])
    rest = 0 if into is None else into[1].shape[2] - beta.shape[2]
    tiles, blocks, heads, constants = _shape(q, beta if g is None else g, norm, rest)
    given = (q if norm else None, k if norm else None, g, beta)
    # those of q and k come contiguous from the recurrence's own backward pass
    outs = tuple(None if x is None else grad.contiguous() for x, grad in zip(given, grads, strict=True))
    dq, dk = (torch.empty(q.shape, dtype=q.dtype, device=q.device) if norm else None for _ in range(2))
    dg, dbeta = into or (None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (g, beta))
    sums = min(PARTS, blocks)
    parts = None if g is None else torch.empty(2, sums, heads, dtype=torch.float32, device=q.device)
    if q.shape[0] * q.shape[1]:
        tensors = (q, k, g, beta, A_log, dt_bias, *outs, dq, dk, dg, dbeta, parts)
        strides = (s for x in (q, k, g, beta) for s in _strides(x))
        steps = _strides(dg if dbeta is None else dbeta)[:2]
        if dg is not None and dg.stride()[:2] != steps:
            raise ValueError(f"gradients of g and beta: expected the same strides; got {dg.stride()} and {steps}")
        numbers = (tiles, *q.shape[:3], heads, beta_max, *strides, *steps, rest)
        launch(delta_rule_inputs_bwd, (tiles + sums,), tensors, numbers, constants, WARPS)
    dA_log = ddt_bias = None
    if parts is not None:
        dA_log, ddt_bias = parts.sum(1)
        dA_log, ddt_bias = dA_log.to(A_log.dtype), None if dt_bias is None else ddt_bias.to(dt_bias.dtype)
    return dq, dk, dg, dbeta, dA_log, ddt_bias
