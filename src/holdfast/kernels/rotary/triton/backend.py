"""Rotation of queries and keys in one launch; their gradients are rotated by the opposite angle.

A program takes some tokens of q or of k. The angle of a token and channel pair is position * base^(-j / half). A
float32 cannot hold one of 10^6 radians, so turns are counted in an integer, as multiples of 2^-64 of a turn, whose
overflow drops whole turns and nothing else. The frequencies are powers of one ratio in float64, some bits of j at a
time; all heads of a token share its cosines and sines. So there is no table to keep.
"""

import math
import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels.lib.triton.sincos import reduced_cos_sin
from holdfast.kernels.runtime.launch import launch

# pairs of a tile, 8 a thread: 16 bytes of each half in half precision
TILE, WARPS = 1024, 4
_PER_RADIAN, _QUARTER = tl.constexpr(1 / math.tau), tl.constexpr(math.tau / 2**32)


class Pointers(NamedTuple):
    """What is rotated, and where it goes."""

    source: tl.tensor
    out: tl.tensor


class Offsets(NamedTuple):
    """Where a tile [tokens, pairs] begins in both."""

    source: tl.tensor
    out: tl.tensor


class Rotation(NamedTuple):
    """cos and sin of a tile's angles."""

    cos: tl.tensor
    sin: tl.tensor


@triton.jit
def frequencies(ratio, j, BITS: tl.constexpr):
    """Return ratio^j / 2 pi of channel pairs j, in units of 2^-64 of a turn a token. ratio: the bits of a float64."""
    power = ratio.to(tl.float64, bitcast=True)
    frequency = tl.full(j.shape, _PER_RADIAN, tl.float64)
    for bit in tl.static_range(BITS):
        frequency = tl.where((j >> bit) & 1 == 1, frequency * power, frequency)
        power *= power
    # within half a turn, so that the integer has a sign
    frequency -= tl.floor(frequency + 0.5)
    return (frequency * 18446744073709551616.0).to(tl.int64)


@triton.jit
def cos_sin(position, frequency):
    """Return cos and sin [tokens, pairs] from positions and frequencies, in units of 2^-64 of a turn a token."""
    fraction = ((position[:, None] * frequency[None, :]) >> 32).to(tl.int32)
    quadrant = (fraction + 536870912) >> 30
    return reduced_cos_sin((fraction - (quadrant << 30)).to(tl.float32) * _QUARTER, quadrant)


@triton.jit
def rotate_heads(pointers, offsets, rotation, inside, x_head, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Rotate every head of a tile's tokens."""
    x, y = pointers.source + offsets.source, pointers.out + offsets.out
    cosine, sine = rotation
    for _ in tl.range(HEADS):
        a = tl.load(x, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(y, (a * cosine - b * sine).to(pointers.out.dtype.element_ty), mask=inside)
        tl.store(y + HALF, (a * sine + b * cosine).to(pointers.out.dtype.element_ty), mask=inside)
        x += x_head
        y += 2 * HALF


@triton.jit
def rotary(
    q_ptr, k_ptr, y_ptr, z_ptr, position_ptr, count, T, ratio,
    q_b, q_t, q_h, k_b, k_t, k_h, y_b, y_t, z_b, z_t, p_b, p_t,
    HQ: tl.constexpr, HK: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    BITS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Grid (2 * tiles of tokens,): even programs rotate q into y, odd ones k into z.

    q [B, T, HQ, D], k [B, T, HK, D], strides
    y, z: of the same shapes, heads side by side, written
    position [B, T], strides, or None for each token's place in T
    count: tokens of all sequences. ratio: bits of base^(-1 / HALF)
    """
    token = tl.program_id(0) // 2 * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK)
    batch, step = (token // T).to(tl.int64), (token % T).to(tl.int64)
    position = step
    if position_ptr is not None:
        position = tl.load(position_ptr + batch * p_b + step * p_t, mask=token < count, other=0).to(tl.int64)
    cosine, sine = cos_sin(position, frequencies(ratio, j, BITS))
    if INVERSE:
        sine = -sine
    rotation = Rotation(cos=cosine, sin=sine)
    inside = (token < count)[:, None] & (j < HALF)[None, :]
    if tl.program_id(0) % 2 == 0:
        at, to = (batch * q_b + step * q_t)[:, None] + j[None, :], (batch * y_b + step * y_t)[:, None] + j[None, :]
        rotate_heads(Pointers(source=q_ptr, out=y_ptr), Offsets(source=at, out=to), rotation, inside, q_h, HQ, HALF)
    else:
        at, to = (batch * k_b + step * k_t)[:, None] + j[None, :], (batch * z_b + step * z_t)[:, None] + j[None, :]
        rotate_heads(Pointers(source=k_ptr, out=z_ptr), Offsets(source=at, out=to), rotation, inside, k_h, HK, HALF)


def run(
    q: Tensor,
    k: Tensor,
    position: Tensor | None,
    base: float,
    inverse: bool,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return q and k [B, T, H, D] rotated by position [B, T] or [1, T], or by each token's place in T; contiguous.

    inverse: by the opposite angle. D is even; q and k have one dtype of at most 32 bits. into: where the results go
    instead, parts of a wider tensor with heads side by side.
    """
    batch, length, heads, width = q.shape
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    y, z = into or (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    half = width // 2
    block, count = triton.next_power_of_2(half), batch * length
    rows = max(1, TILE // block)
    if count:
        places = (0, 0)
        if position is not None:
            places = (0 if position.shape[0] == 1 else position.stride(0), position.stride(1))
        (ratio,) = struct.unpack("<q", struct.pack("<d", base ** (-1 / half)))
        numbers = (count, length, ratio, *q.stride()[:3], *k.stride()[:3], *y.stride()[:2], *z.stride()[:2], *places)
        constants = {
            "HQ": heads, "HK": k.shape[2], "HALF": half, "BLOCK": block, "ROWS": rows,
            "BITS": (half - 1).bit_length(), "INVERSE": inverse,
        }  # fmt: skip
        launch(rotary, (2 * -(-count // rows),), (q, k, y, z, position), numbers, constants, WARPS)
    return y, z
