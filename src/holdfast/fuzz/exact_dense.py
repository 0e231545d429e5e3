"""The dense recurrences a step at a time in float64, from their pages in docs/recurrences."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, sigmoid, tanh

from .rows import Rows

States = tuple[Tensor, ...]


def _run(
    rows: Rows,
    cell: Callable[[list[Tensor], list[Tensor], States], States],
    states: int,
    x: Tensor,
    R: Tensor,
    initial_state: Tensor | None,
    reset: Tensor | None,
    clip: float | None,
    cut: bool,
) -> tuple[Tensor, Tensor]:
    """cell(the parts of x_t, the parts of R h, states) -> states; each part [rows, H, D]."""
    x = rows.split(x)
    inputs = x.unbind(1)
    zeroed = None if reset is None else rows.split(reset).unbind(1)
    if initial_state is None:
        start = tuple(x.new_zeros(rows.count, *x.shape[3:]) for _ in range(states))
    else:
        start = initial_state.unbind(0)

    def step(t: int, state: States) -> Any:
        if zeroed is not None:
            state = tuple(torch.where(zeroed[t][:, None, None], torch.zeros_like(s), s) for s in state)
        h = state[0]
        if cut:
            h = h.detach()
        elif clip is not None and h.requires_grad:
            h = h.clone()
            h.register_hook(lambda grad: grad.clamp(-clip, clip))
        carried = (R[:, None] @ h[None, ..., None])[..., 0]
        state = cell(list(inputs[t].unbind(1)), list(carried.unbind(0)), state)
        return state, state[0]

    h, last = rows.walk(start, step, x[:, :0, 0])
    return h, torch.stack(last)


def _bias(b: Tensor | None, gates: int) -> list[Any]:
    return [0.0] * gates if b is None else list(b.unbind(0))


def elman(
    rows, x, R, b=None, initial_state=None, reset=None, recurrent_grad_clip=None, cut_recurrent_grad=False,
    nonlinearity="tanh",
):  # fmt: skip
    (bias,) = _bias(b, 1)
    act = {"tanh": torch.tanh, "relu": torch.relu}[nonlinearity]

    def cell(x: list[Tensor], r: list[Tensor], _: States) -> States:
        return (act(x[0] + r[0] + bias),)

    return _run(rows, cell, 1, x, R, initial_state, reset, recurrent_grad_clip, cut_recurrent_grad)


def lstm(rows, x, R, b=None, initial_state=None, reset=None, recurrent_grad_clip=None, cut_recurrent_grad=False):
    bias = _bias(b, 4)

    def cell(x: list[Tensor], r: list[Tensor], state: States) -> States:
        i, f, z, o = (x[n] + r[n] + bias[n] for n in range(4))
        c = sigmoid(f) * state[1] + sigmoid(i) * tanh(z)
        return sigmoid(o) * tanh(c), c

    return _run(rows, cell, 2, x, R, initial_state, reset, recurrent_grad_clip, cut_recurrent_grad)


def gru(rows, x, R, b=None, initial_state=None, reset=None, recurrent_grad_clip=None, cut_recurrent_grad=False):
    br, bz, bn, bm = _bias(b, 4)

    def cell(x: list[Tensor], r: list[Tensor], state: States) -> States:
        reset_gate, update = sigmoid(x[0] + r[0] + br), sigmoid(x[1] + r[1] + bz)
        candidate = tanh(x[2] + bn + reset_gate * (r[2] + bm))
        return (update * state[0] + (1 - update) * candidate,)

    return _run(rows, cell, 1, x, R, initial_state, reset, recurrent_grad_clip, cut_recurrent_grad)


def slstm(rows, x, R, b=None, initial_state=None, reset=None, recurrent_grad_clip=None, cut_recurrent_grad=False):
    bias = _bias(b, 4)

    def cell(x: list[Tensor], r: list[Tensor], state: States) -> States:
        i, f, z, o = (x[n] + r[n] + bias[n] for n in range(4))
        _, c, n, m = state
        before = F.logsigmoid(f) + m
        empty = n == 0
        top = torch.where(empty, i, torch.maximum(before, i))
        # an empty state holds nothing to scale
        kept = torch.exp(torch.where(empty, torch.zeros_like(before), before - top))
        write = torch.exp(i - top)
        c, n = kept * c + write * tanh(z), kept * n + write
        return sigmoid(o) * c / n, c, n, top

    return _run(rows, cell, 4, x, R, initial_state, reset, recurrent_grad_clip, cut_recurrent_grad)


def rnn(rows, x, R, b=None, initial_state=None, reset=None, recurrent_grad_clip=None, cut_recurrent_grad=False):
    """The cell of `own_cell`: c = f c + (1 - f) tanh(z), h = sigmoid(o) c, with o fed by x alone."""
    bf, bz, bo = _bias(b, 3)

    def cell(x: list[Tensor], r: list[Tensor], state: States) -> States:
        f = sigmoid(x[0] + r[0] + bf)
        c = f * state[1] + (1 - f) * tanh(x[1] + r[1] + bz)
        return sigmoid(x[2] + bo) * c, c

    return _run(rows, cell, 2, x, R, initial_state, reset, recurrent_grad_clip, cut_recurrent_grad)
