"""Planted faults: doctor's checks notice each, in whatever a kernel or a pass writes, and nothing is left behind."""

from collections.abc import Iterator

import pytest
import torch
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.kernels.common.backend import Rejected
from holdfast.kernels.common.watching import WATCHERS, watched
from holdfast.kernels.matrix.chunked import Chunked
from holdfast.ops import checks, self_check
from holdfast.ops.checks import Check
from holdfast.ops.parity import largest_error, relative_error
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
    forward, backward = [("forward", n) for n in range(2)], [("backward", n) for n in (0, 1, 2, 3, 6)]
    assert found == [(*site, "caught") for site in forward + backward]


def test_one_element_alone_is_noticed(monkeypatch, chunked_alone):
    """An error in norm does not show it: in half precision one of thousands is less than rounding all of them."""
    exact = torch.randn(9000, dtype=torch.float64)
    exact[0] = 0.6
    spoiled = exact.clone()
    spoiled[0] *= -1
    assert relative_error(spoiled, exact) < checks.HALF_LIMIT
    assert largest_error(spoiled, exact) > checks.WORST * checks.HALF_LIMIT
    # nor would a judge that lets it pass be taken for one that catches it
    monkeypatch.setattr(checks.Attempt, "judge", lambda *_: (0.0, ""))
    assert {f.status for f in self_check.self_check(CPU)} == {"missed"}


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
        raise RuntimeError("compiler crashed")

    monkeypatch.setattr(Chunked, "forward", fail)
    (found,) = self_check.self_check(CPU)
    assert (found.status, found.kernel) == ("wrong", "RuntimeError: compiler crashed")


def test_the_command_tells(monkeypatch, chunked_alone):
    monkeypatch.setattr("holdfast.ops.verify.every", self_check.every)
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--self-check"])
    assert result.exit_code == 0
    assert "7 of 7 planted faults would have been caught." in result.output
    monkeypatch.setattr(checks.Attempt, "judge", lambda *_: (0.0, ""))
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--self-check"])
    assert result.exit_code == 1
    assert "missed: simple_gla, backend chunked: tensor 0 of forward" in result.output
    assert "0 of 7 planted faults" in result.output


class Launched:
    """A backend whose pass is one launch: of a kernel that doubles x into y, and fills padding behind it."""

    name = "launched"

    def __call__(self, a: dict[str, torch.Tensor]) -> torch.Tensor:
        whole = torch.empty(len(a["x"]) + 2)

        def double() -> None:
            whole[:-2], whole[-2:] = 2 * a["x"], 7.0

        if WATCHERS:
            watched("double", [a["x"], whole, None, 3], double)
        else:
            double()
        # a second launch reads nothing, and writes nothing that is read
        if WATCHERS:
            watched("idle", [torch.zeros(3)], lambda: None)
        return whole[:-2].clone()


@pytest.mark.parametrize("only_padding", [False, True])
def test_faults_are_planted_behind_launches(monkeypatch, only_padding):
    """In what a launch has written alone; and where nobody reads that, none counts as caught."""
    backend, x = Launched(), {"x": torch.linspace(1, 2, 50)}
    run = (lambda a: backend(a)[:0].sum() + a["x"]) if only_padding else backend
    right = (lambda a: 1 * a["x"]) if only_padding else (lambda a: 2 * a["x"])
    attempt = checks.Attempt(right, x, x, checks.LIMIT, grads=False)
    monkeypatch.setattr(self_check, "every", lambda *_: [Check("double", backend, ((attempt, run),))])
    monkeypatch.setattr(self_check, "further", lambda *_: [])
    (found,) = self_check.self_check(torch.device("cuda"))
    assert (found.kernel, found.tensor, found.launched) == ("double", 1, True)
    assert found.status == ("unread" if only_padding else "caught")


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


@gpu
def test_a_fault_in_whatever_a_kernel_writes_is_caught():
    found = list(self_check.self_check(torch.device("cuda")))
    assert len(found) > 100
    assert [f for f in found if f.status in ("missed", "wrong")] == []
    caught = {f.kernel for f in found if f.status == "caught"}
    names = {
        name if "cuda" not in name and "step." not in name else name.rpartition(".")[2] for name in sources.kernels()
    }
    assert names - caught == set()
