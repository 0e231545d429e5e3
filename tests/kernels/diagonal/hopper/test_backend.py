"""The diagonal scan in Gluon without a Hopper: right on the emulator, compiled without spilling; what it refuses."""

import importlib

import pytest
import torch

from holdfast.kernels.diagonal.hopper.backend import HopperScan
from holdfast.ops import diagonal
from holdfast.planner import Device, Problem
from holdfast.planner.models.diagonal import hopper as diagonal_hopper

pytest.importorskip("triton", reason="needs Triton, which has wheels for Linux alone")

from gluon_emulator import Emulated
from kernels.diagonal.hopper import parity as hopper_parity
from kernels.diagonal.triton import parity as scan_parity
from triton_compile import compile_for

B, T, D = 8, 4096, 2048
PACKED = [0, 0, 3, 40, 75, 75]


def problem(dtype="bfloat16", *traits, sizes=(B, T, D)):
    return Problem("rglru", "diagonal", dtype, tuple(zip("BTD", sizes, strict=True)), frozenset(traits))


@pytest.fixture(params=[False, True], ids=["late", "early"])
def emulated(request, monkeypatch):
    """Copies into shared memory come as late as they may, or as early; which of these."""
    from holdfast.kernels.diagonal import hopper

    for kind in ("real", "complex"):
        kernels = importlib.import_module(f"{hopper.__name__}.{kind}")
        for step in ("fwd", "bwd"):
            name = f"diagonal_{kind}_{step}_sm90"
            monkeypatch.setattr(kernels, name, Emulated(getattr(kernels, name), request.param))
    return "early" if request.param else "late"


@pytest.mark.parametrize("name", ["rglru", "hgrn", "rotlru"])
@pytest.mark.parametrize(
    ("dtype", "packed", "emulated"),
    # each two of the three traits
    [("float16", None, False), ("float16", PACKED, True), ("bfloat16", None, True), ("bfloat16", PACKED, False)],
    indirect=["emulated"],
)
def test_the_kernels_are_right_on_the_emulator(name, dtype, packed, emulated):
    plan = scan_parity.hopper(32 if packed else 64, 16, 2 if packed else 3, 1)
    scan_parity.check(name, dtype, 75, plan, packed, channels=96)


@pytest.mark.parametrize("name", ["rglru", "hgrn", "rotlru"])
@pytest.mark.parametrize(
    ("groups", "steps", "packed", "emulated"),
    [(4, 32, None, False), (4, 32, [*PACKED, 205], True), (8, 16, None, True), (8, 16, [*PACKED, 205], False)],
    indirect=["emulated"],
)
def test_groups_that_share_a_tile_are_right_on_the_emulator(name, packed, groups, steps, emulated):
    plan = scan_parity.hopper(64, steps, 3, groups, groups)
    scan_parity.check(name, "float16", 205, plan, packed, channels=96)


@pytest.mark.parametrize("name", ["rglru", "rotlru"])
@pytest.mark.parametrize(
    ("groups", "steps", "lengths"),
    [
        # a tile forward is groups * steps, backward groups * 32: at a group's end, a tile's, two tiles', and one beside
        (1, 16, (1, 15, 16, 17, 31, 32, 33)),
        (4, 32, (1, 31, 32, 33, 127, 128, 129, 256)),
        (8, 16, (16, 112, 127, 128, 129, 255, 256, 257)),
    ],
)
def test_sequences_that_end_with_a_group_or_a_tile_on_the_emulator(name, groups, steps, lengths, emulated):
    plan = scan_parity.hopper(32, steps, 2, 1 if groups == 1 else groups, groups)
    # by itself where copies are late: what is not copied yet is NaN
    for length in lengths if emulated == "late" else []:
        scan_parity.check(name, "float16", length, plan, batch=1, channels=32)
    offsets = [0, *(sum(lengths[: n + 1]) for n in range(len(lengths)))]
    scan_parity.check(name, "float16", offsets[-1], plan, offsets, channels=32)


