"""Texts that others made, cut to what a row or a line has room for."""

import subprocess
from dataclasses import replace

import torch

from holdfast.cli.bench import clock, counters
from holdfast.cli.bench.case import Case
from holdfast.cli.bench.models import device_time, warm
from holdfast.cli.bench.models.mixers import MIXERS
from holdfast.cli.bench.models.scale import SMALL
from holdfast.cli.bench.models.suite import PARTS
from holdfast.cli.bench.result import of_case
from holdfast.cli.bench.suites import SMALL as SMALL_SIZES
from holdfast.cli.bench.suites import SUITES, scale
from holdfast.cli.bench.targets import Target, judge

LONG = "x" * 400


def test_why_a_run_cannot_be_captured(monkeypatch):
    def time_runs(run, device, how):
        if how == "graph":
            raise RuntimeError(LONG)
        return clock.Times(1.0, 1.0, 1.0, 1, how)

    monkeypatch.setattr(clock, "time_runs", time_runs)
    monkeypatch.setattr(clock, "host_ms", lambda run, device: 0.6)
    _, _, note = clock.device_times(lambda: None, torch.device("cuda"))
    assert note == f"cannot be captured: RuntimeError: {'x' * 66}"


def test_why_a_target_is_not_measured():
    case = Case("rglru", (("B", 1), ("T", 2), ("D", 4)))
    found = judge(Target("m", "t", "floor", at_most=1.0), [of_case(case, "holdfast chunked", "failed", LONG)])
    assert (found.verdict, found.measured) == ("not measured", f"holdfast chunked: failed, {LONG}"[:200])
    noted = replace(of_case(case, "holdfast chunked", "ok"), counters_note=LONG)
    assert judge(Target("m", "t", "tensor", at_least=1.0), [noted]).measured == LONG[:200]


def test_what_ncu_says():
    assert counters._why("one\ntwo\nthree\n==ERROR== " + LONG) == f"ncu failed: ==ERROR== {LONG}"[:300]
    assert counters._why("one\ntwo\nthree\nfour") == "ncu failed: two three four"


def test_what_a_child_that_compiles_says(monkeypatch):
    done = subprocess.CompletedProcess([], 3, "", f"one\n{LONG}\n")
    monkeypatch.setattr(warm.subprocess, "run", lambda *given, **named: done)
    lines = []
    warm.warm([next(x for x in MIXERS if x.name == "rglru")], PARTS, SMALL, torch.device("cpu"), lines.append)
    assert lines == [f"rglru: not compiled ahead, exit status 3 {LONG}"[:300]]


def test_names_of_kernels():
    kernels = {f"{n:02} {LONG}": float(n) for n in range(20)}
    found = device_time.longest(kernels)
    assert [*found.values()] == [float(n) for n in range(15)]
    assert {len(name) for name in found} == {120}


def test_how_long_others_are_waited_for():
    assert (warm.LIMIT_S, warm.MOST, clock.MOST) == (240.0, 12, 100)


def test_sizes_that_a_cpu_gets_through():
    assert SMALL_SIZES == {
        "B": 1, "T": 64, "G": 16, "H": 2, "Hq": 2, "K": 32, "Kg": 32, "V": 32, "D": 64, "N": 16, "C": 64, "r": 8,
    }  # fmt: skip
    whole = Case("rglru", (("B", 4), ("T", 65), ("D", 63), ("gate_bits", 16)), "bfloat16")
    small = scale(whole)
    assert (small.sizes, small.dtype) == ((("B", 1), ("T", 64), ("D", 63)), "float32")


def test_what_a_cpu_gets_through_as_it_is():
    assert {name for name, suite in SUITES.items() if suite.small} == {"smoke"}
