"""Curves for TensorBoard."""

import sys
from types import ModuleType

import pytest

from cli.tiny import TINY
from holdfast.cli import scalars, train_lm
from holdfast.cli.errors import UserError
from holdfast.cli.train_lm import train_language_model


@pytest.fixture
def written(monkeypatch):
    """What writers of a stand-in for torch.utils.tensorboard were given: folder, purge_step, and scalars by name."""
    made = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            self.found = {}
            made.append((folder, purge_step, self.found))

        def add_scalar(self, name, value, step):
            self.found.setdefault(name, {})[step] = value

        def close(self):
            self.found["closed"] = True

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return made


def train(folder, text=None, **more):
    given = dict(zip((x[2:] for x in TINY[::2]), TINY[1::2], strict=True))
    given = {name: int(x) if x.isdigit() else x for name, x in given.items() if name != "device"} if text else {}
    if text:
        given |= {"steps": 4, "validate_every": 2, "save_every": 2, "text": str(text)}
    return train_language_model(given, {}, "cpu", tensorboard=folder, **more)


def test_curves_of_a_run_and_of_one_that_goes_on(tmp_path, text_file, written, monkeypatch):
    monkeypatch.setattr(train_lm, "SAMPLE_TOKENS", 4)
    train(tmp_path / "a", text_file, out=tmp_path / "run")
    train(tmp_path / "a", resume=tmp_path / "run")
    (folder, first, found), (_, again, more) = written
    assert (folder, first, again) == (str(tmp_path / "a"), 0, 5)
    assert found.pop("closed") is more.pop("closed") is True
    assert more == {}
    assert {name: list(values) for name, values in found.items()} == {
        "validation/bits_a_byte": [0, 2, 4],
        "training/bits_a_byte": [1, 2, 3, 4],
        "learning_rate": [1, 2, 3, 4],
        "tokens_per_second": [1, 2, 3, 4],
    }
    assert found["learning_rate"][1] == pytest.approx(2e-3)
    assert found["learning_rate"][4] < found["learning_rate"][2]


def test_without_it_the_option_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="--tensorboard needs the tensorboard package: pip install tensorboard"):
        train(tmp_path, "/nowhere")


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.chdir(tmp_path)
    none = scalars.Scalars()
    none.add(1, {"a": 1.0})
    none.close()
    assert not any(tmp_path.iterdir())
