"""Triton kernels take named tuples and aggregates: in the interpreter and compiled."""

import pytest
import torch

pytest.importorskip("triton")
from interpreted import interpret
from kernels.lib.triton.named_tuples import sum_rows
from triton_compile import compile_for


def test_interpreted():
    assert "all checked" in interpret("kernels.lib.triton.named_tuples", "interpreted")


@pytest.mark.parametrize("bias", [None, torch.float32])
def test_compiles(bias):
    f32 = torch.float32
    made = compile_for(sum_rows, 90, {"source": f32, "bias": bias, "out": f32, "count": 1 << 20, "WIDTH": 128})
    assert made.stack == 0
    assert ".func" not in made.ptx
