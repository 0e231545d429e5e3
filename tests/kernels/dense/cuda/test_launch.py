"""What is handed to the fused kernels is what their signatures ask for, in order; no GPU runs here."""

import importlib.util
import re
from contextlib import contextmanager, nullcontext
from ctypes import c_float, c_int, c_void_p

import pytest
import torch

from holdfast.kernels.dense import saved as kept
from holdfast.kernels.dense.cuda import backend as fused
from holdfast.kernels.dense.cuda import launch
from holdfast.kernels.dense.weight_grad import select as weight_grad
from holdfast.planner import Device, Plan, Problem
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from holdfast.recurrences.definition import DenseCall
from holdfast.recurrences.gru import gru
from holdfast.recurrences.lstm import lstm

ONE_BLOCK = Plan("fused", (("blocks", 1), ("rows", 2), ("fours", 1), ("turns", 1), ("stages_2", 4), ("stages_4", 3)))
SPREAD = Plan(
    "fused",
    (
        ("blocks", 2),
        ("rows", 8),
        ("heads", 2),
        ("channels", 16),
        ("warps", 4),
        ("in_registers", 1),
        ("in_shared", 0),
        ("taken", 0),
        ("left", 0),
        ("at_once", 1),
        ("pause", 100),
    ),
)


@pytest.fixture
def launched(monkeypatch):
    """Launches are recorded: (source, name, grid, threads, shared, arguments, cooperative)."""
    record = []

    def load(source, arch, name, shared, device):
        class Recorder:
            def launch(self, grid, threads, shared, arguments, cooperative=False, first=None):
                if first is not None:
                    first()
                record.append((source, name, grid, threads, shared, arguments, cooperative))

        return Recorder()

    failed = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(launch.nvrtc, "load", load)
    monkeypatch.setattr(launch, "_failed", lambda device: failed)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def no_product(dg, h, initial, reset):
        return torch.zeros(1, dg.shape[2], *dg.shape[3:], dg.shape[4])

    monkeypatch.setattr(weight_grad, "partial_weight_grads", no_product)
    monkeypatch.setattr(weight_grad, "sum_partials", lambda parts, dtype: [x.sum(0) for x in parts])
    monkeypatch.setattr(launch.nvrtc, "is_made", lambda source, arch: True)
    for cached in (launch._architecture, launch._look):
        cached.cache_clear()
    yield record
    for cached in (launch._architecture, launch._look):
        cached.cache_clear()


def parameters(source, name):
    """[(type, name)] of a kernel."""
    listed = re.search(rf"\n{name}\(([^)]*)\)", source)[1]
    return [tuple(re.fullmatch(r"(?:const )?(.*?)\s*(\w+)", part.strip()).groups()) for part in listed.split(",")]


def assert_matches(launch_record):
    source, name, _, _, _, arguments, _ = launch_record
    expected = parameters(source, name)
    assert len(arguments) == len(expected)
    kinds = {"float*": torch.float32, "half_t*": torch.bfloat16, "int*": torch.int32, "u32*": torch.int32}
    for argument, (kind, parameter) in zip(arguments, expected, strict=True):
        if kind == "int":
            assert isinstance(argument, c_int), parameter
        elif kind == "float":
            assert isinstance(argument, c_float), parameter
        elif isinstance(argument, torch.Tensor):
            assert argument.is_contiguous(), parameter
            # gates are in the inputs' dtype or in float32
            assert kind == "char*" or argument.dtype == kinds[kind], parameter
        elif parameter == "failed":
            assert isinstance(argument, c_void_p)
        else:
            assert argument is None, parameter
    return dict(zip([parameter for _, parameter in expected], arguments, strict=True))


