"""The Triton scan where there is no GPU: right in the interpreter, and compiled for GPUs without spilling registers."""

from functools import reduce

import pytest
import torch

from holdfast.kernels.diagonal.triton.backend import Run, TritonScan
from holdfast.ops import diagonal
from holdfast.planner import Device, Plan, Problem
from holdfast.planner.models.diagonal import triton as diagonal_scan
from holdfast.recurrences.definition import DiagonalCall

pytest.importorskip("triton", reason="needs Triton, which has wheels for Linux alone")

from holdfast.kernels.diagonal.triton import complex as triton_complex
from holdfast.kernels.diagonal.triton import real as triton_real
from interpreted import interpret
from triton_compile import TARGETS, compile_for

B, T, D = 8, 4096, 2048


def problem(dtype="bfloat16", *traits, sizes=(B, T, D)):
    return Problem("rglru", "diagonal", dtype, tuple(zip("BTD", sizes, strict=True)), frozenset(traits))


def test_every_kernel_is_right_in_the_interpreter():
    assert interpret("kernels.diagonal.triton.parity", "interpreted", seconds=300).count("\n") == 9


def steps(seed, count):
    """What a scan starts from: of each step its gate and input, complex numbers, and the identity."""
    draw = torch.randn(count, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return [(complex(*gate), complex(*x), 1.0, 0.0) for gate, x in draw.tolist()]


def together(stretches):
    return reduce(lambda a, b: triton_real.combine.fn(*a, *b), stretches)


def parts(stretch):
    return [part for number in stretch for part in (complex(number).real, complex(number).imag)]


@pytest.mark.parametrize("cut", [1, 2, 6])
def test_stretches_of_steps_are_put_together_in_any_order(cut, monkeypatch):
    """A GPU's scan is a tree; the interpreter's goes step by step, and what it puts second has one step alone."""
    monkeypatch.setattr(triton_complex, "times", triton_complex.times.fn)
    every = steps(3, 7)
    whole, first, second = together(every), together(every[:cut]), together(every[cut:])
    assert parts(triton_real.combine.fn(*first, *second)) == pytest.approx(parts(whole))
    assert triton_complex.combine.fn(*parts(first), *parts(second)) == pytest.approx(parts(whole))
    # h -> p h + x through all of it, and up to the last step in it
    (p, x, q, y), h = whole, 0.5 - 2j
    before = h
    for gate, given, *_ in every:
        before, h = h, gate * h + given
    assert parts((p * (0.5 - 2j) + x, q * (0.5 - 2j) + y)) == pytest.approx(parts((h, before)))


def test_recomputed_states_are_those_of_the_forward_pass_bit_for_bit():
    assert "equal" in interpret("kernels.diagonal.triton.recomputation", "interpreted")


def arguments(pairs, direction, x, a, recompute):
    """Of a launch at B8 T4096 D2048."""
    import triton.language as tl

    numbers = D // 2 if pairs else D
    plan = diagonal_scan.candidates(
        problem("bfloat16", *(["complex"] if pairs else [])), Device.named("h200"), direction
    )[0].plan
    given = {
        "a": a,
        "x": x,
        "o": x,
        "initial": None,
        "final": torch.float32,
        "product": None,
        "entries": torch.float32 if recompute else None,
        "bounds": None,
        "length": T,
        "piece_length": T,
        "per_row": 1,
        "BLOCK": plan["block"],
        "SEGMENTS": plan["segments"],
        "STEPS": plan["steps"],
        "STAGES": plan["stages"],
        "grad_o": x,
        "grad_a": a,
        "grad_x": x,
        "grad_final": None,
        "grad_initial": torch.float32,
    }
    strides = {f"{name}_{axis}": size for name in ("a", "x", "grad") for axis, size in (("row", T * D), ("step", D))}
    given |= strides
    if pairs:
        given |= {"theta": a, "grad_theta": a, "theta_row": T * D // 2, "theta_step": D // 2, "pairs": numbers}
        given |= {"ELEMENT": tl.bfloat16 if x == torch.int32 else tl.float32}
    else:
        given |= {"channels": numbers, "LOG": False}
    return given, plan["warps"]


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_scan_over_channels_compiles_without_spilling(capability, direction):
    from holdfast.kernels.diagonal.triton import real

    kernel = {"forward": real.diagonal_real_fwd, "backward": real.diagonal_real_bwd}[direction]
    given, warps = arguments(False, direction, torch.bfloat16, torch.bfloat16, True)
    made = compile_for(kernel, capability, given, num_warps=warps)
    assert made.stack == 0
    # loads and stores of 16 bytes a thread, or of 8 where a thread has 4 channels
    width = "v4" if direction == "forward" else "v2"
    assert f"st.global.{width}.b32" in made.ptx


@pytest.mark.slow
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(("direction", "most"), [("forward", 0), ("backward", 104)])
def test_the_rotational_scan_compiles_and_spills_little(direction, most, capability):
    from holdfast.kernels.diagonal.triton import complex

    kernel = {"forward": complex.diagonal_complex_fwd, "backward": complex.diagonal_complex_bwd}[direction]
    given, warps = arguments(True, direction, torch.int32, torch.bfloat16, True)
    made = compile_for(kernel, capability, given, num_warps=warps)
    assert made.stack <= most


def test_both_passes_have_the_same_tiles():
    """The backward pass would otherwise look for states where the forward pass left none."""
    for sizes in ((8, 4096, 2048), (3, 512, 1536), (1, 1_000_000, 64), (2, 5, 6)):
        for traits in ((), ("complex",), ("varlen",)):
            plans = {
                candidate.plan[key]
                for key in ("segments", "steps")
                for direction in ("forward", "backward")
                for candidate in diagonal_scan.candidates(
                    problem("float16", *traits, sizes=sizes), Device.named("h200"), direction
                )
            }
            assert plans == {diagonal_scan.SEGMENTS, diagonal_scan.STEPS}
    assert diagonal_scan.ROWS % diagonal.ENTRY_STEPS == 0


def test_few_channels_are_cut_into_pieces_and_many_are_not():
    h200 = Device.named("h200")
    few = diagonal_scan.candidates(problem(sizes=(1, 1_000_000, 64)), h200, "forward")[0].plan
    assert few["piece"] > 0
    assert few["piece"] % diagonal_scan.ROWS == 0
    assert diagonal_scan.candidates(problem(), h200, "forward")[0].plan["piece"] == 0
    packed = problem("bfloat16", "varlen", sizes=(1, 1_000_000, 64))
    assert diagonal_scan.candidates(packed, h200, "forward")[0].plan["piece"] == 0


@pytest.mark.parametrize(
    ("given", "device", "reason"),
    [
        (problem(), "cpu", "it needs an NVIDIA GPU; the inputs are on cpu"),
        (problem("float64"), "h200", "it takes float32, bfloat16, float16; got float64"),
        (problem(sizes=(1, 1, 2**23)), "h200", "it takes 4194304 channels at most; got 8388608"),
        (problem(), "a100", None),
    ],
)
def test_reasons(given, device, reason):
    assert TritonScan().reject(given, Device.named(device)) == reason


def test_an_old_gpu_is_refused():
    old = Device("cuda", "old", capability=(7, 5))
    assert TritonScan().reject(problem(), old) == "it needs compute capability 8.0; old has 7.5"


@pytest.mark.parametrize("wide", ["a", "theta"])
def test_gates_of_any_width_are_read_as_the_plan_reckons(wide):
    """Buffers of shared memory are planned for gates of x's dtype, or of four bytes where any gate is wider."""
    gates = {"a": torch.ones(1, 4, 3).bfloat16(), "theta": torch.ones(1, 4, 3).bfloat16()}
    gates[wide] = gates[wide].double()
    call = DiagonalCall(x=torch.ones(1, 4, 6).bfloat16(), **gates)
    assert "wide_gate" in diagonal.problem("rotlru", call, None, False).traits
    read = Run(Plan("triton"), call, None, 0, 128)._read(call.x)
    assert [x.dtype for x in read.tensors[:2]].count(torch.float32) == 1
    assert max(x.element_size() for x in read.tensors) == 4
