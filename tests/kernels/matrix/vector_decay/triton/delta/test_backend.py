"""KDA in Triton without a GPU: right in the interpreter, and compiled for GPUs that are not here."""

import pytest
import torch

from holdfast.kernels.matrix.vector_decay.triton.delta.backend import TritonKDA
from holdfast.planner import Device, Problem
from holdfast.planner.models.matrix.vector_decay.delta import candidates, shared_bytes
from holdfast.planner.models.matrix.vector_decay.triton import padded

pytest.importorskip("triton")
from holdfast.kernels.matrix.vector_decay.triton.delta.chunk_inverse import kda_chunk_inverse
from holdfast.kernels.matrix.vector_decay.triton.delta.states import kda_bwd, kda_fwd
from interpreted import interpret
from triton_compile import TARGETS, compile_for

FLOAT32 = (
    "beta_ptr", "chunk_decay_ptr", "initial_ptr", "final_ptr", "pairs_ptr", "dfinal_ptr", "dinitial_ptr", "dbeta_ptr",
)  # fmt: skip
PASSES = {"forward": kda_fwd, "backward": kda_bwd}


def test_interpreted():
    assert "no token" in interpret("kernels.matrix.vector_decay.triton.delta.parity", "interpreted", seconds=300)


def test_erase_keys_that_read_before_the_decay():
    assert "no token" in interpret("kernels.matrix.vector_decay.triton.delta.parity", "before_decay")


@pytest.mark.slow
def test_erase_keys_that_read_before_the_decay_at_length():
    module = "kernels.matrix.vector_decay.triton.delta.parity"
    assert "all checked" in interpret(module, "before_decay_at_length", seconds=300)


def arguments(kernel, dtype, width, **given):
    """Of one launch, with beta, and with states before and after."""
    found = {x: torch.float32 if x in FLOAT32 else dtype for x in kernel.arg_names if x.endswith("_ptr")}
    found |= {"H": 32, "V_STEP": 32 * width, "DO_STEP": 32 * width, "WIDTH": width, "COLUMNS": width}
    found |= {"BLOCK_K": padded(width), "TILED": True, "cu_seqlens": None, "PRECISION": "tf32x3"}
    found = dict.fromkeys(kernel.arg_names, 4096) | found | given
    return {x: found[x] for x in kernel.arg_names}


@pytest.mark.parametrize("capability", TARGETS)
def test_the_inverse_compiles_for_gpus_that_are_not_here(capability):
    given = arguments(kda_chunk_inverse, torch.bfloat16, 64, cu_seqlens=torch.int32)
    assert compile_for(kda_chunk_inverse, capability, given, num_warps=4).stack == 0


@pytest.mark.parametrize("which", PASSES)
def test_a_pass_compiles_and_fits(which):
    given = arguments(PASSES[which], torch.bfloat16, 64, BLOCK_V=64, STAGES=2)
    made = compile_for(PASSES[which], 90, given, num_warps=4)
    assert "wgmma" in made.ptx
    assert made.stack == 0
    assert made.shared <= shared_bytes(64, 64, 4, 2, 2).value({})


@pytest.mark.slow
@pytest.mark.sizes("K", "stack")
@pytest.mark.parametrize(
    ("which", "dtype", "K", "device", "stack"),
    [
        ("forward", "bfloat16", 128, "h100", 160),
        ("backward", "bfloat16", 128, "h100", 96),
        ("backward", "bfloat16", 128, "rtx4090", 640),
        ("backward", "float32", 128, "h100", 1024),
    ],
)
def test_planned_passes_fit_shared_memory(which, dtype, K, device, stack):
    device = Device.named(device)
    plan = candidates(problem(dtype=dtype, K=K, V=K), device, which)[0].plan
    size = 4 if dtype == "float32" else 2
    given = arguments(PASSES[which], getattr(torch, dtype), K, BLOCK_V=plan["columns"], STAGES=plan["stages"])
    capability = 10 * device.capability[0] + device.capability[1]
    made = compile_for(PASSES[which], capability, given, num_warps=plan["warps"])
    assert made.stack <= stack
    sizes = (plan[x] for x in ("columns", "warps", "stages"))
    assert made.shared <= shared_bytes(padded(K), *sizes, size).value({})
    assert made.shared <= device.shared_per_block


def problem(traits=("decay=vector", "delta"), dtype="bfloat16", **sizes):
    sizes = {"B": 4, "T": 4096, "H": 32, "Hq": 32, "K": 128, "V": 128} | sizes
    return Problem.of("kda", "matrix", dtype, sizes, dict.fromkeys(traits, True))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (problem(dtype="float64"), "float64"),
        (problem(["decay=scalar", "delta"]), "one log decay a key channel, or an erase key"),
        (problem(["delta", "erase_key", "erase_before_decay"]), "a log decay"),
        (problem(["decay=vector"]), "the delta rule alone"),
        (problem(["decay=vector", "delta", "normalizer"]), "normaliser"),
        (problem(V=512), "at most 256; got 128 and 512"),
    ],
)
def test_what_it_cannot_serve_is_said(given, reason):
    assert reason in TritonKDA().reject(given, Device.named("h200"))
    assert "NVIDIA GPU" in TritonKDA().reject(given, Device.named("cpu"))


@pytest.mark.parametrize("device", ["h200", "a100", "rtx4090", "rtx3090"])
def test_plans_fit_devices(device):
    device = Device.named(device)
    for dtype in ("bfloat16", "float32"):
        for which in PASSES:
            found = candidates(problem(dtype=dtype), device, which)
            assert found
            assert all(each.shared <= device.shared_per_block for each in found)
