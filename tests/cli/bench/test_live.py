"""What a person sees while the bench runs, and what the command line makes of its options."""

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.cli.bench import live
from holdfast.cli.bench.case import Case
from holdfast.cli.bench.cold import First
from holdfast.cli.bench.record import Record
from holdfast.cli.bench.result import of_case
from holdfast.cli.bench.selection import Selection, runners_of
from holdfast.cli.bench.session import Job

CPU = torch.device("cpu")
CASES = [Case("rglru", (("B", 1), ("T", T), ("D", 8)), "float32", "fwd") for T in (16, 32)]
WANTED = Selection.of("holdfast chunked, holdfast reference")


def row(case=CASES[0], runner="holdfast chunked", status="ok", detail="", **figures):
    return replace(of_case(case, runner, status, detail), **figures)


def text_of(*things):
    console = Console(file=io.StringIO(), width=100)
    for each in things:
        console.print(each)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


def test_a_case_in_the_terminal():
    timed = row(median_ms=2.0, low_ms=1.0, high_ms=3.0, floor_ms=0.5, floor_ratio=4.0, method="wall clock")
    refused = row(runner="fla chunk", status="rejected", detail="needs an NVIDIA GPU")
    lines = text_of(live._table(CASES[0], [row(runner="x"), timed, refused]))
    assert lines[0] == f"{CASES[0]}   floor 0.5 ms, wall clock"
    # the columns that some row has, and what is to be said of rows below them
    assert lines[1].split() == ["runner", "ms", "quartiles", "x", "floor"]
    assert lines[3].split() == ["x"]
    assert lines[4].split() == ["holdfast", "chunked", "2", "1", "-", "3", "4"]
    # columns side by side, and no empty line but those around the heads
    assert lines[3] == "x"
    console = Console(file=io.StringIO(), width=100)
    console.print(live._table(CASES[0], [row(runner="x"), timed, refused]))
    assert [len(line) for line in console.file.getvalue().splitlines()] == [54, 41, 41, 41, 41, 57, 42, 0]
    assert lines[5:] == [
        "  holdfast chunked: unsteady: was something else running?", "  fla chunk: rejected: needs an NVIDIA GPU",
    ]  # fmt: skip


def test_without_a_time_there_is_no_table():
    lines = text_of(live._table(CASES[0], [row(status="failed", detail="it broke")]))
    assert lines == [str(CASES[0]), "  holdfast chunked: failed: it broke"]


class Bar:
    """In the place of a progress bar."""

    def __init__(self):
        self.done, self.said = 0, []

    def update(self, task, description):
        self.said.append(description)

    def advance(self, task):
        self.done += 1


def record(*rows):
    return Record("some", "", "", "", "", {"name": "x"}, {}, None, rows)


@pytest.mark.parametrize("before", [0, 1])
def test_a_case_is_shown_when_all_its_rows_are_there_with_those_of_an_earlier_run(before):
    """One of them may have been measured before the run was cut short."""
    printed, bar = [], Bar()
    started = record(*[row(runner="holdfast reference")] * before, row(CASES[1]))
    job = Job((CASES[0],), CPU, WANTED)
    names = [runner.name for runner in runners_of(CASES[0], WANTED)][before:]
    assert len(names) == 2 - before
    each = live._printer(job, started, bar, 0, SimpleNamespace(print=printed.append))
    for n, name in enumerate(names, 1):
        each(CASES[0], SimpleNamespace(name=name), None)
        each(CASES[0], SimpleNamespace(name=name), row(runner=name))
        assert (len(printed), bar.done) == (int(n == len(names)), n)
    assert bar.said == [f"rglru B1 T16 D8 fwd: {name}" for name in names]
    # and the next case begins anew
    each(CASES[1], SimpleNamespace(name="holdfast reference"), row(CASES[1], "holdfast reference", "failed", "why"))
    assert len(printed) == 2
    assert text_of(printed[1]) == [str(CASES[1]), "  holdfast reference: failed: why"]


def test_first_calls_are_asked_for_with_cold_alone(monkeypatch):
    asked = []

    def first_calls(cases, device, wanted, side_by_side, skip, each):
        asked.append((side_by_side, skip))
        return {(CASES[0], "a"): First(1.0)}

    monkeypatch.setattr(live, "first_calls", first_calls)
    console = Console(file=io.StringIO())
    assert live._cold(CASES, set(), CPU, live.Choices(WANTED), console) == {}
    assert live._cold(CASES, {"done"}, CPU, live.Choices(WANTED, cold=16), console) == {(CASES[0], "a"): First(1.0)}
    assert asked == [(16, {"done"})]


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """What the command line hands to a run."""
    found = SimpleNamespace()

    def measure_live(named, device, choices, results):
        vars(found).update(named=named, device=device, choices=choices, results=results)

    def measure_models(choices, device, results):
        vars(found).update(choices=choices, device=device, results=results)

    def tune_case(*given, **more):
        from holdfast.cli.bench import clock

        vars(found).update(given=given, more=more, seconds=clock.SECONDS)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("holdfast.cli.bench.live.measure_live", measure_live)
    monkeypatch.setattr("holdfast.cli.bench.models.live.measure_models", measure_models)
    monkeypatch.setattr("holdfast.cli.bench.tune.tune_case", tune_case)

    def run(*options):
        result = CliRunner().invoke(app, ["bench", *options, "--device", "cpu"])
        assert result.exit_code == 0, (result.output, result.exception)
        return found

    return run


OP = ("--op", "rglru", "--shape", "B=1,T=20,D=4")


