"""flash-linear-attention: its chunkwise and recurrent Triton kernels."""

from importlib import import_module
from typing import Any

import torch

from ..case import Case
from ..subject import Refused, Subject


def prepare(case: Case, device: torch.device, variant: str) -> Subject:
    """fla's layout is Holdfast's."""
    inputs, note = case.arguments(device), ""
    if "q" in inputs and inputs["q"].shape[2] != inputs["v"].shape[2]:
        raise Refused("q and k have fewer heads than v")
    shared = import_module("fla.utils")
    if hasattr(shared, "TRITON_ABOVE_3_7_1"):
        # it refuses Triton 3.4 to 3.7.0 on Hopper, whose results may be wrong; here they are checked
        shared.TRITON_ABOVE_3_7_1 = True
        note = "its own refusal of this Triton is off"
    function = getattr(import_module(f"fla.ops.{case.op}"), f"{variant}_{case.op}")

    def call(a: dict[str, Any]) -> torch.Tensor:
        return function(**a)[0]

    return Subject(inputs, call, lambda a: case.work.exact(a, dict(case.options)), note)
