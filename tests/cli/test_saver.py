"""Checkpoints of several ranks: whole or not there, whatever happens while they are written beside training."""

import resource
import shutil
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from holdfast.cli import checkpoint, shards
from holdfast.cli.errors import UserError
from holdfast.cli.ranks import ALONE, Ranks
from holdfast.cli.saver import Kept, Saver


@pytest.fixture(autouse=True)
def _group(tmp_path_factory):
    """Of one rank, which takes itself for the first of two."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Training(SimpleNamespace):
    """Of a model whose weights are the number of its steps."""

    def __init__(self, ranks=None, restored=None):
        ranks = ranks or Ranks(dp=2)
        model = torch.nn.Linear(30, 40)
        super().__init__(ranks=ranks, model=model, optimizer=torch.optim.AdamW(model.parameters(), 0.1), step=0)
        self.restored = restored
        self.take(0)

    def take(self, step):
        if step:
            self.model(torch.ones(2, 30)).sum().backward()
            self.optimizer.step()
        self.step = step
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.fill_(step)

    def head(self):
        return {"step": self.step}

    def state(self):
        return self.head() | {"model": self.model.state_dict(), "optimizer": {}, "shards": None}

    def load(self, folder):
        """What the folder's checkpoint holds; returns its step and the weights."""
        saved = checkpoint.load(folder)
        shards.load(folder / saved["shards"], self.model, self.optimizer, self.model, bool(saved["step"]))
        return saved["step"], self.model.weight.unique().tolist(), self.model.bias.unique().tolist()


