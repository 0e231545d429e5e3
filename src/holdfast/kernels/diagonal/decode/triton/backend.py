"""The backend of a few tokens of a diagonal recurrence on a pool of states."""

from torch import Tensor

from holdfast.kernels.lib.triton.support import refusal
from holdfast.kernels.slots import Slots
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.planner.models.diagonal.decode import triton as model
from holdfast.recurrences.definition import DiagonalCall


class TritonSteps:
    """One launch that reads a state once and writes it once, in float32 in between.

    Its plan does not depend on how many sequences there are, so that no sequence's numbers do.
    """

    name = "decode"
    MOST_TOKENS = 8

    def reject(self, problem: Problem, device: Device) -> str | None:
        if reason := refusal(problem, device):
            return reason
        if not 1 <= problem["T"] <= self.MOST_TOKENS:
            return f"it takes 1 to {self.MOST_TOKENS} tokens a sequence; got {problem['T']}"
        return None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        return (Candidate(model.pool_plan(problem["D"] // (1 + ("complex" in problem.traits)))),)

    def update(self, plan: Plan, call: DiagonalCall, states: Tensor, slots: Slots) -> Tensor:
        """Return h [B, L, D] in x's dtype; the pool's states [slots, D] go on."""
        from holdfast.kernels.runtime.launch import on_device_of

        from . import launch

        with on_device_of(call.x):
            return launch.update(plan, call, states, slots)
