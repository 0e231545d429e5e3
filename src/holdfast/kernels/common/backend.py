"""What a backend is, and how one is chosen."""

from collections.abc import Sequence
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


def choose(backends: Sequence[Backend], problem: Problem, device: Device, name: str | None) -> Backend:
    """The first backend without a rejection, or the named one.

    Raises ValueError for an unknown name and, with every reason, when no backend can serve the problem; Rejected, a
    ValueError, for a named backend that cannot.
    """
    if name:
        for backend in backends:
            if backend.name == name:
                if reason := backend.reject(problem, device):
                    raise Rejected(f"backend: {name!r} cannot run {problem.op} here: {reason}", reason)
                return backend
        known = ", ".join(repr(backend.name) for backend in backends)
        raise ValueError(f"backend: expected one of {known} for {problem.op}; got {name!r}")
    reasons = []
    for backend in backends:
        reason = backend.reject(problem, device)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise ValueError(f"no backend can run {problem.op} on {device.name}: " + "; ".join(reasons))


@lru_cache(maxsize=64)
def describe(device: torch.device) -> Device:
    """The planner's description of a torch device: what the driver says, rates from the table of known devices."""
    if device.type != "cuda":
        return Device(device.type, device.type)
    card = torch.cuda.get_device_properties(device)
    known = Device.recognised(card.name) or Device("cuda", card.name)
    return replace(
        known,
        name=card.name,
        capability=(card.major, card.minor),
        sms=card.multi_processor_count,
        registers_per_sm=card.regs_per_multiprocessor,
        shared_per_sm=card.shared_memory_per_multiprocessor,
        shared_per_block=card.shared_memory_per_block_optin,
        threads_per_sm=card.max_threads_per_multi_processor,
        l2_bytes=card.L2_cache_size,
    )
