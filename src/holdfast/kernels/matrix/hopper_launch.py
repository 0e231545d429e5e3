"""Launches of the Hopper kernels: descriptors of tensors, grids and strides."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.common import triton_launch
from holdfast.kernels.common.gluon import gl
from holdfast.kernels.common.gluon_launch import launch, tiles
from holdfast.planner.models import matrix_hopper as model

from .hopper_adjoint import adjoint
from .hopper_advance import advance
from .hopper_compose import compose
from .hopper_gates import CHUNK
from .hopper_sweep import sweep

TOKENS = CHUNK.value
# the variance of a rounded operand's error, about, relative to its square
ROUNDING = {torch.bfloat16: 2.0**-18, torch.float16: 2.0**-24}
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


@dataclass(frozen=True, slots=True)
class Gates:
    """What weighs writes and states: natural-log decay and strength [B, T, H], or None, and scale."""

    g: Tensor | None
    beta: Tensor | None
    scale: float

    def types(self) -> tuple[Any, ...]:
        """What of them decides how a kernel is compiled: dtypes, and which strides are integers of 32 bits."""
        dtypes = (None if x is None else x.dtype for x in (self.g, self.beta))
        return *dtypes, *(stride < 2**31 for stride in self.strides())

    def strides(self) -> tuple[int, ...]:
        return tuple(s for x in (self.g, self.beta) for s in ((0, 0, 0) if x is None else x.stride()))


@dataclass(frozen=True, slots=True)
class Added:
    """What each segment but the last adds to the state: [B, segments - 1, H, K * V in whole tiles], rounded.

    decay: log2 of each one's, [B, segments - 1, H], or None.
    """

    states: Tensor
    decay: Tensor | None


@dataclass(frozen=True, slots=True)
class Ends:
    """States [B, segments, H, K, V] in float32 where a sweep's segments start, and [B, H, K, V] at the sequence's end.

    turned: whether its tiles hold them transposed. against, as start: gradients of the states after the segments.
    passing [slices, B, segments, H]: where the parts of their products with the states before the segments' last chunks
    go. before: room for those states, in whole tiles. All three or none. added: of a sequence in segments, whose start
    is then the first's alone.
    """

    start: Tensor | None = None
    end: Tensor | None = None
    turned: bool = False
    against: Tensor | None = None
    before: Tensor | None = None
    passing: Tensor | None = None
    added: Added | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """What the sweep for dq leaves to the adjoint sweep, for the log decay's gradient.

    x: q. row: [slices, B, H, T]. log: [B, H, T], log decays to base 2. saved: [B, H, n, K * V], the state before every
    `save` chunks of each segment, the wider of K and V first. n: of each sequence in turn, if they are packed
    (hopper_sweep.py). begins: whether the first state is 0, and not saved.
    """

    x: Tensor
    row: Tensor
    log: Tensor
    saved: Tensor
    save: int
    begins: bool


@dataclass(frozen=True, slots=True)
class Sums:
    """Of a state in slices of K, what the outputs of those before add up to: see hopper_slices.py.

    adds: whether there are some. leaves: whether there are more to come.
    """

    sums: Tensor
    adds: bool
    leaves: bool


def sums_of(out: Tensor, width: int, slices: int, cu_seqlens: Tensor | None) -> Iterator[Sums]:
    """For each slice of K in turn. out [B, T, H, V]. width: columns of v a block."""
    batch, length, heads, values = out.shape
    chunks = batch * -(-length // TOKENS) if cu_seqlens is None else length // TOKENS + cu_seqlens.shape[0] - 1
    shape = (chunks, heads, -(-values // width), width * TOKENS)
    sums = torch.empty(shape, dtype=torch.float32, device=out.device)
    for i in range(slices):
        yield Sums(sums, i > 0, i < slices - 1)


def width_of(columns: int) -> int:
    """The tile that holds so many columns."""
    return 64 if columns <= 64 else 128


def tileable(x: Tensor) -> Tensor:
    """x [B, T, H, D] itself if TMA can read it, else a contiguous copy: rows of 16 bytes, the last axis dense."""
    b, t, h, d = x.stride()
    fits = d == 1 and not (b | t | h) & 7 and b > 0 and t > 0 and h > 0 and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _tiles(x: Tensor, width: int, tokens: int = TOKENS) -> Any:
    return tiles(x, [1, tokens, 1, width], LAYOUT)


def kind(x: Tensor | None) -> Any:
    return None if x is None else x.dtype


def _blocks(batch: int, length: int, span: int, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """Sequences, and segments of each."""
    return (batch, -(-length // (span * TOKENS))) if cu_seqlens is None else (cu_seqlens.shape[0] - 1, 1)


def run_sweep(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    gates: Gates,
    ends: Ends,
    width: int,
    stages: int,
    span: int,
    kept: Kept | None = None,
    cu_seqlens: Tensor | None = None,
    sums: Sums | None = None,
) -> None:
    """One launch of `sweep`: out [B, T, H, V] of q, k [B, T, *, K] and v [B, T, *, V]; H is a multiple of their heads.

    cu_seqlens [N + 1]: where packed sequences begin and end, none of them in segments; out is then contiguous.
    width: columns of v a block, 64 or 128. stages: chunks in flight. span: chunks a segment.
    """
    batch, length, heads, columns = out.shape
    keys = q.shape[3]
    wide = width_of(keys)
    saved = None if kept is None else kept.saved
    constants = {
        "KEYS": keys,
        "VALUES": columns,
        "TURNED": ends.turned,
        "SAVE": 0 if kept is None else kept.save,
        "SAVE_TURNED": wide > width_of(columns),
        "ADDS": sums is not None and sums.adds,
        "LEAVES": sums is not None and sums.leaves,
        "STAGES": stages,
    }
    arguments = (
        _tiles(q, wide),
        _tiles(k, wide),
        _tiles(v, width),
        _tiles(out, width),
        None if kept is None else _tiles(kept.x, width),
        gates.g,
        gates.beta,
        ends.start,
        None if ends.added is None else ends.added.states,
        None if ends.added is None else ends.added.decay,
        ends.end,
        saved,
        None if kept is None else kept.row,
        None if kept is None else kept.log,
        ends.against,
        ends.before,
        ends.passing,
        cu_seqlens,
        None if cu_seqlens is None else out,
        None if sums is None else sums.sums,
        length,
        heads,
        heads // q.shape[2],
        heads // v.shape[2],
        1 if kept is None else heads // kept.x.shape[2],
        *gates.strides(),
        span,
        gates.scale,
    )
    added = None if ends.added is None else ends.added.states
    optional = (ends.start, added, ends.end, ends.passing, None if kept is None else kept.row, cu_seqlens)
    types = (*gates.types(), q.dtype, wide, width, *map(kind, optional), sums is None)
    sequences, segments = _blocks(batch, length, span, cu_seqlens)
    grid = (sequences * heads, -(-columns // width), segments)
    launch(sweep, grid, arguments, constants, width // 16, types, None, segments > 1)


def run_adjoint(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor | None,
    dbeta: Tensor | None,
    gates: Gates,
    ends: Ends,
    stages: int,
    span: int,
    kept: Kept | None,
    passing: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """One launch of `adjoint`: dk and dv [B, T, H, *], dg and dbeta [B, T, H], of the output's gradient u [B, T, H, V].

    cu_seqlens: as for run_sweep.
    passing: of the Ends of the sweep for dq.
    """
    turned = width_of(v.shape[3]) > width_of(k.shape[3])
    if turned:
        # the kernel's first side is the wider, and the equations are the same with the sides exchanged
        q, k, u, v, dk, dv = u, v, q, k, dv, dk
    batch, length, heads, keys = dk.shape
    values = dv.shape[3]
    wide, narrow = width_of(keys), width_of(values)
    saved = None
    if kept is not None:
        saved = tiles(kept.saved.view(-1, kept.saved.shape[2], keys, values), [1, 1, wide, narrow], LAYOUT)
    constants = {
        "KEYS": keys,
        "VALUES": values,
        "TURNED": turned,
        "SAVE": 0 if kept is None else kept.save,
        "FROM": 0 if kept is None else int(kept.begins),
        "ROUNDING": ROUNDING[q.dtype],
        "STAGES": stages,
    }
    arguments = (
        _tiles(q, wide),
        _tiles(k, wide),
        _tiles(u, narrow),
        _tiles(v, narrow),
        _tiles(dk, wide),
        _tiles(dv, narrow),
        saved,
        None if kept is None else kept.log,
        gates.beta,
        ends.start,
        ends.end,
        None if kept is None else kept.row,
        passing,
        dg,
        dbeta,
        cu_seqlens,
        None if cu_seqlens is None else dk,
        None if cu_seqlens is None else dv,
        length,
        heads,
        heads // q.shape[2],
        heads // v.shape[2],
        *gates.strides()[3:],
        1 if kept is None else kept.row.shape[0],
        span,
        gates.scale,
    )
    optional = (ends.start, ends.end, passing, cu_seqlens)
    types = (*gates.types(), q.dtype, wide, narrow, *map(kind, optional))
    sequences, segments = _blocks(batch, length, span, cu_seqlens)
    grid = (sequences * heads, segments, 1)
    launch(adjoint, grid, arguments, constants, wide // 16, types, None, True)


@dataclass(frozen=True, slots=True)
class Turn:
    """What is written beside each other, k [B, T, *, K] and v [B, T, H, V], and the state [B, H, K, V] before or None.

    Forward in time k and v, backward q and the output's gradient.
    """

    k: Tensor
    v: Tensor
    first: Tensor | None


def added(k: Tensor, v: Tensor, gates: Gates, span: int) -> Added:
    """What each segment of `span` chunks but the last adds to the state, of k [B, T, *, K] and v [B, T, H, V]."""
    batch, length, heads, values = v.shape
    segments = -(-length // (span * TOKENS)) - 1
    size = width_of(k.shape[3]) * width_of(values)
    states = torch.empty(batch, segments, heads, size, dtype=v.dtype, device=v.device)
    decay = _decay(gates, batch, segments, heads)
    _run_advance(Turn(k, v, None), None, gates, states, decay, False, span, segments)
    return Added(states, decay)


def entering(forth: Turn, back: Turn, last: Tensor | None, gates: Gates, span: int) -> Tensor:
    """States [B, segments, H, K, V] that enter each segment of `span` chunks, and their gradients after it: [2, ...].

    Fills last [B, H, K, V], the gradient of the state before the sequence, unless it is None.
    """
    batch, length, heads, values = forth.v.shape
    keys, device = forth.k.shape[3], forth.k.device
    segments = -(-length // (span * TOKENS))
    local = torch.empty(2, batch, segments, heads, keys, values, dtype=torch.float32, device=device)
    states = torch.empty_like(local)
    decay = _decay(gates, batch, segments, heads)
    _run_advance(forth, back, gates, local, decay, last is not None, span, segments)
    padded = 1 << (segments - 1).bit_length()
    block = max(16, 2048 // padded)
    blocks, sizes = (batch * heads, -(-keys * values // block), 2), (heads, keys * values, segments)
    constants = {"PADDED": padded, "BLOCK": block, "OVERLAPS": True}
    tensors = (local, decay, forth.first, back.first, states, last)
    with torch.cuda.device_of(local):
        # as measured: one warp scans faster, all of a cell's segments in one thread
        triton_launch.launch(compose, blocks, tensors, sizes, constants, 1, True)
    return states


def _decay(gates: Gates, batch: int, segments: int, heads: int) -> Tensor | None:
    """Where log2 of segments' decays goes, if there is one."""
    if gates.g is None:
        return None
    return torch.empty(batch, segments, heads, dtype=torch.float32, device=gates.g.device)


