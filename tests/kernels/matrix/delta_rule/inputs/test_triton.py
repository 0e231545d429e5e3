"""The kernels of the delta rules' inputs: right in the interpreter, compiled for GPUs that are not here, and on one."""

import pytest
import torch

import holdfast
from parity import relative_error

pytest.importorskip("triton")
from holdfast.kernels.matrix.delta_rule.inputs.triton import delta_rule_inputs_bwd, delta_rule_inputs_fwd
from interpreted import interpret
from kernels.matrix.delta_rule.inputs.parity import check, example
from triton_compile import compile_for, over_targets


def test_interpreted():
    assert "all checked" in interpret("kernels.matrix.delta_rule.inputs.parity", "interpreted", seconds=300)


@pytest.mark.sizes("D", "heads")
@pytest.mark.parametrize(("D", "heads", "capability"), over_targets((128, 32), (256, 1), (80, 6)))
@pytest.mark.parametrize("kernel", [delta_rule_inputs_fwd, delta_rule_inputs_bwd], ids=["forward", "backward"])
def test_compiles_for_gpus_that_are_not_here(kernel, D, heads, capability):
    given = {name: torch.bfloat16 for name in kernel.arg_names if name.endswith("_ptr")}
    wide = ("A_log_ptr", "dt_bias_ptr", "g_out_ptr", "beta_out_ptr", "dg_out_ptr", "dbeta_out_ptr", "parts_ptr")
    given |= dict.fromkeys(wide, torch.float32) | {"beta_max": 1.0}
    block, block_heads = 1 << (D - 1).bit_length(), 1 << (heads - 1).bit_length()
    given |= {"D": D, "ROWS": 2048 // block, "BLOCK_H": block_heads, "TOKENS": 512 // block_heads}
    arguments = {name: given.get(name, 4096) for name in kernel.arg_names}
    made = compile_for(kernel, capability, arguments, num_warps=4)
    assert made.stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype):
    check(example(T=515, H=8, D=128, dtype=dtype, gates=dtype, device="cuda"))
    check(example(T=70, Hq=3, H=6, D=80, dtype=dtype, without=("dt_bias",), device="cuda"), largest=2.0)
    check(example(T=70, D=256, dtype=dtype, without=("g", "A_log", "dt_bias"), device="cuda"))
    check(example(T=1, D=64, dtype=dtype, gates=dtype, device="cuda"), norm=False)


@pytest.mark.gpu
def test_the_op_takes_it_on_a_gpu():
    """The layer's options on a GPU against the same on a CPU, gradients of every input included."""
    given = dict(zip(("q", "k", "g", "beta", "A_log", "dt_bias"), example(T=130, D=64), strict=True))
    given["v"] = torch.randn(2, 130, 4, 32)
    options = {"qk_l2norm": True, "beta_sigmoid": True, "allow_neg_eigval": True}

    def run(device, dtype):
        leaves = {name: x.to(device, dtype).requires_grad_() for name, x in given.items()}
        o, _ = holdfast.gated_delta_rule(**leaves, **options)
        grads = torch.autograd.grad(o.square().sum(), list(leaves.values()))
        return [x.cpu().double() for x in (o, *grads)]

    exact = run("cpu", torch.float64)
    for got, theirs, right in zip(run("cuda", torch.float32), run("cpu", torch.float32), exact, strict=True):
        assert relative_error(got, right) <= max(3 * relative_error(theirs, right), 2e-5)


@pytest.mark.gpu
def test_opcheck():
    given = [None if x is None else x.clone().requires_grad_() for x in example(device="cuda")]
    for norm in (True, False):
        torch.library.opcheck(torch.ops.holdfast.delta_inputs.default, (*given, norm, 2.0))
    torch.library.opcheck(torch.ops.holdfast.delta_inputs.default, (*given[:2], None, None, None, None, True, 1.0))
