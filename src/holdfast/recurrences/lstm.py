"""LSTM with a forget gate and no peepholes, as torch.nn.LSTM has it."""

from typing import Any

from torch import Tensor, sigmoid, tanh

from . import dense
from .cell import cell
from .definition import Recurrence


@cell(states=("h", "c"), gates=("i", "f", "z", "o"))
def lstm(s: Any, g: Any) -> dict[str, Tensor]:
    c = sigmoid(g.f) * s.c + sigmoid(g.i) * tanh(g.z)
    return {"h": sigmoid(g.o) * tanh(c), "c": c}


LSTM = Recurrence(
    name="lstm",
    family="dense",
    title="LSTM",
    equation="i, f, z, o = x_t + R h_{t-1} + b;  c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(z);  "
    "h_t = sigmoid(o) tanh(c_t)",
    paper="Hochreiter and Schmidhuber 1997, Long Short-Term Memory (doi:10.1162/neco.1997.9.8.1735); the forget gate: "
    "Gers, Schmidhuber and Cummins 2000, Learning to Forget (doi:10.1162/089976600300015015)",
    arguments=dense.ARGUMENTS,
    map=dense.mapping(lstm),
    example=dense.example(lstm),
)
