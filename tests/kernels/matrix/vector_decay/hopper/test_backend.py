"""Vector decay on Hopper: what it refuses, that its kernels compile and fit with no GPU, that they are right on one."""

import pytest
import torch

from holdfast.kernels.matrix.vector_decay.hopper.backend import HopperGLA
from holdfast.ops import matrix
from holdfast.planner import Device, Problem
from holdfast.planner.models.matrix.vector_decay import hopper as model
from kernels.lib.triton.group_sums_on_cpu import sums_by_torch
from kernels.matrix.in_room import assert_written_in_room, rooms
from kernels.matrix.scalar_decay.triton.parity import run
from kernels.matrix.vector_decay.triton.parity import LIMITS, errors, example
from layouts import assert_views_are_alike

H200 = Device.named("h200")
SIZES = {"B": 4, "T": 4096, "H": 32, "Hq": 32, "K": 128, "V": 128}
VECTOR = {"decay=vector": True, "needs_grad": True}
PLANS = (model.plan(saves=True), model.BACKWARD)


def problem(sizes=(), traits=(), dtype="bfloat16"):
    return Problem.of("gla", "matrix", dtype, SIZES | dict(sizes), VECTOR | dict(traits))


@pytest.mark.parametrize(
    ("given", "device", "reason"),
    [
        (problem(), Device.named("a100"), "compute capability 9.0"),
        (problem(), Device.named("cpu"), "compute capability 9.0"),
        (problem(dtype="float32"), H200, "bfloat16 and float16"),
        (problem(traits={"decay=vector": False}), H200, "one log decay a key channel"),
        (problem(traits={"delta": True}), H200, "the delta rule"),
        (problem(traits={"normalizer": True}), H200, "a normaliser"),
        (problem({"V": 20}), H200, "a V that 8 divides; got 20"),
        (problem({"K": 256}), H200, "got K = 256"),
        (problem({"T": 2**23}), H200, "a T up to 4194240"),
    ],
)
def test_a_refusal_says_why(given, device, reason):
    assert reason in HopperGLA().reject(given, device)


@pytest.mark.parametrize("sizes", [{}, {"K": 64, "V": 64}, {"K": 24}, {"Hq": 8}, {"B": 1, "H": 1, "Hq": 1}, {"T": 1}])
def test_it_serves_the_others(sizes):
    pytest.importorskip("triton.experimental.gluon")
    assert HopperGLA().reject(problem(sizes), H200) is None


def test_bytes_of_a_forward_and_a_backward_pass():
    unit = 2 * SIZES["B"] * SIZES["T"] * SIZES["H"] * SIZES["K"]
    ((forward,), (backward,)) = (model.candidates(problem(), H200, way) for way in ("forward", "backward"))
    # q, k, v, o, g in float32 and states
    assert forward.moved == pytest.approx(8 * unit, rel=0.05)
    (alone,) = model.candidates(problem(traits={"needs_grad": False}), H200, "forward")
    assert alone.moved == pytest.approx(6 * unit, rel=0.05)
    # gla_fwd's 8, the states' gradients among them, and gla_bwd_grads' 14
    assert backward.moved == pytest.approx(22 * unit, rel=0.05)


def given(**sizes):
    return example(**{"H": 2, "Hq": 2, "K": 128, "V": 128, "dtype": torch.bfloat16, "beta": False} | sizes)


