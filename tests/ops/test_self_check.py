"""Planted faults: doctor's checks notice each, in whatever a kernel or a pass writes, and nothing is left behind."""

import io
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.cli.planted import show
from holdfast.kernels.backend import Rejected
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.kernels.runtime.watching import WATCHERS, watched
from holdfast.ops import checks, self_check
from holdfast.ops.checks import Check
from holdfast.ops.parity import largest_error, relative_error
from holdfast.ops.self_check import Fault
from sanitize import sources
from sanitize.dry import pretending

CPU = torch.device("cpu")


@pytest.fixture
def chunked_alone(monkeypatch):
    """Doctor's check of one backend of one op."""
    every = checks.every

    def one(device: torch.device, seed: int = 0) -> Iterator[Check]:
        wanted = ("simple_gla", "chunked")
        yield next(check for check in every(device, seed) if (check.op, check.backend.name) == wanted)

    monkeypatch.setattr(self_check, "every", one)
    monkeypatch.setattr(self_check, "further", lambda device, seed: iter(()))


def test_a_fault_in_each_result_of_both_passes_is_caught(chunked_alone):
    found = [(f.kernel, f.tensor, f.status) for f in self_check.self_check(CPU)]
    # the output and the final state; gradients of q, k, v, g and, past two that it has not, the initial state
    forward, backward = [("forward", n) for n in "01"], [("backward", n) for n in "01236"]
    assert found == [(*site, "caught") for site in forward + backward]


@pytest.mark.parametrize(
    ("op", "name", "way"),
    [
        ("layer_step", "pytorch", "run"),
        ("pooled_step", "reference", "update"),
        ("pooled_step of mlstm", "reference", "update_normalized"),
        ("pooled_step of hgrn", "reference", "update"),
    ],
)
def test_a_fault_in_a_step_in_place_is_caught(monkeypatch, op, name, way):
    wanted = [check for check in checks.every(CPU) if (check.op, check.backend.name) == (op, name)]
    monkeypatch.setattr(self_check, "every", lambda *_: wanted)
    monkeypatch.setattr(self_check, "further", lambda *_: [])
    assert [(f.kernel, f.tensor, f.status) for f in self_check.self_check(CPU)] == [(way, "0", "caught")]
    assert not {"run", "update", "update_normalized"} & set(vars(wanted[0].backend))


def test_one_element_alone_is_noticed(monkeypatch, chunked_alone):
    """An error in norm does not show it: in half precision one of thousands is less than rounding all of them."""
    exact = torch.randn(9000, dtype=torch.float64)
    exact[0] = 0.6
    spoiled = exact.clone()
    spoiled[0] *= -1
    assert relative_error(spoiled, exact) < checks.HALF_LIMIT
    assert largest_error(spoiled, exact) > checks.WORST * checks.HALF_LIMIT
    # nor would a judge that lets it pass be taken for one that catches it
    blind(monkeypatch)
    assert {f.status for f in self_check.self_check(CPU)} == {"missed"}


def blind(monkeypatch) -> None:
    """Has all pass for right, and few faults tried."""
    monkeypatch.setattr(checks.Attempt, "judge", lambda *_: (0.0, ""))
    monkeypatch.setattr(self_check, "_TRIES", 1)
    monkeypatch.setattr(self_check, "_FACTORS", (1,))


@pytest.mark.parametrize("stopped", [False, True])
def test_all_is_as_before(chunked_alone, stopped):
    faults = self_check.self_check(CPU)
    next(faults)
    assert torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    faults.close() if stopped else list(faults)
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not WATCHERS
    backend = next(iter(checks.every(CPU))).backend
    assert not {"forward", "backward"} & set(vars(backend))


def test_a_check_that_fails_without_a_fault_is_told(monkeypatch, chunked_alone):
    def fail(*_: object) -> None:
        raise RuntimeError("compiler crashed\nin its last stage")

    monkeypatch.setattr(Chunked, "forward", fail)
    (found,) = self_check.self_check(CPU)
    assert (found.status, found.kernel) == ("wrong", "RuntimeError: compiler crashed")


def test_the_command_tells(monkeypatch, chunked_alone):
    monkeypatch.setattr("holdfast.ops.verify.every", self_check.every)
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--self-check"])
    assert result.exit_code == 0
    assert "7 of 7 planted faults would have been caught." in result.output
    blind(monkeypatch)
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--self-check"])
    assert result.exit_code == 1
    assert "missed: simple_gla, backend chunked: tensor 0 of forward" in result.output
    assert "0 of 7 planted faults" in result.output


