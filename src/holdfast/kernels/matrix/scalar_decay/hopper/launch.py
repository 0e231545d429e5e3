"""Launches of scalar decay's kernels on Hopper: descriptors of tensors, grids and strides."""

from dataclasses import dataclass

from torch import Tensor

from holdfast.kernels.lib.gluon.layouts import TILE_LAYOUT
from holdfast.kernels.matrix.args import (
    ROUNDING,
    TOKENS,
    DecayAndBeta,
    Residuals,
    SliceSums,
    StateIO,
    dtype_or_none,
    sequences_and_segments,
    tile_descriptor,
)
from holdfast.kernels.runtime.descriptor_launch import launch
from holdfast.kernels.runtime.tma import round_up_columns, tiles

from .backward import scalar_decay_bwd
from .forward import scalar_decay_fwd


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """columns: of v a block, 64 or 128. stages: chunks in flight. segment_chunks: of each segment."""

    columns: int
    stages: int
    segment_chunks: int


@dataclass(frozen=True, slots=True)
class BackwardInputs:
    """q, k [B, T, *, K], and v and the output's gradient [B, T, *, V]."""

    q: Tensor
    k: Tensor
    do: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class Grads:
    """To be filled: dk [B, T, H, K], dv [B, T, H, V], and dg and dbeta [B, T, H], or None."""

    dk: Tensor
    dv: Tensor
    dg: Tensor | None
    dbeta: Tensor | None


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    gates: DecayAndBeta,
    states: StateIO,
    plan: ForwardPlan,
    residuals: Residuals | None = None,
    cu_seqlens: Tensor | None = None,
    sums: SliceSums | None = None,
) -> None:
    """Launch scalar_decay_fwd: out [B, T, H, V] of q, k [B, T, *, K] and v [B, T, *, V]; their heads divide H.

    cu_seqlens [N + 1]: where packed sequences begin and end, none of them in segments; out is then contiguous.
    """
    batch, length, heads, columns = out.shape
    keys = q.shape[3]
    wide, width = round_up_columns(keys), plan.columns
    saved = None if residuals is None else residuals.saved
    constants = {
        "KEYS": keys,
        "VALUES": columns,
        "TRANSPOSED": states.transposed,
        "SAVE": 0 if residuals is None else residuals.save,
        "SLICE": 0 if sums is None else 2 * sums.adds + sums.leaves,
        # of longer sequences the backward kernel adds what this one subtracts, of numbers rounded alike
        "UNROUNDED": residuals is not None and states.start is not None and length <= TOKENS,
        "STAGES": plan.stages,
    }
    arguments = (
        tile_descriptor(q, wide),
        tile_descriptor(k, wide),
        tile_descriptor(v, width),
        tile_descriptor(out, width),
        None if residuals is None else tile_descriptor(residuals.x, width),
        gates.g,
        gates.beta,
        states.start,
        None if states.added is None else states.added.states,
        None if states.added is None else states.added.decay,
        states.end,
        saved,
        None if residuals is None else residuals.row,
        None if residuals is None else residuals.log,
        states.against,
        states.before,
        states.passing,
        cu_seqlens,
        None if cu_seqlens is None else out,
        None if sums is None else sums.sums,
        length,
        heads,
        heads // q.shape[2],
        heads // v.shape[2],
        1 if residuals is None else heads // residuals.x.shape[2],
        *gates.strides(),
        plan.segment_chunks,
        gates.scale,
    )
    added = None if states.added is None else states.added.states
    row = None if residuals is None else residuals.row
    optional = (states.start, added, states.end, states.passing, row, cu_seqlens)
    types = (*gates.types(), q.dtype, wide, width, *map(dtype_or_none, optional), sums is None)
    sequences, segments = sequences_and_segments(batch, length, plan.segment_chunks, cu_seqlens)
    grid = (sequences * heads, -(-columns // width), segments)
    launch(scalar_decay_fwd, grid, arguments, constants, width // 16, types, None, segments > 1)


def run_backward(
    inputs: BackwardInputs,
    grads: Grads,
    gates: DecayAndBeta,
    states: StateIO,
    stages: int,
    segment_chunks: int,
    residuals: Residuals | None,
    passing: Tensor | None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """Launch scalar_decay_bwd, which fills grads.

    stages, segment_chunks, cu_seqlens: as for run_forward. passing: of the StateIO of the forward kernel for dq.
    """
    q, k, do, v, dk, dv = inputs.q, inputs.k, inputs.do, inputs.v, grads.dk, grads.dv
    transposed = round_up_columns(v.shape[3]) > round_up_columns(k.shape[3])
    if transposed:
        # the kernel's first side is the wider, and the equations are the same with the sides exchanged
        q, k, do, v, dk, dv = do, v, q, k, dv, dk
    batch, length, heads, keys = dk.shape
    values = dv.shape[3]
    wide, narrow = round_up_columns(keys), round_up_columns(values)
    saved = None
    if residuals is not None:
        blocks = residuals.saved.view(-1, residuals.saved.shape[2], keys, values)
        saved = tiles(blocks, [1, 1, wide, narrow], TILE_LAYOUT)
    constants = {
        "KEYS": keys,
        "VALUES": values,
        "TRANSPOSED": transposed,
        "SAVE": 0 if residuals is None else residuals.save,
        "FROM": 0 if residuals is None else int(residuals.from_zero),
        "ROUNDING": ROUNDING[q.dtype],
        "STAGES": stages,
    }
    arguments = (
        tile_descriptor(q, wide),
        tile_descriptor(k, wide),
        tile_descriptor(do, narrow),
        tile_descriptor(v, narrow),
        tile_descriptor(dk, wide),
        tile_descriptor(dv, narrow),
        saved,
        None if residuals is None else residuals.log,
        gates.beta,
        states.start,
        states.end,
        None if residuals is None else residuals.row,
        passing,
        grads.dg,
        grads.dbeta,
        cu_seqlens,
        None if cu_seqlens is None else dk,
        None if cu_seqlens is None else dv,
        length,
        heads,
        heads // q.shape[2],
        heads // v.shape[2],
        *gates.strides()[3:],
        1 if residuals is None else residuals.row.shape[0],
        segment_chunks,
        gates.scale,
    )
    optional = (states.start, states.end, passing, cu_seqlens)
    types = (*gates.types(), q.dtype, wide, narrow, *map(dtype_or_none, optional))
    sequences, segments = sequences_and_segments(batch, length, segment_chunks, cu_seqlens)
    grid = (sequences * heads, segments, 1)
    launch(scalar_decay_bwd, grid, arguments, constants, wide // 16, types, None, True)
