"""The kernels of KDA's gate: right in the interpreter, compiled for GPUs that are not here, and on one."""

import pytest
import torch

import holdfast
from parity import relative_error

pytest.importorskip("triton")
from holdfast.kernels.matrix.vector_decay.gates.launch import WARPS
from holdfast.kernels.matrix.vector_decay.gates.rows import kda_gate_bwd, kda_gate_fwd
from interpreted import interpret
from kernels.matrix.vector_decay.gates.parity import check, check_ends, example
from triton_compile import compile_for, over_targets

every_bound = pytest.mark.parametrize("bound", [None, -5.0], ids=["softplus", "bounded"])


def test_interpreted():
    assert "all checked" in interpret("kernels.matrix.vector_decay.gates.parity", "interpreted", seconds=300)


@pytest.mark.sizes("K")
@every_bound
@pytest.mark.parametrize(("K", "capability"), over_targets((128,), (80,)))
@pytest.mark.parametrize("kernel", [kda_gate_fwd, kda_gate_bwd], ids=["forward", "backward"])
def test_compiles_for_gpus_that_are_not_here(kernel, K, capability, bound):
    given = {"x": torch.bfloat16, "dx": torch.bfloat16}
    given |= dict.fromkeys(("A_log", "dt_bias", "g", "dg", "parts"), torch.float32) | {"bound": -5.0}
    block = 1 << (K - 1).bit_length()
    given |= {"H": 6, "K": K, "BLOCK": block, "ROWS": 2048 // block, "BOUNDED": bound is not None}
    arguments = {name: given.get(name, 4096) for name in kernel.arg_names}
    made = compile_for(kernel, capability, arguments, num_warps=WARPS)
    assert made.stack == 0
    # 16 bytes a load
    assert "ld.global.v4.b32" in made.ptx


@pytest.mark.gpu
@every_bound
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype, bound):
    check(example(T=515, H=6, K=128, dtype=dtype, device="cuda"), bound)
    check(example(T=70, K=80, dtype=dtype, without=("dt_bias",), device="cuda"), bound)
    check(example(B=1, T=1, H=1, K=1, dtype=dtype, device="cuda"), bound)
    check(example(B=3, T=1000, H=70, K=5, dtype=dtype, device="cuda"), bound)


@pytest.mark.gpu
@every_bound
@pytest.mark.parametrize("op", ["kda", "gdn2"])
def test_the_ops_take_it_on_a_gpu(op, bound):
    """An op with a gate on a GPU against the same on a CPU, gradients of every input included."""
    torch.manual_seed(0)
    x, A_log, dt_bias = example(T=130, H=4, K=64)
    q, k, b = torch.randn(3, 2, 130, 4, 64).unbind()
    v, w = torch.randn(2, 2, 130, 4, 32).unbind()
    given = {"g": x, "A_log": A_log, "dt_bias": dt_bias, "q": q, "k": k, "v": v}
    given |= {"beta": torch.rand(2, 130, 4)} if op == "kda" else {"b": b.sigmoid(), "w": w.sigmoid()}

    def run(device, dtype):
        leaves = {name: x.to(device, dtype).requires_grad_() for name, x in given.items()}
        o, _ = getattr(holdfast, op)(**leaves, qk_l2norm=True, lower_bound=bound)
        grads = torch.autograd.grad(o.square().sum(), list(leaves.values()))
        return [x.cpu().double() for x in (o, *grads)]

    exact = run("cpu", torch.float64)
    for got, theirs, right in zip(run("cuda", torch.float32), run("cpu", torch.float32), exact, strict=True):
        assert relative_error(got, right) <= max(3 * relative_error(theirs, right), 2e-5)


@pytest.mark.gpu
def test_gates_that_are_shut_or_wide_open_on_a_gpu():
    check_ends("cuda")


@pytest.mark.gpu
def test_opcheck():
    given = [x.clone().requires_grad_() for x in example(device="cuda")]
    for bound in (None, -5.0):
        torch.library.opcheck(torch.ops.holdfast.kda_gate.default, (*given, bound))
    torch.library.opcheck(torch.ops.holdfast.kda_gate.default, (given[0], None, None, -5.0))
