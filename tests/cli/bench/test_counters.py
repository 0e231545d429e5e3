"""Hardware counters: what ncu's output amounts to, and what is said where there is none."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.cli.bench import counters, session
from holdfast.cli.bench.case import Case
from holdfast.cli.bench.child import request
from holdfast.cli.bench.counters import KERNEL, METRICS, SWEEP_BYTES, Counters, count, counted, summed
from holdfast.cli.bench.measure import measure
from holdfast.cli.bench.record import Record, read
from holdfast.cli.bench.result import of_case
from holdfast.cli.bench.sections import counters as section
from holdfast.cli.bench.selection import Selection
from holdfast.cli.bench.subject import HoldfastRunner

from .test_bench_command import empty

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SCAN = Case("rglru", (("B", 1), ("T", 4), ("D", 8)))
GLA = Case("gla", (("B", 1), ("T", 4), ("H", 1), ("K", 8), ("V", 8)), "float32", "fwd", state=True)
ROW = replace(of_case(SCAN, "holdfast chunked", "ok"), median_ms=1.0, predicted_bytes=1000, floor_bytes=900)


def line(*values: str) -> str:
    return ",".join(f'"{value}"' for value in values)


def profiled(failed: str = "") -> str:
    return json.dumps({"profiled": "a case", "failed": failed})


def output(sweep_read: int = SWEEP_BYTES) -> list[str]:
    """Of two kernels and the sweep, as ncu prints it: a line of units, digits in groups, other text between."""
    return [
        "==PROF== Connected to process 7",
        profiled(),
        line("ID", KERNEL, *METRICS),
        line("", "", "byte", "byte", "ns", "%"),
        line("0", "first", "1,000", "200", "100", "50"),
        line("1", "second", "10", "0", "300", "10.0"),
        line("2", "sweep", f"{sweep_read:,}", "3", "500", "0"),
    ]


def test_kernels_add_up_and_the_sweep_adds_what_it_drove_out():
    assert summed(output()) == [Counters(dram_bytes=1000 + 200 + 10 + 3, tensor_percent=20.0, kernels=2)]


def test_each_run_ends_with_its_sweep():
    # a kernel of the sweep's kind that reads something else belongs to the run
    second = [line("3", "sweep", "50", "5", "10", "0"), line("4", "sweep", f"{SWEEP_BYTES}", "7", "500", "0")]
    first, other = summed([*output(), *second])
    assert first.dram_bytes == 1213
    assert other == Counters(dram_bytes=50 + 5 + 7, tensor_percent=0.0, kernels=1)


def test_the_output_of_ncu_2025_on_an_h200(monkeypatch):
    # a copy that doubles 64 Mi floats, a 4096^3 product in bfloat16, and a sum over 2^29 bytes in two kernels
    monkeypatch.setattr(counters, "SWEEP_BYTES", 2**29)
    with (Path(__file__).parent / "ncu_output.csv").open() as file:
        (found,) = summed(file)
    assert found.kernels == 3
    assert found.dram_bytes == 268463104 + 260659200 + 84509952 + 50996736 + 268484608 + 518610176 + 27466240
    assert found.tensor_percent == pytest.approx(90.04 * 175328 / (127392 + 175328 + 230336))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "expected a line of units"),
        (output()[:4], "expected a line of units"),
        (output(sweep_read=SWEEP_BYTES // 2), f"expected the last kernel to read .*; it read {SWEEP_BYTES // 2}"),
        ([text.replace('"byte"', '"Mbyte"') for text in output()], "expected bytes"),
        ([text.replace("dram__bytes_read", "other") for text in output()], "expected a line of units"),
    ],
)
def test_other_output_is_a_value_error(lines, said):
    with pytest.raises(ValueError, match=said):
        summed(lines)


def answers(monkeypatch, returncode: int = 0, stdout: str = "", stderr: str = "") -> list[list[str]]:
    """Puts an ncu in place that says this; returns the commands that were run."""
    commands = []

    def run(command, timeout, **options):
        assert options == {"capture_output": True, "text": True}
        commands.append(command)
        return subprocess.CompletedProcess(command, returncode, stdout, stderr)

    monkeypatch.setattr(counters.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(counters.subprocess, "run", run)
    return commands


def test_rows_get_their_counters(monkeypatch):
    # the second of three cannot run, and the others have theirs
    said = [profiled(), profiled("RuntimeError: no"), *output(), line("3", "other", "50", "5", "10", "0")]
    said.append(line("4", "sweep", f"{SWEEP_BYTES}", "7", "500", "0"))
    commands = answers(monkeypatch, stdout="\n".join(said))
    rows = counted([ROW, ROW, ROW], GPU)
    assert [(row.dram_bytes, row.kernels, row.counters_note) for row in rows] == [
        (1213, 2, ""),
        (None, None, "RuntimeError: no"),
        (62, 1, ""),
    ]
    assert commands[0][0] == "/bin/ncu"
    assert ",".join(METRICS) in commands[0]


def test_what_is_missing_is_said(monkeypatch):
    assert count([ROW], CPU) == ["hardware counters need an NVIDIA GPU"]
    with monkeypatch.context() as patch:
        patch.setattr(counters.shutil, "which", lambda name: None)
        assert count([ROW], GPU) == ["ncu, Nsight Compute, is not installed"]
    answers(monkeypatch, 1, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")
    assert count([ROW], GPU) == ["this user is not permitted to read hardware counters"]
    answers(monkeypatch, 1, "", "Traceback\nRuntimeError: boom")
    assert count([ROW, ROW], GPU) == ["ncu failed: RuntimeError: boom"] * 2
    answers(monkeypatch, 0, profiled())
    assert count([ROW], GPU) == ["ncu: expected a line of units, one for each kernel and one for the sweep"]
    answers(monkeypatch, 0, profiled("it broke"))
    (row,) = counted([ROW], GPU)
    assert (row.dram_bytes, row.counters_note) == (None, "it broke")


@pytest.mark.parametrize(("read", "sweeps"), [(0.94, False), (0.96, True), (1.0, True), (1.04, True), (1.06, False)])
def test_a_sweep_is_known_by_the_bytes_that_it_reads(read, sweeps):
    """To a twentieth: the caches and what else is read make a little difference."""
    lines = output(sweep_read=round(read * SWEEP_BYTES))
    if sweeps:
        assert summed(lines)[0].dram_bytes == 1213
    else:
        with pytest.raises(ValueError, match="expected the last kernel to read"):
            summed(lines)


def test_the_time_that_counting_may_take_grows_with_what_is_counted(monkeypatch):
    given = []

    def run(line, timeout, **options):
        given.append(timeout)
        raise subprocess.TimeoutExpired(line, timeout)

    monkeypatch.setattr(counters.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(counters.subprocess, "run", run)
    assert count([ROW], GPU) == [f"ncu took more than {given[0]:.0f} s"]
    assert count([ROW] * 3, GPU) == [f"ncu took more than {3 * given[0]:.0f} s"] * 3
    assert (given[0] > 10, given[1]) == (True, 3 * given[0])


def test_one_failure_of_several_is_beside_its_row_and_a_missing_run_beside_all(monkeypatch):
    answers(monkeypatch, 0, "\n".join([profiled(), profiled(), *output()[2:]]))
    assert count([ROW, ROW], GPU) == ["ncu: fewer runs than were asked for"] * 2
    answers(monkeypatch, 0, "\n".join([profiled("no"), *output()]))
    assert count([ROW, ROW], GPU) == ["no", Counters(1213, 20.0, 2)]
    answers(monkeypatch, 0, "first\nsecond\nthird\nfourth")
    assert count([ROW], GPU) == ["ncu failed: second third fourth"]


def test_one_process_counts_for_all_records(monkeypatch, roof, tmp_path):
    asked = []

    def count_all(rows, device):
        asked.append([row.case for row in rows])
        return [replace(row, dram_bytes=7) for row in rows]

    monkeypatch.setattr(session, "counted", count_all)
    cases = (SCAN, SCAN.with_sizes({"B": 1, "T": 8, "D": 8}))
    finished, wanted = [], Selection.of("holdfast chunked")
    for n, case in enumerate(cases):
        out = tmp_path / f"{n}.json"
        finished.append((session.run(session.Job((SCAN, case), CPU, wanted), empty(roof), out), out))
    session.count(finished, Selection.of("holdfast@T8"), CPU)
    assert asked == [[str(cases[1])]]
    assert [[row.dram_bytes for row in read(out).rows] for _, out in finished] == [[None, None], [None, 7]]


def test_the_page_holds_them_against_the_prediction(roof):
    rows = [replace(ROW, dram_bytes=1100, tensor_percent=3.0, kernels=1), replace(ROW, counters_note="no ncu")]
    text = section(Record("some", "", "", "", "", {"name": "x"}, {}, roof, tuple(rows)))
    assert '<span class="good">1.10</span>' in text
    assert "No counters: no ncu." in text
    off = replace(rows[0], dram_bytes=1200)
    assert '<span class="bad">1.20</span>' in section(Record("some", "", "", "", "", {"name": "x"}, {}, roof, (off,)))


def test_the_child_is_asked_for_what_is_to_be_counted(monkeypatch, tmp_path):
    seen = []

    def run(line, **options):
        monkeypatch.setattr("sys.argv", line[line.index("holdfast.cli.bench.profiled") :])
        seen.append(request())
        return subprocess.CompletedProcess(line, 1, "", "boom")

    monkeypatch.setattr(counters.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(counters.subprocess, "run", run)
    mlstm = Case("mlstm", GLA.sizes, "bfloat16", "fwd+bwd", "a label", (("gating", "sigmoid"),))
    count([ROW, of_case(mlstm, "holdfast chunked", "ok"), of_case(GLA, "fla chunk", "ok")], GPU)
    ((wanted, device),) = seen
    assert device == GPU
    assert [(case, runner.name) for case, runner in wanted] == [
        (SCAN, "holdfast chunked"),
        (mlstm, "holdfast chunked"),
        (GLA, "fla chunk"),
    ]


@pytest.mark.gpu
def test_a_gpu_counts_the_bytes_of_a_scan(roof):
    if counters.shutil.which("ncu") is None:
        pytest.skip("needs ncu, Nsight Compute, on the path")
    case = Case("rglru", (("B", 8), ("T", 1024), ("D", 2048)), "bfloat16")
    (row,) = counted([measure(case, HoldfastRunner("chunked"), GPU, roof)], GPU)
    assert row.counters_note == ""
    assert row.dram_bytes > 0.9 * row.floor_bytes
