"""The kernels of a layer's step without a GPU: right in the interpreter, and compiled for GPUs that are not here."""

import pytest
import torch

from holdfast.kernels.layer_step.triton.backend import TritonLayerStep
from holdfast.ops.layer_step import problem
from holdfast.planner import Device

pytest.importorskip("triton")
from holdfast.kernels.layer_step.triton import finish, token
from holdfast.ops.layer_step_checks import DRAWN
from holdfast.recurrences import Draw, Sizes
from interpreted import interpret
from kernels.layer_step.parity import every
from triton_compile import compile_for, over_targets


def test_interpreted():
    assert "all checked" in interpret("kernels.layer_step.parity", "interpreted", seconds=300)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [16, 32])
def test_on_a_gpu(columns):
    """Its exponential has a few more units in the last place than the interpreter's."""
    every("cuda", columns=columns, limit=5e-6)


WIDE = ("tail", "state", "weight", "bias", "A_log", "dt_bias", "D", "o", "C", "n", "m", "h", "rate")
NARROW = ("x", "a", "beta", "gate", "gates", "u", "z", "y")
NUMBERS = dict.fromkeys(("largest", "l2_eps", "scale", "normalizer", "eps", "norm_eps", "cap", "decay_scale"), 0.5)
TILE = {"K": 128, "V": 256, "BLOCK_K": 128, "BLOCK_V": 32}


def given(kernel, dtype, pdl, absent, **constants):
    made = dict.fromkeys(WIDE, torch.float32) | dict.fromkeys(NARROW, dtype) | NUMBERS
    made |= {"position": torch.int64, "PDL": pdl} | TILE | constants | dict.fromkeys(absent)
    return {name: made.get(name, 4096) for name in kernel.arg_names}


KERNELS = {
    "delta": (token.conv_token, ("bias", "D", "gate"), {"DELTA": True, "GROUP": 2, "W": 4, "L": 3}, 4),
    "ssd": (token.conv_token, ("beta",), {"DELTA": False, "GROUP": 32, "W": 4, "L": 3}, 4),
    "gla": (token.retention_token, ("position",), {"LOG2_BASE": 0.0}, 4),
    "retnet": (token.retention_token, ("a",), {"LOG2_BASE": 13.3}, 4),
    "mlstm": (token.mlstm_token, (), {"EXPONENTIAL": True}, 4),
    "rglru": (token.rglru_token, (), {"HEAD": 1024, "BLOCK": 128}, 4),
    "norm": (finish.rms_finish, (), {"N": 2048, "BLOCK_N": 2048, "SHARED": False, "L": 3, "BLOCK": 2048}, 8),
    "norm of heads": (
        finish.rms_finish,
        ("x", "tail"),
        {"N": 256, "BLOCK_N": 256, "SHARED": True, "L": 0, "BLOCK": 256},
        1,
    ),
    "norm of an mlstm": (finish.mlstm_finish, (), {"EXPONENTIAL": True, "NORMALIZE": True, "BLOCK_V": 256}, 1),
}


@pytest.mark.sizes("dtype")
@pytest.mark.parametrize(("dtype", "capability"), over_targets(torch.bfloat16, torch.float32))
@pytest.mark.parametrize("name", KERNELS)
def test_steps_compile(name, dtype, capability):
    kernel, absent, constants, warps = KERNELS[name]
    made = compile_for(kernel, capability, given(kernel, dtype, capability >= 90, absent, **constants), num_warps=warps)
    assert made.stack == 0
    if "state" in kernel.arg_names or "C" in kernel.arg_names:
        # the state moves 16 bytes a thread at a time
        assert "ld.global.v4" in made.ptx
        assert "st.global.v4" in made.ptx


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("device", ["h200", "a100", "rtx3090"])
def test_every_call_has_a_plan(kind, device):
    what = problem(DRAWN[kind](Draw(0, torch.bfloat16), Sizes(B=1, H=2, K=64, V=128)))
    assert TritonLayerStep().reject(what, Device.named(device)) is None
    assert TritonLayerStep().candidates(what, Device.named(device), "forward")


def test_what_it_cannot_serve_is_said():
    def said(dtype=torch.bfloat16, device="h200", taps=4, **sizes):
        call = DRAWN["delta"](Draw(0, dtype), Sizes(B=1, H=1, **sizes), taps=taps)
        return TritonLayerStep().reject(problem(call), Device.named(device))

    assert said() is None
    assert "float64" in said(torch.float64)
    assert "NVIDIA GPU" in said(device="cpu")
    assert "K is at most 512; got 513" in said(K=513)
    assert "W is at most 16; got 17" in said(taps=17)
    assert "N is at most 16384; got 16385" in said(K=1, V=16385)
