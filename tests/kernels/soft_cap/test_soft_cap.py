"""The soft cap's kernels: right in the interpreter, compiled for GPUs that are not here, and on one."""

import pytest
import torch

pytest.importorskip("triton")
from holdfast.kernels.soft_cap.triton.backend import soft_cap_bwd, soft_cap_fwd
from holdfast.ops.soft_cap import soft_cap as soft_cap_op
from interpreted import interpret
from kernels.soft_cap.parity import check
from triton_compile import TARGETS, compile_for


def test_interpreted():
    assert "all checked" in interpret("kernels.soft_cap.parity", "interpreted", seconds=300)


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("kernel", [soft_cap_fwd, soft_cap_bwd], ids=["forward", "backward"])
def test_compiles_for_gpus_that_are_not_here(kernel, capability):
    given = {"x_ptr": torch.bfloat16, "y_ptr": torch.float32, "dy_ptr": torch.float32, "dx_ptr": torch.bfloat16}
    given |= {"count": 4096, "cap": 15.0, "BLOCK": 1024}
    assert compile_for(kernel, capability, {n: given[n] for n in kernel.arg_names}, num_warps=4).stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype):
    check((2, 700, 12), dtype=dtype, device="cuda")
    check((1, 1, 2), dtype=dtype, scale=1e-3, device="cuda")


@pytest.mark.gpu
def test_opcheck():
    x = torch.randn(2, 5, 8, device="cuda", requires_grad=True)
    torch.library.opcheck(torch.ops.holdfast.soft_cap.default, (x, 15.0))
    assert soft_cap_op(x.double(), 15.0).dtype == torch.float64
