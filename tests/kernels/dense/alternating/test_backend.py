"""The alternating backend: its generated kernels on a CPU, in float32 and wherever the loop goes."""

import shutil
from contextlib import nullcontext

import pytest
import torch

import cuda_emulator
from holdfast.kernels.dense.alternating import backend as alternating
from holdfast.kernels.dense.alternating import cell_step as step
from holdfast.planner import Device, Plan, Problem
from holdfast.recurrences import RECURRENCES, Draw, Sizes, cell, oracle
from holdfast.recurrences.definition import DenseCall
from holdfast.recurrences.dense import recurrence
from holdfast.recurrences.gru import gru
from holdfast.recurrences.slstm import slstm
from parity import cast, relative_error

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ (apt install g++)")
PLAN = Plan("alternating", (("rows", 8),))


@cell(states=("h", "c", "d"), gates=("a", "b", "k", "l"), input=("l", "a", "k"), recurrent=("b", "a"))
def own(s, g):
    c = torch.sigmoid(g.a) * s.c + torch.tanh(g.k + s.h) * torch.sigmoid(g.b)
    return {"h": torch.nn.functional.softsign(c), "c": c, "d": 0.5 * s.d + g.l * s.h}


@pytest.fixture
def on_cpu(monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "emulated_steps"
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(
        step.nvrtc, "load", lambda text, arch, name, *rest: cuda_emulator.Emulated(text, name, folder, 0)
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    step._load.cache_clear()
    yield
    step._load.cache_clear()


def check(
    which, lengths=None, B=3, T=6, H=2, D=7, dtype=torch.float32, reset=False, initial=True, bias=True, **options
):
    definition = RECURRENCES.get(which.name) or recurrence(which)
    bounds = None
    if lengths is not None:
        B, T, bounds = 1, sum(lengths), torch.tensor((0, *lengths)).cumsum(0)
    arguments = definition.example(Draw(0, dtype), Sizes(B=B, T=T, H=H, D=D))
    if lengths is not None:
        arguments["initial_state"] = Draw(1, dtype).state(len(which.states), len(lengths), H, D).abs() + 0.5
    if not initial:
        del arguments["initial_state"]
    if not bias:
        del arguments["b"]
    more = {"reset": torch.rand(B, T) < 0.3} if reset else {}
    exact = {k: v.requires_grad_() for k, v in cast(arguments, torch.float64).items()}
    h, last = oracle(definition, exact | more | options, bounds)
    grad_h, grad_last = torch.randn(h.shape).to(dtype), torch.randn(last.shape)
    right = torch.autograd.grad([h, last], list(exact.values()), [grad_h.double(), grad_last.double()])

    backend, call = alternating.Alternating(), DenseCall(which, **arguments, **more, **options)
    got_h, got_last, states, gates = backend.forward(PLAN, call, bounds, True)
    plain_h, plain_last, _, _ = backend.forward(PLAN, call, bounds, False)
    assert torch.equal(got_h, plain_h)
    assert torch.equal(got_last, plain_last)
    dx, dR, db, dinitial = backend.backward(PLAN, call, bounds, states, gates, grad_h, grad_last)
    found = {"x": dx, "R": dR, "b": db, "initial_state": dinitial}
    limit = 2e-6 if dtype == torch.float32 else 1e-2
    pairs = {"h": (got_h, h), "final": (got_last, last)} | {k: (found[k], v) for k, v in zip(exact, right, strict=True)}
    errors = {name: relative_error(x.double(), y.detach()) for name, (x, y) in pairs.items()}
    assert all(error <= limit for error in errors.values()), errors


@pytest.mark.parametrize("which", [gru, slstm, own], ids=lambda c: c.name)
def test_float32(on_cpu, which):
    check(which)


def test_packed_sequences(on_cpu):
    check(own, lengths=(4, 0, 9, 1))
    check(own, lengths=(3, 5), reset=True, H=1)


def test_options(on_cpu):
    check(own, reset=True, recurrent_grad_clip=0.02)
    check(own, cut_recurrent_grad=True, initial=False, bias=False)
    check(own, dtype=torch.bfloat16)
    # more channels than a block has threads
    check(own, B=1, T=2, H=1, D=300)


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [("cpu", "float32", "needs an NVIDIA GPU"), ("h200", "float64", "computes in float32; got float64")],
)
def test_what_it_cannot_serve_is_said(device, dtype, reason):
    what = Device.named(device) if device != "cpu" else Device("cpu", "cpu")
    sizes = {"B": 1, "T": 1, "H": 1, "D": 4, "S": 3, "G": 4, "Gi": 3, "Gr": 2}
    assert (
        alternating.Alternating().reject(Problem.of("own", "dense", dtype, sizes, {f"cell={own.key}": True}), what)
        == reason
    )
