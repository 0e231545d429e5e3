"""The gates of the linear recurrent units as one launch a pass; float32 inside, the backward pass forms them again.

A program takes columns of one head: numbers of the state, which are channels, or pairs of two channels. The gates are
read where the projection leaves them, and their gradients are written into one tensor of its shape.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.lib.triton.sigmoid import log_sigmoid, one_minus_exp, sigmoid
from holdfast.kernels.lru.torch.backend import Gates
from holdfast.kernels.runtime.launch import launch

# channels of a tile, 8 a thread; of a program's row
TILE, WARPS, WIDEST = 1024, 4, 256
# programs whose sums over tokens are added up after the backward pass: the same tokens each in every run
PARTS = 1024
# columns and rows of a tile of what is added up
SUMMED = 32


@triton.jit
def of_channels(x, PAIRED: tl.constexpr):
    """What a number's channels share: each column once, or twice."""
    if PAIRED:
        return tl.reshape(tl.join(x, x), (x.shape[0], 2 * x.shape[1]))
    else:
        return x


@triton.jit
def of_numbers(x, PAIRED: tl.constexpr):
    """What channels add up to for their number."""
    if PAIRED:
        return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    else:
        return x


@triton.jit
def columns_of(block, PAIRED: tl.constexpr, BLOCK: tl.constexpr):
    """A program's numbers of a head, and their channels."""
    EACH: tl.constexpr = 2 if PAIRED else 1
    return block * BLOCK + tl.arange(0, BLOCK), block * BLOCK * EACH + tl.arange(0, BLOCK * EACH)


@triton.jit
def column(ptr, at, here):
    return tl.load(ptr + at, mask=here, other=0.0).to(tl.float32)[None, :]


