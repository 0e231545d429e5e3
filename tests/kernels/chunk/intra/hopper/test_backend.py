"""intra_chunk in Gluon without a Hopper: right on the emulator, compiled without spilling, and what it refuses."""

import pytest
import torch

from holdfast.kernels.chunk.intra.hopper import backend as hopper_intra_chunk
from holdfast.kernels.chunk.intra.hopper.backend import HopperIntraChunk
from holdfast.kernels.chunk.intra.torch.backend import ChunkedIntraChunk
from holdfast.kernels.chunk.intra.triton.backend import TritonIntraChunk
from holdfast.planner import Device, Plan, Problem
from holdfast.planner.models.chunk.intra import hopper as intra_chunk_hopper

pytest.importorskip("triton", reason="needs Triton, which has wheels for Linux alone")

from gluon_compile import compile_launch, places_of_stores, recorded
from gluon_emulator import Emulated
from holdfast.kernels.runtime import descriptor_launch
from kernels.chunk.intra.triton import parity as intra_chunk_parity
from parity import relative_error

PLAIN = Plan("chunked", (("chunks", 4),))
ALL = "g states gate"


def sum_decay_grad(row_sums, column_sums, dg, chunk):
    """What `sum_decay_grad` of chunk/intra/triton/backend.py does."""
    for part, into in zip((row_sums - column_sums).double().split(chunk, 1), dg.split(chunk, 1), strict=True):
        into.copy_(part.flip(1).cumsum(1).flip(1))


@pytest.fixture(params=[False, True], ids=["late", "early"])
def emulated(request, monkeypatch):
    def launch(kernel, grid, arguments, constants, warps, types, registers=None):
        Emulated(kernel, request.param)[grid](*arguments, num_warps=warps, **constants)

    monkeypatch.setattr(descriptor_launch, "launch", launch)
    monkeypatch.setattr(hopper_intra_chunk, "sum_decay_grad", sum_decay_grad)
    return request.param


def drawn(dtype, activation="silu", **shape):
    call = intra_chunk_parity.call(dtype, **shape)._replace(gate_activation=activation)
    return call if call.states is None else call._replace(states=call.states.to(dtype))


def widened(call):
    return call._replace(
        **{name: x.double() for name in intra_chunk_parity.NAMES if (x := getattr(call, name)) is not None}
    )


FORWARD = [
    (torch.float16, 4, {"given": ALL, "length": 140, "chunk": 128, "keys": 64, "values": 64}),
    (torch.bfloat16, 3, {"given": ALL, "length": 300, "chunk": 256, "keys": 128, "values": 128, "harsh": True}),
    (torch.float16, 3, {"given": "", "length": 100, "chunk": 64, "keys": 64, "values": 128, "groups": 2}),
    (torch.float16, 6, {"given": "g", "length": 300, "chunk": 512, "keys": 128, "values": 64, "harsh": True}),
    (torch.float16, 4, {"given": "states gate", "length": 200, "chunk": 256, "keys": 64, "values": 64}),
]


@pytest.mark.parametrize(("dtype", "slots", "shape"), FORWARD, ids=str)
def test_outputs_are_right_on_the_emulator(dtype, slots, shape, emulated):
    call = drawn(dtype, "sigmoid" if emulated else "silu", **shape)
    right = ChunkedIntraChunk().forward(PLAIN, widened(call))
    got = HopperIntraChunk().forward(intra_chunk_parity.hopper(slots), call)
    assert relative_error(got.double(), right) <= intra_chunk_parity.LIMITS[dtype] / 2


BACKWARD = [
    (torch.float16, (4,), {"given": ALL, "length": 140, "chunk": 64, "keys": 64, "values": 64}),
    (torch.bfloat16, (8,), {"given": ALL, "length": 100, "chunk": 64, "keys": 128, "values": 128, "harsh": True}),
    (torch.float16, (4,), {"given": "g", "length": 100, "chunk": 64, "keys": 128, "values": 64}),
    (torch.float16, (8,), {"given": "", "length": 100, "chunk": 64, "keys": 64, "values": 128}),
    (torch.float16, (None, 14), {"given": ALL, "length": 140, "chunk": 128, "keys": 64, "values": 64}),
    (
        torch.bfloat16,
        (None, 13),
        {"given": ALL, "length": 300, "chunk": 256, "keys": 128, "values": 128, "harsh": True},
    ),
    (torch.float16, (None, 14), {"given": "g", "length": 200, "chunk": 128, "keys": 128, "values": 64}),
    (torch.float16, (None, 13), {"given": "", "length": 100, "chunk": 64, "keys": 64, "values": 128}),
    (torch.float16, (None, 14), {"given": "states", "length": 100, "chunk": 128, "keys": 64, "values": 128}),
    (torch.float16, (None, 18), {"given": "g gate", "length": 600, "chunk": 512, "keys": 64, "values": 128}),
]


