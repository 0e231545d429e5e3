"""How figures are written, which row of a case is shown, and at which sizes results are compared."""

import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.cli.bench import case as cases
from holdfast.cli.bench import clock, memory
from holdfast.cli.bench.case import Case, better_in_chunks, checked
from holdfast.cli.bench.glance import lines
from holdfast.cli.bench.groups import axis_name, groups, position
from holdfast.cli.bench.measure import LIMITS
from holdfast.cli.bench.result import Result, of_case
from holdfast.cli.bench.roofs import roofs
from holdfast.cli.bench.subject import _prediction
from holdfast.cli.bench.table import COLUMNS, cells, mebibytes, milliseconds, ratio, said
from holdfast.planner import Candidate, Plan
from holdfast.planner.movement.prediction import Prediction

CPU = torch.device("cpu")
GLA = Case("gla", (("B", 2), ("T", 4096), ("H", 8), ("K", 16), ("V", 16)), "bfloat16", "fwd+bwd", state=True)
ROW = of_case(GLA, "holdfast chunked", "ok")


def test_a_row_without_figures_says_which_case_it_is_of():
    assert ROW.to_case() == GLA
    options = Case("mlstm", GLA.sizes, "float16", "fwd", "label", (("gating", "sigmoid"),), "host")
    assert of_case(options, "x", "failed", "why").to_case() == options
    assert (of_case(options, "x", "failed", "why").status, of_case(options, "x", "failed", "why").detail) == (
        "failed",
        "why",
    )


def test_figures_have_three_digits_and_no_exponent():
    assert [milliseconds(x) for x in (None, 0.01234, 1.5, 999.4, 1000.0, 123456.7)] == [
        "", "0.0123", "1.5", "999", "1000", "123457",
    ]  # fmt: skip
    assert [ratio(x) for x in (None, 1.2345, 99.94, 100.0, 12345.6)] == ["", "1.23", "99.9", "100", "12346"]
    assert [mebibytes(x) for x in (None, 2**19, 10 * 2**20, 2**30)] == ["", "0.5 MiB", "10 MiB", "1024 MiB"]


def test_a_row_of_the_table():
    row = replace(
        ROW, median_ms=2.0, low_ms=1.9, high_ms=2.1, floor_ratio=1.25, first_call_s=3.0, host_ms=0.5,
        memory_bytes=2**20, error=1e-3,
    )  # fmt: skip
    assert dict(zip(COLUMNS, cells(row), strict=True)) == {
        "runner": "holdfast chunked", "ms": "2", "quartiles": "1.9 - 2.1", "x floor": "1.25", "first s": "3.00",
        "host ms": "0.5", "memory": "1.0 MiB", "error": "1.0e-03", "what": "",
    }  # fmt: skip
    assert set(cells(ROW)[1:]) == {""}


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"status": "wrong", "detail": "off"}, "wrong: off"),
        ({"note": "a note"}, "a note"),
        ({"checked_at": dict(GLA.sizes)}, ""),
        ({"checked_at": {"B": 1, "T": 256}}, "checked at B1 T256"),
        ({"checked_by": "chunked"}, "checked against chunked in float64"),
        ({"low_ms": 1.0, "high_ms": 1.5}, ""),
        ({"low_ms": 1.0, "high_ms": 1.6}, "unsteady: was something else running?"),
        ({"median_ms": 1.0, "host_ms": 0.6}, "bound by the host"),
        ({"median_ms": 1.0, "host_ms": 0.6, "method": "CUDA-graph replay, L2 flushed"}, "replayed"),
        ({"median_ms": 1.0, "predicted_ms": 0.5}, "predicted 0.5 ms"),
        ({"predicted_ms": 0.5}, ""),
        ({"dram_bytes": 2**20, "tensor_percent": 40.4}, "DRAM 1.0 MiB, matrix units 40% busy"),
        (
            {"dram_bytes": 2**20, "tensor_percent": 40.4, "predicted_bytes": 2**21},
            "DRAM 1.0 MiB, 0.50 x predicted, matrix units 40% busy",
        ),
        ({"counters_note": "no ncu"}, "no counters: no ncu"),
        ({"step_errors": {"50": [1.0, 2.0]}}, "absolute error at the last step: 2.0e+00 at 50%"),
    ],
)
def test_what_is_said_of_a_row(figures, words):
    assert said(replace(ROW, **figures)) == words


