"""mLSTM's sweeps on Hopper: what they refuse, that their plans compile and fit with no GPU, and that they are right."""

import pytest
import torch

import holdfast
from holdfast.kernels.matrix.mlstm.hopper.backend import HopperMLSTM
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.planner import Device, Plan, Problem
from holdfast.planner.models.matrix.mlstm import hopper as model
from holdfast.recurrences.definition import MatrixCall
from kernels.lib.triton.group_sums_on_cpu import sums_by_torch
from kernels.matrix.in_room import assert_written_in_room
from kernels.matrix.scalar_decay.triton.parity import normaliser_that_cancels
from layouts import assert_views_are_alike
from parity import relative_error

H200 = Device.named("h200")
SIZES = {"B": 4, "T": 4096, "H": 32, "Hq": 32, "K": 128, "V": 128}
TRAITS = {"decay=scalar": True, "beta": True, "normalizer": True, "needs_grad": True}
NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dm", "dstate")
# twice the rounding of an output: what products of rounded operands leave in float32 results
STEP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# of dg, a sum of differences over up to 512 tokens, whose errors add like a random walk's
DRIFT = 1.5


def problem(sizes=(), traits=(), dtype="bfloat16"):
    return Problem.of("mlstm", "matrix", dtype, SIZES | dict(sizes), TRAITS | dict(traits))


@pytest.mark.parametrize(
    ("given", "device", "reason"),
    [
        (problem(), Device.named("a100"), "compute capability 9.0"),
        (problem(dtype="float32"), H200, "bfloat16 and float16"),
        (problem(traits={"normalizer": False}), H200, "a normaliser"),
        (problem(traits={"beta": False}), H200, "a write strength"),
        (problem(traits={"varlen": True}), H200, "packed sequences"),
        (problem({"V": 20}), H200, "a V that 8 divides; got 20"),
        (problem({"K": 256}), H200, "got K = 256"),
        (problem({"K": 64}), H200, "no wider than K; got 128 and 64"),
        (problem(dtype="float16"), H200, "float16 does not hold"),
        (problem({"K": 16, "V": 16}), H200, "computed in float32"),
    ],
)
def test_a_refusal_says_why(given, device, reason):
    assert reason in HopperMLSTM().reject(given, device)


def test_it_serves_the_others():
    pytest.importorskip("triton.experimental.gluon")
    assert HopperMLSTM().reject(problem(), H200) is None
    inference = {"needs_grad": False}
    assert HopperMLSTM().reject(problem({"K": 104, "V": 40, "Hq": 1}, inference, dtype="float16"), H200) is None
    assert HopperMLSTM().reject(problem({"K": 64}, {"needs_grad": False}), H200) is None
    assert HopperMLSTM().reject(problem({"K": 24, "V": 16}), H200) is None


def example(B=1, T=130, H=2, Hq=None, K=64, V=64, dtype=torch.bfloat16, f=2.0, state=True, device="cpu"):
    """Drawn on the CPU, so that the numbers are the same everywhere."""
    draw = torch.Generator().manual_seed(T + K)

    def normal(*shape):
        return torch.randn(*shape, generator=draw)

    heads = Hq or H
    q, k, v = normal(B, T, heads, K), normal(B, T, heads, K) * K**-0.5, normal(B, T, H, V)
    g = torch.nn.functional.logsigmoid(normal(B, T, H) + f)
    beta, floor = (torch.rand(B, T, H, generator=draw) + least for least in (0.1, 0.02))
    m = -floor.log()
    initial = normal(B, H, K, V + 1) if state else None
    floats = [None if x is None else x.to(device) for x in (g, beta, m, initial)]
    return MatrixCall(*(x.to(device, dtype) for x in (q, k, v)), *floats, scale=K**-0.5, eps=1e-6)


def plans_of(call):
    B, T, H, V = call.v.shape
    sizes = {"B": B, "T": T, "H": H, "Hq": call.q.shape[2], "K": call.k.shape[3], "V": V}
    given = problem(sizes, dtype=str(call.v.dtype).removeprefix("torch."))
    return [model.candidates(given, H200, direction)[0] for direction in ("forward", "backward")]


