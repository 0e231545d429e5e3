"""What a backend is, and how one is chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import torch

from holdfast.planner import Candidate, Device, Direction, Plan, Problem


class Backend(Protocol):
    """One way to run a family's calls on some devices.

    reject says in words why the backend cannot serve a problem on a device, or None if it can. candidates lists the
    plans that fit, the best first. forward and backward run one; their arguments beyond the plan are the family's.
    """

    name: str

    def reject(self, problem: Problem, device: Device) -> str | None: ...

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> tuple[Candidate, ...]: ...

    def forward(self, plan: Plan, *args: Any) -> Any: ...

    def backward(self, plan: Plan, *args: Any) -> Any: ...


class Rejected(ValueError):
    """A backend that was asked for by name cannot serve the call; reason says why."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def usable(
    backends: Sequence[Backend], problem: Problem, device: Device, name: str | None
) -> tuple[list[Backend], dict[str, str]]:
    """The backends that do not reject the problem, in order, or the named one alone; and why each other one does.

    Raises ValueError for an unknown name; Rejected, a ValueError, for a named backend that rejects the problem.
    """
    if name and name not in [backend.name for backend in backends]:
        known = ", ".join(repr(backend.name) for backend in backends)
        raise ValueError(f"backend: expected one of {known} for {problem.op}; got {name!r}")
    serving, reasons = [], {}
    for backend in backends:
        if reason := backend.reject(problem, device):
            if backend.name == name:
                raise Rejected(f"backend: {name!r} cannot run {problem.op} here: {reason}", reason)
            reasons[backend.name] = reason
        elif not name or backend.name == name:
            serving.append(backend)
    return serving, reasons


def no_backend_error(problem: Problem, device: Device, reasons: Mapping[str, str]) -> ValueError:
    """The error, with every reason, where no backend can serve the problem."""
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return ValueError(f"no backend can run {problem.op} on {device.name}: {told}")


@lru_cache(maxsize=64)
def describe(device: torch.device) -> Device:
    """The planner's description of a torch device: what the driver says, rates of the known device nearest to it."""
    if device.type != "cuda":
        return Device(device.type, device.type)
    card = torch.cuda.get_device_properties(device)
    capability = (card.major, card.minor)
    return replace(
        Device.like(card.name, capability, card.multi_processor_count),
        registers_per_sm=card.regs_per_multiprocessor,
        shared_per_sm=card.shared_memory_per_multiprocessor,
        shared_per_block=card.shared_memory_per_block_optin,
        threads_per_sm=card.max_threads_per_multi_processor,
        l2_bytes=card.L2_cache_size,
    )
