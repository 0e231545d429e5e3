"""The Triton kernels of intra_chunk where there is no GPU: right in the interpreter, and compiled for GPUs."""

import pytest
import torch

from holdfast.kernels.chunk.intra.triton.backend import TritonIntraChunk
from holdfast.planner import Device, Problem, kernel_model
from holdfast.planner.models.chunk.intra import triton_backward as intra_chunk_gradients

pytest.importorskip("triton", reason="needs Triton, which has wheels for Linux alone")

from interpreted import interpret
from triton_compile import TARGETS, compile_for

B, H = 16, 12


def problem(chunk=64, width=64, dtype="float16"):
    sizes = {"B": B, "T": chunk, "H": H, "Hq": H, "K": width, "V": width, "C": chunk}
    return Problem.of("intra_chunk", "matrix", dtype, sizes, {"decay=scalar": True, "states": True, "gate=silu": True})


def test_every_kernel_is_right_in_the_interpreter():
    assert interpret("kernels.chunk.intra.triton.parity", "interpreted").count("\n") == 4


def arguments(chunk, width, direction, device="h200", dtype="float16"):
    plan = planned(chunk, width, direction, device, dtype).plan
    half, wide = getattr(torch, dtype), torch.float32
    given = dict.fromkeys(("q", "k", "v", "states", "gate", "o", "grad_o"), half)
    given |= dict.fromkeys(("dq", "dk", "dv", "dgate"), half)
    given |= dict.fromkeys(("g", "row_sums", "column_sums", "dg"), wide) | {"dstates": half}
    given |= {"scale": 0.125, "length": chunk, "chunk": chunk, "chunks": 16, "heads": H, "groups": H, "ratio": 1}
    given |= {"keys": width, "values": width, "SIGMOID": False}
    given |= {"PRECISION": "tf32x3" if half == wide else "tf32", "STAGES": plan["stages"]}
    given |= {"BLOCK": plan["block"], "BLOCK_K": width, "BLOCK_V": width, "BLOCK_N": plan["columns"]}
    return given, plan["warps"]


def planned(chunk, width, direction, device="h200", dtype="float16"):
    return TritonIntraChunk().candidates(problem(chunk, width, dtype), Device.named(device), direction)[0]


def backward_kernel(chunk, width, device="h200"):
    """The launch that counts."""
    from holdfast.kernels.chunk.intra.triton import backward_single_tile as single_tile
    from holdfast.kernels.chunk.intra.triton import backward_tiled as tiled

    plan = planned(chunk, width, "backward", device).plan
    if intra_chunk_gradients.is_single_tile(plan["block"], plan["columns"], chunk, width, width):
        return single_tile.intra_chunk_bwd_single_tile
    return tiled.intra_chunk_bwd


@pytest.mark.parametrize("capability", TARGETS)
def test_the_forward_kernel_compiles_without_spilling_and_keeps_scores_on_chip(capability):
    from holdfast.kernels.chunk.intra.triton import forward as kernels

    given, warps = arguments(128, 64, "forward", "a100" if capability == 80 else "h200")
    made = compile_for(kernels.intra_chunk_fwd, capability, given, num_warps=warps)
    assert made.stack == 0
    # one store, of the output: scores go nowhere
    stores = [line for line in made.ttgir.splitlines() if "tt.store" in line]
    assert len(stores) == 1
    assert f"{given['BLOCK']}x{given['BLOCK_N']}" in stores[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "dtype", "chunk", "width"),
    [
        # where without the limit a plan that takes more would be the best
        ("h200", "float16", 32, 256),
        ("h200", "float32", 16, 128),
        ("h200", "float32", 64, 128),
        ("a100", "float16", 256, 256),
        ("a100", "float32", 64, 128),
        ("rtx3090", "float16", 256, 256),
    ],
)
def test_the_forward_kernel_takes_no_more_shared_memory_than_there_is(device, dtype, chunk, width):
    from holdfast.kernels.chunk.intra.triton import forward as kernels

    which = Device.named(device)
    given, warps = arguments(chunk, width, "forward", device, dtype)
    given |= {"states": torch.float32, "dstates": torch.float32}
    capability = which.capability[0] * 10 + which.capability[1]
    made = compile_for(kernels.intra_chunk_fwd, capability, given, num_warps=warps)
    assert made.shared <= which.shared_per_block