@pytest.mark.sizes("K", "V")
@pytest.mark.parametrize(("K", "V"), [(128, 128), (64, 128), (128, 64), (40, 72)])
def test_kernels_compile_and_fit(K, V, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from gluon_compile import compile_launch, recorded
    from holdfast.kernels.matrix.vector_decay.hopper import launch as hopper_gla_launch

    launches = recorded(monkeypatch, hopper_gla_launch)
    call = given(K=K, V=V)
    HopperGLA().forward(model.plan(saves=False), call, None)
    o, _, states = HopperGLA().forward(PLANS[0], call, None)
    HopperGLA().backward(PLANS[1], call, None, torch.zeros_like(call.v), None, o, states)
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["gla_fwd", "gla_fwd", "gla_fwd", "gla_bwd_grads"]
    sizes = problem({"K": K, "V": V})
    # what a block holds does not depend on whether it saves states
    forward = model.candidates(sizes, H200, "forward")
    for launch, planned in zip(launches, [*forward * 3, *model.candidates(sizes, H200, "backward")], strict=True):
        made = compile_launch(launch)
        assert made.shared <= H200.shared_per_block
        assert made.shared <= planned.shared
        assert "wgmma.mma_async" in made.ptx
        assert "cp.async.bulk.tensor" in made.ptx
        assert "serialized" not in made.notes, "a product waits for the one before it"
        # a reload or two a chunk in gla_fwd: ten take 5% of it
        assert made.spilled <= (24 if launch.kernel.__name__ == "gla_fwd" else 160)
    # two of its blocks share an SM
    assert made.shared <= 113 * 1024


@pytest.mark.slow
@pytest.mark.sizes("K", "beta", "spilled")
@pytest.mark.parametrize(("K", "beta", "spilled"), [(64, False, 144), (128, True, 108)])
def test_gradients_in_a_layers_room_compile(K, beta, spilled, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from gluon_compile import compile_launch, recorded
    from holdfast.kernels.matrix.vector_decay.hopper import launch as hopper_gla_launch

    launches = recorded(monkeypatch, hopper_gla_launch)
    call = given(K=K, beta=beta)
    HopperGLA().backward(PLANS[1], call, None, torch.zeros_like(call.v), None, room=rooms(call)[1])
    made = compile_launch(launches[-1])
    assert launches[-1].constants["TOKEN_STEP"] == 4 * K + 2 * 128 + 16
    assert made.shared <= 113 * 1024
    assert made.spilled <= spilled


@pytest.fixture
def on_cpu(monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    import gluon_partitions_emulator
    from holdfast.kernels.matrix.vector_decay.hopper import launch as hopper_gla_launch

    monkeypatch.setattr(hopper_gla_launch, "launch", gluon_partitions_emulator.launch)
    sums_by_torch(monkeypatch)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_right(call, **options):
    found = errors(call, PLANS, kernels=HopperGLA(), **options)
    assert all(mine <= LIMITS[call.v.dtype] for mine, _ in found.values()), found


# the emulator refuses memory that is written twice, and states stay in a gradient's where T is of whole chunks
@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 70, "state": False},
        {"T": 200, "H": 1, "Hq": 1, "K": 64, "V": 64, "g": "channels"},
        {"T": 130, "Hq": 1, "K": 40, "V": 72, "g": "weak", "decays": torch.bfloat16},
        {"T": 100, "K": 64, "dtype": torch.float16, "g": "resets"},
        {"T": 330, "H": 1, "Hq": 1, "V": 64},
    ],
)
def test_right_on_the_emulator(on_cpu, sizes):
    assert_right(given(**sizes))


@pytest.mark.parametrize(
    ("sizes", "in_place"),
    [
        ({"T": 130, "B": 2, "H": 2, "Hq": 2, "K": 128, "V": 64, "state": False}, (True, True, True)),
        ({"T": 65, "H": 1, "Hq": 1, "K": 64, "V": 64}, (True, True, True)),
        ({"T": 70, "H": 2, "Hq": 1, "K": 64, "V": 64, "beta": True}, (False, False, True)),
    ],
)
def test_gradients_in_their_room_on_the_emulator(on_cpu, sizes, in_place):
    call = given(**sizes)
    do = torch.randn_like(call.v)
    assert_written_in_room(lambda **room: HopperGLA().backward(PLANS[1], call, None, do, None, **room), call, in_place)


