"""mLSTM's gates without a GPU: the kernels in the interpreter, and compiled for GPUs that are not here."""

import pytest
import torch

pytest.importorskip("triton")
from holdfast.kernels.matrix.mlstm.gates.launch import mlstm_sigmoid_gates, mlstm_sigmoid_gates_bwd
from holdfast.kernels.matrix.mlstm.gates.stabilizer import mlstm_stabilizer, mlstm_stabilizer_maps
from holdfast.kernels.matrix.mlstm.gates.stabilizer_grad import (
    mlstm_stabilizer_bwd,
    mlstm_stabilizer_bwd_maps,
)
from interpreted import interpret
from triton_compile import TARGETS, compile_for


def test_interpreted():
    assert "20.0" in interpret("kernels.matrix.mlstm.gates.parity", "interpreted", seconds=300)


def compiled(kernel, capability, size, warps, **changed):
    found = dict.fromkeys(kernel.arg_names, size) | {"cu_seqlens": None}
    found |= {name: torch.float32 for name in kernel.arg_names if name.endswith("_ptr")}
    found |= dict.fromkeys(("i_ptr", "f_ptr", "di_ptr", "df_ptr", "share_ptr"), torch.bfloat16) | changed
    return compile_for(kernel, capability, {name: found[name] for name in kernel.arg_names}, num_warps=warps)


@pytest.mark.parametrize("size", [1, 32])
@pytest.mark.parametrize("kernel", [mlstm_sigmoid_gates, mlstm_sigmoid_gates_bwd])
def test_sigmoid_gating_compiles(kernel, size):
    assert compiled(kernel, 80, size, 4, TOKENS=64, HEADS=16).stack == 0


# every pair of what is compiled in for Hopper, and each of them once for the others
EXPONENTIAL = [(90, cu_seqlens, size) for cu_seqlens in (None, torch.int64) for size in (1, 32)]
EXPONENTIAL += [
    (capability, *pair) for capability in TARGETS if capability != 90 for pair in ((None, 32), (torch.int64, 1))
]


@pytest.mark.sizes("cu_seqlens", "size")
@pytest.mark.parametrize(("capability", "cu_seqlens", "size"), EXPONENTIAL)
def test_exponential_gating_compiles(capability, cu_seqlens, size):
    heads = min(size, 16)
    constants = {"TOKENS": 8, "SEGMENTS": 256 // heads, "HEADS": heads, "TILES": 32, "PDL": capability >= 90}
    given = (capability, size, 8)
    for kernel in (mlstm_stabilizer_maps, mlstm_stabilizer):
        # one pair of registers on the stack: ptxas, for these two targets
        spilled = (kernel, capability, size, cu_seqlens) in (
            (mlstm_stabilizer, 80, 32, None),
            (mlstm_stabilizer_maps, 100, 1, torch.int64),
        )
        found = compiled(kernel, *given, cu_seqlens=cu_seqlens, map_ptr=torch.float64, **constants).stack
        assert found <= 8 * spilled, kernel.fn.__name__
    for kernel in (mlstm_stabilizer_bwd_maps, mlstm_stabilizer_bwd):
        assert compiled(kernel, *given, cu_seqlens=cu_seqlens, **constants).stack == 0, kernel.fn.__name__
