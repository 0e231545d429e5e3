"""Launches of the Hopper kernels of a normalised recurrence."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from holdfast.kernels.lib.gluon.layouts import TILE_LAYOUT
from holdfast.kernels.matrix.args import ROUNDING, TOKENS, Gates, Sums
from holdfast.kernels.runtime.descriptor_launch import launch
from holdfast.kernels.runtime.tma import tiles, width_of

from .backward_kv import normalized_adjoint
from .backward_q import normalized_queries
from .forward import normalized_sweep


@dataclass(frozen=True, slots=True)
class Kept:
    """What the launch for dq leaves to the adjoint sweep: see backward_q.py.

    left: [4, B, H, T]. saved [B, H, n, K, V] and saved_n [B, H, n, K]: of every `save` chunks. begins:
    whether the first state is 0, so that it is not saved.
    """

    left: Tensor
    saved: Tensor
    saved_n: Tensor
    save: int
    begins: bool


def _tiles(x: Tensor, width: int) -> Any:
    return tiles(x, [1, TOKENS, 1, width], TILE_LAYOUT)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    gates: Gates,
    m: Tensor,
    norms: tuple[Tensor, Tensor, Tensor | None],
    start: Tensor | None,
    end: Tensor,
    eps: float,
    stages: int,
    sums: Sums | None = None,
) -> None:
    """o [B, T, H, V] of q, k, v; start, end: states [B, H, K, V + 1].

    norms: [B, H, T] each, where norm and its part of earlier chunks go; and that of the slices of K before this one,
    with sums of these, or None.
    """
    batch, length, heads, values = o.shape
    keys = q.shape[3]
    wide, width = width_of(keys), width_of(values)
    constants = {
        "KEYS": keys,
        "VALUES": values,
        "ADDS": sums is not None and sums.adds,
        "LEAVES": sums is not None and sums.leaves,
        "STAGES": stages,
    }
    arguments = (
        _tiles(q, wide),
        _tiles(k, wide),
        _tiles(v, width),
        _tiles(o, width),
        gates.g,
        gates.beta,
        m,
        *norms,
        None if sums is None else sums.sums,
        start,
        end,
        length,
        heads,
        heads // q.shape[2],
        heads // v.shape[2],
        *gates.strides(),
        *m.stride(),
        gates.scale,
        eps,
    )
    wide_strides = (stride < 2**31 for stride in m.stride())
    types = (*gates.types(), q.dtype, wide, width, start is None, sums is None, norms[2] is None, *wide_strides)
    launch(normalized_sweep, (batch * heads, 1, 1), arguments, constants, width // 16, types)


def run_queries(
    u: Tensor,
    v: Tensor,
    k: Tensor,
    q: Tensor,
    dq: Tensor,
    gates: Gates,
    m: Tensor,
    norm: Tensor,
    start: Tensor | None,
    before: Tensor | None,
    kept: Kept,
    eps: float,
    stages: int,
    inner: Tensor | None = None,
) -> None:
    """dq [B, T, H, K], and into kept what the adjoint sweep takes up. norm [2, B, H, T]: of run_forward.

    start, before: the states before the first and the last chunk, [B, H, K, V + 1]. inner [B, H, T]: u . o, where q and
    k are a slice of K and do not tell.
    """
    batch, length, heads, keys = dq.shape
    values = v.shape[3]
    wide, width = width_of(keys), width_of(values)
    constants = {"KEYS": keys, "VALUES": values, "SAVE": kept.save, "STAGES": stages}
    arguments = (
        _tiles(u, width),
        _tiles(v, width),
        _tiles(k, wide),
        _tiles(dq, wide),
        _tiles(q, wide),
        gates.g,
        gates.beta,
        m,
        norm,
        inner,
        start,
        before,
        kept.saved,
        kept.saved_n,
        kept.left,
        length,
        heads,
        heads // k.shape[2],
        heads // v.shape[2],
        *gates.strides(),
        *m.stride(),
        gates.scale,
        eps,
    )
    wide_strides = (stride < 2**31 for stride in m.stride())
    types = (*gates.types(), q.dtype, wide, width, start is None, before is None, inner is None, *wide_strides)
    launch(normalized_queries, (batch * heads, 1, 1), arguments, constants, wide // 16, types)


def run_adjoint(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor,
    dbeta: Tensor,
    gates: Gates,
    start: Tensor | None,
    end: Tensor | None,
    passing: Tensor | None,
    kept: Kept,
    stages: int,
) -> None:
    """dk and dv [B, T, H, *], dg and dbeta [B, T, H], a head's tokens side by side.

    start, end: gradients of the last and of the first state. passing [B, H]: what run_queries left as `before` times
    start.
    """
    batch, length, heads, keys = dk.shape
    values = dv.shape[3]
    wide, narrow = width_of(keys), width_of(values)
    inverse, slope, _, row = kept.left
    saved = tiles(kept.saved.flatten(0, 1), [1, 1, wide, narrow], TILE_LAYOUT)
    constants = {
        "KEYS": keys,
        "VALUES": values,
        "SAVE": kept.save,
        "FROM": int(kept.begins),
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
        gates.g,
        gates.beta,
        inverse,
        slope,
        start,
        end,
        kept.saved_n,
        row,
        passing,
        dg,
        dbeta,
        length,
        heads,
        heads // q.shape[2],
        heads // v.shape[2],
        *gates.strides(),
        gates.scale,
    )
    types = (*gates.types(), q.dtype, wide, narrow, start is None, end is None, passing is None)
    launch(normalized_adjoint, (batch * heads, 1, 1), arguments, constants, wide // 16, types)