def timed(runner: str, ms: float | None, **more) -> Result:
    return replace(ROW, runner=runner, median_ms=ms, **more)


def test_a_line_has_the_fastest_of_ours_and_of_theirs():
    rows = [
        timed("holdfast chunked", 3.0), timed("holdfast triton", 2.0, floor_ms=0.5), timed("fla chunk", 5.0),
        timed("fla fused_recurrent", 4.0), timed("torch SDPA", 0.1), timed("flashrnn", None, status="wrong"),
    ]  # fmt: skip
    (line,) = lines(rows)
    assert (line.ours.runner, line.peer.runner) == ("holdfast triton", "fla fused_recurrent")
    assert (line.speed, line.floor_ms) == (2.0, 0.5)
    assert lines(rows, "host") == lines(rows[-1:]) == []
    (alone,) = lines(rows[:2])
    assert (alone.peer, alone.speed) == (None, None)


def test_rows_of_a_case_come_right_ones_first_and_fastest_first():
    rows = [timed("d", None, status="rejected"), timed("b", 2.0), timed("c", None, status="wrong"), timed("a", 1.0)]
    (group,) = groups(rows)
    assert [row.runner for row in group.cases()[0]] == ["a", "b", "c", "d"]
    assert group.title == "gla, bfloat16, forward + backward with state"
    assert axis_name("bytes") == "MiB that must move"
    assert position(replace(ROW, floor_bytes=3 * 2**20), "bytes") == 3
    assert position(ROW, "T") == 4096


def test_cases_that_differ_in_several_sizes_are_told_apart_by_bytes():
    sizes = ({"B": 1, "T": 16}, {"B": 2, "T": 16}, {"B": 2, "T": 32})
    (group,) = groups([replace(timed("a", 1.0), sizes=dict(GLA.sizes) | each) for each in sizes])
    assert group.axis() == "bytes"


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        # 2 x 4096 x 8 x 16 x 16 elements of state over all steps
        (2**24, {}),
        (2**24 - 1, {"T": 3840}),
        (2**23, {"T": 2048}),
        (2**20, {"T": 256}),
        # time no further than 256 steps, then the batch, then heads
        (2**20 - 1, {"T": 256, "B": 1}),
        (2**18, {"T": 256, "B": 1, "H": 4}),
        (1, {"T": 256, "B": 1, "H": 1}),
    ],
)
def test_what_is_too_large_for_the_oracle_is_cut(monkeypatch, budget, expected):
    monkeypatch.setattr(cases, "ORACLE_BUDGET", {"cpu": budget})
    assert dict(checked(GLA, CPU).sizes) == dict(GLA.sizes) | expected


def test_query_heads_are_cut_with_theirs(monkeypatch):
    grouped = GLA.with_sizes(dict(GLA.sizes))
    grouped = replace(grouped, sizes=(*grouped.sizes, ("Hq", 4)))
    monkeypatch.setattr(cases, "ORACLE_BUDGET", {"cpu": 2**18})
    assert dict(checked(grouped, CPU).sizes) == dict(GLA.sizes) | {"T": 256, "B": 1, "H": 4, "Hq": 2}
    monkeypatch.setattr(cases, "ORACLE_BUDGET", {"cpu": 1})
    assert dict(checked(grouped, CPU).sizes) == dict(GLA.sizes) | {"T": 256, "B": 1, "H": 2, "Hq": 1}


def test_the_scan_between_chunks_is_cut_along_chunks(monkeypatch):
    scan = Case("inter_chunk_scan", (("B", 1), ("G", 600), ("H", 1), ("K", 4), ("V", 4)))
    monkeypatch.setattr(cases, "ORACLE_BUDGET", {"cpu": 300 * 16})
    assert dict(checked(scan, CPU).sizes)["G"] == 300


