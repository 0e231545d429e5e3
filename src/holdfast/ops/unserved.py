"""A warning where a GPU has no kernel for a call's sizes: plain PyTorch runs it, in silence otherwise."""

import warnings
from collections.abc import Sequence
from dataclasses import replace

from holdfast.kernels.backend import Backend
from holdfast.planner import Device, Problem


def warn_of_unserved(kernels: Sequence[Backend], problem: Problem, device: Device) -> None:
    """Warns, once for each op, K, V and dtype, if none of the kernels serves the problem on a GPU.

    problem: of the matrix family. In float64, which no kernel takes, that is as it should be.
    """
    if device.kind != "cuda" or problem.dtype == "float64" or _serves(kernels, problem, device):
        return
    # Python shows a text once
    warnings.warn(
        f"{problem.op}: no kernel serves K = {problem['K']} and V = {problem['V']} in {problem.dtype} on "
        f"{device.name}, and PyTorch's operations are many times slower; {_served(kernels, problem, device)}",
        stacklevel=2,
    )


def _serves(kernels: Sequence[Backend], problem: Problem, device: Device, **sizes: int) -> bool:
    asked = replace(problem, sizes=tuple((dict(problem.sizes) | sizes).items()))
    return any(kernel.reject(asked, device) is None for kernel in kernels)


def _served(kernels: Sequence[Backend], problem: Problem, device: Device) -> str:
    """The nearest sizes that have a kernel, or why none has."""
    told = []
    for name in "KV":
        sizes = range(problem[name], 0, -1)
        if size := next((size for size in sizes if _serves(kernels, problem, device, **{name: size})), None):
            told.append(f"a {name} of {size} has one")
    if told:
        return ", and ".join(told)
    reasons = {kernel.name: kernel.reject(problem, device) for kernel in kernels}
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
