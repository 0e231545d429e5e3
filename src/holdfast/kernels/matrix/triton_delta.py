"""The portable GPU backend of the delta rule: Triton kernels around a state that stays in registers."""

import torch
from torch import Tensor

from holdfast.kernels.common.triton_support import refusal
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models import matrix_triton_delta as model
from holdfast.recurrences.definition import MatrixCall


class TritonDelta:
    """The delta write with a scalar decay or none, on NVIDIA GPUs from Ampere on.

    Forward two launches: each chunk's inverse, all at once, and one walk through the sequence. Backward the inverse
    again, a walk for the states, one back for their gradients, and a launch for the rest of all chunks at once.
    Tensor cores take operands in the inputs' dtype (float32 as three TF32 products, "3xTF32") and add in float32; sums
    of log decays inside a chunk are float32 beside bfloat16 inputs, else float64.
    """

    name = "triton"

    def takes(self, call: MatrixCall) -> bool:
        return call.delta

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        if "delta" not in problem.traits:
            return "it has the delta rule alone"
        if "decay=vector" in problem.traits:
            return "it takes one log decay a head, not one a key channel"
        if "normalizer" in problem.traits:
            return "it has no normaliser"
        if max(problem["K"], problem["V"]) > model.WIDEST:
            return f"K and V are at most {model.WIDEST}; got {problem['K']} and {problem['V']}"
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        from . import triton_delta_passes

        with torch.cuda.device_of(call.v):
            return triton_delta_passes.forward(plan, call, cu_seqlens)

    def backward(
        self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor | None]:
        from . import triton_delta_passes

        with torch.cuda.device_of(call.v):
            return triton_delta_passes.backward(plan, call, cu_seqlens, grad_o, grad_final)
