"""pooled_step: a few tokens of a matrix recurrence on a pool of states, as engines that serve models hold them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.backend import describe
from holdfast.kernels.matrix.decode.call import Pool
from holdfast.kernels.matrix.decode.torch.update import PooledReference
from holdfast.kernels.matrix.decode.triton.backend import TritonPool
from holdfast.kernels.matrix.problem import problem
from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.kernels.select import resolve
from holdfast.kernels.slots import Slots
from holdfast.recurrences import RECURRENCES
from holdfast.recurrences.definition import MatrixCall
from holdfast.recurrences.scalars import flag

from .autocast import without_autocast
from .check import name_of
from .registration import define
from .slot_checks import check_pool, check_slots
from .step import matrix_call

BACKENDS = (TritonPool(), PooledReference())
MOST_TOKENS = TritonPool.MOST_TOKENS


@partial(replayed, changes=True)
@torch.no_grad()
def pooled_step(
    op: str,
    arguments: Mapping[str, Any],
    pool: Tensor,
    slots: Tensor,
    next_slots: Tensor | None = None,
    accepted: Tensor | None = None,
    keys_last: bool = False,
    backend: str | None = None,
) -> Tensor:
    """What `op` returns for a few tokens of each sequence, whose states are read from a pool and written to it.

    Several tokens are what as many calls of one token are, bit for bit, and a sequence's numbers do not depend on its
    neighbours. Nothing is read on the host by the GPU's kernel, so that a CUDA graph replays a call on other slots.
    Gradients are not recorded.

    Args:
        op: a matrix recurrence that has one state and takes a token in one step: all but "mlstm" with its normaliser,
            "gated_delta_product" and "rwkv7".
        arguments: the op's arguments by name, of L = 1 to 8 tokens [B, L, ...], and options such as scale; no
            initial_state.
        pool: [S, H, K, V], or [S, H, V, K] with keys_last; float32, bfloat16 or float16 (float64 for float64 inputs),
            dense but for the stride between slots. Written to. States are rounded to its dtype after each token.
        slots: int32 [B], where each sequence's state is. A number that is none of a slot, such as -1, is a row of
            padding: nothing is read or written for it, and its outputs are 0.
        next_slots: int32 [B], where the state goes, or [B, L], where the state after each token goes; by default where
            it was. Where that is no slot, nothing is written. No slot may be written for one sequence and read or
            written for another.
        accepted: int32 [B], 0 to L, with next_slots [B]: after how many tokens the state is taken; by default after
            all. So tokens that were not accepted leave no trace.
        keys_last: whether K is a state's last axis.
        backend: "decode" or "reference"; by default what serves the call.

    Returns:
        o [B, L, H, V] in the inputs' dtype.

    Raises:
        ValueError, TypeError: for an unknown op or argument, for an argument of the wrong shape, dtype or device, named
            in the message; for a backend that is unknown or cannot serve the call.
    """
    flag("keys_last", keys_last)
    call, finish = matrix_call(op, arguments)
    tokens = arguments[next(iter(RECURRENCES[op].arguments))].shape[1]
    if call.stabilizer is not None or call.v.shape[1] != tokens:
        reason = "a normaliser beside its state" if call.stabilizer is not None else "several steps a token"
        raise ValueError(f"op: expected one with one state and one step a token; got {op!r}, which has {reason}")
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"arguments: expected 1 to {MOST_TOKENS} tokens; got T = {tokens}")
    _check_pool(pool, call, keys_last)
    held = check_slots(slots, next_slots, accepted, call.v, tokens)
    numbers = (keys_last, call.scale, call.delta, call.erase_before_decay, op, name_of(backend))
    o = matrix_pool_step(*call[:5], call.e, pool, *held, *numbers)
    if finish is None:
        return o
    # what is added to outputs, as SSD's D x is, is no more there for a row of padding
    return torch.where(held.are_read(pool.shape[0])[:, None, None, None], finish(o, None)[0], 0.0)


def _check_pool(pool: Any, call: MatrixCall, keys_last: bool) -> None:
    """Raises TypeError or ValueError for a pool that does not fit the call."""
    keys, heads, values = call.k.shape[3], *call.v.shape[2:]
    check_pool(pool, call.v, [heads, values, keys] if keys_last else [heads, keys, values])
    if not pool.is_contiguous() and not pool[0].is_contiguous():
        raise ValueError(f"pool: expected states that are dense; got strides {list(pool.stride())}")


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
    what = problem(op, call, None, False)
    traits = {"keys_last": keys_last, "wide_states": pool.element_size() >= 4}
    what = replace(what, traits=what.traits | {name for name, held in traits.items() if held})
    chosen, plan = resolve(BACKENDS, what, describe(v.device), backend, "forward")
    with without_autocast(v):
        return chosen.update(plan, call, Pool(pool, Slots(slots, next_slots, accepted), keys_last))


def _fake(
    q, k, v, g, beta, e, pool, slots, next_slots, accepted, keys_last, scale, delta, erase_before_decay, op, backend
):  # fmt: skip
    return torch.empty_like(v, memory_format=torch.contiguous_format)


matrix_pool_step = define("matrix_pool_step", _run, _fake, mutates=["pool"])
