"""A few tokens of a diagonal recurrence on a pool of states: the custom op of `pooled_step`."""

from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.diagonal.decode.torch.update import PooledSteps
from holdfast.kernels.diagonal.decode.triton.backend import TritonSteps
from holdfast.kernels.select import resolve
from holdfast.kernels.slots import Slots
from holdfast.recurrences.definition import DiagonalCall

from .autocast import without_autocast
from .diagonal import problem
from .registration import define
from .slot_checks import check_dense, check_pool, pool_dtypes

BACKENDS = (TritonSteps(), PooledSteps())


def diagonal_on_pool(call: DiagonalCall, op: str, pool: Any, held: Slots, keys_last: bool, backend: str) -> Tensor:
    """What `pooled_step` returns for a diagonal recurrence, whose call this is.

    Raises TypeError or ValueError for a pool that does not fit, ValueError for keys_last.
    """
    if keys_last:
        raise ValueError(f"keys_last: expected False for {op!r}, whose state [D] has no keys; got True")
    check_pool("pool", pool, call.x, ["slots", call.x.shape[2]], pool_dtypes(call.x))
    check_dense("pool", pool)
    return diagonal_pool_step(*call[:3], pool, *held, call.log, op, backend)


def _run(
    a: Tensor,
    x: Tensor,
    theta: Tensor | None,
    pool: Tensor,
    slots: Tensor,
    next_slots: Tensor,
    accepted: Tensor | None,
    log: bool,
    op: str,
    backend: str,
) -> Tensor:
    """h [B, L, D] in x's dtype of a DiagonalCall; pool is updated."""
    call = DiagonalCall(a, x, theta, log=log)
    chosen, plan = resolve(BACKENDS, problem(op, call, None, False), describe(x.device), backend, "forward")
    with without_autocast(x):
        return chosen.update(plan, call, pool, Slots(slots, next_slots, accepted))


def _fake(a, x, theta, pool, slots, next_slots, accepted, log, op, backend):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


diagonal_pool_step = define("diagonal_pool_step", _run, _fake, mutates=["pool"])
