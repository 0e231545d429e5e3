"""Launches of what carries states from segment to segment on Hopper."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.kernels.matrix.args import TOKENS, Added, Gates, _tiles
from holdfast.kernels.matrix.state_passing.triton.segment_scan_backward import compose
from holdfast.kernels.runtime import launch as triton_launch
from holdfast.kernels.runtime.descriptor_launch import launch
from holdfast.kernels.runtime.tma import width_of
from holdfast.planner.models.matrix.scalar_decay import hopper as model

from .segment_states import advance


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
