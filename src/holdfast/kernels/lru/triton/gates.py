"""The gates of the linear recurrent units, one launch a pass; float32 inside, the backward pass computes them again.

A program takes columns of one head: numbers of the state, which are channels, or pairs of two channels. The gates are
read where the projection leaves them, and their gradients are written into one tensor of its shape.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.lib.triton.sigmoid import log_sigmoid, one_minus_exp, sigmoid
from holdfast.kernels.lru.call import Gates
from holdfast.kernels.runtime.launch import launch

# channels of a tile, 8 a thread; of a program's row
TILE, WARPS, WIDEST = 1024, 4, 256
# forward, where a tile is all that a program takes
FORWARD_WARPS = 8
# programs whose sums over tokens are added up after the backward pass: the same tokens each in every run
PARTS = 1024
# columns and rows of a tile of what is added up
SUMMED = 32


@triton.jit
def to_channels(x, PAIRED: tl.constexpr):
    """Give each of a number's channels its column: once, or twice."""
    if PAIRED:
        return tl.reshape(tl.join(x, x), (x.shape[0], 2 * x.shape[1]))
    else:
        return x


@triton.jit
def sum_channels(x, PAIRED: tl.constexpr):
    """Add up the channels of each number."""
    if PAIRED:
        return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    else:
        return x


@triton.jit
def columns_of(block, PAIRED: tl.constexpr, BLOCK: tl.constexpr):
    """Return a program's numbers of a head, and their channels."""
    EACH: tl.constexpr = 2 if PAIRED else 1
    return block * BLOCK + tl.arange(0, BLOCK), block * BLOCK * EACH + tl.arange(0, BLOCK * EACH)


