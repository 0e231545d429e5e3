"""What stands around the scan of a selective call, token by token: step sizes before it, skip and gate behind it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.recurrences.definition import SelectiveCall


def step_sizes(call: SelectiveCall, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return delta [B, T, D] in dtype, and what its gradient is multiplied by for that of dt; None for 1."""
    delta = call.dt.to(dtype)
    if call.dt_bias is not None:
        delta = delta + call.dt_bias.to(dtype)
    if not call.softplus:
        return delta, None
    return F.softplus(delta), torch.sigmoid(delta)


def finish(call: SelectiveCall, read: Tensor) -> Tensor:
    """Return y [B, T, D] in x's dtype; read: sum_n C_n S_n, float32 or wider."""
    y = with_skip(call, read)
    if call.z is not None:
        y = y * F.silu(call.z.to(read.dtype))
    return y.to(call.x.dtype)


def with_skip(call: SelectiveCall, read: Tensor) -> Tensor:
    return read if call.D is None else torch.addcmul(read, call.D.to(read.dtype), call.x.to(read.dtype))


def finish_grads(call: SelectiveCall, read: Tensor | None, grad_y: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of what the gate multiplies, in grad_y's dtype, and that of z, or None; read: with a gate."""
    if call.z is None:
        return grad_y, None
    assert read is not None
    z = call.z.to(grad_y.dtype)
    open_ = torch.sigmoid(z)
    silu_grad = open_ * (1 + z * (1 - open_))
    return grad_y * (z * open_), (grad_y * with_skip(call, read) * silu_grad).to(call.z.dtype)
