"""mamba_ssm: the Triton kernels of Mamba-2, whole and the state passing between chunks alone; Mamba-1's in CUDA."""

from typing import Any

import torch

from ..case import Case
from ..subject import Refused, Subject

CHUNK = 256


def prepare(case: Case, device: torch.device, variant: str) -> Subject:
    """variant: "ssd", "state_update", "state_passing" or "selective_scan"."""
    prepared = {
        "ssd": _ssd,
        "state_update": _state_update,
        "state_passing": _state_passing,
        "selective_scan": _selective_scan,
    }
    return prepared[variant](case, case.arguments(device))


def _ssd(case: Case, inputs: dict[str, Any]) -> Subject:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def call(a: dict[str, Any]) -> torch.Tensor:
        return mamba_chunk_scan_combined(a["x"], a["dt"], a["A"], a["B"], a["C"], chunk_size=CHUNK)

    return Subject(inputs, call, lambda a: case.work.exact(a, dict(case.options)), f"chunks of {CHUNK}", shared=True)


def _state_update(case: Case, inputs: dict[str, Any]) -> Subject:
    """One step of decoding: state [B, H, V, K], updated in place, so that each run takes one step more."""
    if not case.state or dict(case.sizes)["T"] != 1 or case.passes != "fwd":
        raise Refused("is one step of decoding")
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    batch, _, heads, width = inputs["x"].shape
    size = inputs["B"].shape[3]
    start = inputs["initial_state"].mT.contiguous()
    # strides of 0 tell it that dt and A are one number a head; it does not run without a bias of dt and D
    zero = torch.zeros(heads, device=inputs["x"].device)[:, None].expand(heads, width)
    one = {
        "x": inputs["x"][:, 0].contiguous(),
        "dt": inputs["dt"][:, 0, :, None].expand(batch, heads, width),
        "A": inputs["A"].float()[:, None, None].expand(heads, width, size),
        "B": inputs["B"][:, 0].contiguous(),
        "C": inputs["C"][:, 0].contiguous(),
        "state": start.clone(),
    }

    def call(a: dict[str, Any]) -> Any:
        out = selective_state_update(a["state"], a["x"], a["dt"], a["A"], a["B"], a["C"], D=zero, dt_bias=zero)
        return out, a["state"]

    def exact(a: dict[str, Any]) -> Any:
        given = {"x": a["x"][:, None], "dt": a["dt"][..., 0][:, None], "A": a["A"][:, 0, 0]}
        given |= {"B": a["B"][:, None], "C": a["C"][:, None], "initial_state": start.double().mT}
        out, state = case.work.exact(given, {})
        return out[:, 0], state.mT

    return Subject(one, call, exact, "updates its state in place")


def _selective_scan(case: Case, inputs: dict[str, Any]) -> Subject:
    """Takes x and dt [B, D, T], B and C [B, N, T], A in float32."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    names = ("x", "dt", "B", "C")
    laid = {name: inputs[name].mT.contiguous() for name in names} | {"A": inputs["A"].float()}

    def call(a: dict[str, Any]) -> torch.Tensor:
        return selective_scan_fn(a["x"], a["dt"], a["A"], a["B"], a["C"])

    def exact(a: dict[str, Any]) -> torch.Tensor:
        return case.work.exact({name: a[name].mT for name in names} | {"A": a["A"]}, {}).mT

    return Subject(laid, call, exact, "tokens side by side in memory")


def _state_passing(case: Case, inputs: dict[str, Any]) -> Subject:
    """Takes states [B, G, H, K V] and decay [B, H, G]; returns the state before each chunk, not after it."""
    if case.passes != "fwd":
        raise Refused("its state passing has no autograd of its own")
    if {"Kg", "r"} & dict(case.sizes).keys():
        raise Refused("one decay a head and chunk, and nothing erased, only")
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