@triton.jit
def load_column(ptr, at, here):
    return tl.load(ptr + at, mask=here, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_tile(ptr, at, columns, inside):
    """Load rows that start at ptr + at."""
    return tl.load(ptr + at[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tile(ptr, at, columns, x, inside):
    tl.store(ptr + at[:, None] + columns[None, :], x.to(ptr.dtype.element_ty), mask=inside)


class Magnitude(NamedTuple):
    """a, s = sqrt(1 - a^2), and -ds / d log a, which is 0 where s is held at its least, as in `input_scale`."""

    decay: tl.tensor
    scale: tl.tensor
    derivative: tl.tensor


@triton.jit
def magnitude(r, softplus, decay_scale):
    """Return the Magnitude that an open gate r makes."""
    log_a = -decay_scale * softplus * r
    a, square = tl.exp(log_a), one_minus_exp(2.0 * log_a)
    scale = tl.sqrt(tl.maximum(square, 1e-30))
    return Magnitude(decay=a, scale=scale, derivative=tl.where(square >= 1e-30, a * a / scale, 0.0))


@triton.jit
def lru_gates_fwd(
    u_ptr, gates_ptr, bias_ptr, rate_ptr, phase_ptr, a_ptr, write_ptr, theta_ptr,
    count, T, H, across, decay_scale, u_b, u_t, g_b, g_t, g_h,
    P: tl.constexpr, S: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of tokens * H * across,): a program takes ROWS tokens and BLOCK numbers of a head.

    u [B, T, H C], gates [B, T, H, S], strides; bias [H, S], rate [H P], phase [H P] or None
    a, theta [B, T, H P] float32, write [B, T, H C] in u's dtype, written
    count: tokens of all sequences. across: programs that share tokens and head.
    """
    C: tl.constexpr = 2 * P if PAIRED else P
    head = tl.program_id(0) // across % H
    token = tl.program_id(0) // (across * H) * ROWS + tl.arange(0, ROWS)
    p, c = columns_of(tl.program_id(0) % across, PAIRED, BLOCK)
    batch, step, row = (token // T).to(tl.int64), (token % T).to(tl.int64), token.to(tl.int64)
    numbers, channels = (token < count)[:, None] & (p < P)[None, :], (token < count)[:, None] & (c < C)[None, :]
    at = batch * g_b + step * g_t + head.to(tl.int64) * g_h
    bias_ptr += head * S
    r = sigmoid(load_tile(gates_ptr, at, p, numbers) + load_column(bias_ptr, p, p < P))
    i = sigmoid(load_tile(gates_ptr, at, P + c, channels) + load_column(bias_ptr, P + c, c < C))
    u = load_tile(u_ptr, batch * u_b + step * u_t + head * C, c, channels)
    softplus = -log_sigmoid(-load_column(rate_ptr, head * P + p, p < P))
    found = magnitude(r, softplus, decay_scale)
    store_tile(a_ptr, (row * H + head) * P, p, found.decay, numbers)
    store_tile(write_ptr, (row * H + head) * C, c, to_channels(found.scale, PAIRED) * i * u, channels)
    if PAIRED:
        angle = load_tile(gates_ptr, at, P + C + p, numbers) + load_column(bias_ptr, P + C + p, p < P)
        store_tile(theta_ptr, (row * H + head) * P, p, angle + load_column(phase_ptr, head * P + p, p < P), numbers)


@triton.jit
def lru_gates_bwd(
    u_ptr, gates_ptr, bias_ptr, rate_ptr, da_ptr, dwrite_ptr, dtheta_ptr, du_ptr, dgates_ptr, parts_ptr,
    count, T, H, across, tiles, decay_scale, u_b, u_t, g_b, g_t, g_h, du_b, du_t,
    P: tl.constexpr, S: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (parts * H * across,): a program takes tiles of tokens p, p + parts and so on, and BLOCK numbers of a head.

    u, gates, bias, rate: as in lru_gates_fwd; da, dtheta [B, T, H P], dwrite [B, T, H C], contiguous
    du [B, T, H C], by strides, dgates [B, T, H, S], contiguous, written
    parts [p, H, S + P] float32, written: sums over a program's tokens, for bias and rate
    """
    C: tl.constexpr = 2 * P if PAIRED else P
    head = tl.program_id(0) // across % H
    part, stride = tl.program_id(0) // (across * H), tl.num_programs(0) // (across * H)
    p, c = columns_of(tl.program_id(0) % across, PAIRED, BLOCK)
    bias_ptr += head * S
    r_bias, i_bias = load_column(bias_ptr, p, p < P), load_column(bias_ptr, P + c, c < C)
    rate = load_column(rate_ptr, head * P + p, p < P)
    softplus = -log_sigmoid(-rate)
    r_sums, rate_sums = tl.zeros([ROWS, p.shape[0]], tl.float32), tl.zeros([ROWS, p.shape[0]], tl.float32)
    i_sums, angle_sums = tl.zeros([ROWS, c.shape[0]], tl.float32), tl.zeros([ROWS, p.shape[0]], tl.float32)
    for n in tl.range(part, tiles, stride, num_stages=3):
        token = n * ROWS + tl.arange(0, ROWS)
        batch, step, row = (token // T).to(tl.int64), (token % T).to(tl.int64), token.to(tl.int64) * H + head
        numbers, channels = (token < count)[:, None] & (p < P)[None, :], (token < count)[:, None] & (c < C)[None, :]
        at = batch * g_b + step * g_t + head.to(tl.int64) * g_h
        r = sigmoid(load_tile(gates_ptr, at, p, numbers) + r_bias)
        i = sigmoid(load_tile(gates_ptr, at, P + c, channels) + i_bias)
        u = load_tile(u_ptr, batch * u_b + step * u_t + head * C, c, channels)
        da, dwrite = load_tile(da_ptr, row * P, p, numbers), load_tile(dwrite_ptr, row * C, c, channels)
        a, scale, derivative = magnitude(r, softplus, decay_scale)
        dscaled = dwrite * to_channels(scale, PAIRED)
        store_tile(du_ptr, batch * du_b + step * du_t + head * C, c, dscaled * i, channels)
        di = dscaled * u * i * (1.0 - i)
        store_tile(dgates_ptr, row * S, P + c, di, channels)
        i_sums += di
        dlog = da * a - sum_channels(dwrite * i * u, PAIRED) * derivative
        open_ = -decay_scale * dlog * r
        dr = open_ * softplus * (1.0 - r)
        store_tile(dgates_ptr, row * S, p, dr, numbers)
        r_sums += dr
        rate_sums += open_
        if PAIRED:
            dangle = load_tile(dtheta_ptr, row * P, p, numbers)
            store_tile(dgates_ptr, row * S, P + C + p, dangle, numbers)
            angle_sums += dangle
    parts_ptr += (part * H + head).to(tl.int64) * (S + P)
    tl.store(parts_ptr + p, tl.sum(r_sums, 0), mask=p < P)
    tl.store(parts_ptr + P + c, tl.sum(i_sums, 0), mask=c < C)
    if PAIRED:
        tl.store(parts_ptr + P + C + p, tl.sum(angle_sums, 0), mask=p < P)
    tl.store(parts_ptr + S + p, tl.sum(rate_sums * sigmoid(rate), 0), mask=p < P)


@triton.jit
def lru_gates_sums(
    parts_ptr, dbias_ptr, drate_ptr, dphase_ptr, count, H, P: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of H (S + P),). Sums in the same order in every run.

    parts [count, H, S + P] float32
    dbias [H, S], drate [H P], dphase [H P] or None, written
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head, j, here = at // (S + P), at % (S + P), at < H * (S + P)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(0, count, ROWS):
        place = first + tl.arange(0, ROWS)
        rows = place.to(tl.int64)[:, None] * (H * (S + P)) + at[None, :]
        total += tl.load(parts_ptr + rows, mask=(place < count)[:, None] & here[None, :], other=0.0)
    found = tl.sum(total, 0)
    tl.store(dbias_ptr + head * S + j, found.to(dbias_ptr.dtype.element_ty), mask=here & (j < S))
    tl.store(drate_ptr + head * P + j - S, found.to(drate_ptr.dtype.element_ty), mask=here & (j >= S))
    if dphase_ptr is not None:
        # the last numbers of the bias are added to the angle as the phase is
        is_phase = here & (j >= S - P) & (j < S)
        tl.store(dphase_ptr + head * P + j - (S - P), found.to(dphase_ptr.dtype.element_ty), mask=is_phase)


class _Run:
    """Inputs as the kernels take them, contiguous where the kernels assume it."""

    def __init__(self, given: Gates) -> None:
        self.u, self.gates = (x if x.stride(-1) == 1 else x.contiguous() for x in given[:2])
        self.bias, self.rate = given.bias.contiguous(), given.rate.contiguous()
        self.phase = None if given.phase is None else given.phase.contiguous()
        batch, length, self.heads, width = self.gates.shape
        self.lead, self.paired = (batch, length), given.phase is not None
        self.numbers = self.rate.shape[0] // self.heads
        each = 1 + self.paired
        block = min(triton.next_power_of_2(self.numbers), WIDEST // each)
        rows = max(1, TILE // (block * each))
        self.across, self.tiles = -(-self.numbers // block), -(-batch * length // rows)
        self.sizes = (batch * length, length, self.heads, self.across)
        self.strides = (*self.u.stride()[:2], *self.gates.stride()[:3])
        self.constants = {"P": self.numbers, "S": width, "PAIRED": self.paired, "BLOCK": block, "ROWS": rows}

    def empty(self, width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*self.lead, width, dtype=dtype, device=self.u.device)


def run_forward(given: Gates) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a, write and theta, as `lru_gates` of torch/backend.py does; contiguous, a and theta float32."""
    run = _Run(given)
    a, write = run.empty(run.rate.shape[0], torch.float32), run.empty(run.u.shape[2], run.u.dtype)
    theta = run.empty(run.rate.shape[0], torch.float32) if run.paired else None
    if a.numel():
        tensors = (run.u, run.gates, run.bias, run.rate, run.phase, a, write, theta)
        grid = (run.tiles * run.heads * run.across,)
        numbers = (*run.sizes, given.decay_scale, *run.strides)
        launch(lru_gates_fwd, grid, tensors, numbers, run.constants, FORWARD_WARPS)
    return a, write, theta


def run_backward(
    given: Gates, da: Tensor, dwrite: Tensor, dtheta: Tensor | None, into: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of u, gates, bias, rate and phase, in their dtypes.

    into: where that of u goes, part of a wider tensor.
    """
    run = _Run(given)
    du = torch.empty(run.u.shape, dtype=run.u.dtype, device=run.u.device) if into is None else into
    dgates = torch.empty(run.gates.shape, dtype=run.gates.dtype, device=run.u.device)
    dbias, drate = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (run.bias, run.rate))
    dphase = None if run.phase is None else torch.empty(run.phase.shape, dtype=run.phase.dtype, device=run.u.device)
    width, per_part = run.gates.shape[3], run.across * run.heads
    count = max(1, min(run.tiles, PARTS // per_part))
    parts = torch.empty(count, run.heads, width + run.numbers, dtype=torch.float32, device=run.u.device)
    if du.numel():
        read = (da.contiguous(), dwrite.contiguous(), None if dtheta is None else dtheta.contiguous())
        tensors = (run.u, run.gates, run.bias, run.rate, *read, du, dgates, parts)
        numbers = (*run.sizes, run.tiles, given.decay_scale, *run.strides, *du.stride()[:2])
        launch(lru_gates_bwd, (count * per_part,), tensors, numbers, run.constants, WARPS)
    else:
        parts.zero_()
    summed = {"P": run.numbers, "S": width, "BLOCK": SUMMED, "ROWS": SUMMED}
    blocks = -(-run.heads * (width + run.numbers) // SUMMED)
    launch(lru_gates_sums, (blocks,), (parts, dbias, drate, dphase), (count, run.heads), summed, WARPS)
    return du, dgates, dbias, drate, dphase
