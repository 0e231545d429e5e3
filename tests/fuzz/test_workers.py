"""A worker that crashes or hangs is a row; the others, and the rest of the scenarios, go on."""

import json
import re
import sys
from types import SimpleNamespace

import pytest

from holdfast.fuzz import workers
from holdfast.fuzz.row import Row
from holdfast.fuzz.workers import Pool, _of_the_busy, allowed

# what the workers run in place of a scenario: words that they obey
OBEDIENT = """
import os, signal, time
from holdfast.fuzz.row import Row

def obey(line):
    if line == "exit":
        os._exit(7)
    if line == "fault":
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if line == "torn":
        print("Timeout (0:00:02)!", "Thread 0x1 (most recent call first):", sep=chr(10), flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if line == "hang":
        time.sleep(600)
    return Row(line, "crashed" if line == "spoil" else "right", str(os.getpid()), spoilt=line == "spoil")

def begin():
    return {"pid": os.getpid()}

def stillborn():
    raise AssertionError("no device")
"""


@pytest.fixture
def obedient(tmp_path, monkeypatch):
    """Importable in the workers too, which are given sys.path."""
    (tmp_path / "obedient.py").write_text(OBEDIENT)
    monkeypatch.syspath_prepend(tmp_path)
    import obedient

    yield obedient
    del sys.modules["obedient"]


def test_crashes_and_hangs_are_rows(obedient):
    lines = ["a", "exit", "b", "fault", "hang", "spoil", "c", "d"]
    pool = Pool(2, obedient.begin, obedient.obey, limit=2)
    rows = {row.line: row for row in pool.rows(lines)}
    assert sorted(rows) == sorted(lines)
    assert {rows[line].status for line in "abcd"} == {"right"}
    assert rows["exit"].status == "crashed"
    assert "status 7" in rows["exit"].detail
    assert rows["fault"].status == "crashed"
    assert "status -11" in rows["fault"].detail
    assert "last words" in rows["fault"].detail
    assert rows["hang"].status == "hung"
    assert "no answer in 2 s" in rows["hang"].detail
    assert "obey" in rows["hang"].detail  # where it hung
    assert rows["spoil"].status == "crashed"
    assert all(row.failed for row in rows.values() if row.line not in "abcd")
    assert pool.environment["pid"]


def test_a_worker_that_faults_while_it_writes_where_it_hangs_has_hung(obedient):
    """Python reads the stacks of threads that go on meanwhile, of compilers say, and may fault."""
    (row,) = Pool(1, obedient.begin, obedient.obey).rows(["torn"])
    assert row.status == "hung"
    assert "no answer in 57 s" in row.detail
    assert "status -11" in row.detail


STACKS = (
    "Timeout (0:00:57)! "
    'Thread 0x1 (most recent call first): File "futures/thread.py", line 89 in _worker File "python3.12/threading.py", '
    "line 1010 in run "
    'Thread 0x2 (most recent call first): File "python3.12/threading.py", line 359 in wait File "tqdm/_monitor.py", '
    "line 69 in run "
    'Thread 0x3 (most recent call first): File "nvidia/compiler.py", line 316 in make_ttgir'
)


def test_a_row_shows_the_threads_that_do_something():
    head, idle, *_, busy = re.split(r"(?=Thread )", STACKS)
    assert _of_the_busy(STACKS) == head + busy
    assert _of_the_busy(head + idle) == head + idle


def test_a_spoilt_process_is_not_used_again(obedient):
    first, second = Pool(1, obedient.begin, obedient.obey).rows(["spoil", "a"])
    assert first.detail != second.detail


def test_nothing_is_begun_after_the_time_is_over(obedient, monkeypatch):
    """By a clock that jumps over the end once there are three rows."""
    rows = []
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: 30.0 if len(rows) == 3 else 0.0))
    for row in Pool(1, obedient.begin, obedient.obey).rows((str(n) for n in range(10**9)), until=20.0):
        rows.append(row.line)
    assert rows == ["0", "1", "2"]


def test_workers_that_do_not_come_up_are_an_error(obedient):
    with pytest.raises(RuntimeError, match=r"workers do not come up; the last one said: .*no device"):
        list(Pool(1, obedient.stillborn, obedient.obey).rows(["a"]))


def test_a_compiled_scenario_may_take_longer():
    assert allowed("op=gla mode=compile", 60) == 180
    assert allowed("op=gla mode=plain", 60) == 60


def test_a_row_for_a_record_is_plain():
    kept = Row("op=gla", "wrong", error=float("inf")).plain()
    assert kept["line"] == "op=gla"
    assert json.loads(json.dumps(kept, allow_nan=False))["error"] == "inf"
