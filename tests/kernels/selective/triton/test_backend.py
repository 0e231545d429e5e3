"""The Triton selective scan where there is no GPU: right in the interpreter, and compiled for GPUs without spilling."""

import pytest
import torch

from holdfast.kernels.selective.triton.backend import TritonSelective
from holdfast.ops import selective
from holdfast.planner import Device, Problem
from holdfast.planner.models.selective import triton as model
from holdfast.recurrences.mamba1 import MAMBA1

pytest.importorskip("triton", reason="needs Triton, which has wheels for Linux alone")

from interpreted import interpret
from triton_compile import TARGETS, compile_for

B, T, D, N = 8, 2048, 1536, 16
FP32, BF16 = torch.float32, torch.bfloat16


def problem(dtype="bfloat16", *traits, sizes=(B, T, D, N, 1)):
    return Problem("mamba1", "selective", dtype, tuple(zip("BTDNG", sizes, strict=True)), frozenset(traits))


def test_every_kernel_is_right_in_the_interpreter():
    assert interpret("kernels.selective.triton.parity", "interpreted", seconds=300).count("\n") == 3


@pytest.mark.slow
def test_what_may_be_left_out_and_wide_states_in_the_interpreter():
    assert interpret("kernels.selective.triton.parity", "interpreted_further", seconds=300).count("\n") == 2


@pytest.mark.slow
def test_views_and_neighbours_in_the_interpreter():
    interpret("kernels.selective.triton.parity", "interpreted_layouts", seconds=300)


def arguments(dtype, block_d, keep=True, packed=False):
    """Of the two launches at B8 T2048 D1536 N16."""
    given = {
        "x": dtype, "dt": dtype, "rate": FP32, "B": FP32, "C": FP32, "D": FP32, "z": dtype, "dt_bias": FP32,
        "y": dtype, "initial": None, "final": FP32, "entries": FP32, "cu_seqlens": torch.int64 if packed else None,
        "T": T, "channels": D, "group_channels": D, "N": N, "SOFTPLUS": True, "KEEP": keep, "CHUNK": model.CHUNK,
        "PADDED": 16, "BLOCK_D": block_d, "BLOCK_N": model.BLOCK_N, "dy": dtype, "d_final": None, "dx": dtype,
        "ddt": dtype, "dz": dtype, "d_initial": FP32, "carried": FP32, "dA": FP32, "dB": FP32, "dC": FP32, "dD": FP32,
        "dbias": FP32, "size": B * T * N,
    }  # fmt: skip
    for name in ("x", "dt", "z", "dy"):
        given |= {f"{name}_batch": T * D, f"{name}_step": D}
    return given


CASES = [(dtype, block) for dtype in (BF16, FP32) for block in model.BLOCKS["forward"]]


@pytest.mark.sizes("dtype", "block")
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(("dtype", "block"), CASES)
def test_the_forward_pass_compiles_without_spilling(dtype, block, capability):
    from holdfast.kernels.selective.triton.forward import selective_fwd

    made = compile_for(selective_fwd, capability, arguments(dtype, block), num_warps=model.WARPS)
    assert made.stack == 0
    if capability == 90:
        assert made.registers <= model.REGISTERS["forward"][block]
    # four tokens of B or C by one load
    assert "ld.global.v4.b32" in made.ptx


@pytest.mark.sizes("dtype", "packed")
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(("dtype", "packed"), [(BF16, False), (FP32, True)])
def test_the_backward_pass_compiles_and_spills_next_to_nothing(dtype, packed, capability):
    from holdfast.kernels.selective.triton.backward import selective_bwd

    (block,) = model.BLOCKS["backward"]
    made = compile_for(selective_bwd, capability, arguments(dtype, block, packed=packed), num_warps=model.WARPS)
    # a few numbers beside the 255 that a thread holds
    assert made.stack <= {80: 32, 90: 16, 100: 0}[capability]
    # a plain sum over channels, and a scan in reverse, exchange each number five times
    assert made.ptx.count("shfl.sync") < 100


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("packed", [False, True])
def test_what_stands_around_the_scan_compiles(packed, capability):
    from holdfast.kernels.selective.triton.chunk_grads import selective_group_grads
    from holdfast.kernels.selective.triton.chunk_prepare import selective_prepare
    from holdfast.kernels.selective.triton.launch import BLOCK, WARPS

    sizes = {"T": T, "sequences": B, "chunks": T // 16, "N": N, "count": 48, "size": B * T * N}
    sizes |= {"CHUNK": model.CHUNK, "PADDED": 16, "BLOCK": BLOCK, "cu_seqlens": torch.int64 if packed else None}
    sizes |= {f"{name}_{axis}": n for name in "BC" for axis, n in (("batch", T * 80), ("step", 80), ("group", N))}
    tensors = {"B": BF16, "C": BF16, "laid_B": FP32, "laid_C": FP32}
    assert compile_for(selective_prepare, capability, tensors | sizes, num_warps=WARPS).stack == 0
    tensors = {"parts_B": FP32, "parts_C": FP32, "dB": BF16, "dC": BF16}
    for count in (48, 1):
        given = tensors | sizes | {"count": count}
        assert compile_for(selective_group_grads, capability, given, num_warps=WARPS).stack == 0


def test_a_call_of_no_token_has_its_operands():
    """A kernel is compiled whole, its loop over no chunk too; without B it did not compile."""
    from holdfast.kernels.selective.triton.launch import Run
    from kernels.selective.triton.parity import example, plan

    call, _ = MAMBA1.map(**example(FP32, 0))
    run = Run(plan(), call, None)
    assert all(x is not None for x in run._operands())


def test_both_passes_have_the_same_chunks():
    """The backward pass would otherwise look for states where the forward pass left none."""
    for sizes in ((8, 2048, 1536, 16, 1), (1, 1, 7, 256, 7), (3, 100_000, 64, 17, 2)):
        for dtype in ("float16", "float32"):
            for direction in ("forward", "backward"):
                found = TritonSelective().candidates(
                    problem(dtype, "varlen", "needs_grad", sizes=sizes), Device.named("h200"), direction
                )
                assert {candidate.plan["chunk"] for candidate in found} == {selective.ENTRY_STEPS}


def test_programs_fill_the_gpu():
    device = Device.named("h200")
    for direction in ("forward", "backward"):
        best = TritonSelective().candidates(problem("bfloat16", "gate", "needs_grad"), device, direction)[0]
        assert best.blocks >= 2 * device.sms


@pytest.mark.parametrize(
    ("given", "device", "reason"),
    [
        (problem(), "cpu", "it needs an NVIDIA GPU; the inputs are on cpu"),
        (problem("float64"), "h200", "it takes float32, bfloat16, float16; got float64"),
        (problem(sizes=(1, 1, 8, 257, 1)), "h200", "it takes an N of 256 at most; got 257"),
        (problem(sizes=(1, 1, 2**23, 1, 1)), "h200", "it takes 4194304 channels at most; got 8388608"),
        (problem(sizes=(1, 1, 8, 256, 1)), "a100", None),
    ],
)
def test_reasons(given, device, reason):
    assert TritonSelective().reject(given, Device.named(device)) == reason
