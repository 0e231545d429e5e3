"""The plain step loop: slow, right, and able to run every call on every device."""

from torch import Tensor

from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models import pytorch
from holdfast.recurrences.definition import MatrixCall
from holdfast.recurrences.oracle_matrix import matrix_steps

from . import segment_runner as runner

_STEP = runner.Step(run=matrix_steps, run_state=lambda call: matrix_steps(call)[1])


class Reference:
    """Runs the family's oracle. Its backward keeps the intermediates of one segment of steps at a time."""

    name = "reference"

    def reject(self, problem: Problem, device: Device) -> str | None:
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        plan = Plan(self.name, (("segment", 64),))
        if problem["T"] != 1 or problem.varlen:
            return (Candidate(plan),)
        return (pytorch.predicted(plan, pytorch.matrix_one_token(problem, direction), problem, device, direction),)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        return runner.forward(_STEP, plan["segment"], call, cu_seqlens)

    def backward(
        self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None, grad_o: Tensor | None, grad_final: Tensor | None
    ) -> tuple[list[Tensor | None], Tensor]:
        return runner.backward(_STEP, plan["segment"], call, cu_seqlens, grad_o, grad_final)
