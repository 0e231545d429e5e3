"""doctor passes where all is right, and names what is wrong where it is not."""

import re
from collections.abc import Callable

import pytest
import torch
import typer
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.cli.doctor import doctor
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.ops import matrix
from holdfast.ops.verify import verify
from holdfast.recurrences import RECURRENCES


class Wrong(Chunked):
    """chunked with one thing broken."""

    name = "wrong"

    def __init__(self, spoil: Callable, backward: bool = False) -> None:
        self.spoil, self.in_backward = spoil, backward

    def forward(self, plan, call, cu_seqlens):
        o, state = super().forward(plan, call, cu_seqlens)
        return (o, state) if self.in_backward else (self.spoil(o), state)

    def backward(self, plan, call, cu_seqlens, grad_o, grad_final):
        grads, grad_state = super().backward(plan, call, cu_seqlens, grad_o, grad_final)
        if self.in_backward:
            grads[0] = self.spoil(grads[0])
        return grads, grad_state


def fail(_):
    raise RuntimeError("compiler crashed\nin its last stage")


def test_every_backend_is_right_here():
    verdicts = list(verify(torch.device("cpu")))
    assert {v.op for v in verdicts} == {
        *RECURRENCES,
        "inter_chunk_scan",
        "intra_chunk",
        "gated_rms_norm",
        "causal_conv1d",
        "layer_step",
        "pooled_step",
        "pooled_step of mlstm",
        "pooled_step of hgrn",
        "pooled_step of rotlru",
    }
    assert [v for v in verdicts if v.status == "wrong"] == []
    # what is skipped needs a GPU; each op still has a backend that ran
    assert {v.op for v in verdicts if v.status == "right"} == {v.op for v in verdicts}
    assert all("GPU" in v.detail for v in verdicts if v.status == "skipped")
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert result.exit_code == 0
    assert "All backends that this machine can run are right." in result.output


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (Wrong(lambda x: x * 1.001), "relative error 1.0e-03 of output or gradient 0"),
        (Wrong(lambda x: x * torch.nan), "relative error nan"),
        (Wrong(lambda x: x * 1.001, backward=True), "relative error 1.0e-03 of output or gradient 2"),
        (Wrong(fail), "RuntimeError: compiler crashed"),
    ],
)
def test_a_wrong_backend_fails_by_name(monkeypatch, capsys, backend, said):
    monkeypatch.setattr(matrix, "BACKENDS", (*matrix.BACKENDS, backend))
    with pytest.raises(typer.Exit) as end:
        doctor(device="cpu")
    assert end.value.exit_code == 1
    assert f"wrong: simple_gla, backend wrong, on cpu: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(("noticed", "status"), [(True, 0), (False, 1)])
def test_damage_that_a_check_lets_through_fails(noticed, status, monkeypatch):
    shown = []
    monkeypatch.setattr("holdfast.ops.verify.verify", lambda device: [])
    monkeypatch.setattr("holdfast.cli.planted.show", lambda device, console: shown.append(str(device)) or noticed)
    assert CliRunner().invoke(app, ["doctor", "--device", "cpu", "--self-check"]).exit_code == status
    assert CliRunner().invoke(app, ["doctor", "--device", "cpu"]).exit_code == 0
    assert shown == ["cpu"]


@pytest.mark.slow
def test_a_backend_that_cannot_run_here_is_skipped_with_its_reason(monkeypatch):
    class Elsewhere(Chunked):
        name = "elsewhere"

        def reject(self, problem, device):
            return "needs an NVIDIA GPU"

    monkeypatch.setattr(matrix, "BACKENDS", (*matrix.BACKENDS, Elsewhere()))
    skipped = [v for v in verify(torch.device("cpu")) if v.backend == "elsewhere"]
    assert {v.status for v in skipped} == {"skipped"}
    assert {v.detail for v in skipped} == {"needs an NVIDIA GPU"}
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu"], env={"COLUMNS": "200"})
    (op,) = {v.op for v in skipped} & {"simple_gla"}
    (cells,) = (
        [cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if f"│ {op} " in line
    )
    # a right one has its error
    (error,) = re.findall(r"\bchunked \((.*?)\)", cells[1])
    assert 0 < float(error) < 2e-5
    assert cells[2] == ""
    assert "elsewhere" in cells[3].split(", ")
    # the reason once for all ops
    reasons = [line for line in result.output.splitlines() if line.startswith("not run, ") and "elsewhere" in line]
    assert [line.endswith(": needs an NVIDIA GPU") for line in reasons] == [True]
