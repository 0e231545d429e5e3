"""Launches of the kernels that carry states from segment to segment on Hopper."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.kernels.matrix.args import TOKENS, DecayAndBeta, SegmentSums, tile_descriptor
from holdfast.kernels.matrix.state_passing.triton.segment_scan_backward import segment_scan_both_ways
from holdfast.kernels.runtime import launch as triton_launch
from holdfast.kernels.runtime.descriptor_launch import launch
from holdfast.kernels.runtime.tma import round_up_columns
from holdfast.planner.models.matrix.scalar_decay import hopper as model

from .segment_states import hopper_segment_states


@dataclass(frozen=True, slots=True)
class ScanOperands:
    """What a scan over segments writes: k [B, T, *, K] and v [B, T, H, V] forward in time, q and do backward.

    first: the state [B, H, K, V] that it starts from, or None.
    """

    k: Tensor
    v: Tensor
    first: Tensor | None


def segment_sums(k: Tensor, v: Tensor, gates: DecayAndBeta, segment_chunks: int) -> SegmentSums:
    """Return what each segment but the last adds to the state, of k [B, T, *, K] and v [B, T, H, V]."""
    batch, length, heads, values = v.shape
    segments = -(-length // (segment_chunks * TOKENS)) - 1
    size = round_up_columns(k.shape[3]) * round_up_columns(values)
    states = torch.empty(batch, segments, heads, size, dtype=v.dtype, device=v.device)
    decay = _empty_decay(gates, batch, segments, heads)
    _run_segment_states(ScanOperands(k, v, None), None, gates, states, decay, False, segment_chunks, segments)
    return SegmentSums(states, decay)


def segment_initial_states(
    forth: ScanOperands, back: ScanOperands, last: Tensor | None, gates: DecayAndBeta, segment_chunks: int
) -> Tensor:
    """Return [2, B, segments, H, K, V]: states that enter each segment, and gradients of those after.

    Fill last [B, H, K, V], the gradient of the state before the sequence, unless it is None.
    """
    batch, length, heads, values = forth.v.shape
    keys, device = forth.k.shape[3], forth.k.device
    segments = -(-length // (segment_chunks * TOKENS))
    local = torch.empty(2, batch, segments, heads, keys, values, dtype=torch.float32, device=device)
    states = torch.empty_like(local)
    decay = _empty_decay(gates, batch, segments, heads)
    _run_segment_states(forth, back, gates, local, decay, last is not None, segment_chunks, segments)
    padded = 1 << (segments - 1).bit_length()
    block = max(16, 2048 // padded)
    blocks, sizes = (batch * heads, -(-keys * values // block), 2), (heads, keys * values, segments)
    constants = {"PADDED": padded, "BLOCK": block, "PDL": True}
    tensors = (local, decay, forth.first, back.first, states, last)
    with torch.cuda.device_of(local):
        # as measured: one warp scans faster, all of a cell's segments in one thread
        triton_launch.launch(segment_scan_both_ways, blocks, tensors, sizes, constants, 1, True)
    return states


def _empty_decay(gates: DecayAndBeta, batch: int, segments: int, heads: int) -> Tensor | None:
    """Return room for log2 of segments' decays, if there is one."""
    if gates.g is None:
        return None
    return torch.empty(batch, segments, heads, dtype=torch.float32, device=gates.g.device)


def _run_segment_states(
    forth: ScanOperands,
    back: ScanOperands | None,
    gates: DecayAndBeta,
    local: Tensor,
    decay: Tensor | None,
    first: bool,
    segment_chunks: int,
    segments: int,
) -> None:
    """Launch hopper_segment_states over `segments` of `segment_chunks`. first: also the first segment's of back."""
    batch, length, heads, values = forth.v.shape
    keys = forth.k.shape[3]
    wide, narrow = round_up_columns(keys), round_up_columns(values)
    # a product of twice as many tokens pays where segments are long, and made of them
    tokens = 2 * TOKENS if segment_chunks >= model.LONG_SEGMENT and segment_chunks % 2 == 0 else TOKENS
    constants = {
        "KEYS": keys,
        "VALUES": values,
        "PASSES": 1 if back is None else 2,
        "FIRST": first,
        "TOKENS": tokens,
        "STAGES": model.ADVANCE_STAGES,
    }
    arguments = (
        tile_descriptor(forth.k, wide, tokens),
        tile_descriptor(forth.v, narrow, tokens),
        None if back is None else tile_descriptor(back.k, wide, tokens),
        None if back is None else tile_descriptor(back.v, narrow, tokens),
        gates.g,
        gates.beta,
        local,
        decay,
        length,
        heads,
        heads // forth.k.shape[2],
        *gates.strides(),
        segment_chunks * TOKENS // tokens,
        gates.scale,
    )
    launch(
        hopper_segment_states,
        (batch * heads, segments, 1),
        arguments,
        constants,
        narrow // 16,
        (*gates.types(), forth.k.dtype),
    )
