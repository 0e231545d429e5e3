"""gated_rms_norm's kernels without a GPU: right in the interpreter, and compiled for GPUs that are not here."""

import pytest
import torch

from holdfast.kernels.norm.triton.backend import TritonGatedNorm
from holdfast.planner import Device, Problem
from holdfast.planner.models.norm.triton import candidates

pytest.importorskip("triton")
from holdfast.kernels.norm.triton.rows import norm_bwd, norm_fwd
from interpreted import interpret
from triton_compile import compile_for, over_targets


def test_interpreted():
    assert "all checked" in interpret("kernels.norm.triton.parity", "interpreted", seconds=300)


def problem(dtype="bfloat16", traits=("gate", "weight"), **sizes):
    sizes = {"B": 4, "T": 4096, "H": 32, "D": 128, "G": 1} | sizes
    return Problem.of("gated_rms_norm", "matrix", dtype, sizes, dict.fromkeys(traits, True))


@pytest.mark.sizes("D", "heads")
@pytest.mark.parametrize(("D", "heads", "capability"), over_targets((128, 1), (4096, 1), (80, 32)))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_compiles_for_gpus_that_are_not_here(direction, D, heads, capability):
    chosen = candidates(problem(D=D, G=heads), Device.named("h200"), direction)[0].plan
    kernel = norm_fwd if direction == "forward" else norm_bwd
    given = {name: torch.bfloat16 for name in kernel.arg_names if name.endswith("_ptr")}
    given |= {"weight_ptr": torch.float32, "parts_ptr": torch.float32, "eps": 1e-5}
    given |= {"D": D, "BLOCK_D": 1 << (D - 1).bit_length(), "ROWS": chosen["rows"], "HEADS": heads}
    given |= {"SIGMOID": False, "CENTER": heads > 1}
    sizes = {name: 4096 for name in kernel.arg_names if name not in given}
    made = compile_for(
        kernel, capability, {name: (given | sizes)[name] for name in kernel.arg_names}, num_warps=chosen["warps"]
    )
    assert made.stack == 0
    # 16 bytes a load of each of o and gate
    assert made.ptx.count("ld.global.v4.b32") >= 2


@pytest.mark.parametrize("device", ["h200", "a100", "rtx3090"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("D", [1, 64, 8192])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_shape_has_a_plan(device, dtype, D, direction):
    for T in (0, 1, 4095):
        given = problem(dtype, D=D, T=T)
        assert TritonGatedNorm().reject(given, Device.named(device)) is None
        assert candidates(given, Device.named(device), direction)


def test_what_it_cannot_serve_is_said():
    assert "at most 8192; got 8193" in TritonGatedNorm().reject(problem(D=8193), Device.named("h200"))
    assert "float64" in TritonGatedNorm().reject(problem("float64"), Device.named("h200"))
    assert "NVIDIA GPU" in TritonGatedNorm().reject(problem(), Device.named("cpu"))
