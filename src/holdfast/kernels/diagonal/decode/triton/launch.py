"""The launch of a few tokens on a pool of states."""

import torch
from torch import Tensor

from holdfast.kernels.runtime.launch import launch
from holdfast.kernels.slots import Slots
from holdfast.planner import Plan
from holdfast.recurrences.definition import DiagonalCall

from .update import diagonal_decode_pool


def update(plan: Plan, call: DiagonalCall, states: Tensor, slots: Slots) -> Tensor:
    """Return h [B, L, D] in x's dtype; the pool's states [slots, D] go on."""
    batch, tokens, _ = call.x.shape
    h = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    if not batch or not states.shape[0]:
        return h.zero_()
    a, x, theta = (None if x is None else x if x.stride(2) == 1 else x.contiguous() for x in call[:3])
    numbers = call.a.shape[2]
    strides = (n for each in (a, x, theta) for n in ((0, 0) if each is None else each.stride()[:2]))
    constants = {
        "TOKENS": tokens,
        "LOG": call.log,
        "EACH": slots.is_each,
        "BLOCK": plan["channels"],
    }
    launch(
        diagonal_decode_pool,
        (-(-numbers // plan["channels"]) * batch,),
        (a, x, theta, h, states, *slots),
        (numbers, states.shape[0], states.stride(0), *strides),
        constants,
        plan["warps"],
    )
    return h
