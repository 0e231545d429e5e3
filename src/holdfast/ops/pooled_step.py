"""pooled_step: a few tokens of a recurrence on a pool of states, as engines that serve models hold them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.kernels.runtime.replay.replay import replayed
from holdfast.recurrences.scalars import flag

from .check import name_of
from .pooled_diagonal import diagonal_on_pool
from .pooled_matrix import MOST_TOKENS, mlstm_on_pool, on_pool
from .slot_checks import check_slots
from .step import checked_tokens, mapped


@partial(replayed, changes=True)
@torch.no_grad()
def pooled_step(
    op: str,
    arguments: Mapping[str, Any],
    pool: Tensor | tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    next_slots: Tensor | None = None,
    accepted: Tensor | None = None,
    keys_last: bool = False,
    backend: str | None = None,
) -> Tensor:
    """What `op` returns for a few tokens of each sequence, whose states are read from a pool and written to it.

    Several tokens are what as many calls of one token are, bit for bit, and a sequence's numbers do not depend on its
    neighbours. Nothing is read on the host by the GPU's kernels, so that a CUDA graph replays a call on other slots.
    Gradients are not recorded.

    Args:
        op: a matrix recurrence that takes a token in one step, all but "gated_delta_product" and "rwkv7", or a diagonal
            one: "rglru", "hgrn" or "rotlru".
        arguments: the op's arguments by name, of L = 1 to 8 tokens [B, L, ...], and options such as scale; no
            initial_state.
        pool: [S, H, K, V], or [S, H, V, K] with keys_last; of "mlstm" the tuple (C, n [S, H, K], m [S, H]) with C like
            that; of a diagonal recurrence [S, D]. float32, bfloat16 or float16 (float64 for float64 inputs), m float32
            at least, dense but for the stride between slots. Written to. States are rounded to their pool's dtype after
            each token.
        slots: int32 [B], where each sequence's state is. A number that is none of a slot, such as -1, is a row of
            padding: nothing is read or written for it, and its outputs are 0.
        next_slots: int32 [B], where the state goes, or [B, L], where the state after each token goes; by default where
            it was. Where that is no slot, nothing is written. No slot may be written for one sequence and read or
            written for another.
        accepted: int32 [B], 0 to L, with next_slots [B]: after how many tokens the state is taken; by default after
            all. So tokens that were not accepted leave no trace.
        keys_last: whether K is the last axis of a matrix state.
        backend: "decode" or "reference"; by default what serves the call.

    Returns:
        o [B, L, H, V] in the inputs' dtype; of a diagonal recurrence h [B, L, D].

    Raises:
        ValueError, TypeError: for an unknown op or argument, for an argument of the wrong shape, dtype or device, named
            in the message; for a backend that is unknown or cannot serve the call.
    """
    flag("keys_last", keys_last)
    recurrence, given, options = checked_tokens(op, ("matrix", "diagonal"), arguments)
    first = given[next(iter(recurrence.arguments))]
    tokens = first.shape[1]
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"arguments: expected 1 to {MOST_TOKENS} tokens; got T = {tokens}")
    held = check_slots(slots, next_slots, accepted, first, tokens)
    if op == "mlstm":
        return mlstm_on_pool(given, pool, held, keys_last, name_of(backend), **options)
    call = mapped(recurrence, given, options)
    if recurrence.family == "diagonal":
        return diagonal_on_pool(call[0], op, pool, held, keys_last, name_of(backend))
    return on_pool(call, op, tokens, pool, held, keys_last, name_of(backend))