def test_what_is_done_unless_the_command_line_says_otherwise(begun):
    found = begun(*OP)
    assert found.choices == live.Choices(
        Selection(), counters=None, graph=False, cold=0, seconds=1.0, commit="", out=None, fresh=False
    )
    assert [(str(case), case.label) for each in found.named for case in each.cases] == [
        ("rglru B1 T20 D4 bfloat16 fwd", ""), ("rglru B1 T20 D4 bfloat16 fwd+bwd", ""),
    ]  # fmt: skip
    (named,) = found.named
    assert (named.name, named.title) == ("rglru", "rglru alone")
    command = "holdfast bench --op rglru --shape B=1,T=20,D=4 --dtype bfloat16 --device cpu"
    assert named.command == command
    assert (found.device, found.results) == (CPU, Path("benchmarks/results"))


def test_options_reach_the_run(begun, tmp_path):
    found = begun(
        *OP, "--pass", "fwd", "--dtype", "float32", "--cold", "3", "--counters", "fla", "--seconds", "0.5", "--commit",
        "abc", "--out", "x.json", "--fresh", "--runners", "holdfast",
    )  # fmt: skip
    assert found.choices == live.Choices(
        Selection.of("holdfast"), Selection.of("fla"), cold=3, seconds=0.5, commit="abc", out=Path("x.json"), fresh=True
    )
    (named,) = found.named
    assert [str(case) for case in named.cases] == ["rglru B1 T20 D4 float32 fwd"]
    # what changes no row is not part of the command that is kept
    assert named.command == (
        "holdfast bench --op rglru --shape B=1,T=20,D=4 --dtype float32 --pass fwd --runners holdfast --counters fla "
        "--device cpu --cold 3 --seconds 0.5"
    )


def test_suites_by_name_and_their_cases_by_text(begun):
    found = begun("--suite", "smoke, proposal-057", "--scaled", "--match", "rotlru,T9999", "--cold", "1")
    assert [each.name for each in found.named] == ["smoke-scaled", "proposal-057-scaled"]
    assert {case.op for each in found.named for case in each.cases} == {"rotlru"}
    assert found.named[0].command == (
        "holdfast bench --suite smoke --match rotlru,T9999 --device cpu --cold 1 --scaled"
    )


def test_models_by_default(begun):
    found = begun("--suite", "models", "--scaled")
    choices = found.choices
    assert (choices.seconds, choices.name, choices.fresh, choices.out, choices.commit) == (
        0.2, "models-scaled", False, None, "",
    )  # fmt: skip
    assert choices.parts == ("training", "layers", "host", "decoding", "longer")
    assert choices.command == "holdfast bench --suite models --scaled"
    assert begun("--suite", "models", "--scaled", "--match", "attention").choices.mixers[0].name == "attention"
    found = begun("--suite", "models", "--scaled", "--seconds", "0.5", "--fresh", "--parts", "host")
    assert (found.choices.seconds, found.choices.fresh, found.choices.parts) == (0.5, True, ("host",))


def test_tuning_by_default(begun):
    found = begun(*OP, "--tune")
    assert found.given == (
        "rglru", (("B", 1), ("T", 20), ("D", 4)), "bfloat16", ["fwd+bwd"], CPU, Selection(),
    )  # fmt: skip
    assert (found.more, found.seconds) == ({"path": None}, 1.0)
    assert begun(*OP, "--tune", "--pass", "fwd", "--seconds", "0.5").given[3] == ["fwd"]


def test_on_a_cpu_nothing_is_compiled_ahead(monkeypatch, tmp_path):
    from holdfast.cli.bench.models import live
    from holdfast.cli.bench.models.mixers import chosen
    from holdfast.cli.bench.models.scale import SMALL

    warmed = []
    monkeypatch.setattr(live, "warm", lambda *given: warmed.append(given))
    choices = live.Choices(chosen(["gla"])[:1], SMALL, "bench", parts=("host",), seconds=0.0, out=tmp_path / "m.json")
    assert live.measure_models(choices, torch.device("cpu"), tmp_path) == ""
    assert (tmp_path / "m.json").exists()
    assert warmed == []


def test_on_a_gpu_mixers_with_rows_to_measure_are_compiled_ahead(monkeypatch, tmp_path):
    """A run that goes on compiles nothing of a mixer whose rows are there."""
    from holdfast.cli.bench.models import live
    from holdfast.cli.bench.models.mixers import MIXERS
    from holdfast.cli.bench.models.scale import SMALL

    class Suite:
        def __init__(self, scale, device):
            pass

        def measure(self, mixer, rows):
            return (replace(row, status="missing") for row in rows)

    warmed, lost = [], ["", "it broke", ""]
    monkeypatch.setattr(live, "warm", lambda mixers, *rest: warmed.append([mixer.name for mixer in mixers]))
    monkeypatch.setattr(live, "device_facts", lambda device: {"name": "a GPU"})
    monkeypatch.setattr(live, "Suite", Suite)
    monkeypatch.setattr(live, "lost_after", lambda row, device: lost.pop(0))
    # the first has one row, the other two
    mixers = [mixer for mixer in MIXERS if mixer.name in ("gla", "rglru")]
    mixers.sort(key=lambda mixer: mixer.name, reverse=True)
    out = tmp_path / "m.json"
    choices = live.Choices(mixers, SMALL, "bench", parts=("layers",), commit="abc", seconds=0.0, out=out)
    assert [live.measure_models(choices, torch.device("cuda"), tmp_path) for _ in range(2)] == ["it broke", ""]
    assert warmed == [["rglru", "gla"], ["gla"]]