@pytest.mark.parametrize("plan", [ONE_BLOCK, SPREAD], ids=["one block", "spread"])
@pytest.mark.parametrize("which", [lstm, gru], ids=lambda c: c.name)
@pytest.mark.parametrize("D", [32, 28])
def test_arguments_match_the_signatures(launched, which, plan, D):
    B, T, H = 3, 40, 2
    arguments = RECURRENCES[which.name].example(Draw(0, torch.bfloat16), Sizes(B=B, T=T, H=H, D=D))
    reset = torch.rand(B, T) < 0.2
    call = DenseCall(which, **arguments, reset=reset, recurrent_grad_clip=0.5)
    h, final, states, gates = fused.Fused().forward(plan, call, None, True)
    assert (h.shape, final.shape) == ((B, T, H, D), arguments["initial_state"].shape)
    assert [tuple(x.shape) for x in (states, gates)] == [*kept.shapes(which, B, T, H, D)]
    given = assert_matches(launched[-1])
    spread = plan is SPREAD
    assert launched[-1][1:4] == (
        ("dense_many_blocks_forward", (4, 1, 1), 256) if spread else ("dense_one_block_forward", (2, 1, 1), 64)
    )
    assert launched[-1][-1] == spread
    assert [given[name].value for name in ("batch", "length", "heads", "width")] == [B, T, H, D]
    assert given["x"].shape == (B, T, len(which.input), H, 32)
    assert given["resets"].shape == (B, 2)
    assert all((given["resets"][:, t // 32] >> (t % 32) & 1).bool().equal(reset[:, t]) for t in range(T))
    if spread:
        assert (given["rows"].value, given["first_head"].value, given["pause"].value) == (8, 0, 100)
        assert given["entry"].float()[..., :D].equal(arguments["initial_state"][0].bfloat16().float())

    grads = fused.Fused().backward(plan, call, None, h, states, gates, torch.ones_like(h), None)
    assert [x.shape for x in grads] == [arguments[k].shape for k in ("x", "R", "b", "initial_state")]
    given = assert_matches(launched[-1])
    assert given["clip"].value == 0.5
    assert given["grad_final"] is None
    assert given["dx"].shape[2] == len(which.input)
    assert given["extra"].shape[2] == len(set(which.recurrent) - set(which.input))


@pytest.mark.parametrize(
    ("clip", "cut", "given"), [(0.5, False, 0.5), (None, True, 0.0), (0.5, True, 0.0), (None, False, float("inf"))]
)
def test_a_gradient_that_is_cut_is_clipped_to_nothing(launched, clip, cut, given):
    arguments = RECURRENCES["lstm"].example(Draw(0, torch.bfloat16), Sizes(B=3, T=4, H=2, D=32))
    call = DenseCall(lstm, **arguments, recurrent_grad_clip=clip, cut_recurrent_grad=cut)
    h, _, states, gates = fused.Fused().forward(ONE_BLOCK, call, None, True)
    fused.Fused().backward(ONE_BLOCK, call, None, h, states, gates, torch.ones_like(h), None)
    assert assert_matches(launched[-1])["clip"].value == given


def test_inference_keeps_nothing(launched):
    arguments = RECURRENCES["lstm"].example(Draw(0, torch.bfloat16), Sizes(B=3, T=4, H=2, D=32))
    fused.Fused().forward(ONE_BLOCK, DenseCall(lstm, **arguments), None, False)
    given = assert_matches(launched[-1])
    assert given["states"] is None
    assert given["gates"] is None
    assert given["resets"] is None


def test_a_stuck_launch_is_reported_once(launched):
    arguments = RECURRENCES["lstm"].example(Draw(0, torch.bfloat16), Sizes(B=3, T=4, H=2, D=32))
    launch._failed(None).fill_(1)
    with pytest.raises(RuntimeError, match="gave up waiting"):
        fused.Fused().forward(SPREAD, DenseCall(lstm, **arguments), None, False)
    assert launched == []
    fused.Fused().forward(SPREAD, DenseCall(lstm, **arguments), None, False)
    assert len(launched) == 1


def test_heads_that_do_not_fit_together_run_in_turns(launched):
    arguments = RECURRENCES["lstm"].example(Draw(0, torch.bfloat16), Sizes(B=3, T=4, H=5, D=32))
    fused.Fused().forward(SPREAD, DenseCall(lstm, **arguments), None, False)
    firsts = [assert_matches(one)["first_head"].value for one in launched]
    assert firsts == [0, 2, 4]
    assert [one[2] for one in launched] == [(4, 1, 1), (4, 1, 1), (2, 1, 1)]


@pytest.mark.parametrize("which", [lstm, gru], ids=lambda c: c.name)
@pytest.mark.parametrize("lengths", [None, (5, 0, 9)])
def test_what_the_loop_keeps_survives_the_other_form(which, lengths):
    B, T = (2, 7) if lengths is None else (1, 14)
    bounds = None if lengths is None else torch.tensor((0, *lengths)).cumsum(0)
    arguments = RECURRENCES[which.name].example(Draw(0, torch.bfloat16), Sizes(B=B, T=T, H=2, D=12))
    call = DenseCall(which, *(arguments[name] for name in ("x", "R", "b")))
    # numbers that bfloat16 holds
    states = torch.randn(len(which.states), B * T, 2, 12).bfloat16().float()
    gates = torch.randn(B * T, 2, len(which.gates), 12).bfloat16().float()
    time = kept.make_schedule(B, T, bounds, torch.device("cpu"))
    h = torch.zeros(B, T, 2, 12)
    time.put(states[0], h, 0, len(time.sizes))
    packed = kept.pack(call, bounds, states, gates)
    back = kept.unpack(call, bounds, h.bfloat16(), *packed)
    assert torch.equal(back[0], states)
    assert torch.equal(back[1], gates)


def refusal(monkeypatch, H=2, grad=True, triton=True, **others):
    found = importlib.util.find_spec
    monkeypatch.setattr(fused, "find_spec", lambda name: found(name) if triton or name != "triton" else None)
    sizes = {"B": 2, "T": 3, "H": H, "D": 32, "S": 2, "G": 4, "Gi": 4, "Gr": 4} | others
    what = Problem.of("lstm", "dense", "bfloat16", sizes, {f"cell={lstm.key}": True, "needs_grad": grad})
    return fused.Fused().reject(what, Device.named("h200"))


def test_what_a_launch_could_not_serve_is_refused(monkeypatch):
    monkeypatch.setattr(fused.nvrtc, "missing", lambda capability: None)
    assert refusal(monkeypatch) is None
    assert refusal(monkeypatch, B=1, T=1, H=1) is None
    assert all(refusal(monkeypatch, **{axis: 0}) for axis in "BTHD")
    assert refusal(monkeypatch, H=65536) == "takes 65535 heads at most; got 65536"
    assert "Triton is not installed" in refusal(monkeypatch, triton=False)
    assert refusal(monkeypatch, grad=False, triton=False) is None


@pytest.mark.parametrize("which", [lstm, gru], ids=lambda c: c.name)
def test_every_launch_of_the_backward_pass_is_on_the_inputs_device(launched, monkeypatch, which):
    inside, devices = [], []

    @contextmanager
    def device(chosen):
        devices.append(chosen)
        yield
        devices.pop()

    def product(dg, h, initial, reset):
        inside.append(list(devices))
        return torch.zeros(1, dg.shape[2], *dg.shape[3:], dg.shape[4])

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(weight_grad, "partial_weight_grads", product)
    arguments = RECURRENCES[which.name].example(Draw(0, torch.bfloat16), Sizes(B=2, T=5, H=1, D=32))
    call = DenseCall(which, **arguments)
    h, _, states, gates = fused.Fused().forward(ONE_BLOCK, call, None, True)
    fused.Fused().backward(ONE_BLOCK, call, None, h, states, gates, h, None)
    assert inside
    assert all(found == [call.x.device] for found in inside)


def test_a_packed_call_takes_offsets_of_the_host(monkeypatch):
    """Tensors without memory stand for a GPU's: none that a kernel is given may be on the CPU, where offsets may be."""
    seen = []
    monkeypatch.setattr(fused, "_planned", lambda *given: [ONE_BLOCK])
    monkeypatch.setattr(fused.torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(fused.launch, "run", lambda plan, cell, way, arrays, *rest: seen.append(arrays))
    monkeypatch.setattr(weight_grad, "partial_weight_grads", lambda dg, h, *rest: dg.new_empty(1, 4, 1, 16, 16))
    monkeypatch.setattr(weight_grad, "sum_partials", lambda parts, dtype: [x[0].to(dtype) for x in parts])
    bounds = torch.tensor([0, 4, 4, 5, 9], dtype=torch.int32)
    x, R = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((1, 9, 4, 1, 16), (4, 1, 16, 16)))
    backend, call = fused.Fused(), DenseCall(lstm, x, R, None)
    h, final, states, gates = backend.forward(ONE_BLOCK, call, bounds, True)
    backend.backward(ONE_BLOCK, call, bounds, h, states, gates, torch.empty_like(h), torch.empty_like(final))
    # one batch, forward and backward
    assert len(seen) == 2
    assert {x.device.type for arrays in seen for x in arrays if x is not None} == {"meta"}
    assert all(any(x is not None and x.dtype == torch.int32 for x in arrays) for arrays in seen)
