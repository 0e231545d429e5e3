"""Packed sequences by the delta rule's kernels on Hopper: each as it is alone, whatever its neighbours hold."""

from itertools import pairwise

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import holdfast
from holdfast.kernels.matrix.delta_rule.hopper.backend import HopperDelta
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.planner.models.matrix.delta_rule import hopper as model
from kernels.lib.triton.group_sums_on_cpu import sums_by_torch
from kernels.matrix.delta_rule.hopper.test_backward import InPlace, weak
from kernels.matrix.delta_rule.hopper.test_forward import CHUNK, H200, example, launched, over, plans_of, problem
from kernels.matrix.delta_rule.triton.parity import errors
from kernels.matrix.scalar_decay.triton.parity import LIMITS, run
from plain_launches import launch_by

# of one token and of none, at both ends too; that end with a chunk, one before it and one behind it
LENGTHS = (0, 0, 1, 1, 64, 127, 192, 320, 320)
NEIGHBOURS = (0, 100, 230, 300)


def packed_example(offsets, device="cpu", state=True, beta=True, **of):
    """A call of sequences that begin and end at the offsets."""
    call = example(**{"B": 1, "T": offsets[-1], "H": 1, "device": device} | of, state=False)
    if not beta:
        call = call._replace(beta=None)
    if state:
        shape = (len(offsets) - 1, call.v.shape[2], call.k.shape[3], call.v.shape[3])
        call = call._replace(initial_state=torch.randn(shape).to(device))
    return call


def cotangents_of(call, sequences):
    """Gradients of the outputs and of the final states."""
    shape = (sequences, call.v.shape[2], call.k.shape[3], call.v.shape[3])
    return torch.randn_like(call.v), torch.randn(shape).to(call.v.device)


def plans(call, **values):
    """The planner's for packed sequences, forward and backward, with other values; segments whole if none are given."""
    values = {"segment_chunks": 1 << 20} | values
    return tuple(over(plans_of(call, way, 2)[0].plan, **values) for way in ("forward", "backward"))


def assert_as_apart(call, offsets, which, dtype=torch.int32, backend=HopperDelta):
    """Outputs, states and gradients are bit for bit those of each sequence alone."""
    grad_o, grad_final = cotangents_of(call, len(offsets) - 1)
    cu_seqlens = torch.tensor(offsets, dtype=dtype, device=call.v.device)
    packed = run(backend(), which, call, cu_seqlens, (grad_o, grad_final))
    for n, (begin, end) in enumerate(pairwise(offsets)):
        tokens, states = slice(begin, end), slice(n, n + 1)
        own = [None if x is None else x[:, tokens] for x in call[:6]]
        state = None if call.initial_state is None else call.initial_state[states]
        alone = call._replace(**dict(zip(call._fields, (*own, state), strict=False)))
        right = run(backend(), which, alone, None, (grad_o[:, tokens], grad_final[states]))
        assert right.keys() == packed.keys()
        for name, x in right.items():
            mine = packed[name][states] if name.endswith("state") else packed[name][:, tokens]
            assert torch.equal(mine, x), (name, n)


def assert_apart_from_nan(call, which, backend=HopperDelta):
    """NaN in one sequence's numbers reaches no other's, though tiles hold tokens of both. call: of NEIGHBOURS."""
    cu_seqlens, cotangents = torch.tensor(NEIGHBOURS, device=call.v.device), cotangents_of(call, 3)
    given = {name: x.clone() for name in ("q", "k", "v", "g", "beta") if (x := getattr(call, name)) is not None}
    grad_o = cotangents[0].clone()
    for x in (*given.values(), grad_o):
        x[:, 100:230] = torch.nan
    spoilt = call._replace(**given)
    good = run(backend(), which, call, cu_seqlens, cotangents)
    bad = run(backend(), which, spoilt, cu_seqlens, (grad_o, cotangents[1]))
    for name, x in bad.items():
        others = (slice(0, 1), slice(2, 3)) if name.endswith("state") else (slice(0, 100), slice(230, 300))
        for part in others:
            pair = (y[part] if name.endswith("state") else y[:, part] for y in (x, good[name]))
            assert torch.equal(*pair), name
    assert bad["o"][:, 100:230].isnan().all()


