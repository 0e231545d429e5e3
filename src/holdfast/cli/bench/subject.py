"""What is measured: one call of one implementation, beside its own exact result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .case import Case


class Refused(Exception):
    """An implementation that cannot run a case; the message says why."""


@dataclass(frozen=True)
class Subject:
    """One implementation, ready for one case.

    inputs: what call takes, in the implementation's own layout, so that no transposition is timed. call: inputs ->
    output. exact: the same function of the same inputs, right in float64. note: what differs from the op, if anything.
    """

    inputs: Any
    call: Callable[[Any], Tensor]
    exact: Callable[[Any], Tensor]
    note: str = ""


class Runner(Protocol):
    """An implementation by name."""

    name: str

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

    def prepare(self, case: Case, device: torch.device) -> Subject:
        from holdfast.kernels.common.backend import describe

        work, options, inputs = case.work, dict(case.options), case.arguments(device)
        backend = next(backend for backend in work.backends() if backend.name == self.backend)
        if reason := backend.reject(work.problem(inputs, options, case.passes != "fwd"), describe(device)):
            raise Refused(reason)
        return Subject(inputs, lambda a: work.call(a, options, self.backend), lambda a: work.exact(a, options))


def holdfast_runners(case: Case) -> list[Runner]:
    """One for each backend of the case's op."""
    return [HoldfastRunner(backend.name) for backend in case.work.backends()]
