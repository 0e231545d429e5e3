"""The parity task."""

import pytest
import torch

from holdfast.cli import parity
from holdfast.cli.errors import UserError
from holdfast.cli.train_parity import ParityConfig, train_parity


def test_running_parity():
    bits = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 1, 1]])
    assert parity.running_parity(bits).tolist() == [[1, 1, 0, 1, 1], [0, 0, 0, 1, 0]]


def test_labels_count_the_bits_up_to_the_length():
    bits, lengths, labels = parity.training_batch(500, torch.Generator().manual_seed(0))
    assert bits.shape == (500, 40)
    assert set(lengths.tolist()) == set(range(1, 41))
    for row, length, label in zip(bits.tolist(), lengths.tolist(), labels.tolist(), strict=True):
        assert sum(row[:length]) % 2 == label


def test_the_loss_looks_at_the_last_bit_alone():
    lengths, labels = torch.tensor([1, 3]), torch.tensor([0, 1])
    logits = torch.zeros(2, 4, 2)
    logits[0, 0, 0] = logits[1, 2, 1] = 50
    assert [x.item() for x in parity.last_bit_loss(logits, lengths, labels)] == [0, 1]


def test_accuracy_by_length_is_that_of_every_prefix():
    class Right(torch.nn.Module):
        """Right up to length 100, then always wrong."""

        head = torch.nn.Linear(1, 2)

        def forward(self, bits):
            answers = parity.running_parity(bits)
            answers[:, 100:] = 1 - answers[:, 100:]
            return torch.nn.functional.one_hot(answers, 2).float()

    accuracy = parity.accuracy_by_length(Right(), 10, 4, torch.Generator())
    assert parity.mean_accuracy(accuracy, (1, 100)) == 1
    assert parity.mean_accuracy(accuracy, (101, 256)) == 0


def test_the_command_prints_a_table(capsys):
    assert train_parity(ParityConfig(mixer="elman", width=8, steps=3, batch=4), "cpu") == 0
    out = capsys.readouterr().out
    assert "192 - 256" in out
    assert "extrapolation, lengths 40 - 256: 0." in out


@pytest.mark.parametrize(
    ("change", "option"), [({"mixer": "x"}, "mixer"), ({"steps": 0}, "steps"), ({"lr": -1.0}, "lr")]
)
def test_wrong_values_are_named(change, option):
    with pytest.raises(UserError, match=f"--{option}: "):
        ParityConfig(**change)
