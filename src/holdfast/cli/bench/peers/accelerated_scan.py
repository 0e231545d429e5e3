"""accelerated-scan: first-order scans over [B, C, T], in CUDA (warp) and Triton (scalar)."""

from importlib import import_module
from typing import Any

import torch

from ..case import Case
from ..subject import Refused, Subject

# of the scan in CUDA: a power of two, from a warp's threads on
WARP_LENGTHS = tuple(2**n for n in range(5, 17))


def prepare(case: Case, device: torch.device, variant: str) -> Subject:
    """variant: "warp" or "scalar". Time is the last axis; the decay is given, not its logarithm."""
    if variant == "warp" and dict(case.sizes)["T"] not in WARP_LENGTHS:
        raise Refused("needs T a power of two, 32 to 65536")
    given = case.arguments(device)
    decay = (given["a"] if "a" in given else given["g"].exp()).to(given["x"].dtype)
    inputs = {"gates": decay.transpose(1, 2).contiguous(), "tokens": given["x"].transpose(1, 2).contiguous()}
    scan = import_module(f"accelerated_scan.{variant}").scan

    def exact(a: dict[str, Any]) -> torch.Tensor:
        from ..workload import workload

        return workload("rglru").exact({"a": a["gates"].transpose(1, 2), "x": a["tokens"].transpose(1, 2)}, {}).mT

    note = "takes the decay in the inputs' dtype, not in float32" if case.dtype != "float32" else ""
    return Subject(inputs, lambda a: scan(a["gates"], a["tokens"]), exact, note)
