"""The calls that doctor checks."""

from inspect import signature

import pytest
import torch

from holdfast.kernels.backend import Rejected
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.ops import checks
from holdfast.ops.self_check import self_check
from holdfast.ops.verify import verdict_of, verify
from ops import recorded_checks


def test_checks_are_those_on_record():
    kept = recorded_checks.CHECKS.read_text(encoding="utf-8").splitlines()
    remedy = "if that is meant: PYTHONPATH=src:tests python -m ops.recorded_checks, and look at its differences"
    assert recorded_checks.lines() == kept, remedy


def test_draws_are_those_that_the_limits_are_known_to_hold_for():
    """Of other seeds the rounding of a sum that cancels may be more: below."""
    for run in (checks.every, checks.further, verify, self_check):
        assert signature(run).parameters["seed"].default == 0


def test_limits():
    """Of float32, of bfloat16, and of a single element over them."""
    assert (checks.LIMIT, checks.HALF_LIMIT, checks.WORST) == (2e-5, 2**-6, 8)


@pytest.mark.parametrize("op", ["causal_conv1d", "layer_step", "gla", "retnet", "mlstm", "rglru", "rotlru"])
def test_pytorch_is_right_by_the_limits_of_what_mixers_have_around_an_op(monkeypatch, op):
    """In each call's own dtype: a draw whose rounding alone exceeds its limit would have doctor blame a kernel."""
    # without those that have an oracle, and those of the chunk primitives, which are large
    monkeypatch.setattr(checks, "of_example", lambda *_, **__: None)
    monkeypatch.setattr(checks, "draw_chunks", lambda draw, **_: {})
    made = [check for check in checks.further(torch.device("cpu")) if check.op == op]
    attempts = [attempt for check in made for attempt, _ in check.tries if attempt is not None]
    assert attempts
    assert [attempt.judge(attempt.results(attempt.right))[1] for attempt in attempts] == [""] * len(attempts)


def doubled(x):
    return 2 * x["x"]


def tripled(x):
    return 3 * x["x"]


def refused(x):
    raise Rejected("chunked", "it is not served")


def failing(x):
    raise RuntimeError("a fault\nand more")


@pytest.mark.parametrize(
    ("runs", "status", "detail"),
    [
        ((doubled,), "right", ""),
        ((tripled, doubled), "wrong", "of output or gradient 0"),
        ((failing,), "wrong", "RuntimeError: a fault"),
        ((refused, doubled, tripled), "right", ""),
        ((refused, refused, tripled), "wrong", "of output or gradient 0"),
        ((refused, refused), "skipped", "it is not served"),
    ],
)
def test_the_first_attempt_that_a_backend_takes_is_its_verdict(runs, status, detail):
    x = {"x": torch.ones(3)}
    attempt = checks.Attempt(doubled, x, x, 1e-6, grads=False)
    found = verdict_of(checks.Check("gla", Chunked(), tuple((attempt, run) for run in runs)))
    assert (found.op, found.backend, found.status) == ("gla", "chunked", status)
    assert detail in found.detail
