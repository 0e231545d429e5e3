"""Launches of the delta rule's kernels on Hopper: descriptors of tensors, grids and strides."""

import torch
from torch import Tensor

from holdfast.kernels.lib.gluon.layouts import TILE_LAYOUT
from holdfast.kernels.matrix.args import TOKENS, DecayAndBeta, dtype_or_none
from holdfast.kernels.matrix.delta_rule.triton.segment_scan import compose
from holdfast.kernels.runtime import launch as triton_launch
from holdfast.kernels.runtime.descriptor_launch import launch
from holdfast.kernels.runtime.tma import tiles, width_of
from holdfast.planner.models.matrix.delta_rule.hopper import PREPARE_REGISTERS

from .chunk_inverse import prepare
from .forward import delta_sweep
from .producers import COLUMNS

# columns of the state that one program carries over the segments
COMPOSED = 16


def chunks_of(length: int, cu_seqlens: Tensor | None) -> int:
    """How many chunks there is room for in what is kept of each: packed sequences have spare ones between them."""
    if cu_seqlens is None:
        return -(-length // TOKENS)
    return length // TOKENS + cu_seqlens.shape[0] - 1


def sequences_in_segments(length: int, span: int, cu_seqlens: Tensor | None) -> int | None:
    """How many packed sequences there are where segments of `span` chunks may be shorter than they; else None."""
    return None if cu_seqlens is None or span * TOKENS >= length else cu_seqlens.shape[0] - 1


def blocks_of(batch: int, length: int, span: int, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """Sequences, and segments of each; of packed sequences in segments their places, some of them spare, and 1."""
    if cu_seqlens is None:
        return batch, -(-length // (span * TOKENS))
    if sequences := sequences_in_segments(length, span, cu_seqlens):
        return length // (span * TOKENS) + sequences, 1
    return cu_seqlens.shape[0] - 1, 1


def run_prepare(k: Tensor, heads: int, gates: DecayAndBeta, cu_seqlens: Tensor | None = None) -> Tensor:
    """A of every chunk, transposed, [B * H, chunks, 64, 64] in k's dtype, of k [B, T, *, K].

    cu_seqlens [N + 1]: where packed sequences begin and end, with B = 1.
    """
    batch, length, own_heads, keys = k.shape
    chunks = chunks_of(length, cu_seqlens)
    a = torch.empty(batch * heads, chunks, TOKENS, TOKENS, dtype=k.dtype, device=k.device)
    arguments = (
        tiles(k, [1, TOKENS, 1, 64], TILE_LAYOUT),
        gates.g,
        gates.beta,
        tiles(a, [1, 1, TOKENS, TOKENS], TILE_LAYOUT),
        cu_seqlens,
        0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        length,
        heads,
        heads // own_heads,
        *gates.strides(),
    )
    constants = {"HALVES": width_of(keys) // 64}
    types = (*gates.types(), k.dtype, dtype_or_none(cu_seqlens))
    grid = (batch * heads, chunks, 1) if cu_seqlens is None else (heads * chunks, 1, 1)
    launch(prepare, grid, arguments, constants, 1, types, PREPARE_REGISTERS)
    return a


def run_sweep(
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    a: Tensor,
    out: Tensor | None,
    gates: DecayAndBeta,
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
    segments but the last; with them, end [B, H, K, V] is the state after that. Without v transitions are, of all, and
    out [B, T, H, K] is what the outputs multiply the state before their segment with. cu_seqlens [N + 1]: where packed
    sequences begin and end; out is then contiguous, and what is of segments [1, places, H, *, *].
    """
    batch, length, own_heads, keys = k.shape
    heads, values = a.shape[0] // batch, keys if v is None else v.shape[3]
    wide, column = width_of(keys), COLUMNS.value
    slices = -(-values // columns)
    if transition is not None and v is not None:
        slices += -(-keys // columns)
    sequences = sequences_in_segments(length, span, cu_seqlens)
    arguments = (
        tiles(k, [1, TOKENS, 1, wide], TILE_LAYOUT),
        None if q is None else tiles(q, [1, TOKENS, 1, wide], TILE_LAYOUT),
        None if v is None else tiles(v, [1, TOKENS, 1, column], TILE_LAYOUT),
        tiles(a, [1, 1, TOKENS, TOKENS], TILE_LAYOUT),
        None if out is None else tiles(out, [1, TOKENS, 1, column], TILE_LAYOUT),
        gates.g,
        gates.beta,
        start,
        end,
        transition,
        cu_seqlens,
        None if cu_seqlens is None else out,
        sequences,
        length,
        heads,
        heads // own_heads,
        *gates.strides(),
        span,
        gates.scale,
    )
    constants = {"KEYS": keys, "VALUES": values, "CONSUMERS": columns // column, "STAGES": stages}
    optional = (q, v, start, end, transition, sequences)
    types = (*gates.types(), k.dtype, wide, *(x is None for x in optional), dtype_or_none(cu_seqlens))
    blocks, segments = blocks_of(batch, length, span, cu_seqlens)
    # it waits for the inverses alone: states of segments have to be there before it starts
    overlaps = start is None or (sequences is None and segments == 1)
    if cu_seqlens is None and q is None:
        segments -= 1
    launch(delta_sweep, (blocks * heads, slices, segments), arguments, constants, 4, types, None, overlaps)


def local_of(k: Tensor, heads: int, values: int, last: bool, span: int, cu_seqlens: Tensor | None) -> Tensor:
    """Room for something [K, values] of each segment, float32 [B, segments, H, K, values], of the last one or not.

    Of packed sequences [1, places, H, K, values].
    """
    blocks, segments = blocks_of(k.shape[0], k.shape[1], span, cu_seqlens)
    rows = blocks if cu_seqlens is not None else segments if last else segments - 1
    return k.new_empty(k.shape[0], rows, heads, k.shape[3], values, dtype=torch.float32)


def entering(
    k: Tensor,
    v: Tensor,
    a: Tensor,
    gates: DecayAndBeta,
    columns: int,
    stages: int,
    span: int,
    first: Tensor | None,
    transition: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The state that enters each segment of `span` chunks, float32 [B, segments, H, K, V].

    first: the state before the sequence. transition: what each segment multiplies the state before it with, [B,
    segments, H, K, K], if that is known. Of packed sequences, cut at cu_seqlens [N + 1]: first [N, H, K, V], the others
    [1, places, H, *, *].
    """
    heads, values = v.shape[2:]
    local = local_of(k, heads, values, False, span, cu_seqlens)
    found = None if transition is not None else local_of(k, heads, k.shape[3], False, span, cu_seqlens)
    run_sweep(None, k, v, a, None, gates, None, local, found, columns, stages, span, cu_seqlens)
    return run_compose(local, found if transition is None else transition, first, False, k.shape[1], span, cu_seqlens)


def run_compose(
    local: Tensor,
    transition: Tensor,
    first: Tensor | None,
    back: bool,
    length: int,
    span: int,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """One launch of `compose`: what enters each segment, float32 [B, segments, H, K, V], forth or back in time.

    length: of the sequences, of packed ones of all. local, transition: [B, segments, H, K, *], whose last is not read
    forth in time and may not be there, and first not back in time. cu_seqlens: with it they and what enters are
    [1, places, H, K, *].
    """
    batch, rows, heads, keys, values = local.shape
    blocks, segments = blocks_of(batch, length, span, cu_seqlens)
    states = local.new_empty(batch, segments if cu_seqlens is None else blocks, heads, keys, values)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    constants = {"KEYS": keys, "VALUES": values, "WIDE": width_of(keys), "BLOCK": COMPOSED, "BACK": back}
    tensors = (local, transition, first, states, cu_seqlens)
    numbers = (length, heads, segments, span, rows, transition.shape[1])
    with torch.cuda.device_of(local):
        triton_launch.launch(compose, (sequences * heads, -(-values // COMPOSED)), tensors, numbers, constants, 8)
    return states
