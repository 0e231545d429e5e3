"""Which files are read, how they are split, and which windows are drawn from them."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli import text as texts
from holdfast.cli.errors import UserError


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "folder"
    for place in ("a.py", "b.md", "sub/c.txt", "sub/d.bin", ".git/e.py", "__pycache__/f.py", ".g.py"):
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {place}\n" * 20)
    return root


def test_a_folder_is_walked_without_hidden_files_and_caches(folder):
    assert list(texts.find_files(folder)) == ["a.py", "b.md", "sub/c.txt"]


def test_globs_match_names_or_places(folder):
    assert list(texts.find_files(folder, ("*.bin", "*.md"))) == ["b.md", "sub/d.bin"]
    assert list(texts.find_files(folder, ("sub/*",))) == ["sub/c.txt", "sub/d.bin"]


@given(st.sets(st.text("abc/", min_size=1, max_size=6), min_size=2, max_size=30))
def test_both_parts_get_a_file(names):
    places = sorted(names)
    chosen = texts.validation_places(places)
    assert chosen
    assert chosen < set(places)


def test_the_split_is_by_hash_of_the_place():
    places = [f"package/module{n}.py" for n in range(400)]
    chosen = texts.validation_places(places)
    # another hash would hold out what a checkpoint has been trained on
    assert texts._digest("package/module0.py") == 495642140861258739
    assert 20 <= len(chosen) <= 60
    assert texts.validation_places(places[::-1]) == chosen
    assert texts.validation_places([*places, "package/new.py"]) - {"package/new.py"} == chosen


@pytest.mark.parametrize(("digests", "chosen"), [((10, 30, 20), "ac"), ((13, 12, 14), "b"), ((13, 20, 14), "b")])
def test_neither_part_is_ever_empty(monkeypatch, digests, chosen):
    """Multiples of ten are held out: of all files all but that of the largest, of none the one of the least."""
    numbers = dict(zip("abc", digests, strict=True))
    monkeypatch.setattr(texts, "_digest", numbers.__getitem__)
    assert texts.validation_places(list(numbers)) == set(chosen)


def test_a_folder_is_split_by_file(folder):
    text = texts.read_text(str(folder))
    whole = bytes(text.train) + bytes(text.validation)
    assert (text.train_files, text.validation_files) == (2, 1)
    for place in ("a.py", "b.md", "sub/c.txt"):
        content = (folder / place).read_bytes() + texts.SEPARATOR
        assert (content in bytes(text.train)) != (content in bytes(text.validation))
    assert len(whole) == sum((folder / place).stat().st_size + 1 for place in ("a.py", "b.md", "sub/c.txt"))


def test_one_file_is_cut_at_nine_tenths(text_file):
    text = texts.read_text(str(text_file))
    content = text_file.read_bytes()
    assert bytes(text.train) == content[:3600] + texts.SEPARATOR
    assert bytes(text.validation) == content[3600:] + texts.SEPARATOR


def test_the_fingerprint_of_a_text_stays_what_it_was():
    """A run that goes on compares it with what its checkpoint has."""
    arrays = [np.frombuffer(part, dtype=np.uint8) for part in (b"abc", b"de")]
    assert texts.fingerprint(arrays) == "bc342f17f0b59f88a89ab828e0244ec0"
    assert texts.fingerprint([np.frombuffer(b"abcde", dtype=np.uint8)]) != texts.fingerprint(arrays)


def test_the_fingerprint_sees_every_byte(folder):
    before = texts.read_text(str(folder)).fingerprint
    assert texts.read_text(str(folder)).fingerprint == before
    (folder / "a.py").write_text((folder / "a.py").read_text().replace("t", "u", 1))
    assert texts.read_text(str(folder)).fingerprint != before


def test_the_standard_library_is_the_default():
    text = texts.read_text(None)
    assert text.name == texts.STANDARD_LIBRARY
    assert len(text.train) > 2_000_000
    assert 0.03 < len(text.validation) / len(text.train) < 0.3
    both = bytes(text.train) + bytes(text.validation)
    assert b"class OrderedDict" in both
    assert b"site-packages" in both, "mentioned in site.py, though not read itself"


def test_batches_depend_on_seed_and_step_alone(text_file):
    text = texts.read_text(str(text_file))
    first = texts.training_batch(text, 3, 10, 4, 32)
    texts.training_batch(text, 3, 11, 4, 32)
    np.random.seed(0)
    assert (texts.training_batch(text, 3, 10, 4, 32) == first).all()
    assert first.shape == (4, 33)
    assert not (texts.training_batch(text, 3, 11, 4, 32) == first).all()
    assert not (texts.training_batch(text, 4, 10, 4, 32) == first).all()


def test_windows_are_pieces_of_the_text(text_file):
    text = texts.read_text(str(text_file))
    assert all(bytes(window) in bytes(text.train) for window in texts.training_batch(text, 0, 0, 8, 50))
    windows = texts.validation_windows(text, 50)
    assert windows.shape == (8, 51)
    assert all(bytes(window) in bytes(text.validation) for window in windows)


def counted(train, validation):
    """A text whose bytes are their own places."""
    return texts.Text("counted", np.arange(train), np.arange(validation), 1, 1, "")


def test_windows_reach_from_the_first_byte_to_the_last():
    windows = texts.validation_windows(counted(1, 220), 20)
    assert (np.diff(windows, axis=1) == 1).all()
    assert (windows[0, 0], windows[-1, -1]) == (0, 219)
    # as many as fit one after the other, evenly spread
    assert len(windows) == 10
    assert set(np.diff(windows[:, 0])) <= {22, 23}
    assert len(texts.validation_windows(counted(1, 2 * texts.VALIDATION_TOKENS), 64)) == texts.VALIDATION_TOKENS // 64
    assert texts.validation_windows(counted(1, 21), 20).tolist() == [list(range(21))]


def test_every_start_is_drawn_also_the_last():
    drawn = texts.training_batch(counted(13, 1), 0, 0, 200, 10)
    assert set(drawn[:, 0]) == {0, 1, 2}
    assert (np.diff(drawn, axis=1) == 1).all()


def test_a_window_may_be_the_whole_part(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 100)
    text = texts.read_text(str(path))
    texts.check_long_enough(text, 10)
    assert texts.validation_windows(text, 10).shape == (1, 11)
    with pytest.raises(UserError, match="its validation part has 11 bytes, and --length 11 needs 12"):
        texts.check_long_enough(text, 11)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"--text: cannot read .*nothing.txt: No such file or directory"):
        texts.read_text(str(tmp_path / "nothing.txt"))


def test_an_empty_file_is_named(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match=r"--text: .*a.txt is empty"):
        texts.read_text(str(tmp_path / "a.txt"))
    with pytest.raises(UserError, match=r"has only empty files that match text or source"):
        texts.read_text(str(tmp_path))


def test_a_folder_without_text_is_named(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"123")
    with pytest.raises(UserError, match=r"has no files that match \*\.rs"):
        texts.read_text(str(tmp_path), ("*.rs",))


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        texts.read_text(str(tmp_path / "pipe"))


@pytest.mark.parametrize("which", ["file", "folder"])
def test_an_unreadable_file_is_named(folder, monkeypatch, which):
    def refuse(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(texts.Path, "open", refuse)
    with pytest.raises(UserError, match=r"--text: cannot read .*a.py: Permission denied"):
        texts.read_text(str(folder / "a.py" if which == "file" else folder))
