"""The gates of the linear recurrent units in PyTorch, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.lru.call import Gates


def lru_gates(given: Gates) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a, write and theta, which is None without a phase:

        log a = -decay_scale softplus(rate) sigmoid(r);  write = sqrt(1 - a^2) sigmoid(i) u;  theta = phase + angle

    a, theta: [B, T, H * P] in float32 or wider; write: [B, T, H * C] in u's dtype.
    """
    u = given.u
    dtype = torch.promote_types(u.dtype, torch.float32)
    parts = (given.gates.to(dtype) + given.bias).split(given.splits, -1)
    r, i, *angle = (part.flatten(-2) for part in parts)
    log_a = log_magnitude(r, given.rate, given.decay_scale)
    scale = input_scale(log_a)
    if given.phase is not None:
        scale = scale.repeat_interleave(2, -1)
    write = (scale * i.sigmoid() * u).to(u.dtype)
    return log_a.exp(), write, given.phase + angle[0] if angle else None


def log_magnitude(gate: Tensor, rate: Tensor, decay_scale: float) -> Tensor:
    """Return log a = -decay_scale softplus(Lambda) sigmoid(gate), in gate's dtype."""
    return -decay_scale * F.softplus(rate.to(gate.dtype)) * gate.sigmoid()


def input_scale(log_a: Tensor) -> Tensor:
    """Return sqrt(1 - a^2), which keeps the state's variance that of the input, exact also where a is near 1."""
    # the bound is below every square that float32 resolves; it stops the gradient where a is 1, which is infinite there
    return (-torch.expm1(2 * log_a)).clamp_min(1e-30).sqrt()
