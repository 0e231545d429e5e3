"""The low-rank scan of states in Gluon without a Hopper: right on the emulator, compiled without spilling, refusals."""

import pytest
import torch

from holdfast.kernels.chunk.inter.call import InterChunkCall
from holdfast.kernels.chunk.inter.hopper.backend import HopperInterChunkScan
from holdfast.kernels.chunk.inter.torch.backend import ChunkedInterChunkScan
from holdfast.planner import Device, Problem
from holdfast.planner.models.chunk.inter import hopper as inter_chunk_hopper

pytest.importorskip("triton", reason="needs Triton, which has wheels for Linux alone")

from gluon_emulator import Emulated
from kernels.chunk.inter.triton import parity as states_parity
from parity import relative_error
from triton_compile import compile_for


def problem(dtype="bfloat16", *traits, **sizes):
    sizes = {"B": 4, "G": 64, "H": 16, "K": 64, "V": 64} | sizes
    return Problem("inter_chunk_scan", "diagonal", dtype, tuple(sizes.items()), frozenset(traits))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("dtype", "vector", "rank", "packed", "keys", "values", "stages", "columns"),
    [
        (torch.float32, False, 4, None, 64, 32, 3, 32),
        (torch.bfloat16, True, 1, [0, 0, 2, 7, 7], 32, 48, 2, 16),
        (torch.float16, True, 16, None, 16, 16, 3, 16),
        (torch.bfloat16, False, 2, None, 128, 16, 2, 16),
        (torch.bfloat16, True, 8, [0, 0, 2, 7, 7], 32, 64, 3, 32),
    ],
)
def test_the_kernels_are_right_on_the_emulator(
    dtype, vector, rank, packed, keys, values, stages, columns, early, monkeypatch
):
    from holdfast.kernels.chunk.inter.hopper import backward as hopper_states_backward
    from holdfast.kernels.chunk.inter.hopper import forward as hopper_states

    for kernels, name in (
        (hopper_states, "inter_chunk_low_rank_fwd_async"),
        (hopper_states_backward, "inter_chunk_low_rank_bwd_async"),
    ):
        monkeypatch.setattr(kernels, name, Emulated(getattr(kernels, name), early))
    shape = {"batch": 1, "sequences": len(packed) - 1} if packed else {}
    given = states_parity.call(dtype, vector, rank, chunks=7, heads=2, keys=keys, values=values, **shape)
    cu_seqlens = torch.tensor(packed) if packed else None
    plan = states_parity.hopper(keys, stages, columns)
    got = states_parity.run(HopperInterChunkScan(), plan, plan, given, cu_seqlens)
    exact = InterChunkCall(*(None if x is None else x.double() for x in given))
    right = states_parity.run(ChunkedInterChunkScan(), None, None, exact, cu_seqlens)
    errors = [relative_error(x.double(), y) for x, y in zip(got, right, strict=True)]
    assert all(error <= states_parity.LIMITS[dtype] / 2 for error in errors), errors
    # float32 whatever the inputs are: the final state
    assert errors[1] <= 1e-6


@pytest.mark.parametrize("grad", [torch.bfloat16, None])
def test_missing_gradients_and_states_on_the_emulator(grad, monkeypatch):
    from holdfast.kernels.chunk.inter.hopper import backward as hopper_states_backward
    from holdfast.kernels.chunk.inter.hopper import forward as hopper_states

    for kernels, name in (
        (hopper_states, "inter_chunk_low_rank_fwd_async"),
        (hopper_states_backward, "inter_chunk_low_rank_bwd_async"),
    ):
        monkeypatch.setattr(kernels, name, Emulated(getattr(kernels, name)))
    given = states_parity.call(torch.bfloat16, rank=4, chunks=3, heads=2, keys=16, values=16)
    given = given._replace(initial_state=None)
    exact = InterChunkCall(*(None if x is None else x.double() for x in given))
    h, final = ChunkedInterChunkScan().forward(None, exact, None)
    grad_o, grad_final = (torch.randn_like(h).to(grad), None) if grad else (None, torch.randn_like(final))
    wide = None if grad_o is None else grad_o.double()
    right = ChunkedInterChunkScan().backward(None, exact, None, h, wide, grad_final)
    got = HopperInterChunkScan().backward(states_parity.hopper(), given, None, None, grad_o, grad_final)
    for x, y in zip(got, right, strict=True):
        assert relative_error(x.double(), y) <= 2.0**-7


@pytest.mark.sizes("columns", "warps")
@pytest.mark.parametrize(("rank", "scalar", "dtype"), [(4, True, torch.bfloat16), (16, False, torch.float32)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("columns", "warps"), [(columns, columns // 8) for columns in inter_chunk_hopper.WIDTHS])
def test_the_kernels_compile_without_spilling(rank, scalar, dtype, direction, columns, warps):
    from holdfast.kernels.chunk.inter.hopper import backward as hopper_states_backward
    from holdfast.kernels.chunk.inter.hopper import forward as hopper_states

    wide = ("decay", "final", "history", "ddecay", "dW", "dY", "dinitial")
    given = dict.fromkeys(("states", "W", "Y", "o", "do", "dstates"), dtype) | dict.fromkeys(wide, torch.float32)
    given |= {"initial": None, "dfinal": None, "bounds": None, "chunks": 64, "heads": 16, "keys": 64, "values": 64}
    given |= {"places": 4096, "SCALAR": scalar, "RANK": rank, "BLOCK_V": columns}
    forward = direction == "forward"
    given["STAGES"] = inter_chunk_hopper.STAGES if forward else 3
    kernel = (
        hopper_states.inter_chunk_low_rank_fwd_async
        if forward
        else hopper_states_backward.inter_chunk_low_rank_bwd_async
    )
    bound = {"maxnreg": inter_chunk_hopper.REGISTERS} if forward else {}
    made = compile_for(kernel, 90, given, num_warps=warps, **bound)
    # with rank 16 the sums of a chunk do not all fit
    assert made.stack <= (0 if forward or rank < 16 else 64)
    assert "cp.async.ca.shared.global" not in made.ptx


@pytest.mark.parametrize(
    ("given", "device", "reason"),
    [
        (problem(), "a100", "it needs a GPU of compute capability 9.0 (H100, H200); the inputs are on {name}"),
        (problem(), "h200", "it serves low ranks only"),
        (problem("bfloat16", "low_rank", r=3), "h200", "W and Y have a rank of 1, 2, 4, 8, 16; got 3"),
        (problem("bfloat16", "low_rank", r=4, K=48), "h200", "it takes K of 16, 32, 64, 128; got 48"),
        (
            problem("bfloat16", "low_rank", r=4, V=72),
            "h200",
            "it copies 16 columns at a time: V must be a multiple; got 72",
        ),
        (problem("float64", "low_rank", r=4), "h200", "it takes float32, bfloat16 and float16; got float64"),
        (problem("bfloat16", "low_rank", r=4), "h200", None),
    ],
)
def test_reasons(given, device, reason):
    device = Device.named(device)
    assert HopperInterChunkScan().reject(given, device) == (reason and reason.format(name=device.name))


@pytest.mark.parametrize("rank", inter_chunk_hopper.RANKS)
@pytest.mark.parametrize("keys", inter_chunk_hopper.KEYS)
def test_every_shape_has_a_plan(rank, keys):
    given = problem("float32", "low_rank", "needs_grad", r=rank, K=keys)
    for direction in ("forward", "backward"):
        found = inter_chunk_hopper.candidates(given, Device.named("h200"), direction)
        assert {candidate.plan.backend for candidate in found} == {"hopper"}
