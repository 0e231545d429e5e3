"""flash-linear-attention: its chunkwise and recurrent Triton kernels, the latter for decoding."""

from importlib import import_module
from typing import Any

import torch

from ..case import Case
from ..subject import Refused, Subject


def lift_refusal() -> bool:
    """Has fla run with Triton 3.4 to 3.7.0 on Hopper, which it refuses, since results may be wrong; whether it does."""
    # the second has its own copy of the first's by the time that fla is imported
    places = [import_module(name) for name in ("fla.utils", "fla.ops.common.chunk_o")]
    found = [place for place in places if hasattr(place, "TRITON_ABOVE_3_7_1")]
    for place in found:
        place.TRITON_ABOVE_3_7_1 = True
    return bool(found)


def prepare(case: Case, device: torch.device, variant: str) -> Subject:
    """fla's layout is Holdfast's. In float32 its products are set to float32 too; by themselves they are TF32, with
    relative errors of 1.5e-3."""
    inputs, note = case.arguments(device), ""
    if variant == "fused_recurrent" and case.op != "hgrn" and not case.state:
        raise Refused("its step-by-step kernel is measured in decoding; chunk is for sequences")
    if "q" in inputs and inputs["q"].shape[2] != inputs["v"].shape[2]:
        raise Refused("q and k have fewer heads than v")
    if lift_refusal():
        # results are checked here
        note = "its own refusal of this Triton is off"
    function = getattr(import_module(f"fla.ops.{case.op}"), f"{variant}_{case.op}")

    if case.dtype == "float32":
        from triton import knobs

        knobs.language.fp32_default = "ieee"
        note = f"{note}; products in float32 instead of its TF32".removeprefix("; ")

    # what chunk_gla calls g is gk there, and an unknown name is swallowed
    renamed = {"g": "gk"} if (variant, case.op) == ("fused_recurrent", "gla") else {}

    def call(a: dict[str, Any]) -> Any:
        given = {renamed.get(name, name): x for name, x in a.items()}
        return function(**given, output_final_state=True) if case.state else function(**given)[0]

    return Subject(inputs, call, lambda a: case.work.exact(a, dict(case.options)), note, shared=True)
