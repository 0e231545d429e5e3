"""A pytest plugin for the tests that mlx-recurrence brings: Metal on the CPU under them, and what they found as JSON.

Many of them record a verdict and never assert it, so the verdicts are in the report beside the outcomes.
"""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from holdfast.mlx import chassis

from . import cpu

_outcomes: dict[str, str] = {}
_verdicts: dict[str, bool] = {}


def pytest_addoption(parser):
    parser.addoption("--found", help="the JSON file for outcomes and verdicts")


def pytest_configure(config):
    mx.fast.metal_kernel = cpu.Metal(seed=1).metal_kernel
    # two of these kernels run for half a minute otherwise
    cpu.level = "-O1"
    chassis.metal_missing = lambda: None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    name = item.nodeid.rpartition("/")[2]
    if report.when == "call" or report.failed:
        _outcomes[name] = "passed" if report.passed else str(call.excinfo.value) if call.excinfo else report.outcome
    return report


@pytest.fixture(autouse=True)
def _verdicts_of_this_test(request, monkeypatch):
    """record(name, passed, ...) and report(name, passed, ...) are what the two older files call."""

    def note(name, passed, detail=""):
        _verdicts[f"{request.node.name}: {name}"] = bool(passed)

    for function in ("record", "report"):
        if hasattr(request.module, function):
            monkeypatch.setattr(request.module, function, note)


def pytest_sessionfinish(session):
    Path(session.config.getoption("--found")).write_text(json.dumps({"outcomes": _outcomes, "verdicts": _verdicts}))
