"""The gates of the linear recurrent units: projections within heads, and a decay that starts between given bounds."""

import torch
from torch import Tensor, nn

SLOWEST, FASTEST = 0.999, 0.9


class HeadLinear(nn.Module):
    """y_h = W_h x_h + b_h for each head h, on the last axis of x [..., heads * inputs], laid out head by head.

    bias [heads, outputs] is left for what reads y to add: a pass over memory less.
    """

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.randn(heads, inputs, outputs) * inputs**-0.5)
        self.bias = nn.Parameter(torch.zeros(heads, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads * inputs] -> [..., heads, outputs], without bias."""
        return torch.einsum("...hi,hio->...ho", x.unflatten(-1, (self.heads, -1)), self.weight)


def initial_rate(channels: int, strength: float) -> Tensor:
    """Lambda [channels] such that exp(-strength softplus(Lambda)) is uniform between 0.9 and 0.999."""
    rate = -torch.empty(channels).uniform_(FASTEST, SLOWEST).log() / strength
    return torch.log(torch.expm1(rate))
