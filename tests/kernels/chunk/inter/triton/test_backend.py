"""The Triton scan of states where there is no GPU: right in the interpreter, and compiled for GPUs without spilling."""

import pytest
import torch

from holdfast.kernels.chunk.inter.triton.backend import TritonInterChunkScan
from holdfast.planner import Device, Problem
from holdfast.planner.models.chunk.inter import triton as inter_chunk_scan

pytest.importorskip("triton", reason="needs Triton, which has wheels for Linux alone")

from interpreted import interpret
from triton_compile import TARGETS, compile_for


def problem(*traits, B=4, G=64, H=16, K=64, V=64, r=0):
    sizes = {"B": B, "G": G, "H": H, "K": K, "V": V} | ({"r": r} if r else {})
    return Problem(
        "inter_chunk_scan", "diagonal", "bfloat16", tuple(sizes.items()), frozenset({*traits, *["low_rank"] * bool(r)})
    )


def test_every_kernel_is_right_in_the_interpreter():
    assert interpret("kernels.chunk.inter.triton.parity", "interpreted").count("\n") == 6


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(
    ("kernel", "rank"), [("inter_chunk_fwd", 0), ("inter_chunk_low_rank_fwd", 4), ("inter_chunk_bwd", 0)]
)
def test_the_kernels_compile_without_spilling(capability, kernel, rank):
    from holdfast.kernels.chunk.inter.triton import states as triton_states

    direction = "backward" if kernel == "inter_chunk_bwd" else "forward"
    plan = inter_chunk_scan.candidates(problem(r=rank), Device.named("h200"), direction)[0].plan
    state, wide = torch.bfloat16, torch.float32
    given = dict.fromkeys(("states", "o", "W", "Y", "do", "dstates"), state)
    given |= dict.fromkeys(("decay", "final", "history", "dfinal", "ddecay", "dinitial"), wide)
    given |= dict.fromkeys(("initial", "bounds", "dW", "dY"))
    given |= {"chunks": 64, "heads": 16, "keys": 64, "values": 64, "places": 4096, "SCALAR": True, "RANK": rank}
    given |= {"BLOCK_K": plan["block_k"], "BLOCK_V": plan["block_v"], "BLOCK_R": 16 if rank else 1}
    given |= {"GROUP": plan["group"], "STAGES": dict(plan.values).get("stages", plan["group"])}
    if not rank:
        given |= {"W": None, "Y": None}
    made = compile_for(getattr(triton_states, kernel), capability, given, num_warps=plan["warps"])
    assert made.stack == 0
    if kernel == "inter_chunk_low_rank_fwd":
        # the sums of tensor cores are operands as they are
        assert "mma.sync" in made.ptx
        assert "shfl" not in made.ptx


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (problem(r=17), "W and Y have rank 16 at most; got 17"),
        (problem(r=4, K=257), "K is at most 256 beside W and Y; got 257"),
        (problem(K=257), None),
        (problem(r=16, K=256), None),
    ],
)
def test_reasons(given, reason):
    assert TritonInterChunkScan().reject(given, Device.named("h200")) == reason


@pytest.mark.parametrize("device", ["h200", "a100", "rtx3090"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("given", [problem(), problem(K=1, V=1), problem(r=16, K=256, V=256), problem(G=1, r=1, K=3)])
def test_every_problem_has_a_plan_that_fits(device, direction, given):
    assert inter_chunk_scan.candidates(given, Device.named(device), direction)
