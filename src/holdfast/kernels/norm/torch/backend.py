"""RMS or layer normalisation of heads' outputs and an output gate, in PyTorch, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.autograd.vjp import vjp
from holdfast.kernels.norm.call import GatedNormCall
from holdfast.planner import Candidate, Device, Direction, Plan, Problem


class PyTorchGatedNorm:
    """Every call, on every device that PyTorch has, in float32 (float64 for float64 inputs)."""

    name = "pytorch"

    def reject(self, problem: Problem, device: Device) -> str | None:
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return (Candidate(Plan(self.name)),)

    def forward(self, plan: Plan, call: GatedNormCall) -> Tensor:
        """Return y [B, T, H, D], contiguous, in o's dtype."""
        return _run(call).contiguous()

    def backward(
        self, plan: Plan, call: GatedNormCall, grad_y: Tensor, into: Tensor | None = None
    ) -> list[Tensor | None]:
        """Return the gradients of o, gate and weight, None where the input is.

        into: where that of gate goes, part of a wider tensor.
        """
        given = {name: x for name, x in zip(call._fields[:3], call[:3], strict=True) if x is not None}

        def run(*leaves: Tensor) -> tuple[Tensor]:
            return (_run(call._replace(**dict(zip(given, leaves, strict=True)))),)

        grads = dict(zip(given, vjp(run, list(given.values()), [grad_y]), strict=True))
        if into is not None:
            grads["gate"] = into.copy_(grads["gate"])
        return [grads.get(name) for name in call._fields[:3]]


def _run(call: GatedNormCall) -> Tensor:
    dtype = torch.promote_types(call.o.dtype, torch.float32)
    norm = F.layer_norm if call.center else F.rms_norm
    y = norm(call.o.to(dtype), call.o.shape[-1:], eps=call.eps)
    if call.weight is not None:
        y = y * call.weight
    if call.gate is not None:
        gate = call.gate.to(dtype)
        y = y * (F.silu(gate) if call.activation == "silu" else gate.sigmoid())
    return y.to(call.o.dtype)
