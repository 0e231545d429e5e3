"""The fused kernels' own source, run on a CPU: small cases of everything that a GPU would run, in shuffled order.

What this cannot see: the PTX itself (ptx.cuh has a stand-in), memory that is slow to arrive elsewhere, and speed.
"""

import shutil
from contextlib import nullcontext

import pytest
import torch

import cuda_emulator
from holdfast.kernels.dense.cuda import assemble as source
from holdfast.kernels.dense.cuda import backend as fused
from holdfast.kernels.dense.cuda import launch
from holdfast.kernels.dense.weight_grad import select as weight_grad
from holdfast.planner import Plan
from holdfast.recurrences import RECURRENCES, Draw, Sizes, cell, oracle
from holdfast.recurrences.definition import DenseCall
from holdfast.recurrences.dense import recurrence
from holdfast.recurrences.elman import elman
from holdfast.recurrences.gru import gru
from holdfast.recurrences.lstm import lstm
from holdfast.recurrences.oracle_dense import dense_steps
from holdfast.recurrences.slstm import slstm
from parity import relative_error

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ (apt install g++)")
slow = pytest.mark.slow


def one_block(fours=0, turns=1):
    numbers = {"blocks": 1, "rows": 2, "fours": fours, "turns": turns, "stages_2": 3}
    return Plan("fused", tuple((numbers | ({"stages_4": 3} if fours else {})).items()))


