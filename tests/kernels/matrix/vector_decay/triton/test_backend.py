"""Vector decay in Triton without a GPU: right in the interpreter, and compiled for GPUs that are not here."""

import pytest
import torch

from holdfast.kernels.matrix.vector_decay.triton.backend import TritonGLA
from holdfast.planner import Device, Problem
from holdfast.planner.models.matrix.vector_decay.triton import candidates

pytest.importorskip("triton")
from holdfast.kernels.matrix.vector_decay.triton.chunk_grads import gla_chunk_grads
from holdfast.kernels.matrix.vector_decay.triton.chunk_prepare import gla_chunk_prepare
from holdfast.kernels.matrix.vector_decay.triton.launch import Passes
from holdfast.kernels.matrix.vector_decay.triton.states import gla_chunk_fwd
from holdfast.recurrences.definition import MatrixCall
from interpreted import interpret
from kernels.matrix.vector_decay.triton.parity import plan
from triton_compile import TARGETS, compile_for, over_targets

FLOATS = ("g_ptr", "beta_ptr", "chunk_decay_ptr", "initial_ptr", "final_ptr", "dg_ptr", "dbeta_ptr")
KERNELS = {
    "prepare": gla_chunk_prepare,
    "forward": gla_chunk_fwd,
    "reverse": gla_chunk_fwd,
    "gradients": gla_chunk_grads,
}


def test_interpreted():
    assert "no token" in interpret("kernels.matrix.vector_decay.triton.parity", "interpreted", seconds=300)


def test_decays_next_to_one():
    assert "weak" in interpret("kernels.matrix.vector_decay.triton.parity", "decays_next_to_one")


def arguments(name, dtype, width, columns, block, **given):
    """Of one launch, with beta, and with states before and after."""
    kernel = KERNELS[name]
    found = {x: torch.float32 if x in FLOATS else dtype for x in kernel.arg_names if x.endswith("_ptr")}
    if name == "forward":
        found["saved_ptr"] = None
    constants = {"GROUP": 1, "WIDTH": width, "COLUMNS": columns, "BLOCK": 64, "BLOCK_K": 64, "BLOCK_V": 64, "PARTS": 4}
    if kernel is gla_chunk_grads:
        constants |= {"BLOCK_K": 32, "PARTS": 8}
    if kernel is gla_chunk_fwd:
        constants |= {"BLOCK_K": width, "BLOCK_V": block, "STAGES": 2, "REVERSE": name == "reverse"}
    constants |= {"H": 32, "FOLDED": name != "forward", "cu_seqlens": None, "scale": 0.5}
    constants |= {"BEFORE_DECAY": False, "WIDE": dtype == torch.float32, "PRECISION": "tf32x3"}
    found = dict.fromkeys(kernel.arg_names, 4096) | constants | found | given
    return {x: found[x] for x in kernel.arg_names}


# what may spill, in bytes; the gradients keep more numbers than registers: docs/notes/vector-decay.md#portable-triton
MOST = {"prepare": 512, "forward": 128, "reverse": 128, "gradients": 320, ("gradients", 100): 920}
EVERYWHERE = [(name, 90) for name in KERNELS]
EVERYWHERE += [(name, capability) for name in ("prepare", "forward") for capability in TARGETS if capability != 90]
EVERYWHERE += [("gradients", 100)]


@pytest.mark.parametrize(("name", "capability"), EVERYWHERE)
def test_compiles_for_gpus_that_are_not_here(name, capability):
    made = compile_for(KERNELS[name], capability, arguments(name, torch.bfloat16, 64, 64, 64), num_warps=4)
    assert ("wgmma" if capability == 90 else "tcgen05.mma" if capability == 100 else "mma.sync") in made.ptx
    assert made.stack <= MOST.get((name, capability), MOST[name])


@pytest.mark.parametrize(("name", "capability"), over_targets("prepare", "gradients"))
def test_compiles_with_reads_before_the_decay(name, capability):
    """As the delta rule launches them with its erase key: the gradients spill more than with reads after the decay."""
    given = {"beta_ptr": None, "dbeta_ptr": None, "BEFORE_DECAY": True}
    given |= {"k_decayed_ptr": None} if name == "prepare" else {"dstates_ptr": None, "FOLDED": False}
    made = compile_for(KERNELS[name], capability, arguments(name, torch.bfloat16, 64, 64, 64, **given), num_warps=4)
    assert made.stack <= {"prepare": MOST["prepare"], "gradients": 640}[name]


def test_compiles_packed():
    given = arguments("forward", torch.float16, 64, 64, 64, cu_seqlens=torch.int64)
    assert compile_for(gla_chunk_fwd, 90, given, num_warps=4).stack <= MOST["forward"]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float32, 128)])
def test_planned_blocks_fit_shared_memory(dtype, width):
    device = Device.named("h200")
    chosen = candidates(problem(dtype=str(dtype).removeprefix("torch."), K=width, V=width), device, "backward")[0].plan
    given = arguments("reverse", dtype, width, width, chosen["columns"], STAGES=chosen["stages"])
    made = compile_for(gla_chunk_fwd, 90, given, num_warps=chosen["warps"])
    assert made.shared <= device.shared_per_block
    assert made.stack <= (32 if dtype == torch.bfloat16 else 1600)


def problem(traits=("decay=vector",), dtype="bfloat16", **sizes):
    sizes = {"B": 4, "T": 4096, "H": 32, "Hq": 32, "K": 128, "V": 128} | sizes
    return Problem.of("gla", "matrix", dtype, sizes, dict.fromkeys(traits, True))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (problem(dtype="float64"), "float64"),
        (problem(["decay=scalar"]), "one log decay a key channel"),
        (problem(["decay=vector", "delta"]), "delta rule"),
        (problem(["decay=vector", "normalizer"]), "normaliser"),
        (problem(V=512), "at most 256; got 128 and 512"),
    ],
)
def test_what_it_cannot_serve_is_said(given, reason):
    assert reason in TritonGLA().reject(given, Device.named("h200"))
    assert "NVIDIA GPU" in TritonGLA().reject(given, Device.named("cpu"))


@pytest.mark.parametrize("device", ["h200", "a100", "rtx4090", "rtx3090"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("K", "V"), [(8, 256), (16, 16), (80, 80), (128, 128), (256, 8), (256, 256)])
def test_every_shape_has_a_plan(device, dtype, K, V):
    for B, T, H in ((1, 0, 1), (1, 1, 1), (4, 4095, 32), (1, 1_000_000, 1)):
        for traits in (["decay=vector"], ["decay=vector", "varlen"]):
            given = problem(traits, dtype=dtype, B=B, T=T, H=H, Hq=1, K=K, V=V)
            assert TritonGLA().reject(given, Device.named(device)) is None
            for direction in ("forward", "backward"):
                assert candidates(given, Device.named(device), direction)


def test_tensors_that_kernels_cannot_read_are_copied():
    call = MatrixCall(*(torch.empty(1, 2, 1, 16, device="meta") for _ in range(4)))
    # 64 tokens of it are past 32 bits
    apart = call.q.as_strided((1, 2, 1, 16), (1 << 27, 1 << 26, 16, 1))
    run = Passes.of(plan(), call._replace(q=apart, v=call.v.mT.contiguous().mT), None)
    assert run.q.stride(1) == 16
    assert run.k is call.k
    assert run.v.stride(-1) == 1
