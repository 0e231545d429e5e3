"""The dense family, one step at a time: what every kernel of the family is checked against."""

from typing import Any

import torch
from torch import Tensor

from .definition import DenseCall
from .oracle_matrix import compute_dtype


class _ClipGrad(torch.autograd.Function):
    """The identity, whose gradient is clipped elementwise."""

    @staticmethod
    def forward(x: Tensor, limit: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.limit = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clamp(-ctx.limit, ctx.limit), None


def dense_steps(call: DenseCall) -> tuple[Tensor, Tensor]:
    """Runs a call of equal-length sequences step by step, differentiably.

    Returns h [B, T, H, D] and the final state [S, B, H, D], both in float32, or float64 for float64
    inputs. The equations are DenseCall's.
    """
    cell, dtype = call.cell, compute_dtype(call.x.dtype)
    x, R = call.x.to(dtype), call.R.to(dtype)
    batch, _, _, heads, width = x.shape
    b = x.new_zeros(len(cell.gates), heads, width) if call.b is None else call.b.to(dtype)
    if call.initial_state is None:
        states = [x.new_zeros(batch, heads, width) for _ in cell.states]
    else:
        states = list(call.initial_state.to(dtype).unbind(0))

    outputs = []
    # taken apart at once: the gradient of each x[:, t] would be as large as x
    for t, inputs in enumerate(x.unbind(1)):
        if call.reset is not None:
            states = [s.masked_fill(call.reset[:, t, None, None], 0) for s in states]
        h = states[0]
        if call.cut_recurrent_grad:
            h = h.detach()
        elif call.recurrent_grad_clip is not None:
            h = _ClipGrad.apply(h, call.recurrent_grad_clip)
        product = torch.einsum("ghij,bhj->gbhi", R, h)
        gates = []
        for k, gate in enumerate(cell.gates):
            value = b[k].expand(batch, heads, width)
            if gate in cell.input:
                value = value + inputs[:, cell.input.index(gate)]
            if gate in cell.recurrent:
                value = value + product[cell.recurrent.index(gate)]
            gates.append(value)
        states = [s.expand(batch, heads, width) for s in cell.step(states, gates)]
        outputs.append(states[0])
    h = torch.stack(outputs, dim=1) if outputs else x[:, :, 0]
    return h, torch.stack(states)
