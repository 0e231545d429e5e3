"""The rotation's kernel: right in the interpreter, compiled for GPUs that are not here, and on one."""

import pytest
import torch

from parity import relative_error

pytest.importorskip("triton")
from holdfast.kernels.rotary.torch.backend import rotate
from holdfast.kernels.rotary.triton.backend import rotary
from holdfast.ops.rotary import rotary as rotary_op
from interpreted import interpret
from kernels.rotary.parity import check, example
from triton_compile import compile_for, over_targets


def test_interpreted():
    assert "all checked" in interpret("kernels.rotary.parity", "interpreted", seconds=300)


@pytest.mark.sizes("half", "heads")
@pytest.mark.parametrize(("half", "heads", "capability"), over_targets((64, 6), (96, 4), (20, 1)))
def test_compiles_for_gpus_that_are_not_here(half, heads, capability):
    given = dict.fromkeys(("q_ptr", "k_ptr", "y_ptr", "z_ptr"), torch.bfloat16) | {"position_ptr": torch.int64}
    block = 1 << (half - 1).bit_length()
    given |= {"HQ": heads, "HK": heads, "HALF": half, "BLOCK": block, "ROWS": 1024 // block}
    given |= {"BITS": (half - 1).bit_length(), "INVERSE": True, "ratio": 2**62}
    made = compile_for(rotary, capability, {n: given.get(n, 4096) for n in rotary.arg_names}, num_warps=4)
    assert made.stack == 0
    if half % 8 == 0:
        # 16 bytes a load of each half
        assert made.ptx.count("ld.global.v4.b32") >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype):
    check(example(T=2048, Hq=6, Hk=6, D=128, dtype=dtype, device="cuda"))
    check(example(T=515, Hq=4, Hk=2, D=192, dtype=dtype, device="cuda"), 10**6)
    check(example(T=1, D=20, dtype=dtype, device="cuda"), torch.tensor([[7], [999_999]], device="cuda"))


@pytest.mark.gpu
def test_the_op_takes_it_on_a_gpu():
    q, k = (x.detach().requires_grad_() for x in example(T=130, D=64, device="cuda"))
    position = torch.randint(0, 10**6, (2, 130), device="cuda")
    for _ in range(4):
        made = rotary_op(q, k, position)
        grads = torch.autograd.grad(sum(x.sin().sum() for x in made), (q, k))
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    right = [rotate(x, position) for x in wide]
    exact = torch.autograd.grad(sum(x.sin().sum() for x in right), wide)
    for got, expected in zip((*made, *grads), (*right, *exact), strict=True):
        assert relative_error(got.double(), expected) <= 1e-6


@pytest.mark.gpu
def test_opcheck():
    q, k = (x.detach().requires_grad_() for x in example(device="cuda"))
    for position in (None, torch.randint(0, 100, (1, 7), device="cuda")):
        torch.library.opcheck(torch.ops.holdfast.rotary.default, (q, k, position, 10000.0))
