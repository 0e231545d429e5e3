"""GRU with the reset gate after the recurrent product, as cuDNN and torch.nn.GRU have it."""

from typing import Any

from torch import Tensor, sigmoid, tanh

from . import dense
from .cell import cell
from .definition import Recurrence


@cell(states=("h",), gates=("r", "z", "n", "m"), input=("r", "z", "n"), recurrent=("r", "z", "m"))
def gru(s: Any, g: Any) -> dict[str, Tensor]:
    z = sigmoid(g.z)
    return {"h": (1 - z) * tanh(g.n + sigmoid(g.r) * g.m) + z * s.h}


GRU = Recurrence(
    name="gru",
    family="dense",
    title="GRU, reset after",
    equation="r, z = x_t + R h_{t-1} + b;  n = x_t + b;  m = R h_{t-1} + b;  "
    "h_t = (1 - sigmoid(z)) tanh(n + sigmoid(r) m) + sigmoid(z) h_{t-1}",
    paper="Cho et al. 2014, Learning Phrase Representations using RNN Encoder-Decoder (arXiv:1406.1078), in the form "
    "that resets after the product, as in Chetlur et al. 2014, cuDNN (arXiv:1410.0759)",
    arguments=dense.ARGUMENTS,
    map=dense.mapping(gru),
    example=dense.example(gru),
)
