"""A few tokens of a matrix recurrence on a pool of states: the custom ops of `pooled_step`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.matrix.decode.call import NormalizedPool, NormalizedTokens, Pool
from holdfast.kernels.matrix.decode.torch.update import PooledReference
from holdfast.kernels.matrix.decode.triton.backend import TritonPool
from holdfast.kernels.matrix.problem import problem
from holdfast.kernels.select import resolve
from holdfast.kernels.slots import Slots
from holdfast.planner import Plan
from holdfast.recurrences.definition import MatrixCall
from holdfast.recurrences.mlstm import Gating
from holdfast.recurrences.scalars import number
from holdfast.recurrences.simple_gla import default_scale

from .autocast import without_autocast
from .mlstm import check_gating
from .registration import define
from .slot_checks import check_dense, check_mlstm_pools, check_pool, matrix_state, pool_dtypes

BACKENDS = (TritonPool(), PooledReference())
MOST_TOKENS = TritonPool.MOST_TOKENS


def on_pool(
    mapped: tuple[MatrixCall, Any], op: str, tokens: int, pool: Any, held: Slots, keys_last: bool, backend: str
) -> Tensor:
    """What `pooled_step` returns for an op with one state. mapped: what the recurrence's `map` returned of the tokens.

    Raises TypeError or ValueError for a pool that does not fit, ValueError for an op of several steps a token.
    """
    call, finish = mapped
    if call.v.shape[1] != tokens:
        raise ValueError(f"op: expected one with one step a token; got {op!r}, which has several steps a token")
    check_pool("pool", pool, call.v, ["slots", *matrix_state(call.k, call.v, keys_last)], pool_dtypes(call.v))
    check_dense("pool", pool)
    numbers = (keys_last, call.scale, call.delta, call.erase_before_decay, op, backend)
    o = matrix_pool_step(*call[:5], call.e, pool, *held, *numbers)
    if finish is None:
        return o
    # what is added to outputs, as SSD's D x is, is no more there for a row of padding
    return torch.where(held.are_read(pool.shape[0])[:, None, None, None], finish(o, None)[0], 0.0)


def mlstm_on_pool(
    given: Mapping[str, Tensor],
    pool: Any,
    held: Slots,
    keys_last: bool,
    backend: str,
    gating: Gating = "exp",
    normalize: bool = True,
    scale: float | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """What `pooled_step` returns for mLSTM. given: its checked tensors; the last four: the op's options.

    Raises TypeError or ValueError for a pool that does not fit and for the options that the op refuses.
    """
    check_gating(gating, normalize)
    q, k, v, i, f = (given[name] for name in "qkvif")
    pool = check_mlstm_pools(pool, k, v, keys_last)
    for n, each in enumerate(pool):
        check_dense(f"pool[{n}]", each)
    scale, eps = default_scale(scale, k), number("eps", eps, 0)
    return mlstm_pool_step(q, k, v, i, f, *pool, *held, keys_last, scale, eps, gating == "exp", normalize, backend)


def _plan(op: str, call: MatrixCall, pool: Tensor, keys_last: bool, backend: str) -> tuple[Any, Plan]:
    """The backend that runs a call on a pool, and how."""
    what = problem(op, call, None, False)
    traits = {"keys_last": keys_last, "wide_states": pool.element_size() >= 4}
    what = replace(what, traits=what.traits | {name for name, held in traits.items() if held})
    return resolve(BACKENDS, what, describe(call.v.device), backend, "forward")


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    e: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    next_slots: Tensor,
    accepted: Tensor | None,
    keys_last: bool,
    scale: float,
    delta: bool,
    erase_before_decay: bool,
    op: str,
    backend: str,
) -> Tensor:
    """o [B, L, H, V] in v's dtype of a MatrixCall without a normaliser; pool is updated."""
    call = MatrixCall(q, k, v, g, beta, e=e, scale=scale, delta=delta, erase_before_decay=erase_before_decay)
    chosen, plan = _plan(op, call, pool, keys_last, backend)
    with without_autocast(v):
        return chosen.update(plan, call, Pool(pool, Slots(slots, next_slots, accepted), keys_last))


def _fake(
    q, k, v, g, beta, e, pool, slots, next_slots, accepted, keys_last, scale, delta, erase_before_decay, op, backend
):  # fmt: skip
    return torch.empty_like(v, memory_format=torch.contiguous_format)


matrix_pool_step = define("matrix_pool_step", _run, _fake, mutates=["pool"])


def _run_mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    C: Tensor,
    n: Tensor,
    m: Tensor,
    slots: Tensor,
    next_slots: Tensor,
    accepted: Tensor | None,
    keys_last: bool,
    scale: float,
    eps: float,
    exponential: bool,
    normalize: bool,
    backend: str,
) -> Tensor:
    """h [B, L, H, V] in v's dtype; C, n and m are updated."""
    call = NormalizedTokens(q, k, v, i, f, scale, eps, exponential, normalize)
    # gates have the shapes of their pre-activations
    chosen, plan = _plan("mlstm", MatrixCall(q, k, v, f, i, i if normalize else None), C, keys_last, backend)
    with without_autocast(v):
        pool = NormalizedPool(C, n, m, Slots(slots, next_slots, accepted), keys_last)
        return chosen.update_normalized(plan, call, pool)


def _fake_mlstm(
    q, k, v, i, f, C, n, m, slots, next_slots, accepted, keys_last, scale, eps, exponential, normalize, backend
):  # fmt: skip
    return torch.empty_like(v, memory_format=torch.contiguous_format)


mlstm_pool_step = define("mlstm_pool_step", _run_mlstm, _fake_mlstm, mutates=["C", "n", "m"])