@pytest.mark.parametrize(
    ("name", "groups", "emulated"),
    # rglru and hgrn are of one kernel
    [("rglru", 1, False), ("rglru", 4, True), ("hgrn", 1, True), ("hgrn", 4, False)]
    + [("rotlru", groups, early) for groups in (1, 4) for early in (False, True)],
    indirect=["emulated"],
)
def test_views_and_neighbours_on_the_emulator(name, groups, emulated):
    plan = scan_parity.hopper(32, 32, 2, 1 if groups == 1 else groups, groups)
    scan_parity.layouts_and_neighbours(name, "float16", plan, [0, 20, 75, 160], 32)


@pytest.mark.parametrize(("length", "groups"), [(1, 1), (32, 1), (33, 1), (70, 1), (32, 4), (70, 4), (200, 4)])
def test_recomputed_states_are_those_of_the_forward_pass_on_the_emulator(length, groups, emulated):
    hopper_parity.check_recomputation("rglru", length, groups)


@pytest.mark.parametrize("groups", [1, 4])
def test_strided_inputs_and_missing_gradients_on_the_emulator(groups, emulated):
    hopper_parity.check_strides("hgrn", 35, 64, groups)
    hopper_parity.check_strides("rotlru", 35, 64, groups)


FEW, MANY = (3, 512, 1536), (B, T, D)


def compiled(direction, pairs, sizes, gate):
    """The kernel of a launch."""
    import triton.language as tl

    from holdfast.kernels.diagonal.hopper import complex, real

    _, length, channels = sizes
    traits, numbers = (["complex"], channels // 2) if pairs else ([], channels)
    if gate == torch.float32:
        traits.append("wide_gate")
    what = problem("bfloat16", *traits, sizes=sizes)
    plan = diagonal_hopper.candidates(what, Device.named("h200"), direction)[0].plan
    x = torch.int32 if pairs else torch.bfloat16
    given = dict.fromkeys(("a", "theta", "grad_a", "grad_theta"), gate) | dict.fromkeys(
        ("x", "o", "grad_o", "grad_x"), x
    )
    given |= dict.fromkeys(("final", "grad_final", "grad_initial", "entries"), torch.float32)
    given |= {"bounds": None, "initial": None, "length": length, "channels": numbers, "pairs": numbers, "LOG": False}
    for name in ("a", "theta", "x", "grad"):
        given |= {f"{name}_row": length * numbers, f"{name}_step": numbers}
    given |= {"ELEMENT": tl.bfloat16, "BLOCK": plan["block"], "GROUPS": plan["groups"]}
    given |= {"STEPS": plan["steps"], "STAGES": plan["stages"]}
    kernel = {
        ("forward", False): real.diagonal_real_fwd_sm90,
        ("backward", False): real.diagonal_real_bwd_sm90,
        ("forward", True): complex.diagonal_complex_fwd_sm90,
        ("backward", True): complex.diagonal_complex_bwd_sm90,
    }[direction, pairs]
    return compile_for(kernel, 90, given, num_warps=plan["warps"], maxnreg=plan["registers"])


@pytest.mark.sizes("sizes", "gate")
@pytest.mark.parametrize(
    ("direction", "pairs", "sizes", "gate"),
    [
        ("forward", False, MANY, torch.bfloat16),
        ("forward", False, FEW, torch.float32),
        ("backward", False, MANY, torch.float32),
        ("backward", False, FEW, torch.bfloat16),
        ("forward", True, MANY, torch.bfloat16),
        pytest.param("forward", True, FEW, torch.float32, marks=pytest.mark.slow),
        pytest.param("backward", True, MANY, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("backward", True, FEW, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("backward", True, FEW, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_the_scan_compiles_without_spilling(direction, pairs, sizes, gate):
    made = compiled(direction, pairs, sizes, gate)
    assert made.stack == 0
    # every copy into shared memory has 16 bytes
    assert "cp.async.cg.shared.global" in made.ptx
    assert "cp.async.ca.shared.global" not in made.ptx


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("traits", [[], ["wide_gate"], ["complex"], ["complex", "wide_gate"]])
def test_few_channels_are_shared_by_more_groups_of_warps(direction, traits):
    """And by blocks of fewer, that more SMs have one; where they are many, rows are as wide as shared memory allows."""
    few, many = (
        diagonal_hopper.candidates(problem("bfloat16", *traits, sizes=sizes), Device.named("h200"), direction)[0].plan
        for sizes in (FEW, MANY)
    )
    assert few["groups"] >= 4
    assert few["block"] <= many["block"]
    assert few["groups"] >= many["groups"]


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