def over(plan, **values):
    """The plan with other values."""
    return Plan(plan.backend, tuple((name, values.get(name, value)) for name, value in plan.values))


@pytest.mark.slow
@pytest.mark.sizes("K", "V")
@pytest.mark.parametrize(("K", "V"), [(128, 128), (128, 64), (64, 64), (104, 40)])
@pytest.mark.parametrize("state", [True, False])
def test_plans_compile_and_fit(K, V, state, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from gluon_compile import compile_launch, recorded
    from holdfast.kernels.matrix.mlstm.hopper import launch as hopper_mlstm_launch

    launches = recorded(monkeypatch, hopper_mlstm_launch)
    call = example(T=700, K=K, V=V, state=state)
    plans = plans_of(call)
    o, final, norm = HopperMLSTM().forward(plans[0].plan, call, None)
    HopperMLSTM().backward(plans[1].plan, call, None, torch.randn_like(o), final if state else None, o, norm)
    assert [launch.kernel.__name__ for launch in launches] == [
        "mlstm_fwd",
        "mlstm_bwd_q",
        "mlstm_bwd_kv",
    ]
    shared_of = [plans[0].shared, *[H200.shared_per_block] * 2]
    for launch, shared in zip(launches, shared_of, strict=True):
        made = compile_launch(launch)
        assert made.shared <= shared
        assert "wgmma.mma_async" in made.ptx
        assert "cp.async.bulk.tensor" in made.ptx
        assert "C7517" not in made.notes, "a product waits for the one before it"
        # numbers on the way into the kernel, and a dozen of what the few warps beside those that multiply hold
        assert made.spilled <= 128


def run(backend, plans, call, cotangents, kept):
    o, state, *norm = backend.forward(plans[0], call, None)
    grads, grad_initial = backend.backward(plans[1], call, None, *cotangents, *((o, *norm) if kept else ()))
    found = zip(NAMES, [o, state, *grads, None if call.initial_state is None else grad_initial], strict=True)
    return {name: x for name, x in found if x is not None}


CHUNKED = (Plan("chunked", (("chunk", 64), ("segment", 1024))),) * 2


def assert_right(call, ends=True, kept=True, **values):
    """Half-precision results within twice the error of the PyTorch path; float32 ones within STEP.

    ends: whether the final state has a gradient. kept: whether the backward pass is given what the forward pass
    returned. values: of the plan, in place of the planner's.
    """
    draw = torch.Generator().manual_seed(1)
    B, _, H, V = call.v.shape
    cotangents = [
        torch.randn(call.v.shape, generator=draw).to(call.v),
        torch.randn(B, H, call.k.shape[3], V + 1, generator=draw).to(call.g) if ends else None,
    ]
    wide = MatrixCall(*(None if x is None else x.double() for x in call[:7]), *call[7:])
    plans = [over(found.plan, **values) for found in plans_of(call)]
    got = run(HopperMLSTM(), plans, call, cotangents, kept)
    same = run(Chunked(), CHUNKED, call, cotangents, False)
    exact = run(Chunked(), CHUNKED, wide, [None if x is None else x.double() for x in cotangents], False)
    step = STEP[call.v.dtype]
    for name, x in got.items():
        mine = relative_error(x.double(), exact[name])
        if x.dtype == call.v.dtype:
            limit = 2 * relative_error(same[name].double(), exact[name])
        else:
            limit = DRIFT * step if name == "dg" else step
        assert mine <= limit, (name, mine, limit)
    return got


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs the kernels on this machine: what they compute, in which order, and whom they wait for."""
    pytest.importorskip("triton.experimental.gluon")
    import gluon_partitions_emulator
    from holdfast.kernels.matrix.mlstm.hopper import launch as hopper_mlstm_launch

    monkeypatch.setattr(hopper_mlstm_launch, "launch", gluon_partitions_emulator.launch)
    sums_by_torch(monkeypatch)
    # many small operations: threads of PyTorch's own would only wait for each other
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("of", "ends"),
    [
        ({"B": 2}, True),
        ({"K": 128, "T": 65, "Hq": 1}, False),
        ({"K": 128, "V": 128, "T": 64, "state": False}, True),
        ({"K": 104, "V": 40, "T": 63}, True),
        ({"f": -20.0}, False),
        ({"T": 1}, True),
        ({"T": 9 * 64 + 7}, True),
        ({"T": 8 * 64}, True),
    ],
)
def test_right_on_the_emulator(on_cpu, of, ends):
    assert_right(example(**of), ends, save=2 if of.get("B") == 2 else 8)


@pytest.mark.parametrize(
    ("of", "in_place"),
    [({"B": 2, "K": 128, "V": 64, "T": 70}, (True, True, True)), ({"Hq": 1, "T": 65}, (False, False, True))],
)
def test_gradients_in_their_room_on_the_emulator(on_cpu, of, in_place):
    call = example(**of)
    backward, do = plans_of(call)[1].plan, torch.randn_like(call.v)
    assert_written_in_room(
        lambda **room: HopperMLSTM().backward(backward, call, None, do, None, **room), call, in_place
    )


def test_a_normaliser_that_cancels_on_the_emulator(on_cpu):
    plan = plans_of(example(T=65, H=1))[0].plan
    normaliser_that_cancels(HopperMLSTM(), plan, K=64, V=64)


def assert_last_chunk(device):
    """dg of a gradient through the final state, where the last chunk leaves e^-7 of the state before it."""
    call = example(T=66, K=128, V=64, device=device)
    call.g[:, -2:] = -3.5
    draw = torch.Generator().manual_seed(1)
    grad_state = torch.randn(call.initial_state.shape, generator=draw).to(device)
    wide = MatrixCall(*(None if x is None else x.double() for x in call[:7]), *call[7:])
    plans = [found.plan for found in plans_of(call)]
    got = run(HopperMLSTM(), plans, call, (torch.zeros_like(call.v), grad_state), True)
    exact = run(Chunked(), CHUNKED, wide, (torch.zeros_like(wide.v), grad_state.double()), False)
    assert relative_error(got["dg"][:, -2:].double(), exact["dg"][:, -2:]) <= 8e-3


def test_what_passes_the_last_chunk_on_the_emulator(on_cpu):
    assert_last_chunk("cpu")


def assert_first_state(T, device):
    """dg of the first token, <S, dS> of the first state: what reads it may cancel, and so may it and what passes on."""
    call = example(T=T, device=device)
    do = torch.randn(call.v.shape, generator=torch.Generator().manual_seed(1)).to(call.v)
    wide = MatrixCall(*(None if x is None else x.double() for x in call[:7]), *call[7:])
    dg = run(HopperMLSTM(), [found.plan for found in plans_of(call)], call, (do, None), True)["dg"]
    exact = run(Chunked(), CHUNKED, wide, (do.double(), None), False)
    size = (exact["dstate"] * wide.initial_state).norm(dim=(2, 3))
    assert ((dg[:, 0].double() - exact["dg"][:, 0]).abs() / size).max() <= 3e-5


@pytest.mark.parametrize("T", [40, 130])
def test_the_first_state_is_not_rounded_on_the_emulator(on_cpu, T):
    assert_first_state(T, "cpu")


def assert_final_unit(device):
    """Where one token is all that is left, what the final state has of its strength and of its unit cancel."""
    call = example(T=1, device=device)
    call.g[:] = -50.0
    grad_state = torch.randn(call.initial_state.shape, generator=torch.Generator().manual_seed(1)).to(device)
    cotangents = (torch.zeros_like(call.v), grad_state)
    got = run(HopperMLSTM(), [found.plan for found in plans_of(call)], call, cotangents, True)
    assert relative_error(-got["dm"].double(), (got["dbeta"] * call.beta).double()) <= 1e-6


def test_the_final_states_unit_on_the_emulator(on_cpu):
    assert_final_unit("cpu")


def assert_layouts_are_alike(device):
    """Views are as good as copies, bit for bit."""
    call = example(B=2, device=device)
    plans = [found.plan for found in plans_of(call)]
    grad_state = torch.randn(call.initial_state.shape).to(device)
    assert_views_are_alike(lambda call, *given: run(HopperMLSTM(), plans, call, given, True), call, grad_state)


def test_views_are_as_good_as_copies_on_the_emulator(on_cpu):
    assert_layouts_are_alike("cpu")


def test_what_is_added_to_the_normaliser_on_the_emulator(on_cpu):
    """So much that its rounding cannot hide it."""
    assert_right(example(T=70)._replace(eps=0.5))


def test_right_without_what_the_forward_pass_returned_on_the_emulator(on_cpu):
    assert_right(example(T=70), kept=False)


def test_right_forward_where_v_is_the_wider_on_the_emulator(on_cpu):
    call = example(K=64, V=128)
    wide = MatrixCall(*(x.double() for x in call[:7]), *call[7:])
    given = problem({"B": 1, "T": 130, "H": 2, "Hq": 2, "K": 64}, {"needs_grad": False})
    plan = model.candidates(given, H200, "forward")[0].plan
    o, final, _ = HopperMLSTM().forward(plan, call, None)
    exact, last = Chunked().forward(CHUNKED[0], wide, None)
    assert relative_error(o.double(), exact) <= STEP[torch.bfloat16]
    assert relative_error(final.double(), last) <= STEP[torch.bfloat16]
    # the normaliser is not rounded
    assert relative_error(final[..., -1].double(), last[..., -1]) <= 1e-5


gpu = pytest.mark.gpu


@gpu
def test_what_passes_the_last_chunk():
    assert_last_chunk("cuda")


@gpu
def test_states_at_both_ends():
    assert_first_state(130, "cuda")
    assert_final_unit("cuda")


@gpu
@pytest.mark.parametrize(("K", "V"), [(128, 128), (128, 64), (64, 64), (104, 40)])
def test_right_at_every_width(K, V):
    assert_right(example(B=2, T=700, H=4, K=K, V=V, device="cuda"))


@gpu
@pytest.mark.parametrize("T", [1, 63, 64, 65, 4095])
def test_right_at_every_length(T):
    assert_right(example(T=T, K=128, V=128, device="cuda"))


@gpu
@pytest.mark.parametrize("f", [-50.0, 0.0, 50.0])
def test_right_at_every_decay(f):
    # without the final state's gradient: with it and a decay that forgets all, dg is a difference of equal numbers
    assert_right(example(B=2, T=300, K=128, V=128, f=f, device="cuda"), ends=f == 50.0)


@gpu
def test_right_in_float16_with_shared_heads_and_without_states():
    assert_right(example(T=300, H=6, Hq=2, K=128, V=128, dtype=torch.float16, device="cuda"))
    assert_right(example(T=300, H=6, Hq=2, K=128, V=64, state=False, device="cuda"), ends=False)


@gpu
@pytest.mark.parametrize("gating", ["exp", "sigmoid"])
def test_two_runs_and_two_backward_passes_are_bit_equal(gating):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 333, 4, 128, generator=draw).to("cuda", torch.bfloat16) for _ in range(3))
    i, f = (torch.randn(2, 333, 4, generator=draw).cuda() for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k * 128**-0.5, v, i, f + 3)]
    found = []
    for _ in range(2):
        o, state = holdfast.mlstm(*leaves, gating=gating, output_final_state=True, backend="hopper")
        loss = o.float().square().sum() + sum(x.sum() for x in state)
        for _ in range(2):
            found.append([o, *state, *torch.autograd.grad(loss, leaves, retain_graph=True)])
    for other in found[1:]:
        assert all(torch.equal(x, y) and not x.isnan().any() for x, y in zip(other, found[0], strict=True))


@gpu
def test_a_decay_of_nan_shows():
    call = example(T=300, device="cuda")
    call.g[0, 100, 0] = torch.nan
    o, state, norm = HopperMLSTM().forward(plans_of(call)[0].plan, call, None)
    assert o[0, 100:, 0].isnan().all()
    assert state[0, 0].isnan().all()
    assert norm[0, 0, 100:].isnan().all()
    assert not o[0, :, 1].isnan().any()


@gpu
def test_views_are_as_good_as_copies():
    assert_layouts_are_alike("cuda")
