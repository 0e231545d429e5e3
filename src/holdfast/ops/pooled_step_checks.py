"""Random calls on a pool of states, for doctor."""

from typing import Any

import torch
from torch import Tensor

from holdfast.recurrences import Draw, Sizes
from holdfast.recurrences.gated_delta_rule import GATED_DELTA_RULE
from holdfast.recurrences.hgrn import HGRN
from holdfast.recurrences.mlstm import MLSTM
from holdfast.recurrences.rotlru import ROTLRU

from .pooled_step import pooled_step

# of a matrix state, of one with its normaliser, of a vector and of pairs
POOLED = {recurrence.name: recurrence for recurrence in (GATED_DELTA_RULE, MLSTM, HGRN, ROTLRU)}
_SLOTS = 5


def draw_pool(draw: Draw, sizes: Sizes, op: str = "gated_delta_rule") -> dict[str, Any]:
    """Arguments of `pooled_step` but for op: of three sequences one is padding, and one goes elsewhere half-way."""
    arguments = POOLED[op].example(draw, sizes)
    state = arguments.pop("initial_state")
    pool = tuple(draw.state(_SLOTS, *x.shape[1:]) for x in (state if isinstance(state, tuple) else (state,)))
    numbers = {"slots": [4, -1, 0], "next_slots": [4, 2, 3], "accepted": [sizes.T, 1, 1]}
    indices = {name: torch.tensor(x, dtype=torch.int32, device=draw.device) for name, x in numbers.items()}
    return {"arguments": arguments, "pool": pool if len(pool) > 1 else pool[0]} | indices


def pooled(
    a: dict[str, Any], backend: str, keys_last: bool = False, op: str = "gated_delta_rule"
) -> tuple[Tensor, ...]:
    """The outputs and the pool after a call on a copy of it. keys_last: of a matrix state, drawn with K before V."""
    given = a["pool"]
    first, *others = (x.clone() for x in (given if isinstance(given, tuple) else (given,)))
    held = first.mT.contiguous() if keys_last else first
    pool = (held, *others) if others else held
    o = pooled_step(op, **a | {"pool": pool}, keys_last=keys_last, backend=backend)
    return o, held.mT if keys_last else held, *others
