"""The words of explain: units, ratios, what is shown of candidates, and of calls that nothing models."""

import pytest

from holdfast.ops.explain import (
    SHOWN,
    Choice,
    Explanation,
    Pass,
    _beaten,
    _bytes,
    _footprint,
    _operations,
    _ratio,
    _time,
    _told,
)  # fmt: skip
from holdfast.planner import Candidate, Device, Floor, Plan, Problem
from holdfast.planner.movement import Prediction


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (1.234e-6, "1.23 us"), (0.9994e-3, "999 us"), (1e-3, "1 ms"), (1.2345e-2, "12.35 ms"),
        (10.0, "10 s"), (123.456, "123.5 s"), (1000.4, "1000 s"),
    ],
)  # fmt: skip
def test_times(seconds, said):
    assert _time(seconds) == said


@pytest.mark.parametrize(
    ("seconds", "least", "said"),
    [(3.0, 2.0, " (1.50 x the floor)"), (199.4, 2.0, " (99.70 x the floor)"), (200.0, 2.0, " (100 x the floor)"),
     (1.0, None, ""), (1.0, 0.0, "")],
)  # fmt: skip
def test_ratios(seconds, least, said):
    assert _ratio(seconds, least) == said


def test_bytes_go_up_in_1024s_and_operations_in_1000s():
    assert [_bytes(n) for n in (512, 2**10, 2**20 - 2**10, 2**20, 3 * 2**30, 5 * 2**40, 2000 * 2**40)] == [
        "0.5 KiB", "1 KiB", "1023 KiB", "1 MiB", "3 GiB", "5 TiB", "2000 TiB",
    ]  # fmt: skip
    assert [_operations(n) for n in (500, 10**3, 10**6, 25 * 10**8, 10**12, 5000 * 10**12)] == [
        "0.5 Kop", "1 Kop", "1 Mop", "2.5 Gop", "1 Top", "5000 Top",
    ]  # fmt: skip


def candidate(n, seconds=1e-3, **figures):
    prediction = None if seconds is None else Prediction(seconds, 0.0)
    return Candidate(Plan("kernel", (("n", n),)), prediction, **figures)


def a_pass(chosen, *beaten):
    return Pass("forward", chosen, beaten, Floor(2**20, 10**6), 5e-4)


def test_blocks_are_counted():
    assert (
        _footprint(candidate(0, blocks=1, shared=2**11, registers=40))
        == "1 block of 2 KiB shared, 40 registers a thread"
    )
    assert _footprint(candidate(0, blocks=3)).startswith("3 blocks of 0 KiB")


def test_a_pass_in_words():
    figures = {"moved": 2**21, "operations": 10**9, "blocks": 2, "shared": 2**10, "registers": 32}
    assert _told(a_pass(Choice(candidate(1, **figures)))) == [
        "  forward",
        "    runs     kernel n=1",
        "    model    1 ms (2.00 x the floor), bound by memory: memory 1 ms",
        "    moves    2 MiB, 1 Gop",
        "    takes    2 blocks of 1 KiB shared, 32 registers a thread",
        "    floor    1 MiB, 1 Mop, 500 us",
    ]
    told = _told(a_pass(Choice(candidate(1, None), measured=2e-3)))
    assert told[2:] == [
        "    measured 2 ms (4.00 x the floor)",
        "    time     no model of this backend on this device",
        "    floor    1 MiB, 1 Mop, 500 us",
    ]


def test_some_of_those_that_it_beat_are_shown():
    beaten = [Choice(candidate(n, n * 1e-3)) for n in range(2, SHOWN + 4)]
    lines = _beaten(a_pass(Choice(candidate(1)), *beaten, Choice(candidate(99, None))))
    assert len(lines) == 1 + SHOWN + 1
    assert lines[0].split() == ["beat", "time", "moves", "blocks", "shared", "registers", "plan"]
    assert lines[1].split() == ["2", "ms", "kernel", "n=2"]
    assert lines[-1] == " " * 13 + "and 2 more"
    assert _beaten(a_pass(Choice(candidate(1)), *beaten[: SHOWN + 1]))[-1] == " " * 13 + "and 1 more"
    assert len(_beaten(a_pass(Choice(candidate(1)), *beaten[:SHOWN]))) == 1 + SHOWN
    assert _beaten(a_pass(Choice(candidate(1)), Choice(candidate(99, None)))) == []
    shown = Choice(candidate(2, 12e-3, moved=2**21, blocks=2, shared=2**10, registers=32))
    assert _beaten(a_pass(Choice(candidate(1)), shown, Choice(candidate(30, 0.5)))) == [
        "    beat       time moves blocks shared registers plan",
        "              12 ms 2 MiB      2  1 KiB        32 kernel n=2",
        "             500 ms                               kernel n=30",
    ]
    (_, measured) = _beaten(a_pass(Choice(candidate(1)), Choice(candidate(2, None), 3e-3)))
    assert "3 ms measured" in measured


def test_a_call_in_words():
    problem = Problem("gla", "matrix", "float32", (("B", 1), ("T", 8)))
    told = Explanation(problem, Device.named("cpu"), (a_pass(Choice(candidate(1))),), {"other": "is slow"}, ("a note",))
    lines = str(told).splitlines()
    assert lines[:3] == ["gla (matrix family) on cpu, float32", "  sizes    B=1 T=8", "  traits   none"]
    assert lines[-2:] == ["  not      other: is slow", "  ignored  a note"]
    assert Choice(candidate(1, None)).seconds is None
    assert Choice(candidate(1, 2e-3)).seconds == 2e-3
    assert Choice(candidate(1, 2e-3), 1e-3).seconds == 1e-3
