"""mLSTM on a pool of states without a GPU: in the interpreter, and compiled for GPUs that are not here."""

import pytest
import torch

pytest.importorskip("triton")
from holdfast.kernels.matrix.decode.triton.normalizer import normalizer_decode_pool
from holdfast.kernels.matrix.decode.triton.update import matrix_decode_pool
from holdfast.planner.models.matrix.decode.triton import pool_plan
from interpreted import interpret
from kernels.matrix.decode.triton.mlstm_parity import EXP, PLAIN, SIGMOID, check, check_extremes
from triton_compile import TARGETS, compile_for


def test_pools_interpreted():
    assert "mlstm" in interpret("kernels.matrix.decode.triton.mlstm_parity", "interpreted")


@pytest.mark.slow
def test_pools_of_all_gates_interpreted():
    assert "mlstm" in interpret("kernels.matrix.decode.triton.mlstm_parity", "interpreted_further")


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(
    ("tokens", "keys", "wide", "accepted", "gating", "each"),
    [
        (1, 128, torch.float32, None, EXP, False),
        (4, 512, torch.bfloat16, torch.int32, EXP, False),
        (8, 128, torch.float16, None, SIGMOID, True),
        (1, 128, torch.float32, None, PLAIN, False),
    ],
)
def test_normalizers_compile(capability, tokens, keys, wide, accepted, gating, each):
    found = dict.fromkeys(normalizer_decode_pool.arg_names, 128) | {"scale": 0.1, "eps": 1e-6, "GROUP": 1}
    found |= dict.fromkeys(("q_ptr", "k_ptr", "i_ptr", "f_ptr"), torch.bfloat16) | {"n_ptr": wide}
    found |= dict.fromkeys(("m_ptr", "g_ptr", "beta_ptr"), torch.float32)
    found |= {"divisor_ptr": torch.float32 if gating[1] else None, "accepted_ptr": accepted, "TOKENS": tokens}
    found |= {"slots_ptr": torch.int32, "next_ptr": torch.int32, "K": keys, "BLOCK_K": keys}
    found |= {"EXPONENTIAL": gating[0], "EACH": each}
    assert compile_for(normalizer_decode_pool, capability, found, num_warps=keys // 128).stack == 0


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(
    ("tokens", "wide", "keys_last"), [(1, torch.float32, False), (4, torch.float32, True), (4, torch.bfloat16, True)]
)
def test_columns_compile(capability, tokens, wide, keys_last):
    """The kernel of the others, with divisors."""
    plan = pool_plan(128, 128, keys_last, wide == torch.float32)
    found = dict.fromkeys(matrix_decode_pool.arg_names, 128) | {"scale": 0.1, "GROUP": 1, "ERASE_GROUP": 1}
    found |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), torch.bfloat16) | {"e_ptr": None, "pool_ptr": wide}
    found |= dict.fromkeys(("g_ptr", "beta_ptr", "divisor_ptr"), torch.float32) | {"accepted_ptr": None}
    found |= {"slots_ptr": torch.int32, "next_ptr": torch.int32, "TOKENS": tokens, "K": 128, "V": 128, "BLOCK_K": 128}
    found |= {"BLOCK_V": plan["columns"], "VECTOR": False, "DELTA": False}
    found |= {"ERASE_BEFORE_DECAY": False, "KEYS_LAST": keys_last, "EACH": False}
    assert compile_for(matrix_decode_pool, capability, found, num_warps=plan["warps"]).stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize("gating", [EXP, SIGMOID, PLAIN], ids=str)
@pytest.mark.parametrize("keys_last", [False, True])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pools_on_a_gpu(wide, keys_last, gating):
    for tokens in (1, 4, 8):
        check(tokens, torch.bfloat16, wide, keys_last, "cuda", gating=gating)
        check(tokens, torch.float32, wide, keys_last, "cuda", views=tokens % 3, gating=gating, K=128, V=64)
    check(2, torch.float32, wide, keys_last, "cuda", gating=gating, K=512, V=64)
    check_extremes("cuda")