def _run_advance(
    forth: Turn,
    back: Turn | None,
    gates: Gates,
    local: Tensor,
    decay: Tensor | None,
    first: bool,
    span: int,
    segments: int,
) -> None:
    """One launch of `advance` over so many segments of `span` chunks. first: whether the first's is wanted of back."""
    batch, length, heads, values = forth.v.shape
    keys = forth.k.shape[3]
    wide, narrow = width_of(keys), width_of(values)
    # a product of twice as many tokens pays where segments are long, and made of them
    tokens = 2 * TOKENS if span >= model.LONG_SPAN and span % 2 == 0 else TOKENS
    constants = {
        "KEYS": keys,
        "VALUES": values,
        "TURNS": 1 if back is None else 2,
        "FIRST": first,
        "TOKENS": tokens,
        "STAGES": model.ADVANCE_STAGES,
    }
    arguments = (
        _tiles(forth.k, wide, tokens),
        _tiles(forth.v, narrow, tokens),
        None if back is None else _tiles(back.k, wide, tokens),
        None if back is None else _tiles(back.v, narrow, tokens),
        gates.g,
        gates.beta,
        local,
        decay,
        length,
        heads,
        heads // forth.k.shape[2],
        *gates.strides(),
        span * TOKENS // tokens,
        gates.scale,
    )
    launch(advance, (batch * heads, segments, 1), arguments, constants, narrow // 16, (*gates.types(), forth.k.dtype))
