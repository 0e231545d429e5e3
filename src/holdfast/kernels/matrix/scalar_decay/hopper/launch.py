"""Launches of scalar decay's kernels on Hopper: descriptors of tensors, grids and strides."""

from torch import Tensor

from holdfast.kernels.lib.gluon.layouts import TILE_LAYOUT
from holdfast.kernels.matrix.args import ROUNDING, Ends, Gates, Kept, Sums, _blocks, _tiles, kind
from holdfast.kernels.runtime.descriptor_launch import launch
from holdfast.kernels.runtime.tma import tiles, width_of

from .backward import scalar_decay_bwd
from .forward import sweep


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
        saved = tiles(kept.saved.view(-1, kept.saved.shape[2], keys, values), [1, 1, wide, narrow], TILE_LAYOUT)
    constants = {
        "KEYS": keys,
        "VALUES": values,
        "TRANSPOSED": turned,
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
    launch(scalar_decay_bwd, grid, arguments, constants, wide // 16, types, None, True)
