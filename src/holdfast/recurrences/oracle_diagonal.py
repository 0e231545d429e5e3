"""The diagonal family, one step at a time: what every kernel of the family is checked against."""

import torch
from torch import Tensor

from .definition import DiagonalCall


def diagonal_steps(call: DiagonalCall) -> tuple[Tensor, Tensor]:
    """Runs a call of equal-length sequences step by step, differentiably.

    Returns h [B, T, D] and the final state [B, D], both in float32, or float64 for float64 inputs. The equations are
    DiagonalCall's.
    """
    dtype = torch.promote_types(call.x.dtype, torch.float32)
    x, a = call.x.to(dtype), call.a.to(dtype)
    if call.log:
        a = a.exp()
    state = x.new_zeros(x.shape[0], x.shape[2]) if call.initial_state is None else call.initial_state.to(dtype)
    if call.theta is not None:
        theta = call.theta.to(dtype)
        gates = zip((a * theta.cos()).unbind(1), (a * theta.sin()).unbind(1), strict=True)
    else:
        gates = a.unbind(1)

    outputs = []
    for gate, addition in zip(gates, x.unbind(1), strict=True):
        if call.theta is None:
            carried = gate * state
        else:
            real, imaginary = state[:, 0::2], state[:, 1::2]
            along, across = gate
            carried = torch.stack([along * real - across * imaginary, across * real + along * imaginary], -1).flatten(1)
        state = carried + addition
        outputs.append(state)
    return torch.stack(outputs, dim=1) if outputs else x.new_zeros(x.shape), state
