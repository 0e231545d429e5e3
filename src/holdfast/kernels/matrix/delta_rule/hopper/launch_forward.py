"""Launches of the delta rule's kernels on Hopper forward in time: descriptors of tensors, grids and strides."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.kernels.lib.gluon.layouts import TILE_LAYOUT
from holdfast.kernels.matrix.args import TOKENS, DecayAndBeta, dtype_or_none
from holdfast.kernels.matrix.delta_rule.triton.segment_scan import delta_rule_segment_scan
from holdfast.kernels.runtime import launch as triton_launch
from holdfast.kernels.runtime.descriptor_launch import launch
from holdfast.kernels.runtime.tma import round_up_columns, tiles
from holdfast.planner.models.matrix.delta_rule.hopper import PREPARE_REGISTERS
from holdfast.planner.models.matrix.tiles import chunk_places

from .chunk_inverse import delta_rule_chunk_inverse
from .forward import delta_rule_fwd
from .producers import COLUMNS

# columns of the state that one program of the scan carries over the segments
SCANNED = 16


@dataclass(frozen=True, slots=True)
class StateIO:
    """States in float32, or None.

    start: before each segment, [B, segments, H, K, V]. end: after each likewise, or [B, H, K, V] after the last.
    transition: what each segment multiplies the state before it with, [B, segments, H, K, K].
    """

    start: Tensor | None = None
    end: Tensor | None = None
    transition: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Tiling:
    """Columns of v a block, 64 or 128; chunks in flight; chunks of a segment."""

    columns: int
    stages: int
    segment_chunks: int


def chunks_of(length: int, cu_seqlens: Tensor | None) -> int:
    """Return how many chunks have room in what is saved of each."""
    return chunk_places(length, None if cu_seqlens is None else cu_seqlens.shape[0] - 1)


def sequences_in_segments(length: int, segment_chunks: int, cu_seqlens: Tensor | None) -> int | None:
    """Return how many packed sequences there are if segments may be shorter than they; else None."""
    return None if cu_seqlens is None or segment_chunks * TOKENS >= length else cu_seqlens.shape[0] - 1


def blocks_of(batch: int, length: int, segment_chunks: int, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """Return the sequences, and segments of each; of packed ones in segments the places, some of them spare, and 1."""
    if cu_seqlens is None:
        return batch, -(-length // (segment_chunks * TOKENS))
    if sequences := sequences_in_segments(length, segment_chunks, cu_seqlens):
        return length // (segment_chunks * TOKENS) + sequences, 1
    return cu_seqlens.shape[0] - 1, 1


def run_chunk_inverse(k: Tensor, heads: int, gates: DecayAndBeta, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return A of every chunk, transposed, [B * H, chunks, 64, 64] in k's dtype. k: [B, T, *, K].

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
    constants = {"HALVES": round_up_columns(keys) // 64}
    types = (*gates.types(), k.dtype, dtype_or_none(cu_seqlens))
    grid = (batch * heads, chunks, 1) if cu_seqlens is None else (heads * chunks, 1, 1)
    launch(delta_rule_chunk_inverse, grid, arguments, constants, 1, types, PREPARE_REGISTERS)
    return a


def run_forward(
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    a: Tensor,
    out: Tensor | None,
    gates: DecayAndBeta,
    states: StateIO,
    tiling: Tiling,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Launch `delta_rule_fwd`: out [B, T, H, V] from q, k [B, T, *, K], v [B, T, H, V] and run_chunk_inverse's a.

    Without q and out only states are found, of all segments but the last; with them, the end state is the one after
    that. Without v transitions are found, of all segments, and out [B, T, H, K] is what the outputs multiply the state
    before their segment with. cu_seqlens [N + 1]: where packed sequences begin and end; out is then contiguous, and
    segments have places, [1, places, H, *, *].
    """
    batch, length, own_heads, keys = k.shape
    heads, values = a.shape[0] // batch, keys if v is None else v.shape[3]
    wide, column = round_up_columns(keys), COLUMNS.value
    slices = -(-values // tiling.columns)
    if states.transition is not None and v is not None:
        slices += -(-keys // tiling.columns)
    sequences = sequences_in_segments(length, tiling.segment_chunks, cu_seqlens)
    arguments = (
        tiles(k, [1, TOKENS, 1, wide], TILE_LAYOUT),
        None if q is None else tiles(q, [1, TOKENS, 1, wide], TILE_LAYOUT),
        None if v is None else tiles(v, [1, TOKENS, 1, column], TILE_LAYOUT),
        tiles(a, [1, 1, TOKENS, TOKENS], TILE_LAYOUT),
        None if out is None else tiles(out, [1, TOKENS, 1, column], TILE_LAYOUT),
        gates.g,
        gates.beta,
        states.start,
        states.end,
        states.transition,
        cu_seqlens,
        None if cu_seqlens is None else out,
        sequences,
        length,
        heads,
        heads // own_heads,
        *gates.strides(),
        tiling.segment_chunks,
        gates.scale,
    )
    constants = {"KEYS": keys, "VALUES": values, "MMA_WARPGROUPS": tiling.columns // column, "STAGES": tiling.stages}
    optional = (q, v, states.start, states.end, states.transition, sequences)
    types = (*gates.types(), k.dtype, wide, *(x is None for x in optional), dtype_or_none(cu_seqlens))
    blocks, segments = blocks_of(batch, length, tiling.segment_chunks, cu_seqlens)
    # it waits for the inverses alone: the states of segments have to be there before it starts
    pdl = states.start is None or (sequences is None and segments == 1)
    if cu_seqlens is None and q is None:
        segments -= 1
    launch(delta_rule_fwd, (blocks * heads, slices, segments), arguments, constants, 4, types, None, pdl)


def segment_buffer(
    k: Tensor, heads: int, values: int, with_last: bool, segment_chunks: int, cu_seqlens: Tensor | None
) -> Tensor:
    """Return room for [K, values] of each segment, float32 [B, segments, H, K, values], with the last one or without.

    Of packed sequences [1, places, H, K, values].
    """
    blocks, segments = blocks_of(k.shape[0], k.shape[1], segment_chunks, cu_seqlens)
    rows = blocks if cu_seqlens is not None else segments if with_last else segments - 1
    return k.new_empty(k.shape[0], rows, heads, k.shape[3], values, dtype=torch.float32)


def segment_initial_states(
    k: Tensor,
    v: Tensor,
    a: Tensor,
    gates: DecayAndBeta,
    tiling: Tiling,
    first: Tensor | None,
    transition: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return the state before each segment, float32 [B, segments, H, K, V].

    first: the state before the sequence. transition: what each segment multiplies the state before it with, [B,
    segments, H, K, K], if that is known. Of packed sequences, cut at cu_seqlens [N + 1]: first [N, H, K, V], the others
    [1, places, H, *, *].
    """
    heads, values = v.shape[2:]
    chunks = tiling.segment_chunks
    local = segment_buffer(k, heads, values, False, chunks, cu_seqlens)
    found = None if transition is not None else segment_buffer(k, heads, k.shape[3], False, chunks, cu_seqlens)
    run_forward(None, k, v, a, None, gates, StateIO(None, local, found), tiling, cu_seqlens)
    transition = found if transition is None else transition
    return run_segment_scan(local, transition, first, False, k.shape[1], chunks, cu_seqlens)


def run_segment_scan(
    local: Tensor,
    transition: Tensor,
    first: Tensor | None,
    back: bool,
    length: int,
    segment_chunks: int,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Launch `delta_rule_segment_scan`: what enters each segment, float32 [B, segments, H, K, V], in either direction.

    length: of the sequences, of packed ones of all. local, transition: [B, segments, H, K, *], whose last is not read
    forward in time and may not be there, and first not backward. cu_seqlens: with it they and what enters are
    [1, places, H, K, *].
    """
    batch, rows, heads, keys, values = local.shape
    blocks, segments = blocks_of(batch, length, segment_chunks, cu_seqlens)
    states = local.new_empty(batch, segments if cu_seqlens is None else blocks, heads, keys, values)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    constants = {"KEYS": keys, "VALUES": values, "WIDE": round_up_columns(keys), "BLOCK": SCANNED, "BACK": back}
    tensors = (local, transition, first, states, cu_seqlens)
    numbers = (length, heads, segments, segment_chunks, rows, transition.shape[1])
    grid = (sequences * heads, -(-values // SCANNED))
    with torch.cuda.device_of(local):
        triton_launch.launch(delta_rule_segment_scan, grid, tensors, numbers, constants, 8)
    return states
