"""What is measured: one call of one implementation, beside its own exact result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from holdfast.planner import Candidate

from .case import Case


class Refused(Exception):
    """An implementation that cannot run a case; the message says why."""


@dataclass(frozen=True)
class Prediction:
    """What the planner says of the plans that run: bytes to and from memory, milliseconds, bytes of shared memory a
    block, and the plans in words.

    moved, shared: 0 where no model says.
    """

    moved: int
    ms: float | None
    shared: int
    plan: str


@dataclass(frozen=True)
class Subject:
    """One implementation, ready for one case.

    inputs: what call takes, in the implementation's own layout, so that no transposition is timed. call: inputs ->
    output, or (output, final state) for a case with state. exact: the same function of the same inputs, right in
    float64. note: what differs from the op, if anything. shared: whether inputs are the case's own arguments and exact
    the op's oracle, so that runners may share what it says. predicted: by the planner.
    """

    inputs: Any
    call: Callable[[Any], Any]
    exact: Callable[[Any], Any]
    note: str = ""
    shared: bool = False
    predicted: Prediction | None = None


class Runner(Protocol):
    """An implementation by name."""

    name: str

    def refusal(self, case: Case, device: torch.device) -> str:
        """Why it cannot run a case, as far as that is known without preparing it; "" if nothing speaks against it."""
        ...

    def prepare(self, case: Case, device: torch.device) -> Subject:
        """Raises Refused with the reason for a case that it cannot run, ImportError where it is not installed."""
        ...


@dataclass(frozen=True)
class HoldfastRunner:
    """One backend of a Holdfast op."""

    backend: str

    @property
    def name(self) -> str:
        return f"holdfast {self.backend}"

    def _plans(self, case: Case, inputs: dict[str, Any], device: torch.device) -> list[Candidate]:
        from holdfast.kernels.backend import Rejected, describe
        from holdfast.kernels.select import decide

        problem = case.work.problem(inputs, dict(case.options), case.passes != "fwd")
        try:
            decision = decide(case.work.backends(), problem, describe(device), self.backend)
        except Rejected as error:
            raise Refused(error.reason) from error
        return [offer.candidate for offer in decision.chosen.values()]

    def refusal(self, case: Case, device: torch.device) -> str:
        try:
            self._plans(case, case.arguments("meta"), device)
        except Refused as reason:
            return str(reason)
        return ""

    def prepare(self, case: Case, device: torch.device) -> Subject:
        work, options, inputs = case.work, dict(case.options), case.arguments(device)
        plans = self._plans(case, inputs, device)
        return Subject(
            inputs,
            lambda a: work.call(a, options, self.backend),
            lambda a: work.exact(a, options),
            shared=True,
            predicted=_prediction(plans),
        )


def _prediction(plans: list[Candidate]) -> Prediction:
    known = all(plan.prediction is not None for plan in plans)
    return Prediction(
        sum(plan.moved for plan in plans),
        sum(plan.seconds for plan in plans) * 1e3 if known else None,
        max(plan.shared for plan in plans),
        "; ".join(str(plan.plan) for plan in plans),
    )


def holdfast_runners(case: Case) -> list[Runner]:
    """One for each backend of the case's op."""
    return [HoldfastRunner(backend.name) for backend in case.work.backends()]
