"""The kernels around a linear recurrent unit's scan: in the interpreter, compiled for GPUs not here, and on one."""

import re

import pytest
import torch
import torch.nn.functional as F

from parity import relative_error

pytest.importorskip("triton")
from holdfast.kernels.lru.call import Gates
from holdfast.kernels.lru.torch.backend import lru_gates
from holdfast.kernels.lru.triton import gated_gelu as triton_gated_gelu
from holdfast.kernels.lru.triton import gates as triton_gates
from holdfast.ops.gated_gelu import gated_gelu
from holdfast.ops.lru_gates import lru_gates as lru_gates_op
from interpreted import interpret
from kernels.lru.parity import check, check_gelu, example
from triton_compile import TARGETS, compile_for, over_targets

WIDE = ("bias_ptr", "rate_ptr", "phase_ptr", "a_ptr", "theta_ptr", "da_ptr", "dtheta_ptr", "parts_ptr")


def test_interpreted():
    assert "all checked" in interpret("kernels.lru.parity", "interpreted", seconds=300)


def compiled(kernel, capability, warps=triton_gates.WARPS, **given):
    pointers = {n: torch.float32 if n in WIDE else torch.bfloat16 for n in kernel.arg_names if n.endswith("_ptr")}
    arguments = {name: (pointers | given).get(name, 4096) for name in kernel.arg_names}
    return compile_for(kernel, capability, arguments, num_warps=warps)


@pytest.mark.sizes("P")
@pytest.mark.parametrize(("P", "capability"), over_targets(768, 48, 20))
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("name", ["lru_gates_fwd", "lru_gates_bwd"])
def test_gates_compile_for_gpus_that_are_not_here(name, paired, P, capability):
    block = min(1 << (P - 1).bit_length(), 256 // (1 + paired))
    sizes = {"P": P, "S": (4 if paired else 2) * P, "PAIRED": paired, "BLOCK": block}
    sizes |= {"ROWS": 1024 // (block * (1 + paired)), "decay_scale": 8.0}
    if not paired:
        sizes |= dict.fromkeys(("phase_ptr", "theta_ptr", "dtheta_ptr"))
    warps = triton_gates.FORWARD_WARPS if name == "lru_gates_fwd" else triton_gates.WARPS
    made = compiled(getattr(triton_gates, name), capability, warps, **sizes)
    assert made.stack == 0
    if P % 16 == 0 and not paired:
        # of each of u and the gates 8 bytes a load, or 16, which may be copies that are on their way meanwhile
        wide = r"ld\.global\.v2\.b32" if name == "lru_gates_fwd" else r"ld\.global\.v4\.b32|cp\.async\.cg\S* .*, 0x10"
        assert len(re.findall(wide, made.ptx)) >= 3


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("name", ["gated_gelu_fwd", "gated_gelu_bwd"])
def test_the_branch_compiles_for_gpus_that_are_not_here(name, capability):
    made = compiled(getattr(triton_gated_gelu, name), capability, BLOCK=256, ROWS=4)
    assert made.stack == 0
    assert made.ptx.count("ld.global.v4.b32") >= 2


def test_the_sums_compile_for_gpus_that_are_not_here():
    sizes = {"P": 48, "S": 96, "BLOCK": 32, "ROWS": 32, "dphase_ptr": None}
    assert compiled(triton_gates.lru_gates_sums, 90, **sizes).stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype, paired):
    check(example(T=515, H=1, P=768, paired=paired, dtype=dtype, device="cuda"))
    check(example(T=130, H=16, P=48, paired=paired, dtype=dtype, device="cuda"))
    check(example(T=1, P=20, paired=paired, dtype=dtype, device="cuda"))
    check_gelu(T=515, D=768, dtype=dtype, device="cuda")
    check_gelu(T=3, D=20, dtype=dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("paired", [False, True])
def test_the_ops_take_them_on_a_gpu(paired):
    """From the third call on what was recorded runs; the same bits each time."""
    given = example(T=130, P=64, paired=paired, device="cuda")
    leaves = [None if x is None else x.detach().requires_grad_() for x in given[:5]]
    z = torch.randn(2, 130, given.u.shape[2], device="cuda", requires_grad=True)

    def run(gates, gelu, leaves, z):
        u, g, bias, rate, phase = leaves
        a, write, theta = gates(u, g, bias, rate, 8.0, phase)
        made = [a, gelu(write, z)] + ([] if theta is None else [theta])
        used = [x for x in (*leaves, z) if x is not None]
        return [*made, *torch.autograd.grad(sum(x.sin().sum() for x in made), used)]

    found = [run(lru_gates_op, gated_gelu, leaves, z) for _ in range(4)]
    wide = [None if x is None else x.detach().double().requires_grad_() for x in leaves]
    right = run(
        lambda u, g, bias, rate, strength, phase: lru_gates(Gates(u, g, bias, rate, phase, strength)),
        lambda h, z: h * F.gelu(z),
        wide,
        z.detach().double().requires_grad_(),
    )
    for got, expected in zip(found[-1], right, strict=True):
        assert relative_error(got.double(), expected) <= 2e-6
    assert all(torch.equal(x, y) for each in found for x, y in zip(each, found[0], strict=True))


@pytest.mark.gpu
def test_opcheck():
    for paired in (False, True):
        *tensors, strength = example(paired=paired, device="cuda")
        given = [None if x is None else x.detach().requires_grad_() for x in tensors]
        torch.library.opcheck(torch.ops.holdfast.lru_gates.default, (*given, strength))
    h, z = (torch.randn(2, 5, 8, device="cuda", requires_grad=True) for _ in range(2))
    torch.library.opcheck(torch.ops.holdfast.gated_gelu.default, (h, z))