def spread(D, rows=40, heads=1, warps=8, in_registers=1, at_once=1, channels=16, in_memory=0):
    values = {"blocks": -(-D // channels), "rows": rows, "heads": heads, "channels": channels, "warps": warps}
    groups = -(-D // 32)
    in_shared = -(-groups // warps) - in_registers - in_memory
    values |= {
        "in_registers": in_registers,
        "in_shared": in_shared,
        "taken": 0,
        "left": 0,
        "at_once": at_once,
        "pause": 0,
    }
    return Plan("fused", tuple(values.items()))


@cell(states=("h", "c", "d"), gates=("a", "b", "k", "l", "m"), input=("a", "k", "l"), recurrent=("m", "b", "a"))
def own(s, g):
    c = torch.sigmoid(g.a) * s.c + torch.tanh(g.k + s.h) * torch.sigmoid(g.b)
    return {"h": torch.nn.functional.softsign(c) * torch.sigmoid(g.m), "c": c, "d": 0.5 * s.d + g.l * g.m}


@pytest.fixture
def on_cpu(monkeypatch, tmp_path_factory):
    """The fused backend's launches run in the emulator, its last product in PyTorch."""
    folder = tmp_path_factory.getbasetemp() / "emulated"
    folder.mkdir(exist_ok=True)
    failed = torch.zeros(1, dtype=torch.int32)
    read = source._read

    def part(name):
        return cuda_emulator.ptx() if name == "ptx.cuh" else read(name)

    def product(dg, h, initial, reset):
        start = torch.zeros_like(h[:, 0]) if initial is None else initial.to(h.dtype)
        before = torch.cat([start[:, None], h[:, :-1]], 1)
        if reset is not None:
            before = before.masked_fill(reset[:, :, None, None], 0)
        return torch.einsum("btghi,bthj->ghij", dg.double(), before.double()).float().contiguous()[None]

    monkeypatch.setattr(source, "_read", part)
    monkeypatch.setattr(
        launch.nvrtc, "load", lambda text, arch, name, *rest: cuda_emulator.Emulated(text, name, folder, 0)
    )
    # less than the tests have steps
    monkeypatch.setattr(launch, "REACH", 4)
    monkeypatch.setattr(launch.nvrtc, "is_made", lambda source, arch: True)
    monkeypatch.setattr(launch, "_failed", lambda device: failed)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(weight_grad, "partial_weight_grads", product)
    monkeypatch.setattr(weight_grad, "sum_partials", lambda parts, dtype: [x.sum(0).to(dtype) for x in parts])
    for cached in (source._assemble, launch._source, launch._architecture, launch._look):
        cached.cache_clear()
    yield failed
    for cached in (source._assemble, launch._source, launch._architecture, launch._look):
        cached.cache_clear()


# of elman and gru resets and packed sequences run in either layout below
CELLS = [pytest.param(elman, marks=slow), lstm, pytest.param(gru, marks=slow), slstm, own]
every_cell = pytest.mark.parametrize("which", CELLS, ids=lambda c: c.name)


def check(which, plan, B, T, H, D, dtype=torch.bfloat16, reset=False, initial=True, bias=True, final=True, **options):
    definition = RECURRENCES.get(which.name) or recurrence(which)
    arguments = definition.example(Draw(0, dtype), Sizes(B=B, T=T, H=H, D=D))
    if not initial:
        del arguments["initial_state"]
    if not bias:
        del arguments["b"]
    call = DenseCall(which, **arguments, reset=torch.rand(B, T) < 0.2 if reset else None, **options)
    exact = {k: v.double().requires_grad_() for k, v in arguments.items()}
    h, last = dense_steps(DenseCall(which, **exact, reset=call.reset, **options))
    grad_h, grad_last = torch.randn_like(h).to(dtype), torch.randn_like(last).float() if final else None
    loss = (h * grad_h.double()).sum() + ((last * grad_last.double()).sum() if final else 0)
    grads = dict(zip(exact, torch.autograd.grad(loss, list(exact.values())), strict=True))

    backend = fused.Fused()
    got_h, got_last, states, gates = backend.forward(plan, call, None, True)
    plain_h, plain_last, _, _ = backend.forward(plan, call, None, False)
    assert torch.equal(got_h, plain_h)
    assert torch.equal(got_last, plain_last)
    # the backward pass of a head in one block takes two sequences a block
    other = one_block() if plan["blocks"] == 1 else plan
    dx, dR, db, dinitial = backend.backward(other, call, None, got_h, states, gates, grad_h, grad_last)
    limit = 1.5e-2 if dtype == torch.bfloat16 else 2e-3
    pairs = {"h": (got_h, h), "final": (got_last, last), "x": (dx, grads["x"]), "R": (dR, grads["R"])}
    if bias:
        pairs["b"] = (db, grads["b"])
    if initial:
        pairs["initial_state"] = (dinitial, grads["initial_state"])
    errors = {name: relative_error(x.double(), y.detach()) for name, (x, y) in pairs.items()}
    assert all(error <= limit for error in errors.values()), errors


@every_cell
@pytest.mark.parametrize("fours", [0, pytest.param(1, marks=slow), pytest.param(2, marks=slow)])
def test_a_head_in_one_block(on_cpu, which, fours):
    check(which, one_block(fours), B=7, T=7, H=2, D=32, reset=True)


@every_cell
def test_a_head_over_several_blocks(on_cpu, which):
    check(which, spread(40), B=5, T=6, H=1, D=40, reset=True)
    assert not on_cpu.any()


@slow
@pytest.mark.parametrize("fours", [0, 1])
@pytest.mark.parametrize("D", [8, 20, 72, 128])
def test_widths(on_cpu, D, fours):
    check(gru, one_block(fours), B=3, T=5, H=1, D=D)


@slow
@pytest.mark.parametrize("T", [1, 2, 9])
@pytest.mark.parametrize("B", [1, 4, 9])
def test_lengths_and_batches(on_cpu, T, B):
    check(lstm, one_block(turns=2), B=B, T=T, H=1, D=16)
    check(lstm, spread(24), B=B, T=T, H=1, D=24)


@pytest.mark.parametrize(
    ("plan", "D"), [(one_block(), 8), (one_block(1), 8), (spread(24), 24)], ids=["pairs", "fours", "spread"]
)
def test_resets_of_as_many_steps_as_words_have_bits(on_cpu, plan, D):
    """A row of resets is whole words of 32 steps: of 32 n steps the next row begins right behind the last bit."""
    for T in (31, 32, 33, 64):
        check(elman, plan, B=5, T=T, H=1, D=D, reset=True)


@slow
def test_several_tiles_ranges_and_heads(on_cpu):
    check(lstm, spread(24, rows=16, heads=2), B=27, T=4, H=3, D=24)
    check(gru, one_block(), B=11, T=5, H=2, D=24)


@slow
@pytest.mark.parametrize("channels", [8, 24, 32])
@pytest.mark.parametrize("which", [elman, gru, slstm, own], ids=lambda c: c.name)
def test_channels_of_a_block(on_cpu, which, channels):
    check(which, spread(72, channels=channels), B=9, T=4, H=1, D=72, reset=True)


@slow
@pytest.mark.parametrize("B", [5, 12, 20, 36])
@pytest.mark.parametrize("at_once", [1, 2])
def test_tiles_of_a_block(on_cpu, B, at_once):
    """One and two wait for their own vectors first; from four on two turns' may be on their way."""
    check(lstm, spread(24, at_once=at_once), B=B, T=5, H=1, D=24)
    assert not on_cpu.any()


@slow
def test_weights_in_shared_memory(on_cpu):
    check(gru, spread(288, in_registers=1, at_once=2), B=3, T=3, H=1, D=288)
    check(gru, spread(288, in_registers=0, at_once=2), B=3, T=3, H=1, D=288)


@slow
@pytest.mark.parametrize("channels", [16, 24])
def test_weights_in_memory(on_cpu, channels):
    check(gru, spread(288, in_registers=1, at_once=2, in_memory=1, channels=channels), B=3, T=3, H=1, D=288)
    check(lstm, spread(296, heads=2, in_registers=0, in_memory=2, channels=channels), B=9, T=2, H=2, D=296)


@slow
@pytest.mark.parametrize("plan", [one_block(), spread(32)], ids=["one block", "spread"])
def test_options(on_cpu, plan):
    check(lstm, plan, B=3, T=5, H=1, D=32, dtype=torch.float16)
    check(lstm, plan, B=3, T=5, H=1, D=32, recurrent_grad_clip=0.05)
    check(gru, plan, B=3, T=5, H=1, D=32, cut_recurrent_grad=True)
    check(slstm, plan, B=3, T=5, H=1, D=32, initial=False, bias=False, final=False)


@pytest.mark.parametrize("plan", [one_block(), spread(24)], ids=["one block", "spread"])
@pytest.mark.parametrize("reset", [False, True])
def test_packed_sequences(on_cpu, monkeypatch, plan, reset):
    """Of lengths that make more than one batch, with an empty sequence between them."""
    lengths = (2, 9, 0, 7, 1, 2)
    monkeypatch.setattr(fused, "_planned", lambda *given: [plan])
    bounds = torch.tensor((0, *lengths)).cumsum(0)
    arguments = RECURRENCES["gru"].example(Draw(0, torch.bfloat16), Sizes(B=1, T=sum(lengths), H=1, D=24))
    del arguments["initial_state"]
    more = {"reset": torch.rand(1, sum(lengths)) < 0.2} if reset else {}
    exact = {k: v.double().requires_grad_() for k, v in arguments.items()}
    h, last = oracle(RECURRENCES["gru"], exact | more, bounds)
    grad_h, grad_last = torch.randn_like(h).bfloat16(), torch.randn_like(last).float()
    right = torch.autograd.grad([h, last], list(exact.values()), [grad_h.double(), grad_last.double()])
    backend, call = fused.Fused(), DenseCall(gru, **arguments, **more)
    got_h, got_last, states, gates = backend.forward(plan, call, bounds, True)
    assert torch.equal(got_h, backend.forward(plan, call, bounds, False)[0])
    assert not got_last[:, 2].any()
    dx, dR, db, _ = backend.backward(plan, call, bounds, got_h, states, gates, grad_h, grad_last)
    for got, expected in zip((got_h, got_last, dx, dR, db), (h, last, *right), strict=True):
        assert relative_error(got.double(), expected.detach()) <= 1.5e-2


def test_nans_of_any_pattern_are_not_taken_for_what_is_not_there_yet(on_cpu, monkeypatch):
    """x, b, R, states and gradients of the exchange's own pattern: results are NaN, and no block waits for ever."""
    read = source._read
    monkeypatch.setattr(source, "_read", lambda name: read(name).replace("PATIENCE = 1 << 22", "PATIENCE = 5000"))
    arguments = RECURRENCES["lstm"].example(Draw(0, torch.bfloat16), Sizes(B=3, T=4, H=1, D=32))
    for name in ("x", "R", "b"):
        arguments[name].view(torch.int16).fill_(-1)
    arguments["initial_state"].view(torch.int32).fill_(-1)
    call = DenseCall(lstm, **arguments)
    backend, plan = fused.Fused(), spread(32)
    h, _, states, gates = backend.forward(plan, call, None, True)
    grad_h, grad_final = torch.empty_like(h), torch.empty_like(arguments["initial_state"])
    grad_h.view(torch.int16).fill_(-1)
    grad_final.view(torch.int32).fill_(-1)
    dx, *_ = backend.backward(plan, call, None, h, states, gates, grad_h, grad_final)
    assert not on_cpu.any()
    assert h.isnan().all()
    assert dx.isnan().all()


def test_a_block_that_does_not_answer_is_given_up(on_cpu, monkeypatch):
    """Half of the grid is launched: the rest waits, gives up, and says so."""
    real = cuda_emulator.Emulated.launch

    def half(self, grid, *rest, **more):
        return real(self, (1, *grid[1:]), *rest, **more)

    monkeypatch.setattr(cuda_emulator.Emulated, "launch", half)
    read = source._read
    monkeypatch.setattr(source, "_read", lambda name: read(name).replace("PATIENCE = 1 << 22", "PATIENCE = 50"))
    arguments = RECURRENCES["lstm"].example(Draw(0, torch.bfloat16), Sizes(B=2, T=4, H=1, D=32))
    fused.Fused().forward(spread(32), DenseCall(lstm, **arguments), None, False)
    assert on_cpu.all()
    with pytest.raises(RuntimeError, match="gave up waiting"):
        fused.Fused().forward(spread(32), DenseCall(lstm, **arguments), None, False)


FAULTS = {
    "no barrier between steps": (
        "one_block/forward.cu",
        "        __syncthreads();\n        char* used",
        "        char* used",
    ),
    "x not waited for": (
        "one_block/forward.cu",
        "        copy_wait<STAGES - 2>();\n",
        "",
    ),
    "gates not waited for": (
        "one_block/backward.cu",
        "        copy_wait<STAGES - 2>();\n",
        "",
    ),
    "h not waited for": (
        "many_blocks/forward.cu",
        "if (patient && turn >= own.tiles && !mail.wait([&](int i) { return source + 32 * i; }))",
        "if (false)",
    ),
    "h not marked ahead": ("many_blocks/forward.cu", "alive && walk.t + REACH < length", "false"),
    "dg not marked ahead": ("many_blocks/backward.cu", "own.live && t >= REACH;", "false;"),
    "dg not waited for": ("many_blocks/backward.cu", "if (patient && !mail.wait(where))", "if (false)"),
    "the other sequence's product": ("one_block/common.cuh", "return (r >> 1) % ROWS;", "return r % ROWS;"),
}


@slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(on_cpu, monkeypatch, fault):
    name, sound, broken = FAULTS[fault]
    read = source._read

    def with_fault(part):
        text = read(part)
        if part == name:
            assert sound in text
            text = text.replace(sound, broken)
        return text

    monkeypatch.setattr(source, "_read", with_fault)
    plan = spread(32) if name.startswith("many_blocks") else one_block()
    with pytest.raises(AssertionError, match=r"for ever|'h'|'x'|nan"):
        check(lstm, plan, B=5, T=7, H=1, D=32)