def test_many_steps_are_compared_in_chunks_where_they_can_be(monkeypatch):
    """Over 1024 steps, as docs/benchmarking.md says."""
    short, longer = (GLA.with_sizes(dict(GLA.sizes) | {"T": steps}) for steps in (1024, 1025))
    monkeypatch.setattr(cases, "ORACLE_BUDGET", {"cpu": 2**40})
    assert not better_in_chunks(longer, CPU)
    monkeypatch.setattr(cases, "IN_CHUNKS_BUDGET", {"cpu": 2**40})
    assert (better_in_chunks(short, CPU), better_in_chunks(longer, CPU)) == (False, True)
    lstm = Case("lstm", (("B", 1), ("T", 5000), ("H", 1), ("D", 8)))
    assert not better_in_chunks(lstm, CPU)


def test_limits_are_stricter_for_wider_dtypes():
    assert LIMITS == {"float64": 1e-10, "float32": 1e-4, "bfloat16": 1.5e-2, "float16": 5e-3}


def test_roofs_are_bytes_and_operations_a_second(monkeypatch):
    taken = []

    def two_milliseconds(run, device):
        taken.append(run())
        return clock.Times(2.0, 2.0, 2.0, 1, "")

    monkeypatch.setattr("holdfast.cli.bench.roofs.time_runs", two_milliseconds)
    torch.set_float32_matmul_precision("medium")
    try:
        found = roofs(CPU, copy_bytes=2**20, matrix_size=32)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    # half of the bytes are read, half are written
    assert taken[0].nbytes == 2**19
    assert found.copy_bandwidth == pytest.approx(2**20 / 2e-3)
    assert [x.dtype for x in taken[1:]] == [torch.bfloat16, torch.float32]
    assert found.rates == {"bfloat16": pytest.approx(2 * 32**3 / 2e-3), "float32": pytest.approx(2 * 32**3 / 2e-3)}
    assert (found.copy_bytes, found.matrix_size) == (2**20, 32)


@pytest.mark.parametrize(("kind", "copied", "side"), [("cuda", 2**31, 8192), ("cpu", 2**28, 1024)])
def test_roofs_of_another_day_are_of_the_same_sizes(monkeypatch, kind, copied, side):
    monkeypatch.setattr("holdfast.cli.bench.roofs._copy_ms", lambda moved, device: moved / 1e9)
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: torch.zeros(2, *[n // side for n in shape[1:]]))
    monkeypatch.setattr("holdfast.cli.bench.roofs.time_runs", lambda run, device: clock.Times(1.0, 1.0, 1.0, 1, ""))
    found = roofs(torch.device(kind))
    assert (found.copy_bytes, found.matrix_size) == (copied, side)
    assert found.copy_bandwidth == pytest.approx(1e12)


def test_the_kernel_tells_kibibytes(monkeypatch):
    monkeypatch.setattr(memory.Path, "read_text", lambda path: "VmPeak:\t 9 kB\nVmRSS:\t    3 kB\n")
    assert memory._status("VmRSS") == 3072


def test_extra_bytes_are_those_of_the_run():
    kept = []
    found = memory.extra_bytes(lambda: kept.append(torch.ones(2**24)), CPU)
    if found is None:
        assert not Path("/proc/self/clear_refs").exists() or platform.libc_ver()[0] != "glibc"
        pytest.skip("this kernel or C library does not say what a process holds")
    assert 2**26 <= found < 2**26 + 2**24
    assert memory.extra_bytes(lambda: None, CPU) < 2**24
    assert memory.extra_bytes(lambda: None, torch.device("meta")) is None


def test_what_is_predicted_of_both_passes():
    plans = [Plan("a", (("n", 1),)), Plan("a", (("n", 2),))]
    both = [
        Candidate(plan, Prediction(1e-3, 0.0), 100, shared=shared) for plan, shared in zip(plans, (8, 5), strict=True)
    ]
    found = _prediction(both)
    assert (found.moved, found.ms, found.shared, found.plan) == (200, pytest.approx(2.0), 8, f"{plans[0]}; {plans[1]}")
    assert _prediction([both[0], Candidate(plans[1])]).ms is None
