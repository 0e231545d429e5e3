"""Several backends under one name: kernels of one compiler that serve different matrix recurrences."""

from typing import Any, Protocol

from torch import Tensor

from holdfast.kernels.backend import Backend
from holdfast.planner import Candidate, Device, Direction, Plan, Problem
from holdfast.recurrences.definition import MatrixCall


class Member(Backend, Protocol):
    """A backend that can tell from a call whether it is the one among others of its name that runs it.

    One with reads_output has a forward pass that may return a third tensor, and a backward pass that takes it and the
    first after its other arguments.
    """

    def takes(self, call: MatrixCall) -> bool: ...


class OneName:
    """Members of one name, of which at most one serves a problem and takes its call."""

    def __init__(self, *members: Member) -> None:
        (self.name,) = {member.name for member in members}
        self.members = members
        self.reads_output = any(map(reads_output, members))

    def reject(self, problem: Problem, device: Device) -> str | None:
        reasons = [member.reject(problem, device) for member in self.members]
        return None if None in reasons else "; ".join(dict.fromkeys(map(str, reasons)))

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]:
        serving = (member for member in self.members if member.reject(problem, device) is None)
        return next(serving).candidates(problem, device, direction)

    def forward(self, plan: Plan, call: MatrixCall, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
        return self._of(call).forward(plan, call, cu_seqlens)

    def backward(self, plan: Plan, call: MatrixCall, *args: Any) -> tuple[list[Tensor | None], Tensor | None]:
        member = self._of(call)
        return member.backward(plan, call, *(args if reads_output(member) else args[:3]))

    def _of(self, call: MatrixCall) -> Member:
        (member,) = (member for member in self.members if member.takes(call))
        return member


def reads_output(member: Member) -> bool:
    return getattr(member, "reads_output", False)
