"""A random call on a pool of states, for doctor."""

from typing import Any

import torch
from torch import Tensor

from holdfast.recurrences import Draw, Sizes
from holdfast.recurrences.gated_delta_rule import GATED_DELTA_RULE

from .pooled_step import pooled_step

_SLOTS = 5


def draw_pool(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    """Arguments of `pooled_step` but for op: of three sequences one is padding, and one goes elsewhere half-way."""
    arguments = GATED_DELTA_RULE.example(draw, sizes)
    del arguments["initial_state"]
    numbers = {"slots": [4, -1, 0], "next_slots": [4, 2, 3], "accepted": [sizes.T, 1, 1]}
    indices = {name: torch.tensor(x, dtype=torch.int32, device=draw.device) for name, x in numbers.items()}
    return {"arguments": arguments, "pool": draw.state(_SLOTS, sizes.H, sizes.K, sizes.V)} | indices


def pooled(a: dict[str, Any], backend: str, keys_last: bool = False) -> tuple[Tensor, Tensor]:
    """The outputs and the pool after a call on a copy of it."""
    pool = a["pool"].mT.contiguous() if keys_last else a["pool"].clone()
    o = pooled_step("gated_delta_rule", **a | {"pool": pool}, keys_last=keys_last, backend=backend)
    return o, pool.mT if keys_last else pool
