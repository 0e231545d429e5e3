"""The sum of what programs added up: right in the interpreter, compiled for GPUs that are not here, and on one."""

import pytest
import torch

pytest.importorskip("triton")
from holdfast.kernels.lib.triton.column_sums import COLUMNS, ROWS, WARPS, column_sums
from interpreted import interpret
from kernels.lib.triton.column_sums_parity import check
from triton_compile import TARGETS, compile_for


def test_interpreted():
    assert "all checked" in interpret("kernels.lib.triton.column_sums_parity", "interpreted", seconds=300)


@pytest.mark.parametrize("capability", TARGETS)
def test_compiles_for_gpus_that_are_not_here(capability):
    given = {"parts": torch.float32, "out": torch.bfloat16, "count": 528, "size": 129, "ROWS": ROWS, "BLOCK": COLUMNS}
    assert compile_for(column_sums, capability, given, num_warps=WARPS).stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "shape"), [(0, (5,)), (528, (128,)), (1, (3, 7)), (1000, (12, 384))])
def test_on_a_gpu(count, shape, dtype):
    check(count, shape, dtype, "cuda")
