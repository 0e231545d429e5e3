"""Files are written whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from holdfast.planner import whole_file
from holdfast.planner.whole_file import write_text


def test_folders_are_made_and_text_is_utf_8(tmp_path):
    path = tmp_path / "a" / "b" / "c.txt"
    write_text(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    write_text(path, "other")
    assert path.read_text() == "other"
    assert os.listdir(path.parent) == ["c.txt"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize("broken", ["replace", "chmod"])
def test_what_fails_leaves_the_old_file_alone(tmp_path, monkeypatch, broken):
    path = tmp_path / "c.txt"
    write_text(path, "old")

    def fail(*arguments):
        raise OSError(28, "No space left on device", "another")

    monkeypatch.setattr(whole_file.os, broken, fail)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_text(path, "new")
    # this file's name, not the draft's
    assert (caught.value.filename, caught.value.errno) == (str(path), 28)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["c.txt"]


def test_a_death_in_between_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "c.txt"
    write_text(path, "old")

    def die(draft, target):
        # all is written by now, in the same folder, so that the rename is one step
        assert Path(draft).read_text() == "new"
        assert Path(draft).parent == tmp_path
        raise KeyboardInterrupt

    monkeypatch.setattr(whole_file.os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["c.txt"]
