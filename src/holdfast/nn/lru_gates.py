"""The gates of the linear recurrent units: projections within heads, and a decay that starts between given bounds."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SLOWEST, FASTEST = 0.999, 0.9


class HeadLinear(nn.Module):
    """y_h = W_h x_h + b_h for each head h, on the last axis of x [..., heads * inputs], laid out head by head."""

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.randn(heads, inputs, outputs) * inputs**-0.5)
        self.bias = nn.Parameter(torch.zeros(heads, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads * inputs] -> [..., heads, outputs]."""
        return torch.einsum("...hi,hio->...ho", x.unflatten(-1, (self.heads, -1)), self.weight) + self.bias


def initial_rate(channels: int, strength: float) -> Tensor:
    """Lambda [channels] such that exp(-strength softplus(Lambda)) is uniform between 0.9 and 0.999."""
    rate = -torch.empty(channels).uniform_(FASTEST, SLOWEST).log() / strength
    return torch.log(torch.expm1(rate))


def log_magnitude(gate: Tensor, rate: Tensor, strength: float) -> Tensor:
    """log a = -strength softplus(Lambda) sigmoid(gate), in gate's dtype."""
    return -strength * F.softplus(rate.to(gate.dtype)) * gate.sigmoid()


def input_scale(log_a: Tensor) -> Tensor:
    """sqrt(1 - a^2), which keeps the state's variance that of the input, exact also where a is near 1."""
    # the bound is below every square that float32 resolves; it stops the gradient where a is 1, which is infinite there
    return (-torch.expm1(2 * log_a)).clamp_min(1e-30).sqrt()
