"""ssd_output's kernels: right in the interpreter, compiled for GPUs that are not here, and on one."""

import pytest
import torch

from holdfast.kernels.ssd_output.call import OutputCall
from holdfast.kernels.ssd_output.triton.backend import SUMMED, WARPS, TritonOutput, _Run

pytest.importorskip("triton")
from holdfast.kernels.ssd_output.triton.backward import ssd_output_add_skip, ssd_output_bwd, ssd_output_sums
from holdfast.kernels.ssd_output.triton.forward import ssd_output_fwd
from interpreted import interpret
from kernels.ssd_output.parity import check, example
from triton_compile import TARGETS, compile_for, over_targets

BF16, FP32 = torch.bfloat16, torch.float32


def test_interpreted():
    assert "all checked" in interpret("kernels.ssd_output.parity", "interpreted", seconds=300)


def run_of(direction, width, norm):
    """A layer's: 24 heads of 64, in a projection whose rows are multiples of 8 numbers alone."""
    o = torch.empty(1, 4, width // 64, 64, dtype=BF16)
    beside = torch.empty(1, 4, width + 24, dtype=BF16)[..., :width].unflatten(-1, (-1, 64))
    weight = torch.empty(1, width) if norm else None
    call = OutputCall(o, beside, torch.empty(width // 64), beside, weight)
    return _Run(call, direction, call.x, call.z)


@pytest.mark.sizes("width")
@pytest.mark.parametrize(("width", "capability"), over_targets(1536, 4096))
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_compiles_for_gpus_that_are_not_here(direction, norm, width, capability):
    kernel = ssd_output_fwd if direction == "forward" else ssd_output_bwd
    run = run_of(direction, width, norm)
    given = dict.fromkeys(("o", "x", "z", "y", "dy", "do", "dz"), BF16) | run.constants | {"eps": 1e-5}
    given |= {"D": FP32, "weight": FP32 if norm else None, "parts": FP32}
    # strides come in multiples of UNIT, of which the compiler is told nothing more
    arguments = {name: given.get(name, 4095) for name in kernel.arg_names}
    arguments |= {"channels": width}
    made = compile_for(kernel, capability, arguments, num_warps=run.warps)
    assert run.constants["UNIT"] == 8
    assert made.stack == 0
    # 16 bytes a load of each tensor, and of each that is written
    read, written = (3, 1) if direction == "forward" else (4, 2)
    assert made.ptx.count("ld.global.v4.b32") >= read
    assert made.ptx.count("st.global.v4.b32") >= written


@pytest.mark.parametrize("capability", TARGETS)
def test_the_small_kernels_compile(capability):
    run = run_of("forward", 1536, False)
    given = dict.fromkeys(("dx", "do", "into"), BF16) | {"D": FP32, "channels": 1536} | run.constants
    arguments = {name: given.get(name, 4095) for name in ssd_output_add_skip.arg_names}
    assert compile_for(ssd_output_add_skip, capability, arguments, num_warps=run.warps).stack == 0
    given = dict.fromkeys(("parts", "dD", "dweight"), FP32) | run.of_sums() | {"channels": 1536}
    assert given["ROWS"] * given["BLOCK"] == SUMMED
    arguments = {name: given.get(name, 528) for name in ssd_output_sums.arg_names}
    assert compile_for(ssd_output_sums, capability, arguments, num_warps=WARPS).stack == 0


def test_what_it_cannot_serve_is_said():
    o = torch.empty(1, 1, 130, 64)
    assert "8192 channels at most; got 8320" in TritonOutput().reject(OutputCall(o, o, weight=torch.empty(1, 8320)))
    assert TritonOutput().reject(OutputCall(o, o, weight=torch.empty(2, 4160))) is None
    assert TritonOutput().reject(OutputCall(o, o)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_on_a_gpu(dtype):
    sizes = {"T": 515, "H": 24, "P": 64, "dtype": dtype, "device": "cuda"}
    for options in (
        {"G": 1, "odd": 24}, {"G": 8, "odd": 8}, {"D": "HP", "odd": 3}, {"D": ""}, {"norm": False}, {"z": False},
        {"norm": False, "D": ""}, {"T": 1, "H": 3, "G": 3}, {"H": 128, "G": 1, "T": 40}, {"T": 0},
    ):  # fmt: skip
        check(example(**sizes | options))
