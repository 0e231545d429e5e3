"""Cells printed as Triton, and the loop around them: parity in the interpreter, and what compiles for which GPU."""

import pytest
import torch

from holdfast.kernels.dense.codegen import triton_cell
from holdfast.kernels.dense.triton.backend import TritonLoop, _counts, _places
from holdfast.planner import Device, Problem
from holdfast.planner.models.dense import triton as dense_triton
from holdfast.recurrences import cell
from holdfast.recurrences.elman import elman
from holdfast.recurrences.gru import gru
from holdfast.recurrences.lstm import lstm
from holdfast.recurrences.slstm import slstm

pytest.importorskip("triton", reason="needs Triton, which has wheels for Linux alone")

from interpreted import interpret
from triton_compile import TARGETS, compile_for

# Bytes that a thread may keep beside its registers, by head dimension.
BUDGET = {128: 24, 64: 0, 32: 0}


def problem(which, D, dtype="bfloat16", **traits):
    sizes = {"B": 16, "T": 1024, "H": 12, "D": D, "S": len(which.states), "G": len(which.gates)}
    sizes |= {"Gi": len(which.input), "Gr": len(which.recurrent)}
    return Problem.of(which.name, "dense", getattr(torch, dtype), sizes, {f"cell={which.key}": True, **traits})


def test_every_cell_is_right_in_the_interpreter():
    interpret("kernels.dense.triton.parity", "interpreted", seconds=300)


def arguments(which, direction, D, plan):
    half, full = torch.bfloat16, torch.float32
    given = {"R": half, "initial": full, "reset": torch.int32, "h": half, "states": full, "gates": half}
    given |= {"batch": 16, "length": 1024, "heads": 12, "CELL": getattr(triton_cell.functions(which), direction)}
    given |= _counts(which) | _places(which) | {"SAVED": 4, "WIDTH": D, "PADDED": D, "ROWS": dense_triton.ROWS}
    given |= {"BLOCK": plan["block"], "x": half, "b": half, "final": full, "clip": 0.5, "EXTRAS": 1}
    return given | {"grad_h": half, "grad_final": full, "dx": half, "extra": half, "db": full, "grad_initial": full}


# every cell for one GPU, and for the others the one with most gates at both ends of what they hold
COMPILED = [(which, 64, 90) for which in (lstm, gru, slstm, elman)]
COMPILED += [(lstm, D, target) for D in (32, 128) for target in TARGETS]


@pytest.mark.slow
@pytest.mark.sizes("D", "reset")
@pytest.mark.parametrize("reset", [torch.int32, None])
@pytest.mark.parametrize(("which", "D", "target"), COMPILED, ids=lambda x: getattr(x, "name", str(x)))
def test_it_compiles_and_keeps_its_registers(which, D, target, reset):
    from holdfast.kernels.dense.triton import time_loop as triton_steps

    for direction in ("forward", "backward"):
        (found,) = dense_triton.candidates(problem(which, D), Device.named("h200"), direction)
        given = arguments(which, direction, D, found.plan) | {"reset": reset}
        made = compile_for(
            getattr(triton_steps, f"dense_time_loop_{direction}"), target, given, num_warps=found.plan["warps"]
        )
        assert made.stack <= BUDGET[D], (direction, made.registers, made.stack)
        assert made.shared <= found.shared, (direction, made.shared)


def test_what_it_does_not_take_is_said():
    backend, device = TritonLoop(), Device.named("h200")
    assert backend.reject(problem(lstm, 64), device) is None
    assert "float32" in backend.reject(problem(lstm, 64, "float32"), device)
    assert "128 channels" in backend.reject(problem(lstm, 136), device)
    assert "backward" in backend.reject(problem(slstm, 128, needs_grad=True), device)
    assert backend.reject(problem(slstm, 128), device) is None
    assert "cu_seqlens" in backend.reject(problem(lstm, 64, varlen=True), device)
    assert "NVIDIA" in backend.reject(problem(lstm, 64), Device("cpu", "cpu"))

    @cell(states=("h",), gates=("a",))
    def hyperbolic(s, g):
        return {"h": torch.asinh(g.a)}

    assert "asinhf" in backend.reject(problem(hyperbolic, 64), device)
