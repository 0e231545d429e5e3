"""Targets of the source documents: read from data, held against rows."""

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.cli.bench import sections, targets
from holdfast.cli.bench.case import Case
from holdfast.cli.bench.record import Record
from holdfast.cli.bench.result import of_case
from holdfast.cli.bench.suites import SUITES
from holdfast.cli.bench.targets import FOLDER, Target, judge, judged, tables_of, targets_of

DOCS = Path(__file__).parents[3] / "docs"
CASES = [Case("simple_gla", (("B", 1), ("T", T), ("H", 1), ("K", 4), ("V", 4)), "bfloat16", "fwd") for T in (8, 16)]


COUNTED = {"dram_bytes": 88, "predicted_bytes": 100}


def timed(case: Case, runner: str, ms: float):
    return replace(
        of_case(case, runner, "ok"), median_ms=ms, memory_bytes=100, history_bytes=1500, error=1e-3, **COUNTED
    )


ROWS = [
    timed(CASES[0], "holdfast triton", 1.0),
    timed(CASES[0], "holdfast chunked", 5.0),
    timed(CASES[0], "fla chunk", 2.0),
    timed(CASES[1], "holdfast triton", 1.0),
    timed(CASES[1], "fla chunk", 1.2),
]


@pytest.mark.parametrize(
    ("target", "verdict", "measured"),
    [
        # the fastest backend counts, and every case has to be within the limit
        (Target("m", "t", "speed", against=("fla",), at_least=1.1), "met", "1.2 to 2 x as fast, 2 cases"),
        (
            Target("m", "t", "speed", against=("fla",), at_least=1.5),
            "missed",
            "1.2 to 2 x as fast, 1 of 2 cases within the target",
        ),
        (Target("m", "t", "speed", ("T8",), against=("fla chunk",), at_least=1.5), "met", "2 x as fast"),
        (Target("m", "t", "history", at_least=12.0), "met", "15 x less than the full history, 2 cases"),
        (Target("m", "t", "error", at_most=1e-4), "missed", "0.001 relative error, 0 of 2 cases within the target"),
        (Target("m", "t", "speed", against=("mamba_ssm",), at_least=1.0), "not measured", "no row of mamba_ssm"),
        (Target("m", "t", "speed", passes="fwd+bwd", against=("fla",), at_least=1.0), "not measured", "no case"),
        (Target("m", "t", "dram", against=("fla",), at_most=1.0), "met", "1 x the DRAM bytes, 2 cases"),
        (Target("m", "t", "tensor", at_least=60.0), "not measured", "no case of this run measures it"),
        (Target("m", "t", "prediction", at_most=15.0), "met", "12 % off the prediction, 2 cases"),
        (Target("m", "t", "prediction", at_most=10.0), "missed", "12 % off"),
        (Target("m", "t", why="it needs a farm"), "not measured", "it needs a farm"),
    ],
)
def test_a_target_is_met_missed_or_not_measured(target, verdict, measured):
    found = judge(target, ROWS)
    assert found.verdict == verdict
    assert found.measured.startswith(measured)


@pytest.mark.parametrize(
    ("value", "ours", "theirs", "expected", "unit"),
    [
        ("speed", {"median_ms": 2.0}, {"median_ms": 3.0}, 1.5, "x as fast"),
        ("memory", {"memory_bytes": 6}, {"memory_bytes": 4}, 1.5, "x the memory"),
        ("dram", {"dram_bytes": 6}, {"dram_bytes": 4}, 1.5, "x the DRAM bytes"),
        ("history", {"history_bytes": 30, "memory_bytes": 2}, {}, 15, "x less than the full history"),
        ("floor", {"floor_ratio": 1.25}, {}, 1.25, "x the floor"),
        # 4 x 10^9 operations in 2 ms are 2 x 10^12 a second
        ("rate", {"operations": 4 * 10**9, "median_ms": 2.0}, {}, 2.0, "TFLOP/s"),
        ("tensor", {"tensor_percent": 61.0}, {}, 61.0, "% of cycles"),
        ("kernels", {"kernels": 3}, {}, 3, "kernels"),
        ("shared", {"shared_bytes": 3 * 2**9}, {}, 1.5, "KiB a block"),
        ("error", {"error": 0.25}, {}, 0.25, "relative error"),
        ("step_error", {"step_errors": {"50": [9.0], "100": [0.1, 0.3, 0.2]}}, {}, 0.3, "absolute error"),
        ("prediction", {"dram_bytes": 3, "predicted_bytes": 4}, {}, 25.0, "% off the prediction"),
        ("prediction", {"dram_bytes": 5, "predicted_bytes": 4}, {}, 25.0, "% off the prediction"),
        ("host", {"median_ms": 0.021}, {}, 21.0, "us a call"),
    ],
)
def test_the_figures_that_targets_are_about(value, ours, theirs, expected, unit):
    mine, other = (replace(of_case(CASES[0], name, "ok"), **of) for name, of in (("a", ours), ("b", theirs)))
    said, value_of = targets.VALUES[value]
    assert (said, value_of(mine, other)) == (unit, pytest.approx(expected))
    # nothing is made up where a figure lacks
    for name in ours:
        assert value_of(replace(mine, **{name: None}), other) is None
    if theirs:
        assert value_of(mine, None) is None
        assert value_of(mine, replace(other, **dict.fromkeys(theirs))) is None


