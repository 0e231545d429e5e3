"""Which rows on disk may stand in a run: those of the same code on the same machine."""

import subprocess
from dataclasses import replace

import pytest

from holdfast.cli.bench import record as records
from holdfast.cli.bench.begun import Begun, keep, kept
from holdfast.cli.bench.case import Case
from holdfast.cli.bench.cold import First
from holdfast.cli.bench.live import _started
from holdfast.cli.bench.record import Record
from holdfast.cli.bench.result import of_case
from holdfast.cli.bench.roofs import Roofs
from holdfast.cli.bench.session import unfinished
from holdfast.cli.errors import UserError

ROOF = Roofs(copy_bandwidth=1e9, rates={"float32": 1e12}, copy_bytes=2**20, matrix_size=64)
RECORD = Record(
    suite="smoke",
    title="Small",
    command="holdfast bench --suite smoke",
    date="2026-01-01T00:00:00+00:00",
    commit="abc",
    device={"kind": "cuda", "name": "NVIDIA H200"},
    versions={"torch": "2.11", "triton": "3.6"},
    roofs=ROOF,
    rows=(),
)
OTHER = {
    "suite": "flashrnn",
    "command": "holdfast bench --suite smoke --pass fwd",
    "commit": "abc+changes",
    "device": {"kind": "cuda", "name": "NVIDIA H100"},
    "versions": {"torch": "2.11", "triton": "3.7"},
}


@pytest.mark.parametrize("name", OTHER)
def test_rows_of_another_run_are_not_taken_up(name):
    other = replace(RECORD, **{name: OTHER[name]})
    assert not RECORD.continues(other)
    assert not other.continues(RECORD)


def test_rows_of_the_same_run_are_whenever_it_began():
    later = replace(RECORD, date="2026-01-02T00:00:00+00:00", complete=False, roofs=replace(ROOF, copy_bandwidth=2e9))
    assert RECORD.continues(later)


CASE = Case("rglru", (("B", 1), ("T", 16), ("D", 8)), "float32", "fwd", "rglru: length")
BEGUN = Begun("2026-01-01T00:00:00+00:00", {(CASE, "holdfast chunked"): First(2.5)})


@pytest.mark.parametrize("name", sorted(OTHER.keys() - {"suite"}))
def test_first_calls_of_another_run_are_not_taken_up(tmp_path, name):
    path = tmp_path / "a.begun.json"
    keep(BEGUN, [RECORD], path)
    assert kept([replace(RECORD, **{name: OTHER[name]})], path) is None
    assert kept([RECORD, RECORD], path) is None


def test_first_calls_of_the_same_run_are(tmp_path):
    path = tmp_path / "a.begun.json"
    assert kept([RECORD], path) is None
    keep(BEGUN, [RECORD], path)
    assert kept([RECORD], path) == BEGUN


@pytest.mark.parametrize(
    ("status", "head", "said"), [("", 0, "1a2b3c"), (" M a.py\n", 0, "1a2b3c+changes"), ("", 128, "")]
)
def test_the_commit_tells_of_changes(monkeypatch, status, head, said):
    def git(line, **options):
        assert (line[:2], options) == (["git", "-C"], {"capture_output": True, "text": True})
        if "rev-parse" in line:
            return subprocess.CompletedProcess(line, head, "1a2b3c\n", "")
        return subprocess.CompletedProcess(line, 0, status, "")

    monkeypatch.setattr(records.subprocess, "run", git)
    assert records.commit() == said


def test_without_git_there_is_no_commit(monkeypatch):
    def missing(line, **options):
        raise FileNotFoundError("git")

    monkeypatch.setattr(records.subprocess, "run", missing)
    assert records.commit() == ""


def test_the_date_is_in_utc():
    assert records.now().endswith("+00:00")


def test_a_file_that_lacks_something_is_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"format": "holdfast-bench-1", "rows": [], "roofs": {}}')
    with pytest.raises(ValueError, match=r"a\.json: not a whole result of holdfast bench"):
        records.read(path)
    path.write_text('{"format": "holdfast-bench-0"}')
    with pytest.raises(ValueError, match="expected a file of holdfast bench, of format holdfast-bench-1"):
        records.read(path)


class Said:
    """In the place of a console."""

    def __init__(self):
        self.lines = []

    def print(self, line, **options):
        self.lines.append(line)


def started(tmp_path, draft=None, whole=None, since="", fresh=False):
    """What a run begins with where these are on disk, and what is said."""
    out, said = tmp_path / "a.json", Said()
    for found, path in ((draft, unfinished(out)), (whole, out)):
        if found is not None:
            records.write(found, path)
    return _started(RECORD, out, since, fresh, said), said.lines


ROW = of_case(CASE, "holdfast chunked", "ok")
BEFORE = replace(
    RECORD, date="2025-12-31T00:00:00+00:00", roofs=replace(ROOF, copy_bandwidth=2e9), rows=(ROW,), first_calls="cold"
)


def test_a_run_goes_on_with_the_rows_and_the_roofs_that_they_were_held_against(tmp_path):
    found, (said,) = started(tmp_path, BEFORE)
    assert (found.rows, found.roofs, found.first_calls, found.date) == (
        BEFORE.rows, BEFORE.roofs, "cold", RECORD.date,
    )  # fmt: skip
    assert said.startswith("1 row is there from a run that was cut short")
    assert started(tmp_path, replace(BEFORE, rows=(ROW, ROW)))[1][0].startswith("2 rows are there")
    assert started(tmp_path, fresh=True) == (RECORD, [])


def test_nothing_is_taken_up_from_another_commit_or_from_a_run_that_ended(tmp_path):
    with pytest.raises(UserError, match="unfinished run of another command, commit or device"):
        started(tmp_path, replace(BEFORE, commit="def"))
    unfinished(tmp_path / "a.json").unlink()
    assert started(tmp_path, whole=BEFORE) == (RECORD, [])
    # a suite of this very run, which another process finished
    assert started(tmp_path, since=BEFORE.date)[0].rows == BEFORE.rows
    assert started(tmp_path, since="2026-01-01T00:00:01+00:00") == (RECORD, [])
    assert started(tmp_path, whole=replace(BEFORE, commit="def"), since=BEFORE.date) == (RECORD, [])