class Launched:
    """A backend whose pass is launches: of a kernel that doubles x into y and fills padding behind it, and of one that
    adds up y, weakly, or what x was doubled to. As on a GPU, launches alone are watched."""

    name = "launched"

    def __init__(self, weight: float = 1.0, padding: int = 2, asked: bool = True) -> None:
        self.weight, self.padding, self.asked = weight, padding, asked

    def __call__(self, a: dict[str, torch.Tensor]) -> torch.Tensor:
        count = len(a["x"])
        whole, out, extra = torch.empty(count + self.padding), torch.empty(count), torch.empty(count)

        def double() -> None:
            whole[:count], whole[count:] = 2 * a["x"], 7.0

        def add() -> None:
            out[:] = a["x"] + self.weight * whole[:count].flip(0)
            extra[:] = whole[:count].sum()

        self._launch("double", [a["x"], whole, None, 3], double)
        self._launch("add", [a["x"], whole, out, extra], add)
        # a launch that reads nothing, and writes nothing that is read
        self._launch("idle", [torch.zeros(3)], lambda: None)
        return out.clone() if self.asked else a["x"].clone()

    def _launch(self, kernel, arguments, start):
        if WATCHERS:
            watched(kernel, arguments, start)
        else:
            start()

    def right(self, a: dict[str, torch.Tensor]) -> torch.Tensor:
        return a["x"] + 2 * self.weight * a["x"].flip(0) if self.asked else 1 * a["x"]

    def faults(self, monkeypatch) -> list[self_check.Fault]:
        x = {"x": torch.linspace(1, 2, 50)}
        attempt = checks.Attempt(self.right, x, x, checks.LIMIT, grads=False)
        monkeypatch.setattr(self_check, "every", lambda *_: [Check("double", self, ((attempt, self),))])
        monkeypatch.setattr(self_check, "further", lambda *_: [])
        found = list(self_check.self_check(torch.device("cuda")))
        assert all(f.launched and (f.op, f.backend) == ("double", "launched") for f in found)
        return found


@pytest.mark.parametrize("padding", [0, 2, 5000])
def test_faults_are_planted_behind_launches(monkeypatch, padding):
    """In what a launch has written alone, and there in what is read, however much of it is padding."""
    found = {(f.kernel, f.tensor): f for f in Launched(padding=padding).faults(monkeypatch)}
    assert {site: f.status for site, f in found.items()} == {
        ("double", "1"): "caught",
        ("add", "2"): "caught",
        ("add", "3"): "unread",
    }
    assert found["add", "3"].reason == "no later launch takes it"


def test_launches_of_a_first_call_alone_are_no_sites(monkeypatch):
    """It runs once to learn which kernels are not compiled: later calls have fewer launches, so other numbers."""

    class First(Launched):
        is_first = True

        def __call__(self, a):
            if self.is_first:
                self.is_first = False
                super().__call__(a)
            return super().__call__(a)

    assert [f.status for f in First().faults(monkeypatch)] == ["caught", "caught", "unread"]


@pytest.mark.parametrize(("steps", "sites"), [(1, 1), (4, 4), (5, 3), (200, 3)])
def test_of_a_launch_a_step_a_few_get_a_fault(monkeypatch, steps, sites):
    class Steps(Launched):
        def __call__(self, a):
            y = torch.zeros(len(a["x"]))

            def add() -> None:
                y.add_(a["x"] / self.padding)

            for _ in range(self.padding):
                self._launch("add", [a["x"], y], add)
            return y

        def right(self, a):
            return 1 * a["x"]

    assert [f.status for f in Steps(padding=steps).faults(monkeypatch)] == ["caught"] * sites


def test_what_one_of_many_launches_alone_writes_gets_a_fault(monkeypatch):
    class Second(Launched):
        def __call__(self, a):
            y, extra = torch.zeros(len(a["x"])), torch.zeros(len(a["x"]))

            def add(n: int) -> None:
                y.add_(a["x"] / 9)
                if n == 1:
                    extra.copy_(a["x"])

            for n in range(9):
                self._launch("add", [a["x"], y, extra], lambda n=n: add(n))
            return y + extra

        def right(self, a):
            return 2 * a["x"]

    assert [(f.tensor, f.status) for f in Second().faults(monkeypatch)] == [
        ("1", "caught"),
        ("2", "caught"),
        ("1", "caught"),
        ("1", "caught"),
    ]


def test_what_one_check_does_not_notice_another_may():
    def fault(status, op="gla", kernel="gla_fwd", launched=True):
        return self_check.Fault(op, "triton", kernel, "o", launched, status)

    missed, unread, caught = (fault(status) for status in ("missed", "unread", "caught"))
    assert self_check.unnoticed([missed, unread]) == [missed, unread]
    assert self_check.unnoticed([missed, unread, fault("caught", "ssd")]) == []
    assert self_check.unnoticed([missed, fault("caught", kernel="gla_bwd")]) == [missed]
    # a backend's pass is another op's in another check
    of_pass, of_others = fault("missed", launched=False), fault("caught", "ssd", launched=False)
    assert self_check.unnoticed([of_pass, of_others, caught]) == [of_pass]


def test_what_nobody_asked_for_is_told(monkeypatch):
    found = {(f.kernel, f.tensor): f for f in Launched(asked=False).faults(monkeypatch)}
    assert {f.status for f in found.values()} == {"unread"}
    assert found["double", "1"].reason == "only add takes it, for what nobody asked for"