@triton.jit
def tile(ptr, at, columns, inside):
    """Rows that start at ptr + at."""
    return tl.load(ptr + at[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def put(ptr, at, columns, x, inside):
    tl.store(ptr + at[:, None] + columns[None, :], x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def magnitude(r, softplus, strength):
    """From an open gate r: a, s = sqrt(1 - a^2), and -ds / d log a, which is 0 where s is held at its least, as in
    `input_scale`."""
    log_a = -strength * softplus * r
    a, square = tl.exp(log_a), one_minus_exp(2.0 * log_a)
    scale = tl.sqrt(tl.maximum(square, 1e-30))
    return a, scale, tl.where(square >= 1e-30, a * a / scale, 0.0)


@triton.jit
def lru_gates(
    u_ptr, gates_ptr, bias_ptr, rate_ptr, phase_ptr, a_ptr, write_ptr, theta_ptr,
    count, T, H, across, strength, u_b, u_t, g_b, g_t, g_h,
    P: tl.constexpr, S: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """a and theta [B, T, H P] float32, write [B, T, H C] in u's dtype. A program: ROWS tokens, BLOCK numbers of a head.

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
    r = sigmoid(tile(gates_ptr, at, p, numbers) + column(bias_ptr, p, p < P))
    i = sigmoid(tile(gates_ptr, at, P + c, channels) + column(bias_ptr, P + c, c < C))
    u = tile(u_ptr, batch * u_b + step * u_t + head * C, c, channels)
    softplus = -log_sigmoid(-column(rate_ptr, head * P + p, p < P))
    a, scale, _ = magnitude(r, softplus, strength)
    put(a_ptr, (row * H + head) * P, p, a, numbers)
    put(write_ptr, (row * H + head) * C, c, of_channels(scale, PAIRED) * i * u, channels)
    if PAIRED:
        turn = tile(gates_ptr, at, P + C + p, numbers) + column(bias_ptr, P + C + p, p < P)
        put(theta_ptr, (row * H + head) * P, p, turn + column(phase_ptr, head * P + p, p < P), numbers)


@triton.jit
def lru_gates_gradient(
    u_ptr, gates_ptr, bias_ptr, rate_ptr, da_ptr, dwrite_ptr, dtheta_ptr, du_ptr, dgates_ptr, parts_ptr,
    count, T, H, across, tiles, strength, u_b, u_t, g_b, g_t, g_h, du_b, du_t,
    P: tl.constexpr, S: tl.constexpr, PAIRED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """du [B, T, H C], dgates [B, T, H, S], contiguous as da, dwrite and dtheta are, and sums over a program's tokens
    for bias and rate: parts [p, H, S + P] float32.

    A program takes tiles of tokens p, p + parts and so on, for BLOCK numbers of a head.
    """
    C: tl.constexpr = 2 * P if PAIRED else P
    head = tl.program_id(0) // across % H
    part, stride = tl.program_id(0) // (across * H), tl.num_programs(0) // (across * H)
    p, c = columns_of(tl.program_id(0) % across, PAIRED, BLOCK)
    bias_ptr += head * S
    r_bias, i_bias = column(bias_ptr, p, p < P), column(bias_ptr, P + c, c < C)
    rate = column(rate_ptr, head * P + p, p < P)
    softplus = -log_sigmoid(-rate)
    r_sums, rate_sums = tl.zeros([ROWS, p.shape[0]], tl.float32), tl.zeros([ROWS, p.shape[0]], tl.float32)
    i_sums, turn_sums = tl.zeros([ROWS, c.shape[0]], tl.float32), tl.zeros([ROWS, p.shape[0]], tl.float32)
    for n in tl.range(part, tiles, stride):
        token = n * ROWS + tl.arange(0, ROWS)
        batch, step, row = (token // T).to(tl.int64), (token % T).to(tl.int64), token.to(tl.int64) * H + head
        numbers, channels = (token < count)[:, None] & (p < P)[None, :], (token < count)[:, None] & (c < C)[None, :]
        at = batch * g_b + step * g_t + head.to(tl.int64) * g_h
        r = sigmoid(tile(gates_ptr, at, p, numbers) + r_bias)
        i = sigmoid(tile(gates_ptr, at, P + c, channels) + i_bias)
        u = tile(u_ptr, batch * u_b + step * u_t + head * C, c, channels)
        da, dwrite = tile(da_ptr, row * P, p, numbers), tile(dwrite_ptr, row * C, c, channels)
        a, scale, slope = magnitude(r, softplus, strength)
        dscaled = dwrite * of_channels(scale, PAIRED)
        put(du_ptr, batch * du_b + step * du_t + head * C, c, dscaled * i, channels)
        di = dscaled * u * i * (1.0 - i)
        put(dgates_ptr, row * S, P + c, di, channels)
        i_sums += di
        dlog = da * a - of_numbers(dwrite * i * u, PAIRED) * slope
        open_ = -strength * dlog * r
        dr = open_ * softplus * (1.0 - r)
        put(dgates_ptr, row * S, p, dr, numbers)
        r_sums += dr
        rate_sums += open_
        if PAIRED:
            dturn = tile(dtheta_ptr, row * P, p, numbers)
            put(dgates_ptr, row * S, P + C + p, dturn, numbers)
            turn_sums += dturn
    parts_ptr += (part * H + head).to(tl.int64) * (S + P)
    tl.store(parts_ptr + p, tl.sum(r_sums, 0), mask=p < P)
    tl.store(parts_ptr + P + c, tl.sum(i_sums, 0), mask=c < C)
    if PAIRED:
        tl.store(parts_ptr + P + C + p, tl.sum(turn_sums, 0), mask=p < P)
    tl.store(parts_ptr + S + p, tl.sum(rate_sums * sigmoid(rate), 0), mask=p < P)


@triton.jit
def lru_gates_sums(
    parts_ptr, dbias_ptr, drate_ptr, dphase_ptr, count, H, P: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """dbias [H, S], drate and, where there is a phase, dphase [H P], from parts [count, H, S + P]: in the same order in
    every run."""
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
        turns = here & (j >= S - P) & (j < S)
        tl.store(dphase_ptr + head * P + j - (S - P), found.to(dphase_ptr.dtype.element_ty), mask=turns)


class _Run:
    """Inputs as the kernels take them, contiguous where they are read so."""

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
    """a, write and theta, as `lru_gates` of pytorch.py returns them; contiguous, a and theta float32."""
    run = _Run(given)
    a, write = run.empty(run.rate.shape[0], torch.float32), run.empty(run.u.shape[2], run.u.dtype)
    theta = run.empty(run.rate.shape[0], torch.float32) if run.paired else None
    if a.numel():
        tensors = (run.u, run.gates, run.bias, run.rate, run.phase, a, write, theta)
        grid = (run.tiles * run.heads * run.across,)
        launch(lru_gates, grid, tensors, (*run.sizes, given.strength, *run.strides), run.constants, WARPS)
    return a, write, theta


def run_backward(
    given: Gates, da: Tensor, dwrite: Tensor, dtheta: Tensor | None, into: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Gradients of u, gates, bias, rate and phase, in their dtypes. into: where that of u will be, part of a wider
    tensor."""
    run = _Run(given)
    du = torch.empty(run.u.shape, dtype=run.u.dtype, device=run.u.device) if into is None else into
    dgates = torch.empty(run.gates.shape, dtype=run.gates.dtype, device=run.u.device)
    dbias, drate = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (run.bias, run.rate))
    dphase = None if run.phase is None else torch.empty(run.phase.shape, dtype=run.phase.dtype, device=run.u.device)
    width, alike = run.gates.shape[3], run.across * run.heads
    count = max(1, min(run.tiles, PARTS // alike))
    parts = torch.empty(count, run.heads, width + run.numbers, dtype=torch.float32, device=run.u.device)
    if du.numel():
        read = (da.contiguous(), dwrite.contiguous(), None if dtheta is None else dtheta.contiguous())
        tensors = (run.u, run.gates, run.bias, run.rate, *read, du, dgates, parts)
        numbers = (*run.sizes, run.tiles, given.strength, *run.strides, *du.stride()[:2])
        launch(lru_gates_gradient, (count * alike,), tensors, numbers, run.constants, WARPS)
    else:
        parts.zero_()
    summed = {"P": run.numbers, "S": width, "BLOCK": SUMMED, "ROWS": SUMMED}
    blocks = -(-run.heads * (width + run.numbers) // SUMMED)
    launch(lru_gates_sums, (blocks,), (parts, dbias, drate, dphase), (count, run.heads), summed, WARPS)
    return du, dgates, dbias, drate, dphase
