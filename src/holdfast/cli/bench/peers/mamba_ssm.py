"""mamba_ssm: the Triton kernels of Mamba-2, whole and the state passing between chunks alone."""

from typing import Any

import torch

from ..case import Case
from ..subject import Refused, Subject

CHUNK = 256


def prepare(case: Case, device: torch.device, variant: str) -> Subject:
    """variant: "ssd" or "state_passing"."""
    inputs = case.arguments(device)
    if variant == "ssd":
        return _ssd(case, inputs)
    return _state_passing(case, inputs)


def _ssd(case: Case, inputs: dict[str, Any]) -> Subject:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def call(a: dict[str, Any]) -> torch.Tensor:
        return mamba_chunk_scan_combined(a["x"], a["dt"], a["A"], a["B"], a["C"], chunk_size=CHUNK)

    return Subject(inputs, call, lambda a: case.work.exact(a, dict(case.options)), f"chunks of {CHUNK}")


def _state_passing(case: Case, inputs: dict[str, Any]) -> Subject:
    """Takes states [B, G, H, K V] and decay [B, H, G]; returns the state before each chunk, not after it."""
    if case.passes != "fwd":
        raise Refused("its state passing has no autograd of its own")
    from mamba_ssm.ops.triton.ssd_state_passing import _state_passing_fwd

    flat = {
        "states": inputs["states"].flatten(3).contiguous(),
        "decay": inputs["decay"].transpose(1, 2).contiguous(),
    }
    shape = inputs["states"].shape

    def exact(a: dict[str, Any]) -> torch.Tensor:
        after = case.work.exact({"states": a["states"].view(shape), "decay": a["decay"].transpose(1, 2)}, {})
        return torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], 1).flatten(3)

    return Subject(
        flat, lambda a: _state_passing_fwd(a["states"], a["decay"])[0], exact, "returns the state before each chunk"
    )
