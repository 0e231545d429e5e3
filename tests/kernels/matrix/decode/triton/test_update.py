"""A few tokens on a pool of states without a GPU: in the interpreter, and compiled for GPUs that are not here."""

import pytest
import torch

from holdfast.kernels.matrix.decode.triton.backend import TritonPool
from holdfast.planner import Device, Problem
from holdfast.planner.models.matrix.decode.triton import STATE_REGISTERS, pool_plan

pytest.importorskip("triton")
from holdfast.kernels.matrix.decode.triton.update import matrix_decode_pool
from interpreted import interpret
from kernels.matrix.decode.triton.pool_parity import OPS, check
from triton_compile import TARGETS, compile_for


def test_pools_interpreted():
    assert "comba" in interpret("kernels.matrix.decode.triton.pool_parity", "interpreted")


@pytest.mark.slow
def test_pools_of_every_recurrence_interpreted():
    assert "comba" in interpret("kernels.matrix.decode.triton.pool_parity", "interpreted_further")


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(
    ("tokens", "wide", "keys_last", "accepted"),
    [(1, torch.float32, False, None), (4, torch.bfloat16, True, torch.int32)],
)
def test_pools_compile(capability, tokens, wide, keys_last, accepted):
    found = dict.fromkeys(matrix_decode_pool.arg_names, 128) | {"scale": 0.1, "GROUP": 1, "ERASE_GROUP": 1}
    found |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), torch.bfloat16) | {"e_ptr": None, "pool_ptr": wide}
    found |= {"g_ptr": torch.float32, "beta_ptr": torch.float32, "slots_ptr": torch.int32, "next_ptr": torch.int32}
    found |= {
        "accepted_ptr": accepted,
        "divisor_ptr": None,
        "TOKENS": tokens,
        "K": 128,
        "V": 128,
        "BLOCK_K": 128,
        "BLOCK_V": 32,
        "VECTOR": False,
    }
    found |= {"DELTA": True, "ERASE_BEFORE_DECAY": False, "KEYS_LAST": keys_last, "EACH": False}
    made = compile_for(matrix_decode_pool, capability, found, num_warps=4)
    assert made.stack == 0
    # the state moves 16 bytes a thread at a time
    assert "ld.global.v4" in made.ptx
    assert "st.global.v4" in made.ptx


def problem(traits=(), **changed):
    sizes = {"B": 4, "T": 1, "H": 32, "Hq": 32, "K": 128, "V": 128}
    return Problem.of("gla", "matrix", "bfloat16", sizes | changed, dict.fromkeys(traits, True))


def test_what_a_pool_cannot_serve_is_said():
    device = Device.named("h200")
    assert TritonPool().reject(problem(T=8), device) is None
    assert "1 to 8 tokens" in TritonPool().reject(problem(T=9), device)
    assert "1 to 8 tokens" in TritonPool().reject(problem(T=0), device)
    assert TritonPool().reject(problem(["normalizer"]), device) is None
    assert "at most 512" in TritonPool().reject(problem(K=1024), device)


@pytest.mark.parametrize("keys_last", [False, True])
@pytest.mark.parametrize("is_wide", [False, True])
def test_a_programs_part_of_a_state_fits_its_registers(keys_last, is_wide):
    for keys in (1, 4, 16, 100, 128, 256, 512):
        for values in (1, 8, 20, 128, 512):
            plan = pool_plan(keys, values, keys_last, is_wide)
            held = (1 << (keys - 1).bit_length()) * plan["columns"]
            assert held <= STATE_REGISTERS * 32 * plan["warps"]
            assert plan["columns"] & (plan["columns"] - 1) == 0
            assert 1 <= plan["columns"] < 2 * values
            assert plan["warps"] in (1, 2, 4, 8)
            # no cell is held by two warps
            assert held >= 32 * plan["warps"] or plan["warps"] == 1
    # what was measured
    chosen = pool_plan(128, 128, keys_last, is_wide)
    right = {(False, False): (32, 2), (False, True): (32, 2), (True, False): (16, 1), (True, True): (8, 1)}
    assert (chosen["columns"], chosen["warps"]) == right[keys_last, is_wide]


def test_the_plan_does_not_depend_on_the_batch():
    device = Device.named("h200")
    plans = {
        TritonPool().candidates(problem(B=B, T=T), device, "forward")[0].plan for B in (1, 64, 4096) for T in (1, 4)
    }
    assert len(plans) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("keys_last", [False, True])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_pools_on_a_gpu(name, wide, keys_last):
    for tokens in (1, 4, 8):
        check(name, tokens, torch.bfloat16, wide, keys_last, "cuda")
        check(name, tokens, torch.float32, wide, keys_last, "cuda", views=tokens % 3, K=128, V=64)
