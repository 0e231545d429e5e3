"""A few tokens on a pool of vectors without a GPU: in the interpreter, and compiled for GPUs that are not here."""

import pytest
import torch

from holdfast.kernels.diagonal.decode.triton.backend import TritonSteps
from holdfast.planner import Device, Problem
from holdfast.planner.models.diagonal.decode.triton import pool_plan

pytest.importorskip("triton")
from holdfast.kernels.diagonal.decode.triton.update import diagonal_decode_pool
from interpreted import interpret
from kernels.diagonal.decode.triton.pool_parity import OPS, check
from triton_compile import TARGETS, compile_for


def test_pools_interpreted():
    assert "rotlru" in interpret("kernels.diagonal.decode.triton.pool_parity", "interpreted")


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(
    ("name", "tokens", "wide", "accepted", "each"),
    [
        ("hgrn", 1, torch.float32, None, False),
        ("rglru", 8, torch.bfloat16, torch.int32, False),
        ("rotlru", 8, torch.bfloat16, None, True),
    ],
)
def test_pools_compile(capability, name, tokens, wide, accepted, each):
    plan = pool_plan(4096)
    found = dict.fromkeys(diagonal_decode_pool.arg_names, 4096) | {"accepted_ptr": accepted, "pool_ptr": wide}
    found |= {"x_ptr": torch.bfloat16, "h_ptr": torch.bfloat16, "a_ptr": torch.float32}
    found |= {"theta_ptr": torch.float32 if name == "rotlru" else None, "LOG": name == "hgrn"}
    found |= {"slots_ptr": torch.int32, "next_ptr": torch.int32, "TOKENS": tokens, "EACH": each}
    found |= {"BLOCK": plan["channels"]}
    made = compile_for(diagonal_decode_pool, capability, found, num_warps=plan["warps"])
    assert made.stack == 0
    if name != "rotlru":
        # four channels a thread
        assert ("st.global.v4" if wide == torch.float32 else "st.global.v2") in made.ptx


def problem(**changed):
    return Problem.of("hgrn", "diagonal", "bfloat16", {"B": 4, "T": 1, "D": 4096} | changed, {})


def test_what_a_pool_cannot_serve_is_said():
    device = Device.named("h200")
    assert TritonSteps().reject(problem(T=8), device) is None
    assert "1 to 8 tokens" in TritonSteps().reject(problem(T=9), device)
    assert "1 to 8 tokens" in TritonSteps().reject(problem(T=0), device)
    double = Problem.of("hgrn", "diagonal", "float64", {"B": 4, "T": 1, "D": 64}, {})
    assert "float64" in TritonSteps().reject(double, device)


def test_the_plan_does_not_depend_on_the_batch():
    device = Device.named("h200")
    plans = {
        TritonSteps().candidates(problem(B=B, T=T), device, "forward")[0].plan for B in (1, 64, 4096) for T in (1, 4)
    }
    assert len(plans) == 1


def test_plans():
    """Four numbers a thread; a pair is one."""
    for channels, block, warps in ((1, 1, 1), (5, 8, 1), (128, 128, 1), (256, 256, 2), (513, 512, 4), (4096, 512, 4)):
        plan = pool_plan(channels)
        assert (plan["channels"], plan["warps"]) == (block, warps)
    pairs = Problem.of("rotlru", "diagonal", "float32", {"B": 1, "T": 1, "D": 512}, {"complex": True})
    assert TritonSteps().candidates(pairs, Device.named("h200"), "forward")[0].plan["channels"] == 256


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_pools_on_a_gpu(name, wide):
    for tokens in (1, 4, 8):
        check(name, tokens, 4096, torch.bfloat16, wide, "cuda")
        check(name, tokens, 1218, torch.float32, wide, "cuda", views=tokens % 3)
        check(name, tokens, 2, torch.float32, wide, "cuda")
