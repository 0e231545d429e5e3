"""holdfast bench as a user runs it: results on disk, the page, and one clear line for each mistake."""

import json
import re
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.cli.bench import clock, live, page, plot
from holdfast.cli.bench.case import Case
from holdfast.cli.bench.groups import groups
from holdfast.cli.bench.peers import Peer
from holdfast.cli.bench.record import device_folder, read, write
from holdfast.cli.bench.roofs import Roofs, roofs
from holdfast.cli.bench.session import run
from holdfast.cli.bench.suites import SMALL, SUITES, scale

CPU = torch.device("cpu")
CASES = [Case("rglru", (("B", 1), ("T", T), ("D", 8)), "float32", "fwd", "rglru: length") for T in (16, 32)]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Two cases, measured once for all tests."""
    wanted, out = ["holdfast", "accelerated-scan warp"], tmp_path_factory.mktemp("run") / "a" / "b.json"
    roof = Roofs(copy_bandwidth=1e9, rates={"float32": 1e12}, copy_bytes=2**20, matrix_size=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "SECONDS", 0.01)
        return run("some", "Two <lengths>", "holdfast bench", CASES, CPU, roof, out, wanted)


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


def test_a_run_that_is_cut_short_leaves_what_it_has(roof, tmp_path):
    def stop(case, runner, result):
        if case == CASES[1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("some", "", "", CASES, CPU, roof, tmp_path / "a.json", ["holdfast chunked"], each=stop)
    left = read(tmp_path / "a.json")
    assert not left.complete
    assert [row.case for row in left.rows] == [str(CASES[0])]


def test_a_failed_write_leaves_the_old_file(record, tmp_path):
    path = tmp_path / "a" / "b.json"
    write(record, path)
    with pytest.raises(TypeError):
        write(replace(record, versions={"torch": object()}), path)
    assert read(path) == record
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]


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
    assert '<tr class="wrong"><td>holdfast new</td><td></td>' in text
    assert "wrong: off by &lt;much&gt;" in text
    assert text.count("accelerated-scan warp") >= 2
    assert "src=" not in text


def test_plots_stand_in_the_page_in_its_own_text_colour(record):
    pytest.importorskip("matplotlib")
    text = page.page([record])
    assert text.count("<svg") == 1
    assert "currentColor" in text
    assert "steps T" in text


def test_the_page_does_without_matplotlib(record, monkeypatch):
    monkeypatch.setattr(page, "can_plot", lambda: False)
    text = page.page([record])
    assert "matplotlib is not installed" in text
    assert "<svg" not in text
    assert str(CASES[0]) in text


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
        "holdfast.cli.bench.session.peers_of", lambda op: [Peer("gone", "no_such_file", needs_gpu=False)]
    )
    line = ["bench", "--op", "gla", "--shape", "B=1,T=20,H=1,K=4,V=4", "--dtype", "float32", "--device", "cpu"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert "holdfast chunked" in result.output
    assert "gone: missing: ModuleNotFoundError" in result.output
    saved = json.loads((tmp_path / "benchmarks/results/cpu/gla.json").read_text())
    assert saved["command"] == "holdfast " + " ".join(line)
    assert [row["passes"] for row in saved["rows"]] == ["fwd"] * 3 + ["fwd+bwd"] * 3
    (tmp_path / "benchmarks/results/cpu/other.json").write_text("{}")
    result = CliRunner().invoke(app, ["bench", "report"])
    assert result.exit_code == 0, result.output
    assert "from 1 file" in result.output
    assert "gla B1 T20 H1 K4 V4 float32 fwd" in (tmp_path / "benchmarks/results/report.html").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--suite", "smok"], "--suite: expected one of smoke, flashrnn"),
        (["--op", "glaa", "--shape", "B=1"], "op: expected one of elman"),
        (["--op", "gla", "--shape", "B=x"], "--shape: expected AXIS=SIZE"),
        (["--op", "gla", "--shape", "B=1"], "sizes: gla needs B, T, H, K, V; missing T, H, K, V"),
        (["--op", "rglru", "--shape", "B=1,T=2,D=4", "--dtype", "int8"], "--dtype: expected one of"),
        (["--suite", "flashrnn", "--device", "cpu"], "--suite flashrnn: made for a GPU; on cpu add --scaled"),
        (["--suite", "smoke", "--device", "cpu", "--graph"], "--graph: CUDA graphs need an NVIDIA GPU"),
        (["--suite", "smoke", "--op", "gla"], "expected either --suite NAME or --op NAME"),
        (["--suite", "smoke", "--device", "cpu", "--runners", "flaa"], "--runners: expected some of"),
        (["--suite", "smoke", "--device", "cpu", "--match", "T9"], "--match T9: no case of suite smoke has this text"),
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
    assert device_folder({"kind": "cuda", "name": "NVIDIA H200"}) == "nvidia-h200"
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
    assert text.count("<svg") == 2
    assert len(ids) == len(set(ids))
