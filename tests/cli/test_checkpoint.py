"""A checkpoint file is whole or not there, and one that is neither is refused in one line."""

import errno
import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from holdfast.cli import checkpoint
from holdfast.cli.errors import UserError


def content(step: int) -> dict:
    return {"step": step, "model": {"w": torch.arange(2000.0) + step}}


@pytest.fixture
def saved(tmp_path):
    checkpoint.save(tmp_path, content(1))
    return tmp_path


def test_round_trip(saved):
    loaded = checkpoint.load(saved)
    assert loaded["step"] == 1
    assert loaded["model"]["w"].equal(content(1)["model"]["w"])


def test_the_folder_is_made(tmp_path):
    checkpoint.save(tmp_path / "a" / "b", content(1))
    assert checkpoint.load(tmp_path / "a" / "b")["step"] == 1


def test_only_the_checkpoint_stays(saved):
    checkpoint.save(saved, content(2))
    assert [path.name for path in saved.iterdir()] == [checkpoint.NAME]


def test_a_full_disk_leaves_the_previous_one(saved, monkeypatch):
    def fill(path, data):
        path.write_bytes(bytes(data)[:100])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_bytes", fill)
    with pytest.raises(UserError, match=r"cannot save .*: no space left .*; the previous checkpoint is intact"):
        checkpoint.save(saved, content(2))
    assert checkpoint.load(saved)["step"] == 1
    assert [path.name for path in saved.iterdir()] == [checkpoint.NAME]


def test_a_death_while_writing_leaves_the_previous_one(saved, monkeypatch):
    class Killed(BaseException):
        pass

    def die(path, data):
        path.write_bytes(bytes(data)[:100])
        raise Killed

    monkeypatch.setattr(checkpoint, "write_bytes", die)
    with pytest.raises(Killed):
        checkpoint.save(saved, content(2))
    monkeypatch.undo()
    assert checkpoint.load(saved)["step"] == 1
    checkpoint.save(saved, content(3))
    assert [path.name for path in saved.iterdir()] == [checkpoint.NAME]


def test_bytes_are_on_the_disk_before_the_name_is_and_then_the_name(tmp_path, monkeypatch):
    """A power cut after the rename must not leave an empty file under the checkpoint's name."""
    events = []
    flush, rename = os.fsync, os.replace

    def fsync(handle):
        where = Path(os.readlink(f"/proc/self/fd/{handle}"))
        events.append(("fsync", where.name, where.stat().st_size if where.is_file() else None))
        flush(handle)

    def replace(source, target):
        events.append(("replace", source.name, source.stat().st_size))
        rename(source, target)

    monkeypatch.setattr(checkpoint.os, "fsync", fsync)
    monkeypatch.setattr(checkpoint.os, "replace", replace)
    checkpoint.save(tmp_path, content(1))
    size = (tmp_path / checkpoint.NAME).stat().st_size
    partial = f"{checkpoint.NAME}.partial"
    assert events == [("fsync", partial, size), ("replace", partial, size), ("fsync", tmp_path.name, None)]
    # so few that Python would keep them
    checkpoint.write_bytes(tmp_path / "few", memoryview(b"few"))
    assert events[-1] == ("fsync", "few", 3)


def test_a_folder_that_cannot_be_opened_is_no_error(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checkpoint.os, "open", refuse)
    checkpoint.save(tmp_path, content(1))
    monkeypatch.undo()
    assert checkpoint.load(tmp_path)["step"] == 1


def test_no_handle_stays_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        checkpoint.save(tmp_path, content(1))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot save .*file/checkpoint.pt: "):
        checkpoint.save(tmp_path / "file", content(1))


def test_a_missing_checkpoint(tmp_path):
    with pytest.raises(UserError, match=r"no checkpoint to resume: .*checkpoint.pt does not exist"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
def test_a_truncated_checkpoint(saved, kept):
    path = saved / checkpoint.NAME
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if kept > 1 else int(len(whole) * kept)])
    with pytest.raises(UserError, match=r"checkpoint.pt is damaged"):
        checkpoint.load(saved)


def test_any_changed_byte_of_a_weight_is_noticed(saved):
    path = saved / checkpoint.NAME
    whole = bytearray(path.read_bytes())
    whole[whole.index(content(1)["model"]["w"].numpy().tobytes()) + 1001] ^= 1
    path.write_bytes(whole)
    with pytest.raises(UserError, match=r"is damaged: the checksum of .* does not match"):
        checkpoint.load(saved)


def test_text_is_no_checkpoint(saved):
    (saved / checkpoint.NAME).write_text("hello " * 100)
    with pytest.raises(UserError, match="is damaged or no checkpoint"):
        checkpoint.load(saved)


def test_another_archive_is_no_checkpoint(saved):
    with zipfile.ZipFile(saved / checkpoint.NAME, "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(UserError, match="is damaged or no checkpoint"):
        checkpoint.load(saved)


def test_other_torch_files_are_refused(saved):
    torch.save({"w": torch.ones(2)}, saved / checkpoint.NAME)
    with pytest.raises(UserError, match="is not a checkpoint of holdfast train lm"):
        checkpoint.load(saved)


def test_code_in_a_checkpoint_does_not_run(saved):
    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("code ran",))

    buffer = io.BytesIO()
    torch.save({"format": checkpoint.FORMAT, "x": Evil()}, buffer, pickle_module=pickle)
    (saved / checkpoint.NAME).write_bytes(buffer.getvalue())
    with pytest.raises(UserError, match=r"is damaged or no checkpoint: Weights only load failed.*$") as told:
        checkpoint.load(saved)
    # of PyTorch's advice the first line
    assert "\n" not in str(told.value)


def test_a_later_version_is_named(saved, monkeypatch):
    monkeypatch.setattr(checkpoint, "VERSION", 7)
    checkpoint.save(saved, content(1))
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"has format version 7; this version of holdfast reads 3"):
        checkpoint.load(saved)


def test_weights_that_do_not_fit_are_named(tmp_path):
    model = torch.nn.Linear(3, 4)
    checkpoint.check_fits(tmp_path, model.state_dict(), model)
    with pytest.raises(UserError, match=r"weight is \[4, 5\] in the file and \[4, 3\] in the model"):
        checkpoint.check_fits(tmp_path, model.state_dict() | {"weight": torch.ones(4, 5)}, model)
    with pytest.raises(UserError, match=r"bias is missing in the file"):
        checkpoint.check_fits(tmp_path, {"weight": model.weight}, model)
