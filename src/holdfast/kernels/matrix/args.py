"""What the launches of the matrix family's kernels on Hopper are given, beside q, k and v."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.lib.gluon.decay import CHUNK
from holdfast.kernels.lib.gluon.layouts import TILE_LAYOUT
from holdfast.kernels.runtime.tma import tiles

TOKENS = CHUNK.value
# the variance of a rounded operand's error, about, relative to its square
ROUNDING = {torch.bfloat16: 2.0**-18, torch.float16: 2.0**-24}


@dataclass(frozen=True, slots=True)
class DecayAndBeta:
    """g and beta [B, T, H], natural-log decay and what writes are multiplied by, or None; and scale."""

    g: Tensor | None
    beta: Tensor | None
    scale: float

    def types(self) -> tuple[Any, ...]:
        """Return what decides how a kernel is compiled: dtypes, and which strides are integers of 32 bits."""
        dtypes = (None if x is None else x.dtype for x in (self.g, self.beta))
        return *dtypes, *(stride < 2**31 for stride in self.strides())

    def strides(self) -> tuple[int, ...]:
        return tuple(s for x in (self.g, self.beta) for s in ((0, 0, 0) if x is None else x.stride()))


@dataclass(frozen=True, slots=True)
class SegmentSums:
    """What each segment but the last adds to the state.

    states: [B, segments - 1, H, K * V in whole tiles], rounded. decay: log2 of each segment's, [B, segments - 1, H], or
    None.
    """

    states: Tensor
    decay: Tensor | None


@dataclass(frozen=True, slots=True)
class StateIO:
    """Boundary states that a kernel reads and writes, in float32.

    start: [B, segments, H, K, V], where segments start. end: [B, H, K, V], after the sequence. transposed: the kernel's
    tiles hold them as [V, K]. against, as start: gradients of the states after the segments; passing [slices, B,
    segments, H]: parts of their products with the states before the segments' last chunks; before: room for those
    states, in whole tiles. All three or none. added: of a sequence in segments, whose start is then the first one's
    alone.
    """

    start: Tensor | None = None
    end: Tensor | None = None
    transposed: bool = False
    against: Tensor | None = None
    before: Tensor | None = None
    passing: Tensor | None = None
    added: SegmentSums | None = None


@dataclass(frozen=True, slots=True)
class Residuals:
    """What the kernel for dq leaves to the backward kernel, for the log decay's gradient.

    x: q. row: [slices, B, H, T]. log: [B, H, T], log decays to base 2. saved: [B, H, n, K * V], the state before every
    `save` chunks of each segment, the wider of K and V first; n as scalar_decay_fwd says. from_zero: the first state is
    0, and not saved.
    """

    x: Tensor
    row: Tensor
    log: Tensor
    saved: Tensor
    save: int
    from_zero: bool


@dataclass(frozen=True, slots=True)
class SliceSums:
    """Of a state in slices of K, what the outputs of earlier slices add up to: see lib/gluon/slice_sums.py.

    adds: there are earlier ones. leaves: there are later ones.
    """

    sums: Tensor
    adds: bool
    leaves: bool


def slice_sums(out: Tensor, width: int, slices: int, cu_seqlens: Tensor | None) -> Iterator[SliceSums]:
    """Yield the sums for each slice of K in turn. out [B, T, H, V]. width: columns of v a block."""
    batch, length, heads, values = out.shape
    chunks = batch * -(-length // TOKENS) if cu_seqlens is None else length // TOKENS + cu_seqlens.shape[0] - 1
    shape = (chunks, heads, -(-values // width), width * TOKENS)
    sums = torch.empty(shape, dtype=torch.float32, device=out.device)
    for i in range(slices):
        yield SliceSums(sums, i > 0, i < slices - 1)


def tile_descriptor(x: Tensor, width: int, tokens: int = TOKENS) -> Any:
    return tiles(x, [1, tokens, 1, width], TILE_LAYOUT)


def dtype_or_none(x: Tensor | None) -> Any:
    return None if x is None else x.dtype


def sequences_and_segments(batch: int, length: int, segment_chunks: int, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """Return the number of sequences, and of segments of each."""
    return (batch, -(-length // (segment_chunks * TOKENS))) if cu_seqlens is None else (cu_seqlens.shape[0] - 1, 1)
