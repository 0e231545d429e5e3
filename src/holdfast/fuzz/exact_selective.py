"""Mamba-1's selective scan, a step at a time in float64, from its page."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .rows import Rows


def mamba1(
    rows: Rows, x, dt, A, B, C, D=None, z=None, dt_bias=None, initial_state=None, dt_softplus=False
) -> tuple[Tensor, Tensor]:
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    if B.dim() == 3:
        B, C = B[:, :, None], C[:, :, None]
    channels, groups = x.shape[2], B.shape[2]
    # the row of B and C that each channel reads
    of_channel = torch.arange(channels, device=x.device) // (channels // groups)
    steps, inputs = rows.split(dt).unbind(1), rows.split(x).unbind(1)
    writes, reads = (rows.split(part[:, :, of_channel]).unbind(1) for part in (B, C))
    S = x.new_zeros(rows.count, *A.shape) if initial_state is None else initial_state

    def step(t: int, state: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        size = steps[t][..., None]
        S = torch.exp(size * A) * state[0] + size * writes[t] * inputs[t][..., None]
        return (S,), torch.einsum("bdn,bdn->bd", reads[t], S)

    y, (S,) = rows.walk((S,), step, rows.split(x)[:, :0])
    if D is not None:
        y = y + D * x
    if z is not None:
        y = y * (z * torch.sigmoid(z))
    return y, S
