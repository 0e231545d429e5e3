"""What the portable GPU backends of the matrix family share: where plans come from and how a pass is launched."""

from dataclasses import replace
from types import ModuleType

from torch import Tensor

from holdfast.kernels.lib.triton.support import refusal
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.recurrences.definition import MatrixCall

from .problem import problem as problem_of
from .refusal import AnothersKernel
from .small_heads import is_small


class TritonMatrix:
    """NVIDIA GPUs from Ampere on, K and V up to the model's WIDEST.

    model: candidates and WIDEST. launches: the module with `forward` and `backward`, which imports Triton: not every
    machine has it. refused: (trait, or several, whether it or any of them is there, why such a problem is refused).

    A pass that float32 has to compute takes the call in float32 and rounds what comes out.
    """

    name = "triton"
    model: ModuleType
    refused: tuple[tuple[str | tuple[str, ...], bool, str], ...]

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        for traits, is_there, why in self.refused:
            any_of = {traits} if isinstance(traits, str) else traits
            if (not problem.traits.isdisjoint(any_of)) == is_there:
                return AnothersKernel(why)
        if max(problem["K"], problem["V"]) > self.model.WIDEST:
            return f"K and V are at most {self.model.WIDEST}; got {problem['K']} and {problem['V']}"
        return None

    def is_in_float32(self, problem: Problem, direction: Direction) -> bool:
        """Whether a pass is, whatever the inputs' dtype."""
        return is_small(problem)

    def _taken(self, call: MatrixCall, cu_seqlens: Tensor | None, direction: Direction) -> MatrixCall:
        """The call, in float32 where the pass is."""
        if not self.is_in_float32(problem_of(self.name, call, cu_seqlens, False), direction):
            return call
        e = None if call.e is None else call.e.float()
        return call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float(), e=e)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        if self.is_in_float32(problem, direction):
            problem = replace(problem, dtype="float32")
        return self.model.candidates(problem, device, direction)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
        from holdfast.kernels.runtime.launch import on_device_of

        wide = self._taken(call, cu_seqlens, "forward")
        with on_device_of(call.v):
            o, final, *saved = self.launches().forward(plan, wide, cu_seqlens)
            return o.to(call.v.dtype), final, *saved

    def backward(
        self,
        plan: Plan,
        call: MatrixCall,
        cu_seqlens: Tensor | None,
        grad_o: Tensor | None,
        grad_final: Tensor | None,
        *made: Tensor | None,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """made: of a backend that saves something, what forward returned first and last."""
        from holdfast.kernels.runtime.launch import on_device_of

        wide = self._taken(call, cu_seqlens, "backward")
        if grad_o is not None:
            grad_o = grad_o.to(wide.v.dtype)
        with on_device_of(call.v):
            grads, grad_state = self.launches().backward(plan, wide, cu_seqlens, grad_o, grad_final, *made)
            of_inputs = (*range(3), 6)
            return [x.to(call.v.dtype) if i in of_inputs else x for i, x in enumerate(grads)], grad_state

    def launches(self) -> ModuleType:
        raise NotImplementedError
