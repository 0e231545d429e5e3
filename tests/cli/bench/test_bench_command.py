"""holdfast bench as a user runs it: results on disk, the page, and one clear line for each mistake."""

import json
import re
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.cli.bench import clock, live, page, plot, session
from holdfast.cli.bench.case import Case
from holdfast.cli.bench.cold import First
from holdfast.cli.bench.figure import can_plot
from holdfast.cli.bench.groups import groups
from holdfast.cli.bench.peers import Peer
from holdfast.cli.bench.record import Record, device_facts, device_folder, now, read, versions, write
from holdfast.cli.bench.roofs import Roofs, roofs
from holdfast.cli.bench.selection import Selection
from holdfast.cli.bench.session import Job, run, unfinished
from holdfast.cli.bench.suites import SMALL, SUITES, scale

CPU = torch.device("cpu")
CASES = [Case("rglru", (("B", 1), ("T", T), ("D", 8)), "float32", "fwd", "rglru: length") for T in (16, 32)]


def empty(roof: Roofs) -> Record:
    """A record of the cases below with no rows yet."""
    facts = device_facts(CPU)
    return Record("some", "Two <lengths>", "holdfast bench", now(), "abc", facts, versions(), roof, (), complete=False)


def job(wanted: str) -> Job:
    return Job(tuple(CASES), CPU, Selection.of(wanted))


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Two cases, measured once for all tests."""
    out = tmp_path_factory.mktemp("run") / "a" / "b.json"
    roof = Roofs(copy_bandwidth=1e9, rates={"float32": 1e12}, copy_bytes=2**20, matrix_size=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "SECONDS", 0.01)
        wanted = "holdfast chunked, holdfast reference, accelerated-scan warp"
        return run(job(wanted), empty(roof), out)


def test_results_are_read_as_written(record, tmp_path):
    assert [row.runner for row in record.rows] == [
        "holdfast chunked",
        "holdfast reference",
        "accelerated-scan warp",
    ] * 2
    assert {row.status for row in record.rows} == {"ok", "rejected"}
    write(record, tmp_path / "a" / "b.json")
    assert read(tmp_path / "a" / "b.json") == record
    assert record.complete
    assert record.versions["torch"] == torch.__version__
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.json"]


def stop_at(case, runner):
    """Interrupts a run where it is about to measure the runner in the case."""

    def each(now_case, now_runner, result):
        if result is None and (now_case, now_runner.name) == (case, runner):
            raise KeyboardInterrupt

    return each


def test_a_run_that_is_cut_short_leaves_every_row_and_no_earlier_file_is_lost(record, roof, tmp_path):
    out = tmp_path / "a.json"
    write(record, out)
    both = job("holdfast chunked, holdfast reference")
    with pytest.raises(KeyboardInterrupt):
        run(both, empty(roof), out, stop_at(CASES[1], "holdfast reference"))
    assert read(out) == record
    left = read(unfinished(out))
    assert not left.complete
    # the case that was cut in the middle keeps what it has too
    assert [(row.case, row.runner) for row in left.rows] == [
        (str(CASES[0]), "holdfast chunked"),
        (str(CASES[0]), "holdfast reference"),
        (str(CASES[1]), "holdfast chunked"),
    ]


def test_a_run_goes_on_where_it_stopped(roof, tmp_path):
    out, both = tmp_path / "a.json", job("holdfast chunked, holdfast reference")
    with pytest.raises(KeyboardInterrupt):
        run(both, empty(roof), out, stop_at(CASES[1], "holdfast reference"))
    first, measured = read(unfinished(out)), []
    record = run(both, first, out, lambda case, runner, result: measured.append(result))
    assert [row.runner for row in measured if row] == ["holdfast reference"]
    assert record.rows[:3] == first.rows
    assert len(record.rows) == 4
    assert record.complete
    assert read(out) == record
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def interrupted(monkeypatch, line):
    """Runs the command and stops it after its first row."""

    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(live, "_printer", lambda *arguments: lambda case, runner, result: result and stop())
        result = CliRunner().invoke(app, line)
    assert result.exit_code == 130
    assert "interrupted: what was measured is in" in result.output


def test_the_command_takes_up_its_own_unfinished_run_only(monkeypatch, tmp_path, roof):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(live, "roofs", lambda device: roof)
    line = ["bench", "--op", "rglru", "--shape", "B=1,T=20,D=4", "--dtype", "float32", "--device", "cpu"]
    line += ["--seconds", "0.01", "--runners", "holdfast chunked,holdfast reference", "--commit", "abc"]
    interrupted(monkeypatch, line)
    draft = tmp_path / "benchmarks/results/cpu/rglru.unfinished.json"
    assert len(read(draft).rows) == 1
    assert read(draft).commit == "abc"
    other = CliRunner().invoke(app, [*line, "--pass", "fwd"])
    assert other.exit_code != 0
    assert "unfinished run of another command" in str(other.exception)
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert "1 row is there from a run that was cut short" in result.output
    assert not draft.exists()
    assert len(read(tmp_path / "benchmarks/results/cpu/rglru.json").rows) == 4
    interrupted(monkeypatch, line)
    result = CliRunner().invoke(app, [*line, "--pass", "fwd", "--fresh"])
    assert result.exit_code == 0, result.output
    assert len(read(tmp_path / "benchmarks/results/cpu/rglru.json").rows) == 2


def breaks_at(monkeypatch, number):
    """The row of that number breaks the device; returns what the process would have been replaced by."""
    rows, replaced = [], []

    def lost(device):
        rows.append(device)
        return "an illegal memory access" if len(rows) == number else ""

    def execv(path, arguments):
        replaced.append(arguments)
        raise SystemExit(0)

    monkeypatch.setattr(session, "lost", lost)
    monkeypatch.setattr(session.os, "execv", execv)
    return replaced


def test_a_broken_device_is_a_row_and_another_process_goes_on_after_it(monkeypatch, tmp_path, roof):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(live, "roofs", lambda device: roof)
    first = First(2.5)
    monkeypatch.setattr(live, "first_calls", lambda cases, *rest, **more: {(cases[0], "holdfast chunked"): first})
    line = ["bench", "--suite", "smoke", "--match", "rglru", "--device", "cpu", "--seconds", "0.01", "--cold", "1"]
    line += ["--runners", "holdfast chunked,holdfast reference", "--commit", "abc", "--fresh"]
    replaced = breaks_at(monkeypatch, 2)
    monkeypatch.setattr(session.sys, "argv", ["holdfast", *line])
    result = CliRunner().invoke(app, line)
    assert "an illegal memory access" in result.output
    assert replaced == [[session.sys.executable, "-m", "holdfast", *line[:-1]]]
    draft = tmp_path / "benchmarks/results/cpu/smoke.unfinished.json"
    assert [(row.status, row.detail) for row in read(draft).rows] == [
        ("ok", ""),
        ("failed", "an illegal memory access"),
    ]
    # the new process: no first call is measured twice
    monkeypatch.setattr(live, "first_calls", lambda *rest, **more: pytest.fail("it had been measured"))
    result = CliRunner().invoke(app, line[:-1])
    assert result.exit_code == 0, result.output
    rows = read(tmp_path / "benchmarks/results/cpu/smoke.json").rows
    assert [row.status for row in rows] == ["ok", "failed", "ok", "ok"]
    assert rows[0].first_call_s == 2.5
    assert [path.name for path in (tmp_path / "benchmarks/results/cpu").iterdir()] == ["smoke.json"]


def test_suites_that_were_finished_are_not_measured_again_when_a_run_goes_on(monkeypatch, tmp_path, roof):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(live, "roofs", lambda device: roof)
    line = ["bench", "--suite", "proposal-057,mlx-recurrence", "--scaled", "--match", "rotlru", "--device", "cpu"]
    line += ["--seconds", "0.01", "--runners", "holdfast chunked", "--commit", "abc"]
    breaks_at(monkeypatch, 3)
    monkeypatch.setattr(session.sys, "argv", ["holdfast", *line])
    CliRunner().invoke(app, line)
    folder = tmp_path / "benchmarks/results/cpu"
    done = read(folder / "proposal-057-scaled.json").rows
    assert len(done) == 2
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert read(folder / "proposal-057-scaled.json").rows == done
    # and are, when it had come to its end
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert read(folder / "proposal-057-scaled.json").rows != done
    assert [row.status for row in read(folder / "mlx-recurrence-scaled.json").rows] == ["ok", "ok"]


def test_a_failed_write_leaves_the_old_file(record, tmp_path):
    path = tmp_path / "a" / "b.json"
    write(record, path)
    with pytest.raises(TypeError):
        write(replace(record, versions={"torch": object()}), path)
    assert read(path) == record
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]


def test_a_place_that_cannot_be_written_is_named_as_it_was_given(record, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/b\.json'$"):
        write(record, tmp_path / "file" / "b.json")


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"x\.json: expected a file of holdfast bench"):
        read(path)


def test_the_page_shows_every_case_and_row(record):
    wrong = replace(record.rows[0], status="wrong", detail="off by <much>", median_ms=None, runner="holdfast new")
    text = page.page([replace(record, rows=(*record.rows, wrong))])
    for case in CASES:
        assert str(case) in text
    assert "Two &lt;lengths&gt;" in text
    assert '<tr class="wrong ours"><td>holdfast new</td><td></td>' in text
    assert "wrong: off by &lt;much&gt;" in text
    assert text.count("accelerated-scan warp") >= 2
    assert "src=" not in text


def test_plots_stand_in_the_page_in_its_own_text_colour(record):
    pytest.importorskip("matplotlib")
    text = page.page([record])
    # the roofline, and the one group
    assert text.count("<svg") == 2
    assert "currentColor" in text
    assert "steps T" in text


def test_the_page_does_without_matplotlib(record, monkeypatch):
    monkeypatch.setattr(page, "can_plot", lambda: False)
    text = page.page([record])
    assert "matplotlib is not installed" in text
    assert "<svg" not in text
    assert str(CASES[0]) in text


def test_records_of_one_suite_are_told_apart(record):
    part = replace(record, rows=record.rows[:3], date="2020-01-02T03:04:05+00:00")
    text = page.page([record, part])
    name = f"some on {record.device['name']}"
    assert f"<h2>{name}, rglru, 2020-01-02 03:04</h2>" in text
    assert text.count("All of it was measured again") == 1
    assert '<a href="#r0">' in text[text.index("All of it was measured again") :]
    # the later one has not all that the earlier one has
    later = replace(part, date="2999-01-01T00:00:00+00:00")
    assert "measured again" not in page.page([record, later])
    assert f"<h2>{name}</h2>" in page.page([record])


def test_groups_know_their_axis(record):
    (group,) = groups(record.rows)
    assert group.axis() == "T"
    assert [len(rows) for rows in group.cases()] == [3, 3]
    same_length = [replace(row, sizes=row.sizes | {"T": 16, "B": row.sizes["T"]}) for row in record.rows]
    assert groups(same_length)[0].axis() == "B"
    assert groups(record.rows[:3])[0].axis() is None


def test_bench_then_report(monkeypatch, tmp_path, roof):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(live, "roofs", lambda device: roof)
    monkeypatch.setattr(
        "holdfast.cli.bench.selection.peers_of", lambda op: [Peer("gone", "no_such_file", needs_gpu=False)]
    )
    line = ["bench", "--op", "gla", "--shape", "B=1,T=20,H=1,K=4,V=4", "--dtype", "float32", "--device", "cpu"]
    line += ["--seconds", "0.01"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert "holdfast chunked" in result.output
    assert "gone: missing: ModuleNotFoundError" in result.output
    saved = json.loads((tmp_path / "benchmarks/results/cpu/gla.json").read_text())
    assert saved["command"] == "holdfast " + " ".join(line)
    rows = [row["passes"] for row in saved["rows"] if row["runner"] in ("holdfast chunked", "gone")]
    assert rows == ["fwd"] * 2 + ["fwd+bwd"] * 2
    (tmp_path / "benchmarks/results/cpu/other.json").write_text("{}")
    result = CliRunner().invoke(app, ["bench", "report"])
    assert result.exit_code == 0, result.output
    assert result.output.endswith("from 1 file\n")
    assert ("matplotlib is not installed" in result.output) == (not can_plot())
    again = CliRunner().invoke(app, ["bench", "report", *["benchmarks/results/cpu/gla.json"] * 2])
    assert again.output.endswith("from 2 files\n")
    assert "gla B1 T20 H1 K4 V4 float32 fwd" in (tmp_path / "benchmarks/results/report.html").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--suite", "smok"], "--suite: expected one of models, smoke, flashrnn"),
        (["--op", "glaa", "--shape", "B=1"], "op: expected one of elman"),
        (["--op", "gla", "--shape", "B=x"], "--shape: expected AXIS=SIZE"),
        (["--op", "gla", "--shape", "B=1"], "sizes: gla needs B, T, H, K, V; missing T, H, K, V"),
        (["--op", "rglru", "--shape", "B=1,T=2,D=4", "--dtype", "int8"], "--dtype: expected one of"),
        (["--suite", "flashrnn", "--device", "cpu"], "--suite flashrnn: made for a GPU; on cpu add --scaled"),
        (["--suite", "smoke", "--device", "cpu", "--graph"], "--graph: CUDA graphs need an NVIDIA GPU"),
        (["--suite", "smoke", "--op", "gla"], "expected either --suite NAME or --op NAME"),
        (["--suite", "smoke", "--device", "cpu", "--runners", "flaa"], "--runners: expected some of"),
        (["--suite", "smoke", "--device", "cpu", "--counters", "flaa"], "--counters: expected some of"),
        (["--suite", "smoke,flashrnn", "--out", "x.json"], "--out: one file holds one suite"),
        (["--suite", "smoke", "--device", "cpu", "--match", "T9"], "--match T9: no case of suite smoke has this text"),
        (["--suite", "smoke", "--device", "cpu", "--runners", "fla@T9"], "--runners: none of these runs in any"),
        (["--suite", "smoke", "--dtype", "float16"], "--dtype: has no meaning with --suite"),
        (["--op", "gla", "--shape", "B=1,B=2"], "--shape: expected each axis once; got B=1 and B=2"),
        (["--op", "gla", "--scaled"], "--scaled: has no meaning with --op"),
        (["--op", "gla", "--tune", "--graph"], "--graph: has no meaning with --tune"),
        (["report", "nothing.json"], "nothing.json"),
        (["report"], "no results under"),
    ],
)
def test_a_mistake_is_one_line(options, said, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["holdfast", "bench", *options])
    from holdfast.cli.app import run as run_app

    with pytest.raises(SystemExit) as stopped:
        run_app()
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.startswith("holdfast: ")
    assert said in error
    assert error.count("\n") == 1


def test_help_does_not_import_torch(command):
    import subprocess
    import sys

    _, environment = command
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom holdfast.cli.app import app\n"
        "assert 'report' in CliRunner().invoke(app, ['bench', '--help']).output\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_a_suite_has_distinct_cases_that_can_be_posed(suite):
    cases = suite.cases()
    assert len(set(cases)) == len(cases)
    for case in cases:
        arguments = case.arguments("meta")
        assert case.work.output(arguments).dtype == case.torch_dtype
    assert all(size <= SMALL[axis] for case in suite.cases(scaled=True) for axis, size in case.sizes)
    assert len(set(suite.cases(scaled=True))) <= len(cases)


def test_scaling_keeps_the_op_and_the_pass():
    big = SUITES["proposal-039"].cases()[0]
    small = scale(big)
    assert (small.op, small.passes, small.options) == (big.op, big.passes, big.options)


def test_a_gpu_has_a_folder_of_its_own():
    assert device_folder({"kind": "cuda", "name": "NVIDIA H200"}) == "h200"
    assert device_folder({"kind": "cuda", "name": "NVIDIA T4 (small)"}) == "nvidia-t4-small"
    assert device_folder({"kind": "cpu", "name": "Some CPU @ 2 GHz"}) == "cpu"


def test_runners_keep_their_colour(record):
    pytest.importorskip("matplotlib")
    (group,) = groups(record.rows)
    one, two = (plot.draw(group, runners, "s") for runners in (["holdfast chunked"], ["x", "holdfast chunked"]))
    assert one != two


def test_roofs_are_measured():
    found = roofs(CPU, copy_bytes=2**20, matrix_size=32)
    assert found.copy_bandwidth > 0
    assert set(found.rates) == {"bfloat16", "float32"}


def test_ops_do_not_share_a_plot(record):
    other = [replace(row, op="hgrn") for row in record.rows]
    assert [len(group.rows) for group in groups([*record.rows, *other])] == [6, 6]


def test_ids_of_plots_are_their_own(record):
    pytest.importorskip("matplotlib")
    other = [replace(row, label="again") for row in record.rows]
    text = page.page([replace(record, rows=(*record.rows, *other))])
    # markers and clips have ids made from what they draw and from the plot's own salt
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert text.count("<svg") == 3
    assert len(ids) == len(set(ids))
