"""Launches of mLSTM's kernels on Hopper."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from holdfast.kernels.lib.gluon.layouts import TILE_LAYOUT
from holdfast.kernels.matrix.args import ROUNDING, TOKENS, DecayAndBeta, SliceSums
from holdfast.kernels.runtime.descriptor_launch import launch
from holdfast.kernels.runtime.tma import round_up_columns, tiles

from .backward_kv import mlstm_bwd_kv
from .backward_q import mlstm_bwd_q
from .forward import mlstm_fwd


@dataclass(frozen=True, slots=True)
class Inputs:
    """q and k [B, T, Hq, K], v [B, T, H, V], log decay, beta and scale, the stabiliser m [B, T, H] and eps."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: DecayAndBeta
    m: Tensor
    eps: float

    def types(self) -> tuple[Any, ...]:
        """What of them decides how a kernel is compiled, but for m: dtypes, and which strides are 32-bit integers."""
        return (*self.gates.types(), self.q.dtype)

    def types_of_m(self) -> tuple[bool, ...]:
        return tuple(stride < 2**31 for stride in self.m.stride())


@dataclass(frozen=True, slots=True)
class Norms:
    """[B, H, T] each: norm and its part of earlier chunks, written; the norm of earlier slices of K, or None."""

    norm: Tensor
    inter: Tensor
    slices: Tensor | None


@dataclass(frozen=True, slots=True)
class Residuals:
    """What the dq kernel leaves to the dk and dv kernel: see backward_q.py.

    token: [4, B, H, T]. saved [B, H, n, K, V] and saved_n [B, H, n, K]: S and n before every `save` chunks but the
    first.
    """

    token: Tensor
    saved: Tensor
    saved_n: Tensor
    save: int


@dataclass(frozen=True, slots=True)
class Grads:
    """dk and dv [B, T, H, *]; dg and dbeta [B, T, H], a head's tokens side by side.

    final_product: [B, H], <S, dS> after the last token, where the final state has a gradient; else None.
    """

    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    final_product: Tensor | None


def _tiles(x: Tensor, width: int) -> Any:
    return tiles(x, [1, TOKENS, 1, width], TILE_LAYOUT)


def run_fwd(
    inputs: Inputs,
    o: Tensor,
    norms: Norms,
    initial: Tensor | None,
    final: Tensor,
    stages: int,
    sums: SliceSums | None = None,
) -> None:
    """Write o [B, T, H, V], the final state and the norms. initial, final: states [B, H, K, V + 1].

    sums: of the outputs of slices of K, or None.
    """
    q, k, v, gates, m = inputs.q, inputs.k, inputs.v, inputs.gates, inputs.m
    batch, length, heads, values = o.shape
    keys = q.shape[3]
    tile_k, tile_v = round_up_columns(keys), round_up_columns(values)
    constants = {
        "KEYS": keys,
        "VALUES": values,
        "ADDS": sums is not None and sums.adds,
        "LEAVES": sums is not None and sums.leaves,
        "STAGES": stages,
    }
    arguments = (
        _tiles(q, tile_k),
        _tiles(k, tile_k),
        _tiles(v, tile_v),
        _tiles(o, tile_v),
        gates.g,
        gates.beta,
        m,
        norms.norm,
        norms.inter,
        norms.slices,
        None if sums is None else sums.sums,
        initial,
        final,
        length,
        heads,
        heads // q.shape[2],
        heads // v.shape[2],
        *gates.strides(),
        *m.stride(),
        gates.scale,
        inputs.eps,
    )
    given = (initial is None, sums is None, norms.slices is None)
    types = (*inputs.types(), tile_k, tile_v, *given, *inputs.types_of_m())
    launch(mlstm_fwd, (batch * heads, 1, 1), arguments, constants, tile_v // 16, types)


def run_bwd_q(
    inputs: Inputs,
    do: Tensor,
    dq: Tensor,
    norm: Tensor,
    initial: Tensor | None,
    last_entry: Tensor | None,
    residuals: Residuals,
    stages: int,
    do_o: Tensor | None = None,
) -> None:
    """Write dq [B, T, H, K], and into residuals what the dk and dv kernel takes. norm [2, B, H, T]: of run_fwd.

    initial, last_entry: the states before the first and, written, before the last chunk, [B, H, K, V + 1]. do_o
    [B, H, T]: do . o, where q and k are a slice of K, from which it cannot be found.
    """
    q, k, v, gates, m = inputs.q, inputs.k, inputs.v, inputs.gates, inputs.m
    batch, length, heads, keys = dq.shape
    values = v.shape[3]
    tile_k, tile_v = round_up_columns(keys), round_up_columns(values)
    constants = {"KEYS": keys, "VALUES": values, "SAVE": residuals.save, "STAGES": stages}
    arguments = (
        _tiles(do, tile_v),
        _tiles(v, tile_v),
        _tiles(k, tile_k),
        _tiles(dq, tile_k),
        _tiles(q, tile_k),
        gates.g,
        gates.beta,
        m,
        norm,
        do_o,
        initial,
        last_entry,
        residuals.saved,
        residuals.saved_n,
        residuals.token,
        length,
        heads,
        heads // k.shape[2],
        heads // v.shape[2],
        *gates.strides(),
        *m.stride(),
        gates.scale,
        inputs.eps,
    )
    given = (initial is None, last_entry is None, do_o is None)
    types = (*inputs.types(), tile_k, tile_v, *given, *inputs.types_of_m())
    launch(mlstm_bwd_q, (batch * heads, 1, 1), arguments, constants, tile_k // 16, types)


def run_bwd_kv(
    inputs: Inputs,
    do: Tensor,
    grads: Grads,
    initial: Tensor | None,
    dfinal: Tensor | None,
    dinitial: Tensor | None,
    state_grad_dot: Tensor | None,
    residuals: Residuals,
    stages: int,
) -> None:
    """Write the gradients, and dinitial. initial: the first state. dfinal, dinitial: gradients of the last and first.

    state_grad_dot [B, H]: last_entry of run_bwd_q times dfinal, summed.
    """
    q, k, v, gates = inputs.q, inputs.k, inputs.v, inputs.gates
    batch, length, heads, keys = grads.dk.shape
    values = grads.dv.shape[3]
    tile_k, tile_v = round_up_columns(keys), round_up_columns(values)
    inv_norm, d_norm, _, q_dq = residuals.token
    saved = tiles(residuals.saved.flatten(0, 1), [1, 1, tile_k, tile_v], TILE_LAYOUT)
    constants = {
        "KEYS": keys,
        "VALUES": values,
        "SAVE": residuals.save,
        "ROUNDING": ROUNDING[q.dtype],
        "STAGES": stages,
    }
    arguments = (
        _tiles(q, tile_k),
        _tiles(k, tile_k),
        _tiles(do, tile_v),
        _tiles(v, tile_v),
        _tiles(grads.dk, tile_k),
        _tiles(grads.dv, tile_v),
        saved,
        gates.g,
        gates.beta,
        inv_norm,
        d_norm,
        initial,
        dfinal,
        dinitial,
        residuals.saved_n,
        q_dq,
        state_grad_dot,
        grads.dg,
        grads.dbeta,
        grads.final_product,
        length,
        heads,
        heads // q.shape[2],
        heads // v.shape[2],
        *gates.strides(),
        gates.scale,
    )
    types = (*inputs.types(), tile_k, tile_v, initial is None, dfinal is None, dinitial is None, state_grad_dot is None)
    launch(mlstm_bwd_kv, (batch * heads, 1, 1), arguments, constants, tile_k // 16, types)
