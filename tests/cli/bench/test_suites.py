"""Every suite runs on a CPU, cut down, through the code that runs it on a GPU."""

import pytest
import torch

from holdfast.cli.bench.page import page
from holdfast.cli.bench.selection import Selection
from holdfast.cli.bench.session import Job, run
from holdfast.cli.bench.suites import SUITES

from . import recorded_cases
from .test_bench_command import empty

CPU = torch.device("cpu")
# the loop over steps is the oracle's own, and compiling it takes minutes on a CPU
WANTED = Selection.of("-holdfast reference,-torch.compile")


def kinds_of_cases(suite: str):
    """The first case of each op, pass, kind and set of axes."""
    found = {}
    for case in SUITES[suite].cases(scaled=True):
        axes = tuple(axis for axis, _ in case.sizes)
        found.setdefault((case.op, case.passes, case.kind, case.state, case.options, axes), case)
    return tuple(found.values())


def test_cases_are_those_on_record():
    kept = recorded_cases.CASES.read_text(encoding="utf-8").splitlines()
    remedy = "if that is meant: PYTHONPATH=src:tests python -m cli.bench.recorded_cases, and look at its differences"
    assert recorded_cases.lines() == kept, remedy


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_runs_and_what_runs_is_right(suite, roof, tmp_path):
    cases = kinds_of_cases(suite)
    record = run(Job(cases, CPU, WANTED), empty(roof), tmp_path / "a.json")
    assert record.complete
    assert [(row.case, row.runner, row.detail) for row in record.rows if row.status in ("wrong", "failed")] == []
    for case in cases:
        right = [row for row in record.rows if row.case == str(case) and row.status == "ok"]
        assert any(row.runner.startswith("holdfast") for row in right), case
    assert str(cases[0]) in page([record])