def kept(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def saved(tmp_path):
    """A folder with the checkpoint of step 3."""
    training = Training()
    with Saver(tmp_path, training) as saver:
        training.take(3)
        saver.save()
    return tmp_path


def again(folder, step=5):
    """A training that goes on from the fixture's, at a later step, and its saver."""
    training = Training(restored=Kept(folder, 3, "shards-3"))
    training.take(step)
    return training, Saver(folder, training)


def test_a_checkpoint_is_what_it_was_when_it_was_begun(tmp_path, monkeypatch):
    training, may_write = Training(), threading.Event()
    write = dcp.FileSystemWriter.write_data
    patient = lambda *arguments: (may_write.wait(60), write(*arguments))[1]  # noqa: E731
    with Saver(tmp_path, training) as saver:
        for step in (0, 1):
            training.take(step)
            saver.save()
        saver.finish()
        monkeypatch.setattr(dcp.FileSystemWriter, "write_data", patient)
        training.take(2)
        saver.save()
        moments = {name: x.clone() for name, x in training.optimizer.state[training.model.weight].items()}
        # training goes on, in the same memory
        training.take(7)
        may_write.set()
    other = Training()
    assert other.load(tmp_path) == (2, [2], [2])
    found = other.optimizer.state[other.model.weight]
    assert moments.keys() == found.keys() >= {"exp_avg", "exp_avg_sq", "step"}
    assert all(torch.equal(moments[name], found[name]) for name in moments)
    assert kept(tmp_path) == [checkpoint.NAME, "shards-2"]


def test_a_checkpoint_before_the_first_step_has_no_optimizer(tmp_path):
    training = Training()
    with Saver(tmp_path, training) as saver:
        saver.save()
    other = Training()
    assert other.load(tmp_path) == (0, [0], [0])
    assert not other.optimizer.state


def test_until_all_parts_are_written_the_previous_one_is_the_checkpoint(saved, monkeypatch):
    training, saver = again(saved)
    written, save = Future(), shards.save
    monkeypatch.setattr(shards, "save", lambda *arguments: (save(*arguments).result(), written)[1])
    saver.save()
    saver.poll()
    assert training.load(saved)[0] == 3
    assert kept(saved) == [checkpoint.NAME, "shards-3", "shards-5"]
    written.set_result(None)
    saver.poll()
    assert Training().load(saved) == (5, [5], [5])
    assert kept(saved) == [checkpoint.NAME, "shards-5"]


def test_what_a_run_left_that_was_killed_while_it_wrote_is_removed(saved):
    shutil.copytree(saved / "shards-3", saved / "shards-5")
    (saved / "shards-5" / ".metadata").unlink()
    _, saver = again(saved)
    assert kept(saved) == [checkpoint.NAME, "shards-3"]
    saver.save()
    saver.finish()
    assert Training().load(saved) == (5, [5], [5])


@pytest.mark.parametrize("room", [0, 3000])
def test_a_full_disk_leaves_the_previous_one(saved, room):
    _, saver = again(saved)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        saver.save()
        with pytest.raises(
            UserError, match=r"cannot save .*checkpoint.pt: no space left .*; the previous checkpoint is"
        ):
            saver.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept(saved) == [checkpoint.NAME, "shards-3"]
    assert Training().load(saved) == (3, [3], [3])


def test_a_file_that_cannot_take_its_place_leaves_the_previous_one(saved, monkeypatch):
    def fill(path, data):
        raise OSError(28, "No space left on device")

    _, saver = again(saved)
    monkeypatch.setattr(checkpoint, "write_bytes", fill)
    saver.save()
    with pytest.raises(UserError, match=r"no space left .*; the previous checkpoint is intact"):
        saver.finish()
    assert Training().load(saved) == (3, [3], [3])


def test_a_lost_rank_is_what_others_are_ended_by(saved, monkeypatch):
    _, saver = again(saved)
    lost = Future()
    lost.set_exception(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    monkeypatch.setattr(shards, "save", lambda *arguments: lost)
    saver.save()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        saver.finish()
    assert Training().load(saved) == (3, [3], [3])


def test_the_checkpoint_that_is_there_is_not_written_again(saved, monkeypatch):
    monkeypatch.setattr(shards, "save", lambda *arguments: pytest.fail("written"))
    _, saver = again(saved, step=3)
    saver.save()
    assert kept(saved) == [checkpoint.NAME, "shards-3"]


def test_one_process_and_several_take_over_from_each_other(saved):
    alone = Training(ALONE, Kept(saved, 3, "shards-3"))
    alone.take(4)
    Saver(saved, alone).save()
    assert kept(saved) == [checkpoint.NAME]
    assert checkpoint.load(saved)["model"]["bias"].unique().tolist() == [4]
    several = Training(restored=Kept(saved, 4, None))
    several.take(6)
    with Saver(saved, several) as saver:
        saver.save()
    assert Training().load(saved) == (6, [6], [6])


def test_without_a_folder_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(shards, "save", lambda *arguments: pytest.fail("written"))
    with Saver(None, Training()) as saver:
        saver.save()
        saver.poll()


def part(folder):
    (found,) = (folder / "shards-3").glob("*.distcp")
    return found


def test_any_changed_byte_of_a_weight_is_noticed(saved):
    content = bytearray(part(saved).read_bytes())
    content[content.index(torch.full((30,), 3.0).numpy().tobytes()) + 57] ^= 1
    part(saved).write_bytes(content)
    with pytest.raises(UserError, match=r"shards-3 is damaged or not whole: the checksum of .* does not match"):
        Training().load(saved)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: part(folder).write_bytes(part(folder).read_bytes()[:-500]),
        lambda folder: part(folder).unlink(),
        lambda folder: (folder / "shards-3" / ".metadata").unlink(),
        lambda folder: (folder / "shards-3" / ".metadata").write_bytes(b"hello"),
        lambda folder: shutil.rmtree(folder / "shards-3"),
    ],
    ids=["cut", "part", "metadata", "no-metadata", "folder"],
)
def test_what_is_not_whole_is_refused_in_one_line(saved, damage):
    damage(saved)
    with pytest.raises(UserError, match=r"shards-3 is damaged or not whole: .") as told:
        Training().load(saved)
    assert "\n" not in str(told.value)


def test_weights_of_another_size_are_named(saved):
    other = Training()
    other.model = torch.nn.Linear(30, 41)
    with pytest.raises(UserError, match=r"shards-3 does not fit the model: bias is \[40\] in the file and \[41\] in"):
        other.load(saved)


def test_what_cannot_be_removed_stays(tmp_path):
    """A file by the name of a folder of shards is nobody's to remove, and no reason to end a training."""
    for name in ("shards-1", "shards-2", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "shards-note").write_text("kept")
    shards.remove_others(tmp_path, "shards-2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "shards-2", "shards-note"]