@pytest.mark.parametrize("other", ["distance", "width", "dtype", "none"])
def test_queries_and_keys_keep_to_room_that_is_alike(other):
    from holdfast.kernels.matrix.variants import GradRoom
    from holdfast.kernels.matrix.vector_decay.hopper.launch import room_for_queries_and_keys

    like = torch.empty(2, 10, 4, 32, dtype=torch.bfloat16)
    q, k = (torch.empty(2, 10, 304, dtype=torch.bfloat16)[..., i : i + 128].unflatten(2, (4, 32)) for i in (0, 128))
    dq, dk = room_for_queries_and_keys(GradRoom(q, k), q.shape, like)
    assert dq is q
    assert dk is k
    spoilt = {
        "distance": torch.empty(2, 10, 4, 32, dtype=torch.bfloat16),
        "width": torch.empty(2, 10, 304, dtype=torch.bfloat16)[..., :160].unflatten(2, (4, 40))[..., :32],
        "dtype": torch.empty(2, 10, 304)[..., :128].unflatten(2, (4, 32)),
        "none": None,
    }
    dq, dk = room_for_queries_and_keys(GradRoom(q, spoilt[other]), q.shape, like)
    assert dq is not q
    assert dq.is_contiguous()
    assert dk.is_contiguous()


@pytest.mark.parametrize("utility", ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"])
def test_a_graph_knows_the_states_that_are_kept(on_cpu, monkeypatch, utility):
    monkeypatch.setattr(matrix, "describe", lambda _: H200)
    call = given(T=130, H=1, Hq=1, K=64, V=64)
    call = call._replace(**{name: getattr(call, name).requires_grad_() for name in ("q", "g", "initial_state")})
    torch.library.opcheck(torch.ops.holdfast.matrix_forward.default, (*call, None, "gla", True, ""), test_utils=utility)


def test_states_gradients_stay_in_dense_memory_alone():
    from holdfast.kernels.matrix.vector_decay.hopper.launch import room_for_dstates

    # of three chunks, with dg's bits in half as many numbers
    states, dg = torch.empty(1, 192, 2, 64, dtype=torch.bfloat16), torch.empty(1, 192, 2, 32)
    apart = torch.empty(1, 192, 3, 64, dtype=torch.bfloat16)[:, :, :2]
    assert room_for_dstates(apart, dg, states).data_ptr() == dg.data_ptr()
    places = [x.data_ptr() for x in (apart, dg)]
    assert room_for_dstates(apart, torch.empty(1, 190, 2, 32), states).data_ptr() not in places
    dense = torch.empty_like(states)
    assert room_for_dstates(dense, torch.empty(1, 190, 2, 32), states) is dense


def test_a_backward_pass_finds_the_states_that_it_is_not_given(on_cpu):
    call = given(T=130)
    o, _, states = HopperGLA().forward(PLANS[0], call, None)
    given_them, without = (
        HopperGLA().backward(PLANS[1], call, None, torch.ones_like(o), None, *kept) for kept in ((o, states), ())
    )
    assert all(torch.equal(x, y) for x, y in zip(given_them[0][:4], without[0][:4], strict=True))


def as_run(call, *cotangents):
    return run(HopperGLA(), PLANS, call, None, cotangents)


def test_views_are_as_good_as_copies_on_the_emulator(on_cpu):
    call = given(B=2, T=70, K=64, V=64, beta=True)
    assert_views_are_alike(as_run, call, torch.randn(call.initial_state.shape))


def test_a_decay_of_zero_has_no_gradient_on_the_emulator(on_cpu):
    """But for the rounding of float32 sums."""
    call = given(T=130, K=64, V=64, g="resets")
    dg = as_run(call, torch.randn_like(call.v), torch.randn(call.initial_state.shape))["dg"]
    assert dg[call.g.isinf()].abs().max() <= 1e-5 * dg.abs().mean()


def test_a_strong_decays_gradient_on_the_emulator(on_cpu):
    assert_right(given(T=130, g="strong", state=False), ends=False)
