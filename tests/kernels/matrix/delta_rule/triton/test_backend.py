"""The delta rule in Triton without a GPU: right in the interpreter, and compiled for GPUs that are not here."""

import pytest
import torch

from holdfast.kernels.matrix.delta_rule.triton.backend import TritonDelta
from holdfast.planner import Device, Problem
from holdfast.planner.models.matrix.delta_rule.triton import candidates, states_fit_gradients

pytest.importorskip("triton")
from holdfast.kernels.matrix.delta_rule.triton.chunk_grads import delta_rule_triton_chunk_grads
from holdfast.kernels.matrix.delta_rule.triton.chunk_inverse import delta_rule_triton_chunk_inverse
from holdfast.kernels.matrix.delta_rule.triton.launch import _sums_are_wide, _tokenwise
from holdfast.kernels.matrix.delta_rule.triton.states import delta_rule_triton_dstates, delta_rule_triton_fwd
from interpreted import interpret
from triton_compile import TARGETS, compile_for

FLOATS = ("g_ptr", "beta_ptr", "first_ptr", "last_ptr", "initial_ptr", "dfinal_ptr", "dg_ptr", "dbeta_ptr")
KERNELS = {
    "prepare": delta_rule_triton_chunk_inverse,
    "forward": delta_rule_triton_fwd,
    "states": delta_rule_triton_fwd,
    "reverse": delta_rule_triton_dstates,
    "gradients": delta_rule_triton_chunk_grads,
}
# the forward pass keeps no states, the walk for them writes no output, and no sequence has one chunk alone
ABSENT = {
    "forward": ("low_ptr", "high_ptr"),
    "states": ("o_ptr", "last_ptr"),
    "gradients": ("initial_ptr", "dfinal_ptr"),
}


def test_tokens_are_copied_only_where_64_of_them_go_past_32_bits():
    near, far = (torch.empty_strided((2, 3, 2, 4), (2**36, step, 4, 1), device="meta") for step in (2**25 - 8, 2**25))
    assert _tokenwise(near) is near
    assert _tokenwise(far).is_contiguous()
    assert _tokenwise(near.transpose(2, 3)).is_contiguous()


@pytest.mark.parametrize(("dtype", "wide"), [("bfloat16", False), ("float16", True), ("float32", True)])
def test_sums_are_wide_where_inputs_hold_more_than_bfloat16(dtype, wide):
    """In float32 a sum that holds a decay of zero is off by 1e-3, less than bfloat16 shows."""
    assert _sums_are_wide(getattr(torch, dtype)) == {"WIDE": wide}


def test_interpreted():
    assert "no token" in interpret("kernels.matrix.delta_rule.triton.parity", "interpreted", seconds=300)


def test_small_heads_are_rounded_once():
    assert "dstate" in interpret("kernels.matrix.delta_rule.triton.parity", "small_heads")


def test_sums_of_dg_in_float32():
    assert "sums 98" in interpret("kernels.matrix.delta_rule.triton.parity", "sums_of_dg_in_float32")


def test_dg_of_a_sequence_of_one_chunk_is_of_unrounded_states():
    assert "dg" in interpret("kernels.matrix.delta_rule.triton.parity", "sequences_of_one_chunk")


def arguments(name, dtype, width, columns, block, **given):
    """Of one launch, with a decay, a beta, and states at both ends."""
    kernel = KERNELS[name]
    found = {x: torch.float32 if x in FLOATS else dtype for x in kernel.arg_names if x.endswith("_ptr")}
    found |= dict.fromkeys(ABSENT.get(name, ()))
    is_float32 = dtype == torch.float32
    constants = {"GROUP": 1, "WIDTH": width, "COLUMNS": columns, "BLOCK_K": width, "BLOCK_V": block, "STAGES": 2}
    constants |= {
        "CHUNK": 32 if is_float32 else 64,
        "WIDE": dtype != torch.bfloat16,
        "IN_GRADS": columns <= 128,
        "cu_seqlens": None,
        "scale": 0.5,
    }
    found = dict.fromkeys(kernel.arg_names, 4096) | constants | found | given
    return {x: found[x] for x in kernel.arg_names}


@pytest.mark.parametrize("capability", [x for x in TARGETS if x != 90])
@pytest.mark.parametrize("name", ["prepare", "forward", "gradients"])
def test_compiles_for_gpus_that_are_not_here(name, capability):
    made = compile_for(KERNELS[name], capability, arguments(name, torch.bfloat16, 32, 64, 64), num_warps=4)
    assert ("tcgen05.mma" if capability == 100 else "mma.sync") in made.ptx


@pytest.mark.parametrize(
    ("name", "most"), [("prepare", 0), ("forward", 352), ("states", 128), ("reverse", 320), ("gradients", 352)]
)
def test_the_planned_blocks_compile_on_hopper(name, most):
    """K = V = 128: little spills, and the plan's shared memory is enough."""
    device = Device.named("h200")
    plan = candidates(problem(), device, "backward")[0].plan
    block = plan["grad_columns" if name == "gradients" else "columns"]
    warps = plan[{"gradients": "grad_warps", "prepare": "prepare_warps"}.get(name, "warps")]
    given = arguments(name, torch.bfloat16, 128, 128, block, STAGES=plan["stages"])
    made = compile_for(KERNELS[name], 90, given, num_warps=warps)
    assert "wgmma" in made.ptx
    assert made.shared <= device.shared_per_block
    assert made.stack <= most