@pytest.mark.slow
def test_gradients_of_a_chunk_of_one_tile_are_one_launch_that_stores_nothing_else():
    """Seven tensors: no score, no sum and no copy in another dtype goes to memory."""
    given, warps = arguments(64, 64, "backward")
    assert backward_kernel(64, 64).fn.__name__ == "intra_chunk_bwd_single_tile"
    made = compile_for(backward_kernel(64, 64), 90, given, num_warps=warps)
    stores = [line for line in made.ttgir.splitlines() if "tt.store" in line]
    assert len(stores) == 6
    assert sum("f32" in line for line in stores) == 1  # dg, in g's dtype


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "width"), [(32, 64), (64, 64), (64, 128), (128, 64), (256, 128), (512, 256)])
def test_the_backward_kernels_take_no_more_shared_memory_than_planned(chunk, width):
    given, warps = arguments(chunk, width, "backward")
    given |= {"states": torch.float32, "dstates": torch.float32}
    made = compile_for(backward_kernel(chunk, width), 90, given, num_warps=warps)
    assert made.shared <= planned(chunk, width, "backward").shared <= Device.named("h200").shared_per_block


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "chunk", "keys", "values", "gate"),
    [
        # a query head with two value heads: one tile for all of a chunk, and several
        ("float32", 20, 128, 128, False),
        ("float16", 256, 128, 64, True),
        ("float32", 64, 256, 256, False),
        ("float32", 256, 128, 16, True),
        ("float32", 128, 64, 64, True),
    ],
)
def test_no_plan_of_the_backward_kernels_takes_more_shared_memory_than_it_says(dtype, chunk, keys, values, gate):
    """Of all plans for an H200, the one that says most."""
    from holdfast.kernels.chunk.intra.triton import backward_single_tile as single_tile
    from holdfast.kernels.chunk.intra.triton import backward_tiled as tiled

    sizes = {"B": B, "T": 513, "H": 8, "Hq": 4, "K": keys, "V": values, "C": chunk}
    traits = {"decay=scalar": True, "states": True, "gate=silu": gate}
    device = Device.named("h200")
    kernel = kernel_model.Kernel(intra_chunk_gradients.model, intra_chunk_gradients.candidate)
    plans = kernel_model.planned(
        Problem.of("intra_chunk", "matrix", dtype, sizes, traits), device, "backward", kernel, keep=10**6
    )
    most = max(plans, key=lambda candidate: (candidate.shared, candidate.plan["columns"]))
    given, _ = arguments(32, 64, "backward", dtype=dtype)
    given |= {"BLOCK_K": keys, "BLOCK_V": values, "keys": keys, "values": values, "chunk": chunk, "length": 513}
    given |= {"groups": 4, "heads": 8, "ratio": 2, "STAGES": most.plan["stages"]}
    given |= {"BLOCK": most.plan["block"], "BLOCK_N": most.plan["columns"]}
    given |= {"states": torch.float32, "dstates": torch.float32}
    if not gate:
        given |= {"gate": None, "dgate": None}
    one_tile = intra_chunk_gradients.is_single_tile(given["BLOCK"], given["BLOCK_N"], chunk, keys, values)
    kernel = single_tile.intra_chunk_bwd_single_tile if one_tile else tiled.intra_chunk_bwd
    made = compile_for(kernel, 90, given, num_warps=most.plan["warps"])
    assert made.shared <= most.shared <= device.shared_per_block


@pytest.mark.slow
def test_gradients_of_float32_in_several_tiles_spill_little():
    """Tiles of 64 steps spilled 1,760 bytes a thread, and on an H200 the gate's gradient was off by 2e-4."""
    from holdfast.kernels.chunk.intra.triton import backward_tiled as tiled

    sizes = {"B": 5, "T": 64, "H": 4, "Hq": 2, "K": 64, "V": 64, "C": 128}
    traits = {"decay=scalar": True, "states": True, "gate=sigmoid": True}
    asked = Problem.of("intra_chunk", "matrix", "float32", sizes, traits)
    plan = intra_chunk_gradients.candidates(asked, Device.named("h200"))[0].plan
    given, _ = arguments(128, 64, "backward", dtype="float32")
    given |= {"length": 64, "chunks": 1, "heads": 4, "groups": 2, "ratio": 2, "SIGMOID": True}
    given |= {"BLOCK": plan["block"], "BLOCK_N": plan["columns"], "STAGES": plan["stages"]}
    assert compile_for(tiled.intra_chunk_bwd, 90, given, num_warps=plan["warps"]).stack <= 512


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("chunk", [64, 128])
def test_the_backward_kernels_compile_and_spill_little(chunk, capability):
    device = "a100" if capability == 80 else "h200"
    given, warps = arguments(chunk, 64, "backward", device)
    made = compile_for(backward_kernel(chunk, 64, device), capability, given, num_warps=warps)
    assert made.stack <= (32 if (capability, chunk) == (90, 128) else 0)


def test_the_sums_of_decays_compile():
    from holdfast.kernels.chunk.intra.triton import backward_tiled as tiled

    given = arguments(128, 64, "backward")[0] | {"BLOCK_C": 128, "BLOCK_H": 16}
    assert compile_for(tiled.intra_chunk_decay_grad, 90, given, num_warps=4).stack == 0


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (problem(chunk=15), "it takes chunks of 16 to 512 steps; got 15"),
        (problem(chunk=513), "it takes chunks of 16 to 512 steps; got 513"),
        (problem(width=257), "it takes K of 16 to 256; got 257"),
        (problem(dtype="float64"), "it takes float32, bfloat16, float16; got float64"),
        (problem(512, 256), None),
    ],
)
def test_reasons(given, reason):
    assert TritonIntraChunk().reject(given, Device.named("h200")) == reason


@pytest.mark.parametrize("device", ["h200", "a100"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("chunk", "width"), [(16, 16), (64, 64), (100, 48), (256, 128), (512, 256)])
def test_every_problem_has_a_plan_that_fits(device, dtype, direction, chunk, width):
    assert TritonIntraChunk().candidates(problem(chunk, width, dtype), Device.named(device), direction)


@pytest.mark.parametrize(
    ("chunk", "width", "tile"), [(64, 64, (64, 64, 1)), (128, 64, (64, 64, 1)), (256, 128, (64, 128, 2))]
)
def test_the_best_plan_is_the_best_that_was_measured(chunk, width, tile):
    plan = planned(chunk, width, "forward").plan
    assert (plan["block"], plan["columns"], plan["stages"]) == tile
