"""Launches of the delta rule's kernels on Hopper: descriptors of tensors, grids and strides."""

import torch
from torch import Tensor

from holdfast.kernels.common import triton_launch
from holdfast.kernels.common.gluon_launch import launch, tiles
from holdfast.planner.models.matrix_hopper_delta import PREPARE_REGISTERS

from .hopper_delta_compose import compose
from .hopper_delta_prepare import prepare
from .hopper_delta_sweep import COLUMNS, delta_sweep
from .hopper_launch import LAYOUT, TOKENS, Gates, kind, width_of

# columns of the state that one program carries over the segments
COMPOSED = 16


def chunks_of(length: int, cu_seqlens: Tensor | None) -> int:
    """How many chunks there is room for in what is kept of each: packed sequences have spare ones between them."""
    if cu_seqlens is None:
        return -(-length // TOKENS)
    return length // TOKENS + cu_seqlens.shape[0] - 1


def run_prepare(k: Tensor, heads: int, gates: Gates, cu_seqlens: Tensor | None = None) -> Tensor:
    """A of every chunk, transposed, [B * H, chunks, 64, 64] in k's dtype, of k [B, T, *, K].

    cu_seqlens [N + 1]: where packed sequences begin and end, with B = 1.
    """
    batch, length, own_heads, keys = k.shape
    chunks = chunks_of(length, cu_seqlens)
    a = torch.empty(batch * heads, chunks, TOKENS, TOKENS, dtype=k.dtype, device=k.device)
    arguments = (
        tiles(k, [1, TOKENS, 1, 64], LAYOUT),
        gates.g,
        gates.beta,
        tiles(a, [1, 1, TOKENS, TOKENS], LAYOUT),
        cu_seqlens,
        0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        length,
        heads,
        heads // own_heads,
        *gates.strides(),
    )
    constants = {"HALVES": width_of(keys) // 64}
    types = (*gates.types(), k.dtype, kind(cu_seqlens))
    grid = (batch * heads, chunks, 1) if cu_seqlens is None else (heads * chunks, 1, 1)
    launch(prepare, grid, arguments, constants, 1, types, PREPARE_REGISTERS)
    return a


def run_sweep(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    out: Tensor | None,
    gates: Gates,
    start: Tensor | None,
    end: Tensor | None,
    transition: Tensor | None,
    columns: int,
    stages: int,
    span: int,
    cu_seqlens: Tensor | None = None,
) -> None:
    """One launch of `delta_sweep`: out [B, T, H, V] of q, k [B, T, *, K], v [B, T, H, V] and what run_prepare made.

    start, end, transition: float32 states [B, segments, H, K, V], and [B, segments, H, K, K], of segments of `span`
    chunks. columns: of v a block, 64 or 128. stages: chunks in flight. Without q and out only states are found, of all
    segments but the last; with them, end [B, H, K, V] is the state after that. cu_seqlens [N + 1]: where packed
    sequences begin and end, none of them in segments; out is then contiguous.
    """
    batch, length, heads, values = v.shape
    keys = k.shape[3]
    wide, column = width_of(keys), COLUMNS.value
    slices = -(-values // columns)
    if transition is not None:
        slices += -(-keys // columns)
    arguments = (
        tiles(k, [1, TOKENS, 1, wide], LAYOUT),
        None if q is None else tiles(q, [1, TOKENS, 1, wide], LAYOUT),
        tiles(v, [1, TOKENS, 1, column], LAYOUT),
        tiles(a, [1, 1, TOKENS, TOKENS], LAYOUT),
        None if out is None else tiles(out, [1, TOKENS, 1, column], LAYOUT),
        gates.g,
        gates.beta,
        start,
        end,
        transition,
        cu_seqlens,
        None if cu_seqlens is None else out,
        length,
        heads,
        heads // k.shape[2],
        *gates.strides(),
        span,
        gates.scale,
    )
    constants = {"KEYS": keys, "VALUES": values, "CONSUMERS": columns // column, "STAGES": stages}
    types = (*gates.types(), k.dtype, wide, q is None, start is None, end is None, transition is None, kind(cu_seqlens))
    sequences, segments = batch, -(-length // (span * TOKENS)) - (0 if q is not None else 1)
    if cu_seqlens is not None:
        sequences, segments = cu_seqlens.shape[0] - 1, 1
    # it waits for the inverses alone: states of segments have to be there before it starts
    overlaps = start is None or segments == 1
    launch(delta_sweep, (sequences * heads, slices, segments), arguments, constants, 4, types, None, overlaps)


def entering(
    k: Tensor,
    v: Tensor,
    a: Tensor,
    gates: Gates,
    columns: int,
    stages: int,
    span: int,
    first: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The state that enters each segment of `span` chunks, float32 [B, segments, H, K, V].

    first: the state before the sequence. With it what each segment but the last multiplies the state before it with,
    [B, segments - 1, H, K, K].
    """
    batch, length, heads, values = v.shape
    keys = k.shape[3]
    segments = -(-length // (span * TOKENS))
    local, transition = (
        torch.empty(batch, segments - 1, heads, keys, width, dtype=torch.float32, device=k.device)
        for width in (values, keys)
    )
    run_sweep(None, k, v, a, None, gates, None, local, transition, columns, stages, span)
    return run_compose(local, transition, first, False), transition


def run_compose(local: Tensor, transition: Tensor, first: Tensor | None, back: bool) -> Tensor:
    """One launch of `compose`: what enters each segment, float32 [B, segments, H, K, V], forth or back in time."""
    batch, others, heads, keys, values = local.shape
    states = local.new_empty(batch, others + 1, heads, keys, values)
    constants = {"KEYS": keys, "VALUES": values, "WIDE": width_of(keys), "BLOCK": COMPOSED, "BACK": back}
    blocks, tensors = (batch * heads, -(-values // COMPOSED)), (local, transition, first, states)
    with torch.cuda.device_of(local):
        triton_launch.launch(compose, blocks, tensors, (heads, others + 1), constants, 8)
    return states
