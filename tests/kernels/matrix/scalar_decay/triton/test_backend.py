"""The portable single pass without a GPU: right in the interpreter, and compiled for GPUs that are not here."""

import pytest
import torch

from holdfast.kernels.matrix.scalar_decay.triton.backend import TritonSinglePass
from holdfast.planner import Device, Problem
from holdfast.planner.models.matrix.scalar_decay.triton import candidates
from holdfast.recurrences.definition import MatrixCall

pytest.importorskip("triton")
from holdfast.kernels.matrix.scalar_decay.triton.decay_grad import scalar_decay_dg
from holdfast.kernels.matrix.scalar_decay.triton.launch import Passes
from holdfast.kernels.matrix.scalar_decay.triton.single_pass import scalar_decay_single_pass
from holdfast.kernels.matrix.state_passing.triton.segment_scan import segment_scan
from holdfast.kernels.matrix.state_passing.triton.segment_states import triton_segment_states
from interpreted import interpret
from kernels.matrix.scalar_decay.triton.parity import plan
from triton_compile import TARGETS, compile_for

POINTERS = tuple(name for name in scalar_decay_single_pass.arg_names if name.endswith("_ptr"))
GRADIENTS = ("rows_ptr", "products_ptr", "full_ptr")
SIZES = ("saved_offset", "products_size", "state_size", "state_k", "state_v", "state_add")
NUMBERS = ("T", "H", "segment", "tokens", *SIZES)
STRIDES = tuple(f"{x}_{axis}" for x in "qkvx" for axis in ("batch", "step", "head"))


def test_interpreted():
    assert "no token" in interpret("kernels.matrix.scalar_decay.triton.parity", "interpreted", seconds=300)


def test_the_gradient_of_a_rate_of_long_steps():
    assert "rate 3" in interpret("kernels.matrix.scalar_decay.triton.parity", "rate_of_long_steps")


def test_sums_of_dg_in_float32():
    assert "sums 132" in interpret("kernels.matrix.scalar_decay.triton.parity", "sums_of_dg_in_float32")


def test_dg_of_long_steps_in_float32():
    assert "far 130" in interpret("kernels.matrix.scalar_decay.triton.parity", "dg_of_long_steps_in_float32")


def test_what_passes_the_last_chunk():
    assert "passes 66" in interpret("kernels.matrix.scalar_decay.triton.parity", "what_passes_the_last_chunk")


def test_dg_of_one_chunk_is_of_unrounded_states():
    assert "chunk (0, 10" in interpret("kernels.matrix.scalar_decay.triton.parity", "dg_of_one_chunk")


def test_small_heads_with_a_normaliser_are_rounded_once():
    assert "dstate" in interpret("kernels.matrix.scalar_decay.triton.parity", "small_heads_with_a_normaliser")


def test_a_normaliser_that_cancels():
    assert "cancels 64" in interpret("kernels.matrix.scalar_decay.triton.parity", "normaliser_that_cancels")


def arguments(passed, dtype, width, columns, block, **given):
    """Of one pass: "o", "dq", "dk" or "dv", with a decay, a strength and, for o, a final state."""
    reverse, wide = passed in ("dk", "dv"), dtype == torch.float32
    found = dict.fromkeys(POINTERS) | dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), dtype)
    present = {
        "o": ("source_ptr", "last_ptr"),
        "dq": ("source_ptr", "rows_ptr", "first_ptr"),
        "dk": ("after_ptr", *GRADIENTS, "first_ptr", "last_ptr"),
        "dv": ("after_ptr", "first_ptr"),
    }[passed]
    found |= dict.fromkeys(("g_ptr", *present), torch.float32)
    if passed in ("dq", "dk"):
        found |= {"x_ptr": dtype, "saved_ptr": dtype}
    found |= dict.fromkeys((*NUMBERS, *STRIDES), 4096) | {"cu_seqlens": None, "scale": 0.5, "eps": 1e-6}
    found |= {"QK_GROUP": 1, "VX_GROUP": 1, "WIDTH": width, "COLUMNS": columns}
    found |= {"BLOCK_K": width, "BLOCK_V": block, "CHUNK": 32 if wide else 64, "SEGMENTS": 1, "KEEP": 8, "STAGES": 2}
    return found | {"REVERSE": reverse, "ADD": False} | given