@pytest.mark.parametrize(
    ("weight", "status", "factor"),
    [(1.0, "caught", 1), (2.4e-5, "caught", 4), (2.5e-6, "caught", 64), (1e-7, "missed", 64)],
)
def test_a_fault_that_a_result_hardly_shows_grows_until_it_does(monkeypatch, weight, status, factor):
    """Its size is told, and one that no size shows is missed."""
    handed_on, result, _ = Launched(weight).faults(monkeypatch)
    assert (handed_on.status, handed_on.factor) == (status, factor)
    assert (result.status, result.factor) == ("caught", 1)


def test_arguments_have_the_kernels_names(monkeypatch):
    pytest.importorskip("triton")
    from holdfast.kernels.norm.triton.rows import norm_fwd

    seen = []
    monkeypatch.setattr("holdfast.kernels.runtime.watching.WATCHERS", [lambda *given: seen.append(given)])
    x = torch.zeros(3)
    watched(norm_fwd, [x, None, SimpleNamespace(base=x), 3], lambda: None)
    ((kernel, tensors, _),) = seen
    assert kernel == "norm.triton.rows.norm_fwd"
    assert list(tensors) == [norm_fwd.arg_names[0], norm_fwd.arg_names[2]]


@pytest.mark.slow
def test_the_checks_launch_every_kernel():
    """As an H200 would; what is computed here is what uninitialised memory holds."""
    with pretending() as found:
        for check in (*checks.every(CPU), *checks.further(CPU)):
            if check.backend.name not in ("reference", "chunked", "loop", "pytorch"):
                _first(check)
    assert found == sources.kernels()


def _first(check: Check) -> None:
    for attempt, run in check.tries:
        try:
            attempt.results(run)
        except Rejected:
            continue
        return


gpu = pytest.mark.gpu


# what the launch that writes it reads itself: a fault behind the launch reaches nothing
_ON_CHIP = "matrix.scalar_decay.hopper.onchip.kernel.scalar_decay_fwd_onchip"
OWN = {
    ("matrix.scalar_decay.hopper.forward.scalar_decay_fwd", "before_ptr"),
    *((_ON_CHIP, tensor) for tensor in ("states_desc", "states_ptr", "decay_ptr")),
}


@gpu
def test_a_fault_in_whatever_a_kernel_writes_is_caught():
    found = list(self_check.self_check(torch.device("cuda")))
    assert len(found) > 100
    assert [f for f in found if f.status == "wrong"] == []
    assert {(f.kernel, f.tensor) for f in self_check.unnoticed(found)} <= OWN
    caught = {f.kernel for f in found if f.status == "caught"}
    # a CUDA kernel's launch tells its name alone
    names = {
        name.rpartition(".")[2] if name in sources.MADE or name.startswith("dense.cuda.") else name
        for name in sources.kernels()
    }
    assert names - caught == set()


def test_what_is_said_of_planted_faults(monkeypatch):
    """A line a kernel, and below what no check reads or notices; those of a pass are told by its backend."""
    faults = [
        Fault("gla", "triton", "fwd", "o", True, "caught", 4),
        Fault("ssd", "triton", "fwd", "o", True, "missed", 16),
        Fault("gla", "triton", "fwd", "s", True, "unread", 2, "the backward pass takes it"),
        Fault("ssd", "triton", "fwd", "s", True, "unread", 2, "the backward pass takes it"),
        Fault("gla", "chunked", "forward", "1", False, "caught", 8),
        Fault("gla", "triton", "bwd", "dq", True, "missed"),
    ]

    def said(*found):
        monkeypatch.setattr("holdfast.ops.self_check.self_check", lambda device: iter(found))
        text = io.StringIO()
        right = show(torch.device("cpu"), Console(file=text, width=160))
        return right, text.getvalue().splitlines()

    right, lines = said(*faults)
    assert not right
    rows = [[cell.strip() for cell in line.strip("│┃").split(line[0])] for line in lines if line[:1] in ("│", "┃")]
    assert rows == [
        ["written by", "caught", "times", "missed", "unread"],
        ["bwd", "0", "1", "1", "0"],
        ["fwd", "1", "16", "1", "2"],
        ["gla, backend chunked, forward", "1", "8", "0", "0"],
    ]
    assert lines[-3:] == [
        "unread in gla, ssd: s of fwd: the backward pass takes it",
        "missed: gla, backend triton: tensor dq of bwd",
        "2 of 4 planted faults would have been caught; 2 more are in what nothing reads.",
    ]
    right, lines = said(faults[0])
    assert right
    assert lines[-1] == "1 of 1 planted faults would have been caught."
    right, lines = said(faults[0], Fault("gla", "triton", "off by 1", "", False, "wrong"))
    assert not right
    assert lines[-2:] == [
        "wrong without a fault: gla, backend triton: off by 1",
        "1 of 1 planted faults would have been caught.",
    ]
