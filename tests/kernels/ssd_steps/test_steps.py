"""The kernels of ssd's step sizes: right in the interpreter, compiled for GPUs that are not here, and on one."""

import pytest
import torch

pytest.importorskip("triton")
from holdfast.kernels.ssd_steps.triton.backend import SUMMED, TILE, WARPS
from holdfast.kernels.ssd_steps.triton.backward import ssd_steps_bwd, ssd_steps_sums
from holdfast.kernels.ssd_steps.triton.forward import ssd_steps_fwd
from interpreted import interpret
from kernels.ssd_steps.parity import check, example
from triton_compile import TARGETS, compile_for, over_targets

BF16, FP32 = torch.bfloat16, torch.float32


def test_interpreted():
    assert "all checked" in interpret("kernels.ssd_steps.parity", "interpreted", seconds=300)


@pytest.mark.sizes("heads")
@pytest.mark.parametrize(("heads", "capability"), over_targets(24, 6))
@pytest.mark.parametrize("kernel", [ssd_steps_fwd, ssd_steps_bwd], ids=["forward", "backward"])
def test_compiles_for_gpus_that_are_not_here(kernel, heads, capability):
    block = 1 << (heads - 1).bit_length()
    pointers = dict.fromkeys(("A", "bias", "step", "g", "dstep", "dg", "parts"), FP32) | {"dt": BF16, "ddt": BF16}
    given = pointers | {"SOFTPLUS": True, "LOG": True, "TOKENS": TILE // block, "BLOCK_H": block}
    arguments = {name: given.get(name, 4095) for name in kernel.arg_names}
    assert compile_for(kernel, capability, arguments, num_warps=WARPS).stack == 0


@pytest.mark.parametrize("capability", TARGETS)
def test_the_sums_compile(capability):
    given = dict.fromkeys(("parts", "dA", "dbias"), FP32) | {"BLOCK_H": 32, "ROWS": SUMMED // 32}
    arguments = {name: given.get(name, 24) for name in ssd_steps_sums.arg_names}
    assert compile_for(ssd_steps_sums, capability, arguments, num_warps=WARPS).stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
def test_on_a_gpu(dtype):
    for options in ({}, {"bias": False, "log": False}, {"softplus": False}, {"T": 0}):
        check(example(**{"T": 515, "H": 24, "dtype": dtype, "device": "cuda"} | options))
