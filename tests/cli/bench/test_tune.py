"""holdfast bench --tune: right plans are timed and kept, wrong ones are not, and the table then decides."""

from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.cli.bench import tune as tuning
from holdfast.cli.bench.selection import Selection
from holdfast.cli.bench.tune import tune_case
from holdfast.cli.errors import UserError
from holdfast.kernels import select as planning
from holdfast.kernels.backend import describe
from holdfast.kernels.matrix.torch.chunked import Chunked
from holdfast.ops import matrix
from holdfast.planner import Candidate, Plan, tables
from holdfast.planner.tables import Table, TableError

CPU = torch.device("cpu")
SIZES = (("B", 2), ("T", 70), ("H", 2), ("K", 8), ("V", 8))


class Several(Chunked):
    """The chunked backend with three plans: one as usual, one with its results doubled, one that raises."""

    name = "several"

    def candidates(self, problem, device, direction):
        return tuple(Candidate(Plan(self.name, (("chunk", c), ("segment", 64)))) for c in (16, 32, 7, 64))

    def forward(self, plan, call, cu_seqlens):
        if plan["chunk"] == 7:
            raise RuntimeError("no kernel for chunks of 7")
        o, final = super().forward(plan, call, cu_seqlens)
        return (2 * o if plan["chunk"] == 32 else o), final


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    tables._read_once.cache_clear()
    planning.forget()
    yield tmp_path
    tables._read_once.cache_clear()
    planning.forget()


@pytest.fixture
def several(monkeypatch):
    monkeypatch.setattr(matrix, "BACKENDS", (Several(), matrix.Reference()))


def chunks(timings):
    return sorted(timing.plan["chunk"] for timing in timings)


@pytest.mark.parametrize("passes", ["fwd", "fwd+bwd"])
def test_right_plans_are_kept_and_others_told(several, folder, passes):
    said = []
    path = tune_case("simple_gla", SIZES, "float32", [passes], CPU, say=said.append)
    assert path == folder / "cpu.json"
    table = tables.read(path)
    grad = passes != "fwd"
    directions = ["forward", "backward"] if grad else ["forward"]
    assert sorted(direction for _, direction in table.timings) == sorted(directions)
    assert {problem.needs_grad for problem, _ in table.timings} == {grad}
    for (_, direction), timings in table.timings.items():
        # the backward pass has no doubled results and no chunk that it cannot take
        assert chunks(timings) == ([16, 64] if direction == "forward" else [7, 16, 32, 64])
        assert [t.seconds for t in timings] == sorted(t.seconds for t in timings)
    text = "\n".join(said)
    assert "wrong   several chunk=32 segment=64: relative error 1.0e+00" in text
    assert "failed  several chunk=7 segment=64: RuntimeError: no kernel for chunks of 7" in text
    assert "reference" not in text


def test_plans_are_right_up_to_the_limit(several, monkeypatch):
    for error, kept in ((1e-4, [16, 32, 64]), (1.01e-4, None), (float("nan"), None)):
        monkeypatch.setattr(tuning._Tuning, "error", lambda self, error=error: error)
        if kept is None:
            with pytest.raises(ValueError, match="expected a right plan"):
                tune_case("simple_gla", SIZES, "float32", ["fwd"], CPU, say=lambda line: None)
            continue
        path = tune_case("simple_gla", SIZES, "float32", ["fwd"], CPU, say=lambda line: None)
        ((_, timings),) = tables.read(path).timings.items()
        assert chunks(timings) == kept


def test_the_table_is_in_seconds(several, monkeypatch):
    monkeypatch.setattr(tuning, "time_runs", lambda run, device: SimpleNamespace(median_ms=4.0))
    path = tune_case("simple_gla", SIZES, "float32", ["fwd+bwd"], CPU, say=lambda line: None)
    found = {way: {timing.seconds for timing in timings} for (_, way), timings in tables.read(path).timings.items()}
    assert found == {"forward": {4e-3}, "backward": {4e-3}}


