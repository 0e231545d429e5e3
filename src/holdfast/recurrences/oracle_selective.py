"""The selective family, one step at a time: what every kernel of the family is checked against."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .definition import SelectiveCall


def selective_steps(call: SelectiveCall) -> tuple[Tensor, Tensor]:
    """Runs a call of equal-length sequences step by step, differentiably.

    Returns y [B, T, D] and the final state [B, D, N], in float32, or float64 for float64 inputs; y in x's dtype. The
    equations are SelectiveCall's.
    """
    dtype = torch.promote_types(call.x.dtype, torch.float32)
    x, delta, A = (part.to(dtype) for part in (call.x, call.dt, call.A))
    if call.dt_bias is not None:
        delta = delta + call.dt_bias.to(dtype)
    if call.softplus:
        delta = F.softplus(delta)
    # a row of B and C for each channel: [B, T, D, N]
    writes, reads = (part.to(dtype).repeat_interleave(x.shape[2] // part.shape[2], 2) for part in (call.B, call.C))
    state = x.new_zeros(x.shape[0], *A.shape) if call.initial_state is None else call.initial_state.to(dtype)
    outputs = []
    # unbound, since the gradient of a slice of all tokens has all tokens
    for step, token, write, read in zip(*(part.unbind(1) for part in (delta, x, writes, reads)), strict=True):
        size = step[..., None]
        state = (size * A).exp() * state + size * write * token[..., None]
        outputs.append((read * state).sum(-1))
    y = torch.stack(outputs, 1) if outputs else x.new_zeros(x.shape)
    if call.D is not None:
        y = y + call.D.to(dtype) * x
    if call.z is not None:
        y = y * F.silu(call.z.to(dtype))
    return y.to(call.x.dtype), state