@pytest.mark.parametrize("capability", TARGETS)
def test_what_passes_a_chunk_compiles_for_gpus_that_are_not_here(capability):
    names = ("g_ptr", "read_ptr", "written_ptr", "products_ptr", "out_ptr", "grad_m_ptr")
    pointers = dict.fromkeys(names, torch.float32) | {"cu_seqlens": torch.int32}
    sizes = dict.fromkeys(("T", "H", "segment", "tokens", "products_size"), 4096)
    sizes |= {"SPLITS": 3, "CHUNK": 64, "SEGMENTS": 1, "KEEP": 8, "BLOCK": 64, "VARIANCE": 2.0**-18, "EXACT": False}
    assert compile_for(scalar_decay_dg, capability, pointers | sizes, num_warps=1).stack == 0


EVERYWHERE = [(passed, 90) for passed in ("o", "dq", "dk", "dv")]
EVERYWHERE += [(passed, capability) for passed in ("o", "dk") for capability in TARGETS if capability != 90]


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("passed", ["dq", "dk"])
def test_compiles_with_states_that_are_not_rounded(passed, capability):
    """Where no sequence is longer than a chunk."""
    made, rounded = (
        compile_for(
            scalar_decay_single_pass, capability, arguments(passed, torch.bfloat16, 64, 64, 64, **given), num_warps=4
        )
        for given in ({"saved_ptr": torch.float32}, {})
    )
    # one more product, of what rounding leaves
    assert made.ptx != rounded.ptx
    assert made.stack <= rounded.stack + 40


@pytest.mark.parametrize(("passed", "capability"), EVERYWHERE)
def test_compiles_for_gpus_that_are_not_here(passed, capability):
    made = compile_for(scalar_decay_single_pass, capability, arguments(passed, torch.bfloat16, 64, 64, 64), num_warps=4)
    assert "cp.async" in made.ptx
    assert ("wgmma" if capability == 90 else "tcgen05.mma" if capability == 100 else "mma.sync") in made.ptx
    # the passes that also sum gates' gradients spill most: see docs/notes/scalar-decay-backward.md#portable-triton
    assert made.stack <= (832 if passed == "dk" else 88 if passed == "dq" else 224)


@pytest.mark.parametrize(
    ("passed", "options", "most"),
    [
        ("o", {"m_ptr": torch.float32, "norm_ptr": torch.float32}, 256),
        ("dq", {"ADD": True, "output_ptr": torch.float32, "output_add_ptr": torch.float32}, 304),
        ("dk", {"ADD": True}, 480),
        ("o", {"cu_seqlens": torch.int64}, 16),
    ],
)
def test_compiles_with_a_normaliser_and_packed(passed, options, most):
    made = compile_for(
        scalar_decay_single_pass, 90, arguments(passed, torch.float16, 64, 64, 64, **options), num_warps=4
    )
    assert made.stack <= most


def test_compiles_in_float32():
    made = compile_for(scalar_decay_single_pass, 80, arguments("o", torch.float32, 64, 64, 32), num_warps=4)
    assert "tf32" in made.ptx


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "columns", "exact"), [(16, 16, True), (5, 16, True), (16, 32, False), (32, 16, False)]
)
def test_products_of_small_heads_are_exact_in_float32(width, columns, exact):
    """A normaliser that cancels had dq off by 1.3e-2 where float32's own rounding moves it by 1.8e-3."""
    padded = [16 if x <= 16 else 32 for x in (width, columns)]
    given = arguments("dq", torch.float32, *padded, 16) | {"WIDTH": width, "COLUMNS": columns}
    made = compile_for(scalar_decay_single_pass, 90, given, num_warps=4)
    assert ("tf32" not in made.ptx) == exact
    assert made.stack <= 64


