"""explain: how a call would run, and why not otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from holdfast.kernels.common.backend import choose
from holdfast.planner import Device, Plan, Problem
from holdfast.recurrences import RECURRENCES, Draw, Sizes

from .families import backends_of, problem_of


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a call would do. passed_over: backend -> why another runs instead."""

    problem: Problem
    device: Device
    plan: Plan
    passed_over: Mapping[str, str]

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.problem.sizes)
        traits = ", ".join(sorted(self.problem.traits)) or "none"
        lines = [
            f"{self.problem.op} ({self.problem.family} family) on {self.device.name}, {self.problem.dtype}",
            f"  sizes    {sizes}",
            f"  traits   {traits}",
            f"  runs     {self.plan}",
        ]
        lines += [f"  not      {name}: {reason}" for name, reason in self.passed_over.items()]
        return "\n".join(lines)


def explain(
    op: str,
    sizes: Mapping[str, int] | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    needs_grad: bool = True,
    varlen: bool = False,
    backend: str | None = None,
) -> Explanation:
    """Plans a call of an op without running it, and says why each other backend would not take it.

    Args:
        op: the op's name, such as "gla".
        sizes: axis -> size, of B, T, H, Hq (query or group heads), K, V (matrix) and D (diagonal, dense); axes left out
            keep small defaults.
        dtype: of the inputs, torch's name.
        device: one that Device.named knows, such as "cpu" or "h200"; it need not be present.
        needs_grad: whether a backward pass follows. varlen: whether sequences are packed.
        backend: forces a backend, as the op's argument of that name does.

    Raises:
        ValueError: for an unknown op, axis, dtype, device or backend; with every reason if no backend can run the call.
    """
    if op not in RECURRENCES:
        raise ValueError(f"op: expected one of {', '.join(RECURRENCES)}; got {op!r}")
    known = [field.name for field in fields(Sizes)]
    for name, size in (sizes or {}).items():
        if name not in known:
            raise ValueError(f"sizes: expected axes among {', '.join(known)}; got {name!r}")
        if size < 0:
            raise ValueError(f"sizes: expected {name} >= 0; got {size}")
    scalar = getattr(torch, dtype, None)
    if not isinstance(scalar, torch.dtype) or not scalar.is_floating_point:
        raise ValueError(f"dtype: expected a floating-point dtype such as 'bfloat16'; got {dtype!r}")
    recurrence, target = RECURRENCES[op], Device.named(device)
    arguments = recurrence.example(Draw(0, scalar, "meta"), Sizes(**(sizes or {})))
    packed = torch.empty(2, dtype=torch.int32, device="meta") if varlen else None
    problem = problem_of(recurrence, arguments, packed, needs_grad)
    backends = backends_of(recurrence)
    chosen = choose(backends, problem, target, backend)
    passed_over = {
        other.name: other.reject(problem, target) or f"{chosen.name} {'is forced' if backend else 'comes first'}"
        for other in backends
        if other is not chosen
    }
    return Explanation(problem, target, chosen.candidates(problem, target, "forward")[0].plan, passed_over)
