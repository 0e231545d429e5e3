"""The portable GPU backend: one Triton kernel, the state in registers from a sequence's first token to its last."""

from torch import Tensor

from holdfast.kernels.common.triton_support import refusal
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models import matrix_triton_single_pass as model
from holdfast.recurrences.definition import MatrixCall


class TritonSinglePass:
    """Scalar decay or none, additive write, on NVIDIA GPUs from Ampere on. Forward one sweep, backward three.

    Tensor cores take operands in the inputs' dtype (float32 as three TF32 products, "3xTF32") and add in float32; sums
    of log decays inside a chunk are float32, float64 beside float32 inputs.
    """

    name = "triton"

    def takes(self, call: MatrixCall) -> bool:
        return not call.delta and (call.g is None or call.g.dim() == 3)

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        if "decay=vector" in problem.traits:
            return "it takes one log decay a head, not one a key channel"
        if "delta" in problem.traits:
            return "it has no delta rule"
        if max(problem["K"], problem["V"]) > model.WIDEST:
            return f"K and V are at most {model.WIDEST}; got {problem['K']} and {problem['V']}"
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        from holdfast.kernels.common.triton_launch import on_device_of

        from . import triton_passes

        with on_device_of(call.v):
            return triton_passes.forward(plan, call, cu_seqlens)

    def backward(
        self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor | None]:
        from holdfast.kernels.common.triton_launch import on_device_of

        from . import triton_passes

        with on_device_of(call.v):
            return triton_passes.backward(plan, call, cu_seqlens, grad_o, grad_final)
