"""Few heads in one launch on Hopper: which calls get it, that it compiles and fits with no GPU, and is right on one."""

import pytest
import torch

from holdfast.kernels.matrix.scalar_decay.hopper.backend import Hopper
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.planner import Device
from holdfast.planner.models.matrix.scalar_decay import hopper as model
from holdfast.recurrences.definition import MatrixCall
from kernels.matrix.scalar_decay.hopper.test_backend import CHUNKED, STEP, WIDTHS, doubled, example, plans_of, problem
from layouts import views
from parity import relative_error

H200 = Device.named("h200")


def resident_plan(call):
    """The planner's plan that keeps a call's tiles on chip."""
    ((found,), _) = plans_of(call, resident=True)
    return found


def errors(call):
    """(of the outputs, of the PyTorch path's, of the final state), against float64; the kernel's outputs and state."""
    o, state = Hopper().forward(resident_plan(call).plan, call, None)
    exact, last = Chunked().forward(CHUNKED[0], MatrixCall(*doubled(call[:7]), *call[7:]), None)
    same, _ = Chunked().forward(CHUNKED[0], call, None)
    found = (relative_error(x.double(), y) for x, y in ((o, exact), (same, exact), (state, last)))
    return *found, o, state


def assert_right(call):
    mine, same, of_state, *_ = errors(call)
    assert mine <= 2 * same
    assert of_state <= STEP[call.q.dtype]


def sized(**sizes):
    return problem({"B": 1, "H": 8, "Hq": 8} | sizes)


def test_few_heads_run_in_one_launch():
    (best, *_) = model.candidates(sized(), H200, "forward")
    assert best.plan["resident"]
    assert best.blocks == 8 * 4096 // 256
    assert not any(found.plan["resident"] for found in model.candidates(sized(H=9, Hq=9), H200, "forward"))


@pytest.mark.parametrize(
    ("sizes", "traits"),
    [({"T": 4096 + 1280}, {}), ({"V": 256}, {"needs_grad": False}), ({"T": 256}, {"varlen": True})],
)
def test_what_a_launch_cannot_hold_is_left_to_others(sizes, traits):
    given = problem({"B": 1, "H": 8, "Hq": 8} | sizes, traits)
    assert not any(found.plan["resident"] for found in model.candidates(given, H200, "forward"))


def test_a_short_sequence_is_left_to_the_sweep():
    (best, *_) = model.candidates(sized(T=64), H200, "forward")
    assert not best.plan["resident"]