def test_the_composition_compiles():
    given = arguments("dq", torch.bfloat16, 64, 64, 64)
    given |= {"source_add_ptr": None, "last_ptr": torch.float32, "decay_ptr": torch.float32}
    given |= {"K_GROUP": 1, "V_GROUP": 1, "WIDE": False, "PRECISION": "tf32x3"}
    assert (
        compile_for(
            triton_segment_states, 90, {name: given[name] for name in triton_segment_states.arg_names}, num_warps=4
        ).stack
        == 0
    )
    states = {"states_ptr": torch.float32, "decay_ptr": torch.float32, "first_ptr": None, "last_ptr": torch.float32}
    numbers = {"H": 16, "size": 4096, "SEGMENTS": 16, "REVERSE": False, "BLOCK": 512}
    assert compile_for(segment_scan, 90, states | numbers, num_warps=4).stack == 0


def test_tensors_that_kernels_cannot_read_are_copied():
    call = MatrixCall(*(torch.empty(1, 2, 1, 16, device="meta") for _ in range(3)))
    # 64 tokens of it are past 32 bits
    apart = call.q.as_strided((1, 2, 1, 16), (1 << 27, 1 << 26, 16, 1))
    run = Passes.of(plan(), call._replace(q=apart, v=call.v.mT.contiguous().mT), None)
    assert run.q.stride(1) == 16
    assert run.k is call.k
    assert run.v.stride(-1) == 1


# dk sums states and pairs apart, in a few numbers more than the registers hold
@pytest.mark.parametrize(("name", "stack"), [("o", 16), ("dk", 32)])
def test_compiles_for_one_token_and_one_head(name, stack):
    ones = dict.fromkeys(("T", "H", "tokens", "q_step", "q_head", "saved_offset"), 1)
    assert (
        compile_for(
            scalar_decay_single_pass, 90, arguments(name, torch.bfloat16, 16, 16, 16, **ones), num_warps=4
        ).stack
        <= stack
    )


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 256), (torch.float32, 128)])
def test_planned_blocks_fit_shared_memory(dtype, width):
    device = Device.named("h200")
    given = problem(dtype=str(dtype).removeprefix("torch."), K=width, V=width)
    for passed, direction, block in (("o", "forward", "columns"), ("dk", "backward", "key_columns")):
        chosen = candidates(given, device, direction)[0].plan
        sizes = {"CHUNK": chosen["chunk"], "STAGES": chosen["stages"]}
        made = compile_for(
            scalar_decay_single_pass,
            90,
            arguments(passed, dtype, width, width, chosen[block], **sizes),
            num_warps=chosen["warps"],
        )
        assert made.shared <= device.shared_per_block


def problem(traits=(), dtype="bfloat16", **sizes):
    sizes = {"B": 4, "T": 4096, "H": 32, "Hq": 32, "K": 128, "V": 128} | sizes
    return Problem.of("simple_gla", "matrix", dtype, sizes, dict.fromkeys(traits, True))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (problem(dtype="float64"), "float64"),
        (problem(["decay=vector"]), "one log decay a head"),
        (problem(["delta"]), "delta rule"),
        (problem(K=512), "at most 256; got 512 and 128"),
    ],
)
def test_what_it_cannot_serve_is_said(given, reason):
    assert reason in TritonSinglePass().reject(given, Device.named("h200"))
    assert "NVIDIA GPU" in TritonSinglePass().reject(given, Device.named("cpu"))


@pytest.mark.parametrize("device", ["h200", "a100", "rtx4090"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("K", "V"), [(8, 256), (64, 256), (256, 8), (256, 256)])
def test_few_heads_have_a_plan(device, dtype, K, V):
    for T in (4096, 1_000_000):
        given = problem(dtype=dtype, B=1, H=1, Hq=1, T=T, K=K, V=V)
        for direction in ("forward", "backward"):
            assert candidates(given, Device.named(device), direction)


@pytest.mark.parametrize("device", ["h200", "a100", "rtx3090"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", [16, 80, 256])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_shape_has_a_plan(device, dtype, width, direction):
    for T in (0, 1, 63, 4095):
        given = problem(dtype=dtype, T=T, K=width, V=width)
        assert TritonSinglePass().reject(given, Device.named(device)) is None
        assert candidates(given, Device.named(device), direction)


def test_few_sequences_are_cut_into_segments():
    device = Device.named("h200")
    assert candidates(problem(B=1, H=8), device, "forward")[0].plan["segments"] > 1
    assert candidates(problem(), device, "forward")[0].plan["segments"] == 1
    assert candidates(problem(["varlen"], B=1, H=8), device, "forward")[0].plan["segments"] == 1