def test_the_table_then_decides(several):
    tune_case("simple_gla", SIZES, "float32", ["fwd"], CPU, say=lambda line: None)
    ((problem, direction), timings), *_ = tables.table_of(describe(CPU)).timings.items()
    backend, plan = planning.resolve(matrix.BACKENDS, problem, describe(CPU), "", direction)
    assert (backend.name, plan) == ("several", timings[0].plan)
    # the slower plan on top: the file is read again, and the order of candidates does not matter
    other = tables.Timing(timings[-1].plan, 1e-12)
    tables.write(tables.path_of(describe(CPU)), Table("cpu", None, {}, {(problem, direction): (other,)}))
    planning.forget()
    assert planning.resolve(matrix.BACKENDS, problem, describe(CPU), "", direction)[1] == other.plan


def test_what_was_tuned_before_stays(several):
    path = tune_case("simple_gla", SIZES, "float32", ["fwd"], CPU, say=lambda line: None)
    longer = (("B", 2), ("T", 90), *SIZES[2:])
    tune_case("simple_gla", longer, "float32", ["fwd"], CPU, say=lambda line: None)
    assert sorted(problem["T"] for problem, _ in tables.read(path).timings) == [70, 90]


def test_backends_by_name(several):
    path = tune_case(
        "simple_gla", SIZES, "float32", ["fwd"], CPU, Selection.of("holdfast reference"), lambda line: None
    )
    (timings,) = tables.read(path).timings.values()
    assert [timing.plan.backend for timing in timings] == ["reference"]


def test_a_backend_that_is_wrong_is_not_tuned(several, folder, monkeypatch):
    monkeypatch.setattr(
        Several, "candidates", lambda *a: (Candidate(Plan("several", (("chunk", 32), ("segment", 64)))),)
    )
    said = []
    with pytest.raises(ValueError, match=r"expected a right plan of simple_gla B2 .*; got none"):
        tune_case("simple_gla", SIZES, "float32", ["fwd"], CPU, say=said.append)
    assert any("several: wrong: relative error" in line for line in said)
    assert list(folder.iterdir()) == []


def test_a_table_that_cannot_be_read_stops_before_anything_is_timed(several, folder, monkeypatch):
    (folder / "cpu.json").write_text("{")
    monkeypatch.setattr(tuning, "_tuned", lambda *a: pytest.fail("timed all the same"))
    with pytest.raises(TableError, match="not readable as JSON"):
        tune_case("simple_gla", SIZES, "float32", ["fwd"], CPU, say=lambda line: None)


def test_a_diagonal_and_a_dense_op(folder):
    """Families differ in what their backends take; the plan goes through the op."""
    for op, sizes in (("rglru", (("B", 2), ("T", 40), ("D", 8))), ("lstm", (("B", 2), ("T", 9), ("H", 2), ("D", 8)))):
        path = tune_case(op, sizes, "float32", ["fwd+bwd"], CPU, say=lambda line: None)
    found = {(problem.op, direction) for problem, direction in tables.read(path).timings}
    assert found == {(op, direction) for op in ("rglru", "lstm") for direction in ("forward", "backward")}


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


def test_the_command(several, folder):
    options = ("--dtype", "float32", "--device", "cpu", "--seconds", "0.01")
    found = run("--op", "simple_gla", "--shape", "B=2,T=70,H=2,K=8,V=8", *options, "--tune")
    assert found.exit_code == 0, found.output
    assert "several chunk=16" in found.output
    assert {direction for _, direction in tables.read(folder / "cpu.json").timings} == {"forward", "backward"}


def test_the_command_with_a_backend_and_a_file_of_its_own(several, folder, tmp_path):
    shape, path = "B=2,T=70,H=2,K=8,V=8", tmp_path / "elsewhere.json"
    options = ("--dtype", "float32", "--pass", "fwd", "--device", "cpu", "--runners", "holdfast reference")
    options += ("--seconds", "0.01")
    found = run("--op", "simple_gla", "--shape", shape, *options, "--tune", "--out", str(path))
    assert found.exit_code == 0, found.output
    (timings,) = tables.read(path).timings.values()
    assert [timing.plan.backend for timing in timings] == ["reference"]
    assert not (folder / "cpu.json").exists()


def test_the_command_wants_an_op():
    found = run("--suite", "smoke", "--tune", "--device", "cpu")
    assert isinstance(found.exception, UserError)
    assert "--op" in str(found.exception)
