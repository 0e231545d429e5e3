"""The training loop of the parity task, and what it reports."""

import pytest
import torch

from holdfast.cli import parity, train_parity
from holdfast.cli.config import check_at_least
from holdfast.cli.errors import UserError
from holdfast.cli.train_parity import ParityConfig

CONFIG = ParityConfig(mixer="elman", width=8, steps=3, batch=4, lr=0.25, seed=5)


def test_ranges_join_without_a_gap_from_what_was_trained_to_the_longest():
    trained, *longer = parity.RANGES
    assert trained == (1, parity.LONGEST_TRAINED) == (1, 40)
    assert (longer[0][0], longer[-1][1]) == parity.EXTRAPOLATION == (40, parity.LONGEST) == (40, 256)
    assert [start for start, _ in longer[1:]] == [stop + 1 for _, stop in longer[:-1]] == [80, 128, 192]


def test_each_range_has_its_mean_accuracy(monkeypatch, capsys):
    seen = {}

    def accuracy(model, sequences, batch, generator):
        seen.update(sequences=sequences, batch=batch, seed=generator.initial_seed())
        return torch.arange(1, 257, dtype=torch.float64) / 257

    monkeypatch.setattr(train_parity, "accuracy_by_length", accuracy)
    assert train_parity.train_parity(CONFIG, "cpu") == 0
    out = capsys.readouterr().out
    rows = [line.replace("│", " ").split() for line in out.splitlines() if line.startswith("│")]
    means = [f"{(first + last) / 2 / 257:.3f}" for first, last in parity.RANGES]
    assert [row[-1] for row in rows] == means
    assert [" ".join(row[:-1]) for row in rows] == [f"{first} - {last}" for first, last in parity.RANGES]
    assert "extrapolation, lengths 40 - 256: 0.576 (0.5 is chance)" in out
    # other sequences than those of training
    assert seen == {"sequences": 512, "batch": 4, "seed": 6}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [20, 29])
def test_no_weight_decays_and_the_rate_follows_the_schedule(monkeypatch, steps):
    decays, rates = [], []
    make = train_parity.make_optimizer

    def made(model, lr, weight_decay):
        decays.append((lr, weight_decay))
        return make(model, lr, weight_decay)

    monkeypatch.setattr(train_parity, "make_optimizer", made)
    monkeypatch.setattr(train_parity, "learning_rate", lambda *arguments: rates.append(arguments) or 0.0)
    train_parity.train_parity(ParityConfig(mixer="elman", width=8, steps=steps, batch=2, lr=0.25), "cpu")
    assert decays == [(0.25, 0.0)]
    assert rates == [(step, steps, 0.25, 2) for step in range(steps)]


@pytest.mark.slow
def test_runs_of_a_seed_are_the_same(capsys):
    def lines(seed):
        assert train_parity.train_parity(ParityConfig(mixer="elman", width=8, steps=2, batch=4, seed=seed), "cpu") == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]

    torch.manual_seed(1)
    first = lines(5)
    torch.manual_seed(2)
    assert lines(5) == first
    assert lines(6) != first
    assert len(first) == 2


def test_accuracy_counts_every_sequence_once():
    drawn = []

    class Half(torch.nn.Module):
        """Right for the first sequence of each batch alone."""

        head = torch.nn.Linear(1, 2)

        def forward(self, bits):
            drawn.append(len(bits))
            answers = parity.running_parity(bits)
            answers[1:] = 1 - answers[1:]
            return torch.nn.functional.one_hot(answers, 2).float()

    found = parity.accuracy_by_length(Half(), 10, 4, torch.Generator().manual_seed(0))
    assert drawn == [4, 4, 2]
    assert found.tolist() == pytest.approx([0.3] * 256)
    assert parity.mean_accuracy(torch.arange(1.0, 257.0), (40, 42)) == 41


@pytest.mark.parametrize(
    "change",
    [{"layers": 0}, {"width": 0}, {"heads": 0}, {"batch": 0}, {"threads": 0}, {"seed": -1}, {"width": 9, "heads": 2}],
)
def test_every_setting_is_checked(change):
    with pytest.raises(UserError, match=f"--{next(iter(change))}: expected"):
        ParityConfig(**change)


def test_the_least_of_each_setting_is_fine():
    ParityConfig(layers=1, width=1, heads=1, steps=1, batch=1, seed=0, threads=1)
    check_at_least("steps", 3, 3)
