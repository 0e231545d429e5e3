"""The diagonal recurrences, and the walk of chunk states, a step at a time in float64, from their pages."""

from typing import Any

import torch
from torch import Tensor

from .rows import Rows


def _scan(rows: Rows, a: Tensor, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
    a, x = rows.split(a), rows.split(x)
    gates, inputs = a.unbind(1), x.unbind(1)
    h = x.new_zeros(rows.count, x.shape[-1]) if h is None else h

    def step(t: int, state: tuple[Tensor, ...]) -> Any:
        h = gates[t] * state[0] + inputs[t]
        return (h,), h

    o, (h,) = rows.walk((h,), step, x[:, :0])
    return o, h


def rglru(rows: Rows, a: Tensor, x: Tensor, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return _scan(rows, a, x, initial_state)


def hgrn(rows: Rows, x: Tensor, g: Tensor, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return _scan(rows, torch.exp(g), x, initial_state)


def rotlru(rows: Rows, a: Tensor, theta: Tensor, x: Tensor, initial_state=None) -> tuple[Tensor, Tensor]:
    def paired(y: Tensor) -> Tensor:
        return torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())

    def flat(y: Tensor) -> Tensor:
        # not view_as_real, whose gradient asks for an even place in memory
        return torch.stack((y.real, y.imag), -1).flatten(-2)

    turned = torch.complex(a * torch.cos(theta), a * torch.sin(theta))
    h, last = _scan(rows, turned, paired(x), None if initial_state is None else paired(initial_state))
    return flat(h), flat(last)


def inter_chunk_scan(rows: Rows, states: Tensor, decay: Tensor, W=None, Y=None, initial_state=None):
    added, kept = rows.split(states).unbind(1), rows.split(decay).exp()
    kept = (kept[..., None, None] if decay.dim() == 3 else kept[..., None]).unbind(1)
    left, right = (None if x is None else rows.split(x).unbind(1) for x in (W, Y))
    shape = rows.count, *states.shape[2:]
    h = states.new_zeros(shape) if initial_state is None else initial_state

    def step(t: int, state: tuple[Tensor, ...]) -> Any:
        (h,) = state
        if left is not None:
            h = h - left[t] @ (right[t].mT @ h)
        h = kept[t] * h + added[t]
        return (h,), h

    o, (h,) = rows.walk((h,), step, rows.split(states)[:, :0])
    return o, h
