"""What the portable GPU backends of the matrix family share: where plans come from and how a pass is launched."""

from types import ModuleType

from torch import Tensor

from holdfast.kernels.lib.triton.support import refusal
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.recurrences.definition import MatrixCall


class TritonMatrix:
    """NVIDIA GPUs from Ampere on, K and V up to the model's WIDEST.

    model: candidates and WIDEST. launches: the module with `forward` and `backward`, which imports Triton: not every
    machine has it. refused: (trait, whether it is there, why such a problem is refused).
    """

    name = "triton"
    model: ModuleType
    refused: tuple[tuple[str, bool, str], ...]

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        for trait, is_there, why in self.refused:
            if (trait in problem.traits) == is_there:
                return why
        if max(problem["K"], problem["V"]) > self.model.WIDEST:
            return f"K and V are at most {self.model.WIDEST}; got {problem['K']} and {problem['V']}"
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return self.model.candidates(problem, device, direction)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        from holdfast.kernels.runtime.launch import on_device_of

        with on_device_of(call.v):
            return self.launches().forward(plan, call, cu_seqlens)

    def backward(
        self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor | None]:
        from holdfast.kernels.runtime.launch import on_device_of

        with on_device_of(call.v):
            return self.launches().backward(plan, call, cu_seqlens, grad_o, grad_final)

    def launches(self) -> ModuleType:
        raise NotImplementedError
