"""The portable GPU backend of a vector decay: chunks prepared side by side, and sweeps with the state in registers."""

from torch import Tensor

from holdfast.kernels.common.triton_support import refusal
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models import matrix_triton_gla as model
from holdfast.recurrences.definition import MatrixCall


class TritonGLA:
    """Vector decay, additive write, on NVIDIA GPUs from Ampere on.

    Forward two launches: every chunk's scores and decayed queries and keys, all at once, and one sweep over the
    sequence. Backward the first again, a sweep for the states, one back for their gradients and dv, and a launch for
    the rest of all chunks at once. Tensor cores take operands in the inputs' dtype (float32 as three TF32 products,
    "3xTF32") and add in float32; decays are products of float32 numbers of at most 1.
    """

    name = "triton"

    def takes(self, call: MatrixCall) -> bool:
        return not call.delta and call.g is not None and call.g.dim() == 4

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        if "decay=vector" not in problem.traits:
            return "it takes one log decay a key channel"
        if "delta" in problem.traits:
            return "it has no delta rule"
        if "normalizer" in problem.traits:
            return "it has no normaliser"
        if max(problem["K"], problem["V"]) > model.WIDEST:
            return f"K and V are at most {model.WIDEST}; got {problem['K']} and {problem['V']}"
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return model.candidates(problem, device, direction)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        from holdfast.kernels.common.triton_launch import on_device_of

        from . import triton_gla_passes

        with on_device_of(call.v):
            return triton_gla_passes.forward(plan, call, cu_seqlens)

    def backward(
        self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor | None]:
        from holdfast.kernels.common.triton_launch import on_device_of

        from . import triton_gla_passes

        with on_device_of(call.v):
            return triton_gla_passes.backward(plan, call, cu_seqlens, grad_o, grad_final)
