"""sLSTM: exponential gates, a normaliser and a stabiliser."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, sigmoid, tanh

from . import dense
from .cell import cell
from .definition import Recurrence
from .example import Draw, Sizes


@cell(states=("h", "c", "n", "m"), gates=("i", "f", "z", "o"))
def slstm(s: Any, g: Any) -> dict[str, Tensor]:
    decayed = F.logsigmoid(g.f) + s.m
    # c and n stand for c exp(m) and n exp(m): an empty state has no scale of its own. This keeps n >= 1 from the first
    # step on, however small its input gate is.
    m = torch.where(s.n == 0, g.i, torch.maximum(decayed, g.i))
    keep, write = torch.exp(torch.where(s.n == 0, 0.0, decayed - m)), torch.exp(g.i - m)
    c = keep * s.c + write * tanh(g.z)
    n = keep * s.n + write
    return {"h": sigmoid(g.o) * c / n, "c": c, "n": n, "m": m}


def _example(draw: Draw, sizes: Sizes) -> dict[str, Any]:
    arguments = dense.example(slstm)(draw, sizes)
    h, c, n, m = arguments["initial_state"]
    return arguments | {"initial_state": torch.stack([h, c, n.abs() + 1, m])}


SLSTM = Recurrence(
    name="slstm",
    family="dense",
    title="sLSTM",
    equation="i, f, z, o = x_t + R h_{t-1} + b;  m_t = max(logsigmoid(f) + m_{t-1}, i), or i while n_{t-1} = 0;  "
    "c_t = exp(logsigmoid(f) + m_{t-1} - m_t) c_{t-1} + exp(i - m_t) tanh(z);  "
    "n_t = exp(logsigmoid(f) + m_{t-1} - m_t) n_{t-1} + exp(i - m_t);  h_t = sigmoid(o) c_t / n_t",
    paper="Beck et al. 2024, xLSTM (arXiv:2405.04517)",
    arguments=dense.ARGUMENTS,
    map=dense.mapping(slstm),
    example=_example,
)
