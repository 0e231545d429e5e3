"""Elman network: one gate, one state."""

from typing import Any, Literal

import torch
from torch import Tensor

from . import dense
from .cell import Cell, cell
from .definition import DenseCall, Recurrence

Nonlinearity = Literal["tanh", "relu"]


@cell(states=("h",), gates=("z",))
def elman(s: Any, g: Any) -> dict[str, Tensor]:
    return {"h": torch.tanh(g.z)}


@cell(states=("h",), gates=("z",))
def elman_relu(s: Any, g: Any) -> dict[str, Tensor]:
    return {"h": torch.relu(g.z)}


CELLS: dict[str, Cell] = {"tanh": elman, "relu": elman_relu}


def _map(
    x: Tensor,
    R: Tensor,
    b: Tensor | None = None,
    initial_state: Tensor | None = None,
    reset: Tensor | None = None,
    recurrent_grad_clip: float | None = None,
    cut_recurrent_grad: bool = False,
    nonlinearity: Nonlinearity = "tanh",
) -> tuple[DenseCall, None]:
    chosen = CELLS[nonlinearity]
    return DenseCall(chosen, x, R, b, initial_state, reset, recurrent_grad_clip, cut_recurrent_grad), None


ELMAN = Recurrence(
    name="elman",
    family="dense",
    title="Elman network",
    equation="h_t = tanh(x_t + R h_{t-1} + b), or relu for tanh",
    paper="Elman 1990, Finding Structure in Time (doi:10.1207/s15516709cog1402_1)",
    arguments=dense.ARGUMENTS,
    map=_map,
    example=dense.example(elman),
)
