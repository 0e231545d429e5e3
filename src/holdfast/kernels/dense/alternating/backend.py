"""Two launches a step, PyTorch's matrix product and one generated kernel for the cell: any head dimension and dtype."""

import torch
from torch import Tensor

from holdfast.kernels.dense.codegen import cpp
from holdfast.kernels.dense.cuda.backend import cell_of
from holdfast.kernels.dense.torch.time_loop import Loop
from holdfast.kernels.runtime import nvrtc
from holdfast.planner import Device, Plan, Problem
from holdfast.recurrences.definition import DenseCall

from . import cell_step as step


class Alternating(Loop):
    """The loop's own passes with a generated kernel in place of PyTorch's pointwise operations.

    It computes in float32 throughout, also for 16-bit inputs; products in TensorFloat-32 only where
    torch.backends.cuda.matmul allows it, which by default it does not.
    """

    name = "alternating"
    cells = step

    def reject(self, problem: Problem, device: Device) -> str | None:
        if device.kind != "cuda" or device.capability is None:
            return "needs an NVIDIA GPU"
        if problem.dtype == "float64":
            return "computes in float32; got float64"
        if reason := nvrtc.missing(device.capability):
            return reason
        return cpp.unprintable(cell_of(problem))

    def forward(
        self, plan: Plan, call: DenseCall, cu_seqlens: Tensor | None, save: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.cuda.device(call.x.device):
            return super().forward(plan, call, cu_seqlens, save)

    def backward(
        self,
        plan: Plan,
        call: DenseCall,
        cu_seqlens: Tensor | None,
        states: Tensor,
        gates: Tensor,
        grad_h: Tensor | None,
        grad_final: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        with torch.cuda.device(call.R.device):
            return super().backward(plan, call, cu_seqlens, states, gates, grad_h, grad_final)
