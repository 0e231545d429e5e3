"""torch.nn.LSTM, GRU and RNN (cuDNN on an NVIDIA GPU), one layer, input product included."""

from typing import Any

import torch
from torch import Tensor, nn

from ..case import Case
from ..subject import Refused, Subject

_LAYERS = {"lstm": (nn.LSTM, torch.lstm, 4), "gru": (nn.GRU, torch.gru, 3), "elman": (nn.RNN, torch.rnn_tanh, 1)}


def _gate_biases(op: str, b_ih: Tensor, b_hh: Tensor) -> Tensor:
    """The op's bias from torch.nn's two: they add up, but for GRU's candidate."""
    if op != "gru":
        return b_ih + b_hh
    both, (n, m) = (b_ih + b_hh).view(3, -1), (b_ih.view(3, -1)[2], b_hh.view(3, -1)[2])
    return torch.stack([both[0], both[1], n, m]).flatten()


def prepare(case: Case, device: torch.device, variant: str) -> Subject:
    """u [B, T, D] in place of x, and the layer's own weights, in the one block of memory that cuDNN wants."""
    sizes = dict(case.sizes)
    if sizes["H"] != 1:
        raise Refused("has no heads: H must be 1")
    width, (make, function, gates) = sizes["D"], _LAYERS[case.op]
    torch.manual_seed(0)
    layer = make(width, width, batch_first=True, device=device, dtype=case.torch_dtype)
    u = case.arguments(device)["x"][:, :, 0, 0].contiguous()
    states = torch.zeros(1, sizes["B"], width, device=device, dtype=case.torch_dtype)
    start = (states, states) if case.op == "lstm" else states

    def call(a: dict[str, Any]) -> Tensor:
        # has_biases, num_layers, dropout, train, bidirectional, batch_first
        return function(a["u"], start, a["weights"], True, 1, 0.0, case.passes != "fwd", False, True)[0]

    def exact(a: dict[str, Any]) -> Tensor:
        w_ih, w_hh, b_ih, b_hh = a["weights"]
        x = (a["u"] @ w_ih.T).unflatten(-1, (gates, 1, width))
        R = w_hh.view(gates, 1, width, width)
        b = _gate_biases(case.op, b_ih, b_hh).view(-1, 1, width)
        return case.work.exact({"x": x, "R": R, "b": b}, {})[:, :, 0]

    weights = [getattr(layer, name) for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")]
    where = "cuDNN" if device.type == "cuda" else "torch.nn"
    return Subject({"u": u, "weights": weights}, call, exact, f"{where}, input product included")
