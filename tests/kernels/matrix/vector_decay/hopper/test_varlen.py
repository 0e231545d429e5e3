"""Packed sequences and write strengths by the vector decay's kernels on Hopper."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.kernels.matrix.vector_decay.hopper.backend import HopperGLA
from holdfast.ops import matrix
from holdfast.planner import Device
from holdfast.planner.models.matrix.vector_decay import hopper as model
from kernels.matrix.delta_rule.hopper.test_varlen import (
    LENGTHS,
    NEIGHBOURS,
    RAGGED,
    assert_apart_from_nan,
    assert_as_apart,
    cotangents_of,
)
from kernels.matrix.scalar_decay.triton.parity import moved, run
from kernels.matrix.vector_decay.hopper.test_backend import PLANS, given, on_cpu, problem
from kernels.matrix.vector_decay.triton.parity import LIMITS, errors

H200 = Device.named("h200")
__all__ = ["on_cpu"]


@pytest.fixture
def apart(on_cpu, monkeypatch):
    """States of whole chunks beside gradients, not in their memory: the emulator refuses to write it twice."""
    from holdfast.kernels.matrix.vector_decay.hopper import launch as hopper_gla_launch

    monkeypatch.setattr(hopper_gla_launch, "room_for_dstates", lambda dq, dg, states: torch.empty_like(states))


def packed(offsets, device="cpu", **of):
    """A call of sequences that begin and end at the offsets."""
    return moved(given(**{"T": offsets[-1], "K": 64, "V": 64} | of, packed=offsets), device)


def test_they_are_served():
    pytest.importorskip("triton.experimental.gluon")
    for sizes, traits in (({"B": 1, "T": 16384, "N": 4}, {"varlen": True}), ({}, {"beta": True})):
        assert HopperGLA().reject(problem(sizes, traits), H200) is None


def test_packed_sequences_are_planned_as_a_batch_of_as_many():
    def seconds(sizes, way, **traits):
        return model.candidates(problem(sizes, traits), H200, way)[0].seconds

    for way in ("forward", "backward"):
        assert seconds({"B": 1, "T": 16384, "N": 4}, way, varlen=True) == seconds({}, way)
        assert seconds({"B": 1, "T": 16384, "N": 1}, way, varlen=True) > 1.5 * seconds({}, way)


def test_kernels_of_one_sequence_serve_many(monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from gluon_compile import recorded, specialised
    from holdfast.kernels.matrix.vector_decay.hopper import launch as hopper_gla_launch

    launches = recorded(monkeypatch, hopper_gla_launch)
    call, cu_seqlens = packed(NEIGHBOURS), torch.tensor(NEIGHBOURS, dtype=torch.int32)
    HopperGLA().backward(PLANS[1], call, cu_seqlens, torch.zeros_like(call.v), None)
    assert len(launches) == 3
    assert [specialised(launch) for launch in launches] == [[], [], []]


@pytest.mark.slow
@pytest.mark.sizes("K", "V", "offsets", "beta")
@pytest.mark.parametrize(
    ("K", "V", "offsets", "beta"),
    [(128, 128, NEIGHBOURS, False), (64, 64, NEIGHBOURS, True), (128, 128, None, True), (128, 128, NEIGHBOURS, True)],
)
def test_kernels_compile_and_fit(K, V, offsets, beta, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from gluon_compile import compile_launch, recorded
    from holdfast.kernels.matrix.vector_decay.hopper import launch as hopper_gla_launch

    launches = recorded(monkeypatch, hopper_gla_launch)
    call = given(T=300, K=K, V=V, beta=beta, packed=offsets)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32) if offsets else None
    o, _, states = HopperGLA().forward(PLANS[0], call, cu_seqlens)
    HopperGLA().backward(PLANS[1], call, cu_seqlens, torch.zeros_like(call.v), None, o, states)
    sizes = problem({"K": K, "V": V} | ({"B": 1, "N": 3} if offsets else {}), {"varlen": bool(offsets), "beta": beta})
    planned = [model.candidates(sizes, H200, way)[0].shared for way in ("forward", "backward")]
    for launch, shared in zip(launches, [planned[0], *planned], strict=True):
        made = compile_launch(launch)
        assert made.shared <= min(shared, H200.shared_per_block)
        assert "serialized" not in made.notes, "a product waits for the one before it"
        name = launch.kernel.fn.__name__
        assert made.spilled <= {"gla_fwd": 64, "gla_bwd_grads": 80}[name], name


@pytest.mark.parametrize(
    ("offsets", "of", "dtype"),
    [
        (LENGTHS, {"H": 1, "Hq": 1}, torch.int32),
        ((0, 65, 128), {"Hq": 1, "K": 40, "V": 72, "state": False, "g": "channels"}, torch.int64),
        ((0, 63, 129), {"K": 128, "V": 128, "dtype": torch.float16, "beta": True}, torch.int32),
    ],
)
def test_as_apart_on_a_cpu(apart, offsets, of, dtype):
    assert_as_apart(packed(offsets, **of), offsets, PLANS, dtype, HopperGLA)


@hypothesis.settings(max_examples=6, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.lists(st.sampled_from((0, 1, 2, 31, 63, 64, 65, 100, 127, 128, 129)), min_size=1, max_size=5))
def test_lengths_of_all_kinds_on_a_cpu(apart, lengths):
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    assert_as_apart(packed(offsets, H=1, Hq=1), offsets, PLANS, torch.int64, HopperGLA)


@pytest.mark.parametrize("beta", [False, True])
def test_nan_stays_in_its_sequence_on_a_cpu(on_cpu, beta):
    assert_apart_from_nan(packed(NEIGHBOURS, beta=beta), PLANS, HopperGLA)


@pytest.mark.parametrize("utility", ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"])
def test_a_graph_knows_the_states_that_are_kept(on_cpu, monkeypatch, utility):
    monkeypatch.setattr(matrix, "describe", lambda _: H200)
    # no chunk between them is a spare one, which nobody writes
    offsets = (0, 40, 190)
    call, cu_seqlens = packed(offsets, H=1, Hq=1, beta=True), torch.tensor(offsets)
    call = call._replace(**{name: getattr(call, name).requires_grad_() for name in ("q", "g", "beta")})
    given = (*call, cu_seqlens, "gla", True, "")
    torch.library.opcheck(torch.ops.holdfast.matrix_forward.default, given, test_utils=utility)


def test_no_token_hands_states_and_their_gradients_on():
    pytest.importorskip("triton.experimental.gluon")
    call, cu_seqlens = packed((0, 0, 0)), torch.tensor((0, 0, 0))
    grad_final = torch.randn_like(call.initial_state)
    o, final, kept = HopperGLA().forward(PLANS[0], call, cu_seqlens)
    _, grad_state = HopperGLA().backward(PLANS[1], call, cu_seqlens, torch.ones_like(o), grad_final, o, kept)
    assert torch.equal(final, call.initial_state)
    assert torch.equal(grad_state, grad_final)


def assert_near_the_truth(call, offsets=None, **options):
    found = errors(call, PLANS, offsets, kernels=HopperGLA(), **options)
    assert all(mine <= LIMITS[call.v.dtype] for mine, _ in found.values()), found


@pytest.mark.parametrize(
    ("offsets", "of"),
    [
        (LENGTHS, {"H": 1, "Hq": 1}),
        ((0, 100, 130), {"beta": True, "g": "channels"}),
        (None, {"T": 70, "beta": True, "state": False}),
        (None, {"T": 130, "Hq": 1, "K": 128, "V": 40, "beta": True, "g": "resets", "dtype": torch.float16}),
    ],
)
def test_near_the_truth_on_a_cpu(on_cpu, offsets, of):
    assert_near_the_truth(packed(offsets, **of) if offsets else given(**{"K": 64, "V": 64} | of), offsets)


gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize(
    ("of", "dtype"),
    [
        ({"H": 4, "Hq": 4, "K": 128, "V": 128}, torch.int32),
        ({"H": 4, "Hq": 2, "K": 128, "V": 128, "beta": True, "g": "channels"}, torch.int64),
        ({"dtype": torch.float16, "state": False}, torch.int64),
        ({"H": 3, "Hq": 1, "K": 40, "V": 72}, torch.int32),
    ],
)
def test_as_apart(of, dtype):
    assert_as_apart(packed(RAGGED, "cuda", **of), RAGGED, PLANS, dtype, HopperGLA)


@gpu
@pytest.mark.parametrize("beta", [False, True])
def test_nan_stays_in_its_sequence(beta):
    assert_apart_from_nan(packed(NEIGHBOURS, "cuda", K=128, V=128, beta=beta), PLANS, HopperGLA)


@gpu
@pytest.mark.parametrize("beta", [False, True])
def test_near_the_truth(beta):
    call = packed(RAGGED, K=128, V=128, beta=beta)
    assert_near_the_truth(call, RAGGED, device="cuda", exact=Chunked)


@gpu
def test_in_a_cuda_graph():
    call = packed(RAGGED, "cuda", beta=True)
    cu_seqlens, cotangents = torch.tensor(RAGGED, device="cuda"), cotangents_of(call, len(RAGGED) - 1)
    right = run(HopperGLA(), PLANS, call, cu_seqlens, cotangents)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(HopperGLA(), PLANS, call, cu_seqlens, cotangents)
    graph.replay()
    assert all(torch.equal(found[name], x) for name, x in right.items())