@pytest.mark.parametrize(("dtype", "plan", "shape"), BACKWARD, ids=str)
def test_gradients_are_right_on_the_emulator(dtype, plan, shape, emulated):
    call = drawn(dtype, "sigmoid" if emulated else "silu", **shape, groups=2)
    grad_o = torch.randn(call.v.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    right = ChunkedIntraChunk().backward(PLAIN, widened(call), grad_o.double())
    got = HopperIntraChunk().backward(intra_chunk_parity.hopper_backward(*plan), call, grad_o)
    for mine, exact in zip(got, right, strict=True):
        assert (mine is None) == (exact is None)
        assert mine is None or relative_error(mine.double(), exact) <= intra_chunk_parity.LIMITS[dtype] / 2


def compiled(run, monkeypatch):
    launches = recorded(monkeypatch, descriptor_launch)
    monkeypatch.setattr(hopper_intra_chunk, "sum_decay_grad", sum_decay_grad)
    run()
    (launch,) = launches
    made = compile_launch(launch)
    assert "C7517" not in made.notes
    assert "C7512" not in made.notes
    return made, int(made.notes.split("Used ")[1].split()[0])


def planned(chunk, keys, values, direction):
    sizes = {"B": 1, "T": chunk, "H": 1, "Hq": 1, "K": keys, "V": values, "C": chunk}
    traits = {"states": True, "decay=scalar": True, "gate=silu": True}
    problem = Problem.of("intra_chunk", "matrix", "float16", sizes, traits)
    return intra_chunk_hopper.candidates(problem, Device.named("h200"), direction)


@pytest.mark.sizes("chunk", "keys", "values")
@pytest.mark.parametrize(
    ("chunk", "keys", "values"), [(64, 64, 64), (128, 64, 64), (256, 128, 128), (128, 128, 64), (512, 64, 128)]
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_best_plan_compiles_as_planned(chunk, keys, values, direction, monkeypatch):
    candidate = planned(chunk, keys, values, direction)[0]
    call = drawn(torch.float16, given=ALL, length=chunk, chunk=chunk, keys=keys, values=values, heads=1)
    if direction == "forward":
        made, registers = compiled(lambda: HopperIntraChunk().forward(candidate.plan, call), monkeypatch)
    else:
        made, registers = compiled(lambda: HopperIntraChunk().backward(candidate.plan, call, call.v), monkeypatch)
    # gradients of one tile leave room for a third block on the SM, and spill 12 bytes for it
    assert made.spilled <= (12 if (direction, chunk) == ("backward", 64) else 0)
    assert registers <= candidate.registers
    # what the planner lays out in shared memory is what the compiler takes, but for how it aligns
    assert made.shared <= candidate.shared <= made.shared + 2048


@pytest.mark.slow
@pytest.mark.parametrize("given", ["", "states", "gate", ALL])
@pytest.mark.parametrize(("keys", "values"), [(64, 64), (64, 128), (128, 64)])
def test_gradients_on_their_way_out_keep_their_places(given, keys, values, monkeypatch):
    """The compiler gives a tile's memory away after its last use, and does not see that a copy still reads it."""
    backward = intra_chunk_parity.hopper_backward(intra_chunk_hopper.SINGLE_TILE[keys + values][1])
    call = drawn(torch.float16, given=given, length=64, chunk=64, keys=keys, values=values, heads=1)
    made, _ = compiled(lambda: HopperIntraChunk().backward(backward, call, call.v), monkeypatch)
    places = places_of_stores(made.ptx)
    assert len(places) == 3 + ("states" in given) + ("gate" in given)
    assert len(set(places)) == len(places), places


def problem(dtype="float16", **sizes):
    sizes = {"B": 16, "T": 256, "H": 12, "Hq": 12, "K": 128, "V": 128, "C": 256} | sizes
    return Problem.of("intra_chunk", "matrix", dtype, sizes, {"states": True})


@pytest.mark.parametrize(
    ("given", "device", "reason"),
    [
        (problem(), "a100", "it needs a GPU of compute capability 9.0 (H100, H200); the inputs are on {name}"),
        (problem("float32"), "h200", "it takes bfloat16 and float16; got float32"),
        (problem(C=32), "h200", "it takes chunks of 64, 128, 256, 512 steps; got 32"),
        (problem(K=96), "h200", "it takes K of 64 or 128; got 96"),
        (problem(V=256), "h200", "it takes V of 64 or 128; got 256"),
        (problem("bfloat16", C=512), "h200", None),
    ],
)
def test_reasons(given, device, reason):
    device = Device.named(device)
    assert HopperIntraChunk().reject(given, device) == (reason and reason.format(name=device.name))


def test_states_of_another_dtype_are_left_to_triton():
    sizes = {"B": 16, "T": 256, "H": 12, "Hq": 12, "K": 128, "V": 128, "C": 256}
    given = Problem.of("intra_chunk", "matrix", "float16", sizes, {"states": True, "mixed_states": True})
    assert HopperIntraChunk().reject(given, Device.named("h200")) == (
        "it takes states in the inputs' dtype, float16; got another"
    )


def test_gradients_of_grouped_heads_are_tritons_and_called_so():
    given, h200 = problem(Hq=4), Device.named("h200")
    found = intra_chunk_hopper.candidates(given, h200, "backward")
    assert {each.plan.backend for each in found} == {"triton"}
    assert found == TritonIntraChunk().candidates(given, h200, "backward")
    for Hq, direction in ((4, "forward"), (12, "backward")):
        own = intra_chunk_hopper.candidates(problem(Hq=Hq), h200, direction)
        assert {each.plan.backend for each in own} == {"hopper"}, direction


def test_the_backward_pass_runs_what_its_plan_names(monkeypatch):
    runs = []
    monkeypatch.setattr(TritonIntraChunk, "backward", lambda self, plan, *_: runs.append(plan))
    plan = intra_chunk_hopper.candidates(problem(Hq=4), Device.named("h200"), "backward")[0].plan
    HopperIntraChunk().backward(plan, None, None)
    assert runs == [plan]
