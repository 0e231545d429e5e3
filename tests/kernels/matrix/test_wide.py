"""Wide states without a GPU: how they are cut, that slices are right, interpreted and emulated, and compile."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from holdfast.kernels.matrix.mlstm.hopper.backend import HopperMLSTM
from holdfast.kernels.matrix.scalar_decay.hopper.backend import Hopper
from holdfast.kernels.matrix.scalar_decay.triton.backend import TritonSinglePass
from holdfast.kernels.matrix.vector_decay.hopper.backend import HopperGLA
from holdfast.kernels.matrix.wide import Slices, Wide
from holdfast.kernels.select import decide
from holdfast.ops import matrix
from holdfast.planner import Device, Problem
from holdfast.planner.models.matrix import wide as model
from holdfast.planner.models.matrix.wide import Cut
from interpreted import interpret
from kernels.lib.triton.group_sums_on_cpu import sums_by_torch
from kernels.matrix.in_room import assert_written_in_room
from kernels.matrix.mlstm.hopper import test_backend as test_hopper_mlstm
from kernels.matrix.scalar_decay.hopper import test_backend as test_hopper
from kernels.matrix.scalar_decay.triton.parity import example
from kernels.matrix.vector_decay.triton import parity as gla_parity
from kernels.matrix.wide_parity import errors
from plain_launches import launch_by

H200 = Device.named("h200")
STEP = 2.0**-7


def problem(K, V, **traits):
    sizes = {"B": 4, "T": 4096, "H": 8, "Hq": 8, "K": K, "V": V}
    return Problem.of("simple_gla", "matrix", "bfloat16", sizes, {"decay=scalar": True, "needs_grad": True} | traits)


@pytest.mark.slow
def test_interpreted():
    assert "no token" in interpret("kernels.matrix.wide_parity", "interpreted", seconds=300)


def test_interpreted_in_short():
    assert "in short" in interpret("kernels.matrix.wide_parity", "in_short")


def test_products_of_rows():
    assert "products" in interpret("kernels.matrix.wide_parity", "products")


@pytest.mark.parametrize(
    ("cut", "K", "V", "rows", "columns"),
    [
        (Cut(2, 4), 256, 512, [128, 128], 128),
        (Cut(2, 3), 192, 384, [96, 96], 128),
        (Cut(2, 2), 200, 19, [104, 96], 16),
        (Cut(1, 3), 20, 257, [20], 88),
    ],
)
def test_slices_are_whole_rows_of_16_bytes(cut, K, V, rows, columns):
    assert [rows.stop - rows.start for rows in cut.rows(K)] == rows
    assert cut.columns(V) == columns


@pytest.mark.parametrize("K", [1, 64, 128, 129, 136, 192, 256, 264, 392, 512, 1000])
def test_slices_of_keys_take_one_tile(K):
    slices = model.key_slices(K)
    widths = [rows.stop - rows.start for rows in Cut(slices).rows(K)]
    assert sum(widths) == K
    assert len(widths) == slices
    assert max(widths) <= 128
    assert len({width > 64 for width in widths}) == 1


def test_what_fits_is_not_cut():
    for member in (Hopper(), TritonSinglePass()):
        whole = member.candidates(problem(128, 128), H200, "forward")
        assert Wide(member).candidates(problem(128, 128), H200, "forward") == whole


def test_the_planner_picks_slices_by_time_and_says_so():
    decision = matrix.resolve(matrix.BACKENDS, problem(256, 512), H200, "", "forward")
    assert "key_slices=2 value_slices=4" in str(decision[1])
    # bytes of a float32 sum on their way to memory and back
    (best, *_) = Wide(Hopper()).candidates(problem(256, 512), H200, "forward")
    assert best.moved > 8 * 4 * 4096 * 8 * 512


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("device", ["h200", "a100", "rtx3090"])
@pytest.mark.parametrize(
    ("op", "traits"),
    [
        ("linear_attention", ()),
        ("ssd", ("decay=scalar", "beta")),
        ("gla", ("decay=vector",)),
        ("delta_rule", ("delta", "beta")),
        ("gated_delta_rule", ("delta", "beta", "decay=scalar")),
        ("mlstm", ("decay=scalar", "beta", "normalizer")),
    ],
)
def test_every_recurrence_has_a_kernel_to_256_keys_and_of_any_values(op, traits, device, dtype):
    for packed in (False, True):
        for K, V in ((192, 384), (256, 512), (256, 1024), (96, 257), (1, 1000)):
            sizes = {"B": 1, "T": 2048, "H": 4, "Hq": 2, "K": K, "V": V, "N": 3}
            given = dict.fromkeys((*traits, "needs_grad"), True) | {"varlen": packed}
            which = Problem.of(op, "matrix", dtype, sizes, given)
            ranked = decide(matrix.BACKENDS, which, Device.named(device), None).ranked
            for direction in ("forward", "backward"):
                found = {scored.backend.name for scored in ranked[direction]}
                assert found & {"hopper", "triton"}, (op, K, V, packed)


def test_values_are_not_copied():
    call = example(B=2, T=3, H=2, V=32)
    packed = torch.randn(2, 3, 200)
    v = packed[..., 8:72].unflatten(2, (2, 32))
    parts = Slices(call._replace(v=v), Cut(1, 4), False)
    (cut,) = parts.rows()
    assert cut.v.shape == (2, 3, 8, 8)
    assert cut.v.data_ptr() == v.data_ptr()
    assert torch.equal(parts.output(cut.v), v)
    assert cut.q.data_ptr() == call.q.data_ptr()


@pytest.mark.parametrize(("keys", "said"), [(1, False), (2, True), (3, True)])
def test_a_slice_of_keys_says_that_its_output_is_a_part(keys, said):
    traits = model.sliced(problem(512, 256), Cut(keys, 2)).traits
    assert "slices" in traits
    assert ("key_slices" in traits) == said


@pytest.fixture
def on_cpu(monkeypatch):
    """Runs the kernels on this machine: what they compute, in which order, and whom they wait for."""
    import gluon_partitions_emulator
    from holdfast.kernels.matrix.mlstm.hopper import launch as hopper_mlstm_launch
    from holdfast.kernels.matrix.mlstm.triton import row_dot as row_dot_module
    from holdfast.kernels.matrix.scalar_decay.hopper import launch as scalar_launch
    from holdfast.kernels.matrix.state_passing.hopper import launch as state_launch
    from holdfast.kernels.matrix.vector_decay.hopper import launch as hopper_gla_launch

    for module in (scalar_launch, state_launch, hopper_gla_launch, hopper_mlstm_launch):
        monkeypatch.setattr(module, "launch", gluon_partitions_emulator.launch)
    launch_by(monkeypatch, test_hopper._composed)
    sums_by_torch(monkeypatch)
    # a plain Triton kernel, interpreted elsewhere
    monkeypatch.setattr(
        row_dot_module, "row_dot", lambda do, o: (do.float() * o.float()).sum(-1).transpose(1, 2).contiguous()
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


CALLS = {
    "scalar": (Hopper(), "ssd", test_hopper.example, {"B": 1, "H": 2, "Hq": 1, "K": 192, "V": 192, "beta": True}, None),
    "scalar, packed": (Hopper(), "ssd", test_hopper.example, {"B": 1, "H": 1, "K": 144, "V": 72}, (0, 70, 130)),
    "vector": (HopperGLA(), "gla", gla_parity.example, {"H": 2, "Hq": 1, "K": 144, "V": 160}, None),
    "vector, packed": (HopperGLA(), "gla", gla_parity.example, {"H": 1, "K": 144, "V": 160}, (0, 70, 130)),
    "mlstm": (HopperMLSTM(), "mlstm", test_hopper_mlstm.example, {"H": 2, "Hq": 1, "K": 192, "V": 192}, None),
    "mlstm, values": (HopperMLSTM(), "mlstm", test_hopper_mlstm.example, {"H": 1, "K": 64, "V": 128}, None),
}


def planned(name, T=130):
    """(backend, plans of both passes, call, offsets)."""
    member, op, draw, of, packed = CALLS[name]
    call = draw(T=T, dtype=torch.bfloat16, **of)
    if packed:
        states = torch.randn(len(packed) - 1, *call.initial_state.shape[1:])
        call = call._replace(initial_state=states)
    given = matrix.problem(op, call, torch.tensor(packed) if packed else None, True)
    backend = Wide(member)
    found = [backend.candidates(given, H200, direction) for direction in ("forward", "backward")]
    return backend, [next(one.plan for one in each if Cut.of(one.plan) != Cut()) for each in found], call, packed


@pytest.mark.parametrize("name", CALLS)
def test_slices_are_right_on_the_emulator(on_cpu, name):
    backend, plans, call, packed = planned(name)
    if call.k.shape[3] > 128:
        assert plans[0]["key_slices"] == plans[1]["key_slices"] == 2
    found = errors(backend, plans, call, packed)
    assert all(error <= STEP for error in found.values()), found


@pytest.mark.parametrize(("name", "in_place"), [("mlstm, values", True), ("scalar", False)])
def test_gradients_of_slices_of_values_in_their_room_on_the_emulator(on_cpu, name, in_place):
    """Those of slices of keys are sums, and so are those of q and k."""
    backend, plans, call, _ = planned(name)
    do = torch.randn_like(call.v)
    run = lambda **room: backend.backward(plans[1], call, None, do, None, **room)  # noqa: E731
    assert_written_in_room(run, call, (False, False, in_place))


@pytest.mark.parametrize("name", ["scalar", "vector", "mlstm"])
def test_no_token_and_no_states(on_cpu, name):
    backend, plans, call, _ = planned(name, T=0)
    found = errors(backend, plans, call._replace(initial_state=None), ends=False)
    assert not any(found.values()), found


def test_what_a_normaliser_keeps_has_the_shape_that_graphs_are_told(on_cpu):
    backend, plans, call, _ = planned("mlstm")
    _, _, kept = backend.forward(plans[0], call, None)
    saved = backend.saved_shape(matrix.problem("mlstm", call, None, True))
    assert (kept.shape, kept.dtype) == saved
    assert kept.is_contiguous()


@pytest.mark.slow
@pytest.mark.sizes("K", "V")
@pytest.mark.parametrize(("K", "V"), [(256, 512), (192, 384)])
@pytest.mark.parametrize(("name", "most"), [("scalar", 0), ("vector", 24), ("mlstm", 64)])
def test_sums_of_slices_compile_and_fit(monkeypatch, name, most, K, V):
    from gluon_compile import compile_launch, recorded
    from holdfast.kernels.matrix.mlstm.hopper import launch as hopper_mlstm_launch
    from holdfast.kernels.matrix.scalar_decay.hopper import launch as scalar_launch
    from holdfast.kernels.matrix.state_passing.hopper import launch as state_launch
    from holdfast.kernels.matrix.vector_decay.hopper import launch as hopper_gla_launch

    launches = recorded(monkeypatch, scalar_launch, state_launch, hopper_gla_launch, hopper_mlstm_launch)
    member, op, draw, _, _ = CALLS[name]
    call = draw(B=1, T=130, H=2, K=K, V=V, dtype=torch.bfloat16, state=False)
    plan = Wide(member).candidates(matrix.problem(op, call, None, True), H200, "forward")[0].plan
    Wide(member).forward(plan, call, None)
    found = [each.constants for each in launches]
    assert [x["SLICE"] if name == "scalar" else 2 * x["ADDS"] + x["LEAVES"] for x in found] == [1, 2]
    for launch in launches:
        made = compile_launch(launch)
        assert made.shared <= H200.shared_per_block
        assert "(C75" not in made.notes, "a product waits for the one before it"
        assert made.spilled <= most
        assert len(made.reloaded) <= 2
