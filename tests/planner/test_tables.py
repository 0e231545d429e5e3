"""Tables of measured plans: what is written is read again, and what cannot be understood says what to do."""

import errno
import json
import os

import pytest

from holdfast.planner import Device, Plan, Problem, tables
from holdfast.planner.tables import Table, TableError, Timing, merged, path_of, read, write

PROBLEM = Problem("gla", "matrix", "bfloat16", (("B", 4), ("T", 4096)), frozenset({"needs_grad", "decay=vector"}))
OTHER = Problem("gla", "matrix", "bfloat16", (("B", 8), ("T", 4096)))
FAST, SLOW = Timing(Plan("triton", (("chunk", 64),)), 1e-4), Timing(Plan("triton", (("chunk", 16),)), 3e-4)
TABLE = Table("NVIDIA H200", 132, {"triton": "3.6.0"}, {(PROBLEM, "forward"): (FAST, SLOW), (OTHER, "backward"): ()})


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "tables" / "h200.json"
    write(path, TABLE)
    assert read(path) == TABLE
    assert TABLE.of(PROBLEM, "forward") == (FAST, SLOW)
    assert TABLE.of(PROBLEM, "backward") == ()
    write(path, Table("NVIDIA H200", None, {}))
    assert read(path) == Table("NVIDIA H200", None, {})
    assert [each.name for each in path.parent.iterdir()] == ["h200.json"]


def test_plans_come_fastest_first(tmp_path):
    path = tmp_path / "h200.json"
    write(path, Table("NVIDIA H200", 132, {}, {(PROBLEM, "forward"): (SLOW, FAST)}))
    assert read(path).of(PROBLEM, "forward") == (FAST, SLOW)


def test_an_entry_is_a_line(tmp_path):
    """So that a difference of two tables can be read."""
    path = tmp_path / "h200.json"
    write(path, TABLE)
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert all('"op": "gla"' in line for line in lines[1:3])


def test_a_failed_write_leaves_the_old_table(tmp_path, monkeypatch):
    path = tmp_path / "h200.json"
    write(path, TABLE)

    def broken(*arguments):
        raise OSError(errno.ENOSPC, "no space left", "a draft")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match=r"no space left: '.*h200.json'"):
        write(path, Table("NVIDIA H200", 132, {}))
    assert read(path) == TABLE
    assert len(list(tmp_path.iterdir())) == 1


def test_new_measurements_replace_old_ones_of_the_same_call():
    new = Table("NVIDIA H200", 132, {"triton": "3.7.0"}, {(PROBLEM, "forward"): (SLOW,)})
    both = merged(TABLE, new)
    assert both.of(PROBLEM, "forward") == (SLOW,)
    assert (OTHER, "backward") in both.timings
    assert both.versions == {"triton": "3.7.0"}
    assert merged(None, new) is new
    assert merged(TABLE, Table("NVIDIA H200", 16, {}, {})).timings == {}


def test_where_a_device_has_its_table():
    assert path_of(Device.named("h200")) == path_of(Device("cuda", "NVIDIA H200")) == tables.FOLDER / "h200.json"
    assert path_of(Device("cuda", "NVIDIA L40S")).name == "nvidia-l40s.json"
    assert path_of(Device.named("cpu")).name == "cpu.json"


def test_a_table_is_read_when_it_is_wanted_and_again_when_it_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    device = Device.named("h200")
    tables._read_once.cache_clear()
    assert tables.table_of(device) is None
    write(path_of(device), TABLE)
    assert tables.table_of(device) == TABLE
    with tables.instead(None):
        assert tables.table_of(device) is None
    tables._read_once.cache_clear()


def test_a_table_of_another_size_of_gpu_says_so():
    assert TABLE.mismatch(Device.named("h200")) is None
    assert TABLE.mismatch(Device.named("a100")) == "was measured with 132 SMs, this device has 108"
    assert TABLE.mismatch(Device.named("cpu")) is None


def changed(**changes):
    entry = {
        "op": "gla",
        "family": "matrix",
        "dtype": "bfloat16",
        "sizes": {"B": 4},
        "traits": [],
        "direction": "forward",
        "plans": [{"backend": "triton", "values": {"chunk": 64}, "seconds": 1e-4}],
    }
    return {"format": 1, "device": "NVIDIA H200", "sms": 132, "versions": {}, "entries": [entry | changes]}


def plans(**changes):
    return changed(plans=[{"backend": "triton", "values": {"chunk": 64}, "seconds": 1e-4} | changes])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not readable as JSON"),
        ("[]", "expected an object; got list"),
        ({"format": 2}, "has format 2, this Holdfast reads 1"),
        ({"format": 1}, "no 'sms'"),
        (changed() | {"sms": "many"}, "sms: expected an integer; got 'many'"),
        (changed() | {"device": 7}, "device: expected text; got 7"),
        (changed() | {"entries": 5}, "not iterable"),
        (changed(direction="sideways"), "direction 'sideways'"),
        (changed(sizes={"B": 4.0}), r"B: expected an integer; got 4\.0"),
        (changed(sizes=[4]), "no attribute 'items'"),
        (changed(traits=[3]), "trait: expected text; got 3"),
        (changed(plans=[{"backend": "triton", "values": {}}]), "no 'seconds'"),
        (plans(seconds=0), "seconds: expected a positive number; got 0"),
        (plans(seconds=float("nan")), "seconds: expected a positive number; got nan"),
        (plans(seconds="fast"), "seconds: expected a positive number; got 'fast'"),
        (plans(values={"chunk": True}), "chunk: expected an integer; got True"),
        (plans(backend=None), "backend: expected text; got None"),
    ],
)
def test_a_table_that_cannot_be_understood_says_what_to_do(tmp_path, content, said):
    path = tmp_path / "h200.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(TableError, match=said) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert "holdfast bench --tune" in str(caught.value)


def test_a_good_table_of_the_same_shape_is_read(tmp_path):
    """The one that the cases above are made from."""
    path = tmp_path / "h200.json"
    path.write_text(json.dumps(changed()))
    assert list(read(path).timings.values()) == [(FAST,)]


def test_tables_in_the_package_can_be_read():
    for path in sorted(tables.FOLDER.glob("*.json")):
        assert read(path).timings, path
