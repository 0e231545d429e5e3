"""The kernels of a gate's log decay: right in the interpreter, compiled for GPUs that are not here, and on one."""

import pytest
import torch

pytest.importorskip("triton")
from holdfast.kernels.log_gate.triton.backend import _shape
from holdfast.kernels.log_gate.triton.rows import log_gate_bwd, log_gate_fwd
from interpreted import interpret
from kernels.log_gate.parity import check
from triton_compile import TARGETS, compile_for


def test_interpreted():
    assert "all checked" in interpret("kernels.log_gate.parity", "interpreted", seconds=300)


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("kernel", [log_gate_fwd, log_gate_bwd], ids=["forward", "backward"])
def test_compiles_for_gpus_that_are_not_here(kernel, capability):
    _, _, constants, warps = _shape(torch.empty(8, 2048, 384))
    given = {"x": torch.bfloat16, "dx": torch.bfloat16} | dict.fromkeys(("bias", "g", "dg", "parts"), torch.float32)
    arguments = given | {"count": 4096, "share": 0.0625} | constants
    made = compile_for(kernel, capability, {name: arguments[name] for name in kernel.arg_names}, num_warps=warps)
    assert made.stack == 0
    # 16 bytes a load
    assert "ld.global.v4.b32" in made.ptx


@pytest.mark.parametrize(
    ("channels", "rows", "warps"), [(13, 64, 4), (384, 2, 4), (1024, 1, 4), (2048, 1, 8), (4096, 1, 16), (8192, 1, 16)]
)
def test_a_block_has_rows_for_four_warps_of_eight_elements_a_thread_and_more_warps_for_a_wider_row(
    channels, rows, warps
):
    count, tiles, constants, found = _shape(torch.empty(3, 100, channels, device="meta"))
    assert (count, tiles, constants["ROWS"], found) == (300, -(-300 // rows), rows, warps)
    assert (constants["D"], channels <= constants["BLOCK"] < 2 * channels) == (channels, True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype):
    check(3, 515, 384, dtype=dtype, device="cuda")
    check(1, 7, 13, dtype=dtype, device="cuda")
    check(1, 0, 13, dtype=dtype, device="cuda")