@pytest.mark.slow
@pytest.mark.sizes("K", "V")
@pytest.mark.parametrize(("K", "V"), WIDTHS)
@pytest.mark.parametrize("beta", [False, True])
def test_it_compiles_and_fits(K, V, beta, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    from gluon_compile import compile_launch, recorded
    from holdfast.kernels.matrix.scalar_decay.hopper.onchip import launch as hopper_resident_launch

    call = example(B=1, T=300, H=2, K=K, V=V, beta=beta, state=beta)
    launches = recorded(monkeypatch, hopper_resident_launch)
    plan = resident_plan(call)
    Hopper().forward(plan.plan, call, None)
    made = compile_launch(launches[0], aligned=("states_ptr", "start_ptr", "end_ptr"))
    assert made.shared <= plan.shared <= H200.shared_per_block
    assert "wgmma.mma_async" in made.ptx
    assert "cp.async.bulk.tensor" in made.ptx
    assert "(C75" not in made.notes, "a product waits for the one before it"
    assert made.spilled <= 28


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs the blocks on this machine, all at once: what they compute, in which order, and whom they wait for."""
    pytest.importorskip("triton.experimental.gluon")
    import gluon_partitions_emulator
    from holdfast.kernels.matrix.scalar_decay.hopper.onchip import launch as hopper_resident_launch

    monkeypatch.setattr(hopper_resident_launch, "launch", gluon_partitions_emulator.launch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SHAPES = [
    {"B": 1, "T": 512, "H": 1, "K": 128, "V": 128},
    {"B": 2, "T": 300, "H": 2, "Hq": 1, "K": 128, "V": 64, "beta": True},
    {"B": 1, "T": 257, "H": 2, "K": 64, "V": 128, "g": None, "state": False},
    {"B": 1, "T": 1, "H": 1, "K": 104, "V": 40},
    {"B": 1, "T": 600, "H": 2, "K": 64, "V": 64, "g": -50.0, "beta": True},
    {"B": 1, "T": 700, "H": 2, "K": 64, "V": 64, "dtype": torch.float16},
    # more segments than states are loaded at once
    {"B": 1, "T": 17 * 256 + 3, "H": 1, "K": 64, "V": 64},
]


@pytest.mark.parametrize("of", SHAPES)
def test_right_on_the_emulator(on_cpu, of):
    assert_right(example(**of))


def assert_layouts_are_alike(device):
    """Views are as good as copies, bit for bit."""
    call = example(B=2, T=300, H=2, K=64, V=64, beta=True, device=device)
    plan = resident_plan(call).plan
    right = Hopper().forward(plan, call, None)
    for kind in range(3):
        assert all(map(torch.equal, Hopper().forward(plan, views(call, kind), None), right))


def test_views_are_as_good_as_copies_on_the_emulator(on_cpu):
    assert_layouts_are_alike("cpu")


def assert_nan_stays_behind(device):
    """A decay of NaN spoils its head from there on and nothing else."""
    call = example(B=1, T=600, H=2, K=64, V=64, device=device)
    call.g[0, 300, 0] = torch.nan
    *_, o, state = errors(call)
    assert o[0, 300:, 0].isnan().all()
    assert state[0, 0].isnan().all()
    assert not o[0, :256, 0].isnan().any()
    assert not o[0, :, 1].isnan().any()
    assert not state[0, 1].isnan().any()


def test_nan_stays_behind_on_the_emulator(on_cpu):
    assert_nan_stays_behind("cpu")


gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("of", SHAPES)
def test_right(of):
    assert_right(example(**of, device="cuda"))


@gpu
@pytest.mark.parametrize("T", [1, 63, 64, 65, 255, 256, 257, 4095, 33000])
def test_right_at_every_length(T):
    assert_right(example(B=1, T=T, H=1, device="cuda"))


@gpu
@pytest.mark.parametrize("g", [0.0, -50.0, float("-inf")])
def test_right_at_every_decay(g):
    assert_right(example(B=1, T=600, g=g, beta=True, device="cuda"))


@gpu
def test_views_are_as_good_as_copies():
    assert_layouts_are_alike("cuda")


@gpu
def test_nan_stays_behind():
    assert_nan_stays_behind("cuda")


@gpu
def test_two_runs_are_bit_equal_and_write_everything():
    call = example(B=1, T=3333, H=8, beta=True, device="cuda")
    *_, o, state = errors(call)
    *_, again, last = errors(call)
    assert torch.equal(o, again)
    assert torch.equal(state, last)
    assert not o.isnan().any()


@gpu
def test_streams_and_graphs_share_nothing():
    call = example(B=1, T=1024, H=4, device="cuda")
    plan = resident_plan(call).plan
    right = Hopper().forward(plan, call, None)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(Hopper().forward(plan, call, None))
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for each in found for x, y in zip(each, right, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = Hopper().forward(plan, call, None)
    call.v.mul_(-2)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured[0], Hopper().forward(plan, call, None)[0])


@gpu
def test_more_blocks_than_the_gpu_runs_at_once_fail_cleanly():
    from holdfast.kernels.matrix.args import DecayAndBeta
    from holdfast.kernels.matrix.scalar_decay.hopper.onchip.launch import run_onchip

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    call = example(B=1, T=256 * (sms + 1), H=1, state=False, device="cuda")
    end = torch.empty(1, 1, 128, 128, device="cuda")
    with pytest.raises(RuntimeError, match="launching scalar_decay_fwd_onchip"):
        run_onchip(call.q, call.k, call.v, torch.empty_like(call.v), DecayAndBeta(call.g, None, 1.0), None, end)
    assert_right(example(B=1, T=600, device="cuda"))
