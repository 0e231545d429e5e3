"""The fuzzer passes what is right, and catches what is planted."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from holdfast.fuzz.case import Case
from holdfast.fuzz.check import check
from holdfast.fuzz.draw import draw
from holdfast.fuzz.judge import Judge, Result
from holdfast.fuzz.modes import MODES
from holdfast.fuzz.modules import MODULES, ModuleCase
from holdfast.fuzz.scenario import Scenario
from holdfast.kernels.dense.torch.time_loop import Loop
from holdfast.kernels.diagonal.torch.chunked import Chunked as Scan
from holdfast.kernels.matrix.torch.chunked import Chunked

PLAIN = Scenario("simple_gla", "cpu", 3, B=2, T=20, H=2, Hq=1, K=8, V=4, options=("g",), state=True)


pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_slice_of_scenarios_is_right():
    rows = [check(draw(55, index, "cpu").line()) for index in range(20)]
    assert [row for row in rows if row.failed] == []
    assert sum(row.tensors for row in rows) > 100


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("stream", "graph", "compile")])
def test_every_mode_passes_what_is_right(mode):
    s = replace(PLAIN, mode=mode, grads="none" if mode in ("step", "inference") else "both")
    if mode == "autocast":
        s = replace(s, dtype="bfloat16")
    row = check(s.line())
    # what is wrong of derivatives that no op has is refused
    assert row.status == ("refused" if mode in ("jvp", "twice") else "right"), row


def spoil(monkeypatch, backend, method, change):
    """Lets a backend's method return what `change` makes of its result."""
    true = getattr(backend, method)
    monkeypatch.setattr(backend, method, lambda self, *a: change(true(self, *a)))