@pytest.fixture
def on_cpu(monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    import gluon_partitions_emulator
    from holdfast.kernels.matrix.delta_rule.hopper import launch_backward as hopper_delta_passes
    from holdfast.kernels.matrix.delta_rule.hopper import launch_forward as hopper_delta_launch

    in_place = InPlace(hopper_delta_passes)
    for module in (hopper_delta_launch, hopper_delta_passes):
        monkeypatch.setattr(module, "launch", gluon_partitions_emulator.launch)
    launch_by(monkeypatch, launched)
    sums_by_torch(monkeypatch)
    for name in ("run_states", "run_backward"):
        monkeypatch.setattr(hopper_delta_passes, name, getattr(in_place, name))


def plan_of(sequences, length, heads, direction="forward"):
    packed = problem({"B": 1, "T": sequences * length, "H": heads, "Hq": heads, "N": sequences}, {"varlen": True})
    return model.candidates(packed, H200, direction)[0].plan


def test_they_are_served():
    pytest.importorskip("triton.experimental.gluon")
    assert HopperDelta().reject(problem({"B": 1, "H": 8, "Hq": 8, "N": 3}, {"varlen": True}), H200) is None


@pytest.mark.parametrize(("sequences", "length", "heads"), [(1, 16384, 32), (1, 4096, 4), (8, 4096, 4)])
def test_few_are_cut_into_segments(sequences, length, heads):
    assert plan_of(sequences, length, heads, "backward")["segment_chunks"] < length // CHUNK
    assert plan_of(1, sequences * length, heads)["segment_chunks"] < sequences * length // CHUNK


@pytest.mark.parametrize(("sequences", "length", "heads"), [(4, 4096, 32), (64, 256, 32), (16, 1024, 32), (3, 1, 1)])
def test_many_are_not(sequences, length, heads):
    for direction in ("forward", "backward"):
        # as long as all of them together: none is longer
        assert plan_of(sequences, length, heads, direction)["segment_chunks"] == -(-sequences * length // CHUNK)


def test_more_columns_where_sequences_are_many():
    assert plan_of(8, 2048, heads=16)["columns"] == 128
    assert plan_of(8, 2048, heads=4)["columns"] == 64


@pytest.mark.slow
@pytest.mark.sizes("K", "V", "Hq")
@pytest.mark.parametrize(("K", "V", "Hq"), [(128, 128, 4), (64, 64, 2)])
def test_plans_compile_and_fit(K, V, Hq, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from gluon_compile import recorded
    from holdfast.kernels.matrix.delta_rule.hopper import launch_backward as hopper_delta_passes
    from holdfast.kernels.matrix.delta_rule.hopper import launch_forward as hopper_delta_launch

    launches = recorded(monkeypatch, hopper_delta_launch, hopper_delta_passes)
    sums_by_torch(monkeypatch)
    call = packed_example((0, 100, 128), H=4, Hq=Hq, K=K, V=V)
    cu_seqlens = torch.tensor((0, 100, 128), dtype=torch.int32)
    forward, backward = plans(call, columns=V)
    HopperDelta().forward(forward, call, cu_seqlens)
    HopperDelta().backward(backward, call, cu_seqlens, torch.ones_like(call.v), None)
    limits = {"delta_rule_chunk_inverse": 8, "delta_rule_fwd": 24, "delta_rule_bwd_states": 8, "delta_rule_bwd": 680}
    assert [launch.kernel.fn.__name__ for launch in launches] == [
        "delta_rule_chunk_inverse",
        "delta_rule_fwd",
        "delta_rule_chunk_inverse",
        *[*limits][2:],
    ]
    assert_fit(launches, limits)


def assert_fit(launches, limits):
    """They compile, and spill no more bytes than that."""
    from gluon_compile import compile_launch

    for launch in launches:
        made = compile_launch(launch)
        assert made.spilled <= limits[launch.kernel.fn.__name__], launch.kernel.fn.__name__
        assert "C75" not in made.notes
        assert made.shared <= H200.shared_per_block


@pytest.mark.slow
@pytest.mark.sizes("columns")
@pytest.mark.parametrize("columns", [128, 64])
def test_segments_compile_and_fit(columns, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from gluon_compile import recorded
    from holdfast.kernels.matrix.delta_rule.hopper import launch_backward as hopper_delta_passes
    from holdfast.kernels.matrix.delta_rule.hopper import launch_forward as hopper_delta_launch

    launches = recorded(monkeypatch, hopper_delta_launch, hopper_delta_passes)
    # a plain Triton kernel, compiled in test_forward.py
    launch_by(monkeypatch, lambda *_: None)
    call = packed_example((0, 100, 128), H=4)
    cu_seqlens = torch.tensor((0, 100, 128), dtype=torch.int32)
    forward, backward = plans(call, columns=columns, state_columns=columns, segment_chunks=1)
    HopperDelta().forward(forward, call, cu_seqlens)
    HopperDelta().backward(backward, call, cu_seqlens, torch.ones_like(call.v), None)
    names = [launch.kernel.fn.__name__ for launch in launches]
    sweeps = ["delta_rule_chunk_inverse", "delta_rule_fwd", "delta_rule_fwd"]
    assert names == [*sweeps, *sweeps, "delta_rule_bwd_states", "delta_rule_bwd"]
    # the state after each segment takes the last a dozen bytes more than none does, <S, dS'> in float32 44 more
    limits = {"delta_rule_fwd": 64, "delta_rule_bwd_states": 8, "delta_rule_bwd": 748}
    assert_fit([launch for launch in launches if launch.kernel.fn.__name__ in limits], limits)


@pytest.mark.parametrize(
    ("offsets", "of", "values"),
    [
        (LENGTHS, {"K": 64, "V": 64}, {}),
        ((0, 100, 130), {"H": 2}, {"columns": 128}),
        ((0, 65, 128), {"H": 2, "Hq": 1, "K": 48, "V": 80, "state": False}, {"columns": 64}),
        ((0, 63, 129), {"V": 80, "g": None, "beta": False, "dtype": torch.float16}, {"columns": 128}),
        ((0, 300), {"K": 64, "V": 64}, {"segment_chunks": 2}),
        ((0, 0, 65, 128, 129, 400, 400), {"K": 64, "V": 64}, {"segment_chunks": 1}),
        (
            (0, 64, 420),
            {"H": 2, "Hq": 1, "K": 48, "V": 80, "state": False},
            {"segment_chunks": 2, "state_columns": 128},
        ),
        # one segment as long as all of them
        ((0, 64, 128), {"K": 64, "V": 64}, {"segment_chunks": 2}),
        # the first has room for two segments and is one
        ((0, 100, 150, 320), {"K": 64, "V": 64}, {"segment_chunks": 2}),
    ],
)
def test_as_apart_on_a_cpu(on_cpu, offsets, of, values):
    call = packed_example(offsets, **of)
    assert_as_apart(weak(call) if len(offsets) > 3 else call, offsets, plans(call, **values))


@hypothesis.settings(max_examples=6, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.lists(st.sampled_from((0, 1, 2, 31, 63, 64, 65, 100, 127, 128, 129)), min_size=1, max_size=5))
def test_lengths_of_all_kinds_on_a_cpu(on_cpu, lengths):
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    call = packed_example(offsets, K=16, V=16)
    assert_as_apart(call, offsets, plans(call), torch.int64)


def test_nan_stays_in_its_sequence_on_a_cpu(on_cpu):
    call = packed_example(NEIGHBOURS, H=2, K=64, V=64)
    assert_apart_from_nan(call, plans(call))


def test_near_the_truth_on_a_cpu(on_cpu):
    call = packed_example(LENGTHS, K=64, V=64)
    assert_near_the_truth(call, LENGTHS, {}, "cpu")


def test_no_token_hands_states_and_their_gradients_on():
    pytest.importorskip("triton.experimental.gluon")
    call = packed_example((0, 0, 0), H=2, K=16, V=16)
    grad_final = torch.randn_like(call.initial_state)
    cu_seqlens, which = torch.tensor((0, 0, 0)), plans(call)
    o, final = HopperDelta().forward(which[0], call, cu_seqlens)
    _, grad_state = HopperDelta().backward(which[1], call, cu_seqlens, torch.ones_like(o), grad_final)
    assert torch.equal(final, call.initial_state)
    assert torch.equal(grad_state, grad_final)


def assert_near_the_truth(call, offsets, values, device="cuda"):
    found = errors(call, plans(call, **values), offsets, device, exact=Chunked, backend=HopperDelta())
    for name, (mine, theirs) in found.items():
        assert mine <= max(1.5 * theirs, LIMITS[call.v.dtype]), (name, found)


gpu = pytest.mark.gpu
RAGGED = (0, 0, 1, 1, 64, 127, 192, 700, 1000, 2300, 2300)


@gpu
@pytest.mark.parametrize(
    ("K", "V", "H", "Hq", "dtype", "values"),
    [
        (128, 128, 4, 4, torch.bfloat16, {}),
        (128, 128, 4, 2, torch.bfloat16, {"columns": 128}),
        (64, 64, 4, 4, torch.float16, {}),
        (48, 80, 3, 1, torch.bfloat16, {"columns": 128}),
        (64, 128, 2, 2, torch.float16, {"columns": 64}),
    ],
)
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
def test_as_apart(K, V, H, Hq, dtype, values, offsets):
    call = packed_example(RAGGED, "cuda", H=H, Hq=Hq, K=K, V=V, dtype=dtype)
    assert_as_apart(call if K == V == 128 else weak(call), RAGGED, plans(call, **values), offsets)


@gpu
@pytest.mark.parametrize(("g", "beta"), [(None, True), ("mild", True), ("mild", False)])
def test_near_the_truth(g, beta):
    call = packed_example(RAGGED, H=2, g=g, beta=beta)
    assert_near_the_truth(call, RAGGED, {})


@gpu
@pytest.mark.parametrize(
    ("K", "V", "H", "Hq", "dtype", "values"),
    [
        (128, 128, 4, 4, torch.bfloat16, {"segment_chunks": 1}),
        (128, 128, 4, 2, torch.bfloat16, {"segment_chunks": 4, "columns": 64, "state_columns": 64}),
        (64, 64, 3, 1, torch.float16, {"segment_chunks": 2}),
        (48, 80, 3, 1, torch.bfloat16, {"segment_chunks": 2, "columns": 128, "state_columns": 64}),
        (64, 128, 2, 2, torch.float16, {"segment_chunks": 8, "columns": 64}),
    ],
)
@pytest.mark.parametrize("offsets", [RAGGED, (0, 2000)])
def test_in_segments(K, V, H, Hq, dtype, values, offsets):
    """Near the truth, and bit for bit what each sequence is alone in segments of its own."""
    of = {"H": H, "Hq": Hq, "K": K, "V": V, "dtype": dtype}
    assert_near_the_truth(packed_example(offsets, **of, state=V == 128), offsets, values)
    call = packed_example(offsets, "cuda", **of)
    assert_as_apart(weak(call), offsets, plans(call, **values))


@gpu
def test_the_planners_segments():
    call = packed_example((0, 4096), "cuda", H=2)
    which = tuple(plans_of(call, way, 1)[0].plan for way in ("forward", "backward"))
    assert all(plan["segment_chunks"] < 64 for plan in which)
    assert_as_apart(call, (0, 4096), which)


@gpu
def test_nan_stays_in_its_sequence():
    call = packed_example(NEIGHBOURS, "cuda", H=2, K=64, V=64)
    assert_apart_from_nan(call, plans(call))


@gpu
@pytest.mark.parametrize("segment_chunks", [1 << 20, 3])
def test_in_a_cuda_graph(segment_chunks):
    call = packed_example(RAGGED, "cuda", H=2)
    which = plans(call, segment_chunks=segment_chunks)
    cu_seqlens, cotangents = torch.tensor(RAGGED, device="cuda"), cotangents_of(call, 10)
    right = run(HopperDelta(), which, call, cu_seqlens, cotangents)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(HopperDelta(), which, call, cu_seqlens, cotangents)
    graph.replay()
    assert all(torch.equal(found[name], x) for name, x in right.items())


@gpu
@pytest.mark.parametrize("V", [128, 256])
def test_gradients_through_the_op(V):
    call = packed_example(RAGGED, "cuda", H=4, Hq=2, V=V)
    cu_seqlens = torch.tensor(RAGGED, device="cuda")

    def gradients(dtype, backend):
        given = [call.q, call.k, call.v, call.g, call.beta, call.initial_state]
        q, k, v, g, beta, state = inputs = [x.detach().to(dtype or x.dtype).requires_grad_() for x in given]
        o, final = holdfast.gated_delta_rule(
            q, k, v, g, beta, initial_state=state, scale=call.scale, output_final_state=True, cu_seqlens=cu_seqlens,
            backend=backend,
        )  # fmt: skip
        return torch.autograd.grad(o.double().square().sum() + final.double().square().sum(), inputs)

    for name, mine, right in zip("qkvgbS", gradients(None, "hopper"), gradients(torch.float64, "chunked"), strict=True):
        # of o's own rounding too, which its gradient here is twice of
        assert (mine.double() - right).norm() <= 1.5e-2 * right.norm(), name