def test_a_case_runs_or_does_not():
    target = Target("m", "t", "runs", at_least=1.0)
    assert judge(target, ROWS).measured == "2 of 2 cases run and are right"
    assert targets.VALUES["runs"][1](of_case(CASES[0], "a", "wrong"), None) == 0.0


@pytest.mark.parametrize(
    ("limit", "value", "held"),
    [
        ({"at_most": 2.0}, 2.0, True), ({"at_most": 2.0}, 2.1, False), ({"at_most": 0.0}, 0.0, True),
        ({"at_least": 2.0}, 2.0, True), ({"at_least": 2.0}, 1.9, False), ({"at_least": 0.0}, 0.0, True),
    ],
)  # fmt: skip
def test_a_limit_holds_what_is_on_it(limit, value, held):
    assert Target("m", "t", "error", **limit).holds(value) is held


def test_a_peer_that_is_wrong_is_named():
    wrong = replace(of_case(CASES[0], "fla chunk", "wrong", "relative error 2"), error=2.0)
    found = judge(Target("m", "t", "speed", against=("fla",), at_least=1.0), [ROWS[0], wrong])
    assert (found.verdict, found.measured) == ("not measured", "fla chunk: wrong, relative error 2")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "either a value or why"),
        ({"value": "speed", "at_most": 1.0, "why": "no"}, "either a value or why"),
        ({"value": "sped", "at_most": 1.0}, "expected a value of speed"),
        ({"value": "speed"}, "one of at_most and at_least"),
    ],
)
def test_a_target_that_says_nothing_is_a_value_error(fields, said):
    with pytest.raises(ValueError, match=said):
        Target("m", "t", **fields)


def test_every_file_is_a_suite_and_every_text_is_in_one_of_its_cases():
    files = sorted(path.stem for path in FOLDER.glob("*.toml"))
    assert files == ["flashrnn", "mlx-recurrence", "proposal-032", "proposal-039", "proposal-057"]
    for suite in files:
        said = [f"{case.label}: {case}" for case in SUITES[suite].cases()]
        for target in targets_of(suite):
            for text in target.cases:
                assert any(text in each for each in said), (suite, target.metric, text)


def test_a_suite_of_no_document_has_no_targets():
    assert judged("smoke", ROWS) == []
    assert tables_of("smoke") == []


def test_the_head_limits_are_those_of_the_solver():
    (table,) = tables_of("flashrnn")
    page = (DOCS / "planner" / "flashrnn-head-limits.md").read_text(encoding="utf-8")
    for row in table.rows:
        assert f"| {' | '.join(row)} |" in page


def test_the_page_shows_the_verdicts(roof, monkeypatch):
    found = [Target("Speed <x>", "> 1.5 x", "speed", against=("fla",), at_least=1.5), Target("Farm", "big", why="none")]
    monkeypatch.setattr(targets, "targets_of", lambda suite: found)
    text = sections.targets(Record("some", "", "", "", "", {"name": "x"}, {}, roof, tuple(ROWS)))
    assert "0 met, 1 missed, 1 not measured" in text
    assert '<span class="badge bad">missed</span>' in text
    assert "Speed &lt;x&gt;" in text