def one_element(x, by=1.0):
    x = x.clone()
    x.view(-1)[x.numel() // 2] += by
    return x


def in_output(returned):
    return one_element(returned[0]), *returned[1:]


def in_state(returned):
    return returned[0], one_element(returned[1]), *returned[2:]


def in_gradient(returned):
    grads, state = returned
    return [one_element(grads[0]), *grads[1:]], state


@pytest.mark.parametrize(
    ("backend", "method", "change", "s", "said"),
    [
        (Chunked, "forward", in_output, PLAIN, "o is off by"),
        (Chunked, "forward", in_output, replace(PLAIN, dtype="bfloat16"), "o is off by"),
        (Chunked, "forward", in_state, PLAIN, "final is off by"),
        (Chunked, "backward", in_gradient, PLAIN, "dq is off by"),
        (Chunked, "backward", in_gradient, replace(PLAIN, mode="threads"), "dq is off by"),
        (Chunked, "forward", lambda r: (r[0] * torch.nan, *r[1:]), PLAIN, "o is off by inf"),
        (Chunked, "forward", lambda r: (r[0][:, 1:], *r[1:]), replace(PLAIN, grads="none"), "o has shape"),
        (Scan, "forward", in_output, Scenario("hgrn", "cpu", 1, B=2, T=9, D=4, backend="chunked"), "o is off by"),
        (Loop, "forward", in_output, Scenario("gru", "cpu", 1, B=2, T=9, H=1, D=4, backend="loop"), "off by"),
    ],
)
def test_a_planted_fault_is_caught(monkeypatch, backend, method, change, s, said):
    s = replace(s, backend=backend.name)
    assert check(s.line()).status == "right"
    spoil(monkeypatch, backend, method, change)
    row = check(s.line())
    assert row.status == "wrong"
    assert said in row.detail


def test_a_fault_from_the_third_call_on_is_caught(monkeypatch):
    calls = []

    def later(returned):
        calls.append(1)
        return in_output(returned) if len(calls) > 2 else returned

    spoil(monkeypatch, Chunked, "forward", later)
    once = replace(PLAIN, grads="none", backend="chunked")
    assert check(once.line()).status == "right"
    calls.clear()
    assert check(replace(once, mode="repeat").line()).status == "wrong"


def test_an_error_from_inside_is_no_refusal(monkeypatch):
    def fail(*_):
        raise ValueError("expected a power of two")

    monkeypatch.setattr(Chunked, "forward", fail)
    row = check(replace(PLAIN, backend="chunked").line())
    assert row.status == "raised"
    assert "ValueError: expected a power of two" in row.detail


def test_a_refusal_of_the_librarys_own_is_told_apart():
    row = check(replace(PLAIN, backend="hopper").line())
    assert row.status == "refused"
    assert "cannot run simple_gla here" in row.detail


def test_written_arguments_are_found(monkeypatch):
    true = Chunked.forward

    def writes(self, plan, call, cu_seqlens):
        returned = true(self, plan, call, cu_seqlens)
        call.v.data.mul_(2)
        return returned

    monkeypatch.setattr(Chunked, "forward", writes)
    row = check(replace(PLAIN, grads="none", backend="chunked").line())
    assert row.detail == "the argument v was written to"


def test_memory_that_a_result_shares_with_an_argument_is_found(monkeypatch):
    true = Chunked.forward
    monkeypatch.setattr(Chunked, "forward", lambda self, plan, call, cu: (true(self, plan, call, cu)[0], call[6]))
    row = check(replace(PLAIN, grads="none", backend="chunked").line())
    assert row.detail == "final shares memory with the argument initial_state"


def test_wrong_calls_that_are_taken_are_found(monkeypatch):
    op = import_module("holdfast.ops.simple_gla")
    monkeypatch.setattr(op, "prepare", lambda recurrence, cu_seqlens, given: given)
    rows = [check(replace(PLAIN, mode="misuse", seed=seed).line()) for seed in range(12)]
    assert {row.status for row in rows} & {"wrong", "raised"}


def test_a_backend_may_refuse_the_sizes_of_a_wrong_call():
    """As hopper does K = 13, before the op reads offsets that go past the end."""
    line = (
        "op=lightning device=cpu seed=56777106248 mode=misuse backend=hopper dtype=float16 B=1 T=127 H=2 Hq=2 K=13 V=7 "
        "gates=same strength=inf layout=transposed state=yes final=no grads=out needs=some"
    )
    assert check(line).status == "refused"


@pytest.mark.parametrize("layout", ["negated", "mixed"])
def test_nothing_is_negated_for_inductor(layout):
    """Nor a gradient: PyTorch itself gets them wrong, as test_inductor.py shows."""

    def negated(options):
        found = set()
        for n in range(20):
            case = Case(replace(PLAIN, mode="compile", layout=layout, options=options), n)
            grads = case.cotangents(case.run(), 0)[1]
            found |= {x.is_neg() for x in (*case.tensors.values(), *grads)}
        return found

    assert True in negated(("g",))
    assert negated(("g", "inductor")) == {False}


@pytest.mark.parametrize(("o", "is_right"), [(1 + 2**-6, True), (1 + 3 * 2**-7, False)])
def test_what_rounding_does_is_not_left_to_one_draw(o, is_right, monkeypatch):
    """A sum of a few numbers moves by next to nothing in some draws."""
    case = Case(replace(PLAIN, dtype="bfloat16", final=False, grads="none"))
    shape, by = case.exact()["o"].shape, (0.0, 0.0, 0.01, -0.01, 0.01)
    monkeypatch.setattr(case, "exact", lambda which, draw=0: {"o": torch.full(shape, 1 + by[draw]).double()})
    monkeypatch.setattr(case, "by_backend", lambda *_: {})
    (found,) = Judge().compare(Result(case, {"o": torch.full(shape, o, dtype=torch.bfloat16)}))
    assert found.ground == "rounded inputs"
    assert found.limit == pytest.approx(2.5 * 0.01 * 0.75**0.5)
    assert found.is_right == is_right


@pytest.mark.parametrize(("T", "draws"), [(15, 16), (16, 4)])
def test_a_few_numbers_take_more_draws(T, draws, monkeypatch):
    case = Case(replace(PLAIN, dtype="bfloat16", B=1, T=T, H=1, Hq=1, V=1, final=False, grads="none"))
    shape, drawn = case.exact()["o"].shape, []
    assert shape.numel() == T

    def exact(which, draw=0):
        drawn.append(draw)
        return {"o": torch.full(shape, 1 + 0.01 * bool(draw)).double()}

    monkeypatch.setattr(case, "exact", exact)
    monkeypatch.setattr(case, "by_backend", lambda *_: {})
    (found,) = Judge().compare(Result(case, {"o": torch.full(shape, 1 + 2**-6, dtype=torch.bfloat16)}))
    assert found.limit == pytest.approx(0.025, rel=1e-3)
    assert drawn == [0, *range(1, 1 + draws)]


def test_what_is_one_number_in_memory_rounds_as_one():
    """A key that is one number along K is off in all its products in one direction."""
    case = Case(replace(PLAIN, dtype="bfloat16", layout="expanded", grads="none"))
    assert case.has_expanded
    for name, x in case.tensors.items():
        by = case._off(name, torch.ones_like(case.before[name]), -1)
        apart = case._off(name, torch.ones_like(case.before[name]), 1)
        for axis, stride in enumerate(x.stride()):
            if x.shape[axis] > 1 and not stride:
                assert torch.equal(by, by.narrow(axis, 0, 1).expand_as(by)), name
                assert not torch.equal(apart, apart.narrow(axis, 0, 1).expand_as(apart)), name
    assert not Case(replace(PLAIN, dtype="bfloat16")).has_expanded


@pytest.mark.parametrize(("off", "is_right"), [(1.5e-7, True), (2e-6, False)])
def test_a_gates_gradient_that_cancels_is_a_sum_over_channels(off, is_right, monkeypatch):
    """Of terms as large as dv, so that float32 leaves as much of each of its V terms."""
    case = Case(replace(PLAIN, op="simple_gla", V=64, final=False))
    sizes = {"o": 1.0, "dq": 1e-3, "dk": 1e-3, "dv": 0.1, "dg": 1e-12}
    right = {name: torch.full_like(x, sizes[name]) for name, x in case.exact().items() if name in sizes}
    monkeypatch.setattr(case, "exact", lambda which, draw=0: right)
    monkeypatch.setattr(case, "by_backend", lambda *_: {})
    got = {name: x.to(torch.float32) for name, x in right.items()}
    for name, judged in (("dg", is_right), ("dq", True)):
        moved = got | {name: got[name] + (off if name == "dg" else 1e-8)}
        found = {each.name: each for each in Judge().compare(Result(case, moved))}
        assert found[name].is_right == judged, found[name]
    # a number of its own, which none is the sum of
    moved = got | {"dq": got["dq"] + 3e-7}
    assert not {each.name: each for each in Judge().compare(Result(case, moved))}["dq"].is_right


@pytest.mark.parametrize(
    ("dtype", "size", "is_right"), [("float16", 5e-8, True), ("float16", 1e-6, False), ("bfloat16", 5e-8, False)]
)
def test_a_state_may_lose_what_the_calls_dtype_cannot_hold(dtype, size, is_right, monkeypatch):
    case = Case(replace(PLAIN, dtype=dtype, grads="none"))
    right = {name: torch.full_like(x, size) for name, x in case.exact().items()}
    monkeypatch.setattr(case, "exact", lambda which, draw=0: right)
    monkeypatch.setattr(case, "by_backend", lambda *_: {})
    got = {"o": right["o"].to(case.s.torch_dtype), "final": torch.zeros_like(right["final"], dtype=torch.float32)}
    found = {each.name: each for each in Judge().compare(Result(case, got))}
    assert found["final"].is_right == is_right


def test_each_draw_rounds_otherwise_and_the_first_not_at_all():
    case = Case(replace(PLAIN, dtype="bfloat16", grads="none"))
    exact, *drawn = (case.exact(0, draw)["o"] for draw in range(4))
    assert torch.equal(exact, case.exact()["o"])
    moved = [(x - exact).norm().item() for x in drawn]
    assert all(0 < x < 2**-7 * exact.norm() for x in moved)
    assert len(set(moved)) == 3


def test_a_mixer_is_rounded_in_draws_alone():
    s = Scenario("nn.RGLRU", "cpu", 3, mode="plain", B=1, T=8, D=16)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        case = ModuleCase(s, 0, MODULES[s.op](s.D))
    exact, *drawn = (case.exact(0, draw)["y"] for draw in range(3))
    assert torch.equal(case.by_backend("chunked")["y"], case.of(torch.float32, "chunked", 0)["y"])
    assert len({(x - exact).norm().item() for x in (exact, *drawn)}) == 3
    assert check(s.line()).status == "right"
