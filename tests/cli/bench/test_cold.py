"""First calls in processes of their own."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from holdfast.cli.bench import cold
from holdfast.cli.bench.case import Case
from holdfast.cli.bench.cold import First, died, first_call, first_calls
from holdfast.cli.bench.peers import PEERS, Peer
from holdfast.cli.bench.selection import Selection
from holdfast.cli.bench.session import Job, run
from holdfast.cli.bench.subject import HoldfastRunner

from .test_bench_command import empty

CPU = torch.device("cpu")
SCAN_PEER = next(peer for peer in PEERS if peer.name == "accelerated-scan scalar")
SCAN = Case("rglru", (("B", 1), ("T", 4), ("D", 8)))
LONGER = SCAN.with_sizes({"B": 1, "T": 8, "D": 8})
TRAINED = Case("rglru", (("B", 1), ("T", 4), ("D", 8)), passes="fwd+bwd")


@pytest.fixture
def asked(monkeypatch):
    """Calls of first_call, which here answers at once."""
    calls = []

    def answer(case, runner, device, folder, limit):
        (folder / "triton").mkdir(parents=True)
        calls.append((case, runner.name))
        return First(None, "it crashed") if "reference" in runner.name else First(1.5)

    monkeypatch.setattr(cold, "first_call", answer)
    # as on a machine with a GPU
    monkeypatch.setattr(Peer, "refusal", lambda self, case, device: "")
    return calls


def test_what_is_refused_has_no_first_call(asked, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(cold, "first_call", lambda *arguments: pytest.fail("it was called"))
    assert first_calls([SCAN], CPU, Selection.of("accelerated-scan, holdfast triton"), 1) == {}


def test_one_first_call_for_each_set_of_kernels(asked):
    lines, wider = [], SCAN.with_sizes({"B": 1, "T": 4, "D": 16})
    found = first_calls([SCAN, LONGER, wider, TRAINED], CPU, Selection.of("holdfast chunked"), 2, each=lines.append)
    assert found == {(case, "holdfast chunked"): First(1.5) for case in (SCAN, wider, TRAINED)}
    assert "rglru B1 T4 D8 fwd holdfast chunked: 1.5 s" in lines


def test_a_run_that_goes_on_asks_for_what_is_left(asked):
    done = {(SCAN, "holdfast chunked"), (LONGER, "holdfast chunked")}
    found = first_calls([SCAN, LONGER, TRAINED], CPU, Selection.of("holdfast chunked"), 1, done)
    assert list(found) == [(TRAINED, "holdfast chunked")]


def test_an_extension_holds_both_passes(asked):
    first_calls([SCAN, TRAINED], CPU, Selection.of("accelerated-scan"), 1)
    assert asked == [
        (TRAINED, "accelerated-scan scalar"),
        (SCAN, "accelerated-scan warp"),
        (SCAN, "accelerated-scan scalar"),
    ]


def test_one_that_compiles_for_each_size_has_a_first_call_in_each_and_starts_first(asked):
    cells = [Case("lstm", (("B", B), ("T", 4), ("H", 1), ("D", 8))) for B in (1, 2)]
    found = first_calls(cells, CPU, Selection.of("flashrnn triton_fused, holdfast loop"), 1)
    assert list(found) == [
        (cells[0], "flashrnn triton_fused"),
        (cells[1], "flashrnn triton_fused"),
        (cells[0], "holdfast loop"),
    ]


def test_a_first_call_that_ends_its_process_is_not_repeated_here(asked, roof, tmp_path):
    wanted = Selection.of("holdfast chunked, holdfast reference")
    firsts = first_calls([SCAN, LONGER], CPU, wanted, 1)
    assert died(firsts, LONGER, HoldfastRunner("reference")) == "it crashed"
    record = run(Job((SCAN, LONGER), CPU, wanted, firsts=firsts), empty(roof), tmp_path / "a.json")
    assert [(row.runner, row.status, row.first_call_s) for row in record.rows if row.runner != "holdfast triton"] == [
        ("holdfast chunked", "ok", 1.5),
        ("holdfast reference", "failed", None),
        ("holdfast chunked", "ok", None),
        ("holdfast reference", "failed", None),
    ]


def test_what_children_compiled_is_there_for_this_process(asked, monkeypatch, tmp_path):
    knobs = pytest.importorskip("triton").knobs

    def compiles(case, runner, device, folder, limit):
        kernel = folder / "triton" / str(dict(case.sizes)["D"]) / "kernel.cubin"
        kernel.parent.mkdir(parents=True)
        kernel.write_text(case.op)
        cubin = folder / "home" / ".cache" / "holdfast" / "cubins" / "1.cubin"
        cubin.parent.mkdir(parents=True)
        cubin.write_text(case.op)
        return First(1.0)

    monkeypatch.setattr(cold, "first_call", compiles)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "mine"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(knobs.autotuning, "cache", False)
    (tmp_path / "mine" / "8").mkdir(parents=True)
    first_calls([SCAN, SCAN.with_sizes({"B": 1, "T": 4, "D": 16})], CPU, Selection.of("holdfast chunked"), 2)
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["16", "8"]
    assert (tmp_path / "mine" / "8" / "kernel.cubin").read_text() == "rglru"
    assert knobs.autotuning.cache
    assert (tmp_path / ".cache" / "holdfast" / "cubins" / "1.cubin").read_text() == "rglru"


@pytest.mark.slow
def test_a_child_says_how_long_its_first_call_took(tmp_path):
    first = first_call(SCAN, HoldfastRunner("chunked"), CPU, tmp_path, 120)
    assert first.died == ""
    assert 0 < first.seconds < 60


@pytest.mark.slow
def test_a_child_without_a_first_call(tmp_path, monkeypatch):
    # refused is no death
    refused = first_call(SCAN, SCAN_PEER, CPU, tmp_path / "1", 120)
    assert refused == First(None, why=refused.why)
    assert "GPU" in refused.why
    slow = first_call(SCAN, HoldfastRunner("chunked"), CPU, tmp_path / "2", 0.01)
    assert slow.died == "the first call took more than 0 s"
    monkeypatch.setattr(cold.sys, "executable", str(Path(__file__).parent / "no_such_python"))
    gone = first_call(SCAN, HoldfastRunner("chunked"), CPU, tmp_path / "3", 120)
    assert "ended its process: exit status 127" in gone.died


@pytest.fixture
def child(monkeypatch):
    """Answers in the place of the child process; what it was started with."""
    found = SimpleNamespace(returncode=0, stdout='noise\n{"seconds": 2.5}\n', stderr="", raises=None)

    def run(line, timeout, **options):
        assert options == {"capture_output": True, "text": True}
        found.line, found.timeout = line, timeout
        if found.raises:
            raise found.raises
        return found

    monkeypatch.setattr(cold.subprocess, "run", run)
    monkeypatch.setattr(cold, "_extensions", lambda: {Path("old")})
    return found


def test_a_child_gets_caches_of_its_own(child, tmp_path):
    assert first_call(SCAN, HoldfastRunner("chunked"), CPU, tmp_path, 7.0) == First(2.5)
    given = dict(word.split("=", 1) for word in child.line[1:] if "=" in word)
    assert {name: given[name] for name in cold.CACHES} == {n: str(tmp_path / p) for n, p in cold.CACHES.items()}
    assert all((tmp_path / place).is_dir() for place in cold.CACHES.values())
    assert (given["TRITON_CACHE_AUTOTUNING"], child.timeout) == ("1", 7.0)
    assert child.line[-3:-1] == ["-m", "holdfast.cli.bench.first_call"]


def test_an_extension_is_built_where_it_stays_and_counts_only_if_it_was_not_there(child, tmp_path, monkeypatch):
    peer = next(peer for peer in PEERS if peer.extension)
    assert first_call(SCAN, peer, CPU, tmp_path / "1", 7.0) == First(None, why="its extension was there already")
    given = {word.split("=", 1)[0] for word in child.line[1:] if "=" in word}
    assert not given & set(cold.LEADS_TO_EXTENSIONS)
    assert "TRITON_CACHE_DIR" in given
    built = iter([{Path("old")}, {Path("old"), Path("new")}])
    monkeypatch.setattr(cold, "_extensions", lambda: next(built))
    assert first_call(SCAN, peer, CPU, tmp_path / "2", 7.0) == First(2.5)


ENDED = "the first call ended its process: "


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"stdout": '{"refused": "needs a GPU"}'}, First(None, why="needs a GPU")),
        ({"raises": cold.subprocess.TimeoutExpired("", 7)}, First(None, "the first call took more than 7 s")),
        ({"returncode": -11, "stderr": "one\nlast\n"}, First(None, f"{ENDED}signal SIGSEGV last")),
        ({"returncode": -1, "stderr": "x" * 400}, First(None, f"{ENDED}signal SIGHUP {'x' * 300}"[:300])),
        ({"returncode": 3}, First(None, f"{ENDED}exit status 3 ")),
    ],
)
def test_how_a_child_ended(child, answer, expected, tmp_path):
    vars(child).update(answer)
    assert first_call(SCAN, HoldfastRunner("chunked"), CPU, tmp_path, 7.0) == expected


def test_a_first_call_may_take_four_minutes_and_both_passes_start_before_one(monkeypatch):
    asked = []

    def answer(case, runner, device, folder, limit):
        (folder / "triton").mkdir(parents=True)
        asked.append((case.passes, limit))
        return First(None, why="no")

    monkeypatch.setattr(cold, "first_call", answer)
    lines = []
    host = replace(SCAN, kind="host")
    first_calls([SCAN, host, TRAINED], CPU, Selection.of("holdfast chunked"), 1, each=lines.append)
    assert asked == [("fwd+bwd", 240.0), ("fwd", 240.0)]
    assert lines[0].endswith("holdfast chunked: not measured: no")


def test_only_what_died_is_not_run_again():
    runner = HoldfastRunner("chunked")
    found = {(SCAN, "holdfast chunked"): First(None, why="refused"), (SCAN, "other"): First(None, "it crashed")}
    assert died(found, SCAN, runner) == ""
    found[SCAN, "holdfast chunked"] = First(None, "it crashed")
    assert died(found, LONGER, runner) == "it crashed"
    assert died(found, TRAINED, runner) == ""
