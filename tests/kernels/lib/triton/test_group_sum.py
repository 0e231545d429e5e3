"""The sum over heads of a group: right in the interpreter, compiled for GPUs that are not here, and on one."""

import re

import pytest
import torch

pytest.importorskip("triton")
from holdfast.kernels.lib.triton.group_sum import WARPS, group_sum, launch_constants, sum_over_groups
from interpreted import interpret
from kernels.lib.triton.group_sum_parity import check
from triton_compile import compile_for, over_targets


def test_interpreted():
    assert "all checked" in interpret("kernels.lib.triton.group_sum_parity", "interpreted", seconds=300)


def test_turns_are_of_as_many_heads_as_each_other():
    assert [launch_constants(group, 64, torch.bfloat16)["IN_FLIGHT"] for group in (1, 3, 8, 12, 13, 24, 64)] == [
        1,
        3,
        8,
        6,
        7,
        8,
        8,
    ]


@pytest.mark.sizes("rows", "group", "keys", "dtype", "out")
@pytest.mark.parametrize(("rows", "capability"), over_targets(4095, 1))
@pytest.mark.parametrize(
    ("group", "keys", "dtype", "out"),
    [
        (24, 128, torch.bfloat16, torch.bfloat16),
        (3, 192, torch.bfloat16, torch.bfloat16),
        (2, 72, torch.float32, torch.bfloat16),
        (64, 40, torch.float16, torch.float16),
    ],
)
def test_compiles_to_reads_of_16_bytes(group, keys, dtype, out, rows, capability):
    constants = launch_constants(group, keys, dtype)
    given = {"q_parts": dtype, "k_parts": dtype, "q_out": out, "k_out": out, "rows": rows} | constants
    made = compile_for(group_sum, capability, given, num_warps=WARPS)
    assert made.stack == 0
    assert made.registers <= 128
    assert set(re.findall(r"ld\.global(\S*)", made.ptx)) == {".v4.b32"}
    assert set(re.findall(r"st\.global(\S*)", made.ptx)) == {".v4.b32" if out == dtype else ".v2.b32"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "out"), [("bfloat16", None), ("float16", None), ("float32", None), ("float32", "bfloat16")]
)
@pytest.mark.parametrize(("shape", "group"), [((2, 700, 1, 128), 24), ((1, 333, 4, 192), 3), ((3, 5, 2, 7), 64)])
def test_on_a_gpu(shape, group, dtype, out):
    check(shape, group, getattr(torch, dtype), out and getattr(torch, out), "cuda")


@pytest.mark.gpu
def test_of_more_than_2_to_31_numbers():
    dq = torch.ones(1, 1 << 19, 64, 65, dtype=torch.bfloat16, device="cuda")
    into = [torch.empty(1, 1 << 19, 2, 65, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    sum_over_groups(dq, dq, *into)
    assert all((x == 32).all() for x in into)
