"""Mixers and models over ranks equal one process, short convolutions and rotations with them."""

import pytest
import torch
from torch import nn

import holdfast
from holdfast.parallel import context_parallel
from parallel_support.module_cases import MIXERS, mixer_equals_one_process, model_equals_one_process
from parallel_support.op_cases import Setting

PARTS = {2: (7, 4), 4: (5, 1, 2, 6)}
EVEN = {2: (6, 4), 4: (2, 6, 4, 2)}


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("initial", [False, True], ids=["from zeros", "from a state"])
def test_mixers(ranks, name, initial):
    ranks.run(mixer_equals_one_process, name, Setting(PARTS[ranks.size], initial=initial), 1e-10)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("initial", [False, True], ids=["from zeros", "from a state"])
def test_packed_sequences(ranks, name, initial):
    total = sum(PARTS[ranks.size])
    setting = Setting(PARTS[ranks.size], bounds=(0, 0, 3, 10, total, total), initial=initial)
    ranks.run(mixer_equals_one_process, name, setting, 1e-10)


@pytest.mark.parametrize("name", ["GatedDeltaNet", "Mamba2", "RetNet"])
@pytest.mark.parametrize("lengths", [(1, 0, 1, 1), (0, 0, 2, 0), (1, 1, 1, 9)], ids=str)
def test_the_convolution_reaches_over_short_and_empty_parts(four_ranks, name, lengths):
    four_ranks.run(mixer_equals_one_process, name, Setting(lengths), 1e-10)
    bounds = (0, 1, sum(lengths))
    four_ranks.run(mixer_equals_one_process, name, Setting(lengths, bounds=bounds), 1e-10)


@pytest.mark.parametrize("name", ["GatedDeltaNet", "RetNet", "MLSTM", "RGLRU"])
def test_zigzag(ranks, name):
    total = sum(EVEN[ranks.size])
    ranks.run(mixer_equals_one_process, name, Setting(EVEN[ranks.size], layout="zigzag"), 1e-10)
    setting = Setting(EVEN[ranks.size], bounds=(0, 2, 2, 7, total), layout="zigzag")
    ranks.run(mixer_equals_one_process, name, setting, 1e-10)


def test_a_model_of_all_mixers(four_ranks):
    four_ranks.run(model_equals_one_process, Setting((3, 8, 0, 5)), 1e-10)


@pytest.mark.parametrize(
    "module",
    [holdfast.nn.LSTM(4, 4), holdfast.nn.SLSTM(4, num_heads=1), nn.Sequential(holdfast.nn.GLA(8), nn.GRU(8, 8))],
    ids=["LSTM", "SLSTM", "GRU in a model"],
)
def test_dense_recurrences_are_refused(module):
    with pytest.raises(ValueError, match=r"module: .*(LSTM|SLSTM|GRU at '1') .*its time cannot be cut") as error:
        context_parallel(module, None)
    assert "batch over the ranks" in str(error.value)


def test_a_module_without_mixers_is_refused():
    with pytest.raises(ValueError, match=r"module: expected a mixer of holdfast\.nn"):
        context_parallel(nn.Linear(3, 3), None)


def test_parameters_and_state_dict_stay(two_ranks):
    mixer = holdfast.nn.GatedDeltaNet(8, num_heads=2)
    before = list(mixer.state_dict())
    x = torch.randn(1, 3, 8)
    expected, _ = mixer(x)
    assert context_parallel(mixer, None) is mixer
    assert list(mixer.state_dict()) == before
    assert torch.equal(mixer(x)[0], expected)
