"""The diagonal scan in Gluon without a Hopper: right on the emulator, compiled without spilling; what it refuses."""

import pytest
import torch

from holdfast.kernels.diagonal.hopper_scan import HopperScan
from holdfast.ops import diagonal
from holdfast.planner import Device, Problem
from holdfast.planner.models import diagonal_hopper

pytest.importorskip("triton", reason="needs Triton, which has wheels for Linux alone")

from gluon_emulator import Emulated
from kernels.diagonal import hopper_parity, scan_parity
from triton_compile import compile_for

B, T, D = 8, 4096, 2048


def problem(dtype="bfloat16", *traits, sizes=(B, T, D)):
    return Problem("rglru", "diagonal", dtype, tuple(zip("BTD", sizes, strict=True)), frozenset(traits))


@pytest.fixture(params=[False, True], ids=["late", "early"])
def emulated(request, monkeypatch):
    """Copies into shared memory come as late as they may, or as early."""
    from holdfast.kernels.diagonal import hopper_channels, hopper_pairs

    for kernels in (hopper_channels, hopper_pairs):
        for name in ("forward", "backward"):
            monkeypatch.setattr(kernels, name, Emulated(getattr(kernels, name), request.param))


@pytest.mark.parametrize("name", ["rglru", "hgrn", "rotlru"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("packed", [None, [0, 0, 3, 40, 75, 75]])
def test_the_kernels_are_right_on_the_emulator(name, dtype, packed, emulated):
    stages = 2 if packed else 3
    block = 32 if packed else 64
    plan = scan_parity.hopper(block, 32, stages, 4) if name == "rotlru" else scan_parity.hopper(64, 16, stages, 1)
    scan_parity.check(name, dtype, 75, plan, packed, channels=96)


@pytest.mark.parametrize("length", [1, 32, 33, 70])
def test_recomputed_states_are_those_of_the_forward_pass_on_the_emulator(length, emulated):
    hopper_parity.check_recomputation("rglru", length)


def test_strided_inputs_and_missing_gradients_on_the_emulator(emulated):
    hopper_parity.check_strides("hgrn", 35, 64)
    hopper_parity.check_strides("rotlru", 35, 64)


def compiled(direction, pairs, gate=torch.bfloat16):
    """The kernel of a launch at B8 T4096 D2048."""
    import triton.language as tl

    from holdfast.kernels.diagonal import hopper_channels, hopper_pairs

    traits, numbers = (["complex"], D // 2) if pairs else ([], D)
    plan = diagonal_hopper.candidates(problem("bfloat16", *traits), Device.named("h200"), direction)[0].plan
    x = torch.int32 if pairs else torch.bfloat16
    given = dict.fromkeys(("a", "theta", "grad_a", "grad_theta"), gate) | dict.fromkeys(
        ("x", "o", "grad_o", "grad_x"), x
    )
    given |= dict.fromkeys(("final", "grad_final", "grad_initial", "entries"), torch.float32)
    given |= {"bounds": None, "initial": None, "length": T, "channels": numbers, "pairs": numbers, "LOG": False}
    for name in ("a", "theta", "x", "grad"):
        given |= {f"{name}_row": T * numbers, f"{name}_step": numbers}
    given |= {"ELEMENT": tl.bfloat16, "BLOCK": plan["block"], "STEPS": plan["steps"], "STAGES": plan["stages"]}
    kernel = getattr(hopper_pairs if pairs else hopper_channels, direction)
    return compile_for(kernel, 90, given, num_warps=plan["warps"])


@pytest.mark.parametrize(
    ("direction", "pairs", "gate"),
    [
        ("forward", False, torch.bfloat16),
        ("backward", False, torch.float32),
        ("forward", True, torch.bfloat16),
        pytest.param("backward", True, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_the_scan_compiles_without_spilling(direction, pairs, gate):
    made = compiled(direction, pairs, gate)
    assert made.stack == 0
    # every copy into shared memory has 16 bytes
    assert "cp.async.cg.shared.global" in made.ptx
    assert "cp.async.ca.shared.global" not in made.ptx


def test_few_pairs_are_cut_into_narrow_blocks_backward():
    h200 = Device.named("h200")
    for sizes, block in (((3, 512, 1536), 32), ((B, T, D), 64)):
        found = diagonal_hopper.candidates(problem("bfloat16", "complex", sizes=sizes), h200, "backward")
        assert found[0].plan["block"] == block


def test_states_are_kept_as_often_as_the_op_has_room_for():
    assert diagonal_hopper.ROWS == diagonal.ENTRY_STEPS


@pytest.mark.parametrize(
    ("given", "device", "reason"),
    [
        (problem(), "a100", "it needs a GPU of compute capability 9.0 (H100, H200); the inputs are on {name}"),
        (problem("float32"), "h200", "it takes bfloat16 and float16; got float32"),
        (problem(sizes=(1, 1, 40)), "h200", "it copies 16 channels at a time: it needs a D that 16 divides; got 40"),
        (
            problem("bfloat16", "complex", sizes=(1, 1, 48)),
            "h200",
            "it copies 32 channels at a time: it needs a D that 32 divides; got 48",
        ),
        (problem(), "h200", None),
        (problem("float16", "varlen", "wide_gate"), "h200", None),
    ],
)
def test_reasons(given, device, reason):
    device = Device.named(device)
    assert HopperScan().reject(given, device) == (reason and reason.format(name=device.name))
