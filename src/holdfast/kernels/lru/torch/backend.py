"""The gates of the linear recurrent units in PyTorch, on any device."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Gates(NamedTuple):
    """What the gates are made of: P numbers of a state a head, C channels of u, C = P or, of pairs, C = 2 P.

    Of `gates` [B, T, H, S] and `bias` [H, S], the first P columns are of r, the next C of i, and the last P, where
    there is a phase, of the angle.
    """

    u: Tensor  # [B, T, H * C], inputs of the recurrence
    gates: Tensor  # [B, T, H, S], before their bias and activation
    bias: Tensor  # [H, S]
    rate: Tensor  # [H * P], Lambda
    phase: Tensor | None  # [H * P], theta_0, radians
    strength: float  # c

    @property
    def splits(self) -> list[int]:
        heads = self.bias.shape[0]
        numbers, channels = self.rate.shape[0] // heads, self.u.shape[2] // heads
        return [numbers, channels] + ([] if self.phase is None else [numbers])


def lru_gates(given: Gates) -> tuple[Tensor, Tensor, Tensor | None]:
    """a, write and theta, which is None without a phase:

        log a = -strength softplus(rate) sigmoid(r);  write = sqrt(1 - a^2) sigmoid(i) u;  theta = phase + angle

    a, theta: [B, T, H * P] in float32 or wider; write: [B, T, H * C] in u's dtype.
    """
    u = given.u
    dtype = torch.promote_types(u.dtype, torch.float32)
    parts = (given.gates.to(dtype) + given.bias).split(given.splits, -1)
    r, i, *turn = (part.flatten(-2) for part in parts)
    log_a = log_magnitude(r, given.rate, given.strength)
    scale = input_scale(log_a)
    if given.phase is not None:
        scale = scale.repeat_interleave(2, -1)
    write = (scale * i.sigmoid() * u).to(u.dtype)
    return log_a.exp(), write, given.phase + turn[0] if turn else None


def log_magnitude(gate: Tensor, rate: Tensor, strength: float) -> Tensor:
    """log a = -strength softplus(Lambda) sigmoid(gate), in gate's dtype."""
    return -strength * F.softplus(rate.to(gate.dtype)) * gate.sigmoid()


def input_scale(log_a: Tensor) -> Tensor:
    """sqrt(1 - a^2), which keeps the state's variance that of the input, exact also where a is near 1."""
    # the bound is below every square that float32 resolves; it stops the gradient where a is 1, which is infinite there
    return (-torch.expm1(2 * log_a)).clamp_min(1e-30).sqrt()
