"""What the bench's child processes do and print, run in this one."""

import json

import pytest
import torch

from holdfast.cli.bench import child, first_call, profiled
from holdfast.cli.bench.case import Case
from holdfast.cli.bench.child import case_of, request, write_request
from holdfast.cli.bench.failure import one_line
from holdfast.cli.bench.subject import HoldfastRunner, Refused, Subject

CPU = torch.device("cpu")
CASE = Case("rglru", (("B", 1), ("T", 4), ("D", 8)), "float32", "fwd+bwd", "a label")


def asked(monkeypatch, tmp_path, *what):
    path = write_request(what, CPU, tmp_path)
    monkeypatch.setattr("sys.argv", ["child", str(path)])


def test_a_case_comes_back_as_it_was(monkeypatch, tmp_path):
    odd = Case(
        "mlstm", tuple((axis, 4) for axis in "BTHKV"), "bfloat16", "fwd", "x", (("gating", "sigmoid"),), "time", True
    )
    asked(monkeypatch, tmp_path, (CASE, "holdfast chunked"), (odd, "holdfast reference"))
    wanted, device = request()
    assert device == CPU
    assert [(case, runner.name) for case, runner in wanted] == [(CASE, "holdfast chunked"), (odd, "holdfast reference")]
    assert case_of(json.loads(json.dumps(vars(odd)))) == odd


@pytest.mark.parametrize(
    ("error", "key", "words"),
    [
        (Refused("needs a GPU"), "refused", "Refused: needs a GPU"),
        (ImportError("no module"), "refused", "ImportError: no module"),
        (RuntimeError("it\nbroke"), "failed", "RuntimeError: it broke"),
    ],
)
def test_a_first_call_that_does_not_end_well_says_why(monkeypatch, tmp_path, capsys, error, key, words):
    def fail(self, case, device):
        raise error

    asked(monkeypatch, tmp_path, (CASE, "holdfast chunked"))
    monkeypatch.setattr(HoldfastRunner, "prepare", fail)
    first_call.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {key: words}


def test_a_first_call_counts_what_prepares_and_runs_both_passes_but_no_drawing(monkeypatch, tmp_path, capsys):
    events, now = [], [0.0]

    class Runner:
        name = "holdfast chunked"

        def prepare(self, case, device):
            events.append("prepare")
            now[0] += 2.0

            def call(inputs):
                events.append("call")
                now[0] += 0.5
                return inputs["x"] * 2

            return Subject({"x": torch.ones(3)}, call, None)

    draw = Case.arguments

    def drawn(case, device, seed=0):
        events.append("draw")
        now[0] += 100.0
        return draw(case, device, seed)

    asked(monkeypatch, tmp_path, (CASE, "holdfast chunked"))
    monkeypatch.setattr(child, "_runner", lambda each: Runner())
    monkeypatch.setattr(Case, "arguments", drawn)
    monkeypatch.setattr("holdfast.cli.bench.clock.time.perf_counter", lambda: now[0])
    first_call.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"seconds": 2.5}
    assert events == ["draw", "prepare", "call"]


@pytest.fixture
def events(monkeypatch):
    """What a profiled case does, in order."""
    found = []
    monkeypatch.setattr(profiled, "SWEEP_BYTES", 64)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: found.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append("free"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: found.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: found.append("stop"))
    amax = torch.Tensor.amax

    def sweep(x, *rest):
        found.append(f"sweep {x.nbytes}")
        return amax(x, *rest)

    monkeypatch.setattr(torch.Tensor, "amax", sweep)
    return found


def test_one_run_and_a_sweep_lie_between_the_marks(monkeypatch, tmp_path, capsys, events):
    class Runner:
        name = "holdfast chunked"

        def prepare(self, case, device):
            if case.passes == "fwd":
                raise Refused("no")
            return Subject({"x": torch.ones(3)}, lambda a: events.append("run") or a["x"] * 2, None)

    forward = Case(CASE.op, CASE.sizes, passes="fwd")
    asked(monkeypatch, tmp_path, (CASE, "holdfast chunked"), (forward, "holdfast chunked"))
    monkeypatch.setattr(child, "_runner", lambda each: Runner())
    profiled.main()
    assert events == [
        "run", "run", "sweep 64", "wait", "start", "run", "sweep 64", "wait", "stop", "free", "free",
    ]  # fmt: skip
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"profiled": f"{CASE} holdfast chunked", "failed": ""},
        {"profiled": f"{forward} holdfast chunked", "failed": "Refused: no"},
    ]


def test_an_error_is_one_line_of_at_most_300_characters():
    assert one_line(RuntimeError("a\n  b")) == "RuntimeError: a b"
    assert one_line(RuntimeError("x" * 400)) == f"RuntimeError: {'x' * 400}"[:300]
