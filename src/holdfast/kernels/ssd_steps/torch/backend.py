"""Step sizes and log decays in PyTorch, on any device."""

import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.autograd.vjp import vjp

from ..call import StepsCall


class PyTorchSteps:
    """Every call."""

    def forward(self, call: StepsCall) -> tuple[Tensor, Tensor]:
        """Return the step sizes and the log decays, [B, T, H], in the call's dtype."""
        return tuple(x.contiguous() for x in _run(call))

    def backward(
        self, call: StepsCall, dstep: Tensor, dg: Tensor, ddt: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of dt, A and dt_bias, in their dtypes. ddt: where the first is written."""
        given = {name: x for name, x in zip(("dt", "A", "dt_bias"), call, strict=False) if x is not None}

        def run(*leaves: Tensor) -> tuple[Tensor, Tensor]:
            return _run(call._replace(**dict(zip(given, leaves, strict=True))))

        grads = dict(zip(given, vjp(run, list(given.values()), [dstep, dg]), strict=True))
        found = grads["dt"] if ddt is None else ddt.copy_(grads["dt"])
        return found, grads["A"], grads.get("dt_bias")


def _run(call: StepsCall) -> tuple[Tensor, Tensor]:
    # a copy, so that no result is an argument
    step = call.dt.to(call.dtype, copy=True)
    if call.dt_bias is not None:
        step = step + call.dt_bias.to(call.dtype)
    if call.softplus:
        step = F.softplus(step)
    A = call.A.to(call.dtype)
    return step, step * (-A.exp() if call.log else A)