def test_gradients_of_wide_keys_compile_on_hopper():
    """K = 256, V = 512, in two programs: in one 2.4 KB spilt."""
    made = compile_for(
        delta_rule_triton_chunk_grads, 90, arguments("gradients", torch.bfloat16, 256, 512, 32), num_warps=8
    )
    assert made.stack <= 500


@pytest.mark.slow
def test_gradients_of_packed_sequences_with_states_at_both_ends_compile_on_hopper():
    """As many registers as without these states; 40 bytes more of stack."""
    plan = candidates(problem(), Device.named("h200"), "backward")[0].plan
    pointers = {"states_ptr": torch.bfloat16, "initial_ptr": torch.float32, "dfinal_ptr": torch.float32}
    given = arguments("gradients", torch.bfloat16, 128, 128, plan["grad_columns"], cu_seqlens=torch.int64, **pointers)
    assert compile_for(delta_rule_triton_chunk_grads, 90, given, num_warps=plan["grad_warps"]).stack <= 352


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward", "gradients"])
def test_the_planned_blocks_on_ampere(name):
    """K = V = 128: what spills stays far from the 9 and 17 KB of wider tiles."""
    device = Device.named("a100")
    plan = candidates(problem(), device, "backward")[0].plan
    block, warps = ("grad_columns", "grad_warps") if name == "gradients" else ("columns", "warps")
    sizes = {"STAGES": plan["stages"], "CHUNK": plan["chunk"]}
    given = arguments(name, torch.bfloat16, 128, 128, plan[block], **sizes)
    made = compile_for(KERNELS[name], 80, given, num_warps=plan[warps])
    assert made.shared <= device.shared_per_block
    assert made.stack <= 1900


@pytest.mark.slow
@pytest.mark.parametrize(("T", "K", "V"), [(16, 256, 256), (17, 256, 256), (30, 128, 256)])
def test_gradients_of_short_sequences_fit_as_the_model_says(T, K, V):
    device = Device.named("h200")
    plan = candidates(problem(B=1, H=2, Hq=2, T=T, K=K, V=V), device, "backward")[0].plan
    given = arguments("gradients", torch.bfloat16, K, V, plan["grad_columns"], CHUNK=plan["chunk"])
    assert (
        compile_for(delta_rule_triton_chunk_grads, 90, given, num_warps=plan["grad_warps"]).shared
        <= device.shared_per_block
    )


def test_compiles_packed_and_in_float32():
    packed = {"cu_seqlens": torch.int64}
    assert compile_for(
        delta_rule_triton_chunk_inverse, 90, arguments("prepare", torch.float16, 32, 32, 32, **packed), num_warps=4
    ).ptx
    made = compile_for(delta_rule_triton_fwd, 80, arguments("forward", torch.float32, 32, 32, 32), num_warps=4)
    assert "tf32" in made.ptx


@pytest.mark.slow
def test_the_code_of_the_gradients_does_not_grow_with_the_values():
    """At K = V = 256 in float32, eight blocks of columns, it was compiled for 79 s of one core; a loop for 7 s."""

    def products(blocks):
        given = arguments("gradients", torch.float32, 16, 16 * blocks, 16, CHUNK=16)
        return compile_for(delta_rule_triton_chunk_grads, 80, given, num_warps=4).ptx.count("mma.sync")

    assert products(8) == products(3) < products(2)


def problem(traits=("decay=scalar",), dtype="bfloat16", **sizes):
    sizes = {"B": 4, "T": 4096, "H": 32, "Hq": 32, "K": 128, "V": 128} | sizes
    return Problem.of("gated_delta_rule", "matrix", dtype, sizes, dict.fromkeys((*traits, "delta", "beta"), True))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (problem(dtype="float64"), "float64"),
        (problem(["decay=vector"]), "one log decay a head"),
        (problem(["normalizer"]), "no normaliser"),
        (problem(K=512), "at most 256; got 512 and 128"),
        (Problem.of("simple_gla", "matrix", "bfloat16", dict(problem().sizes), {}), "delta rule alone"),
    ],
)
def test_what_it_cannot_serve_is_said(given, reason):
    assert reason in TritonDelta().reject(given, Device.named("h200"))
    assert "NVIDIA GPU" in TritonDelta().reject(given, Device.named("cpu"))


@pytest.mark.parametrize("device", ["h200", "a100", "rtx3090"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("K", "V"), [(8, 256), (16, 16), (80, 80), (128, 128), (256, 8), (256, 256)])
def test_every_shape_has_a_plan(device, dtype, K, V):
    for T in (0, 1, 63, 4095, 1_000_000):
        given = problem(dtype=dtype, B=1, H=2, Hq=1, T=T, K=K, V=V)
        assert TritonDelta().reject(given, Device.named(device)) is None
        for direction in ("forward", "backward"):
            assert candidates(given, Device.named(device), direction)


def test_windows_bound_what_is_kept():
    plan = candidates(problem(), Device.named("h200"), "backward")[0].plan
    assert plan["windows"] == 4
    assert states_fit_gradients(4096, 128, plan["chunk"])
    assert candidates(problem(["varlen"], B=1), Device.named("h200"), "backward")[0].plan["windows"] == 1
