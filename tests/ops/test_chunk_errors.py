"""Bad input to the chunk primitives, one mistake at a time; and how many chunks there are of so many steps."""

import pytest
import torch

import holdfast

STATES = {"states": torch.zeros(2, 3, 2, 4, 5), "decay": torch.zeros(2, 3, 2)}
FACTOR = torch.zeros(2, 3, 2, 4, 1)


@pytest.mark.parametrize(("given", "missing", "other"), [("Y", "W", "Y"), ("W", "Y", "W")])
def test_of_a_low_rank_both_factors_are_needed(given, missing, other):
    with pytest.raises(ValueError, match=rf"{missing}: expected a tensor \[B, G, H, K, r\] beside {other}; got None"):
        holdfast.inter_chunk_scan(**STATES, **{given: FACTOR})
    assert holdfast.inter_chunk_scan(**STATES, W=FACTOR, Y=FACTOR)[0].shape == STATES["states"].shape


TOKENS = {"q": torch.zeros(1, 5, 2, 4), "k": torch.zeros(1, 5, 2, 4), "v": torch.zeros(1, 5, 2, 3), "g": None}


def intra_chunk(**changes):
    return holdfast.intra_chunk(**TOKENS | changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"chunk_size": True}, TypeError, "chunk_size: expected an integer; got bool"),
        ({"chunk_size": 2.0}, TypeError, "chunk_size: expected an integer; got float"),
        ({"chunk_size": 0}, ValueError, "chunk_size: expected at least 1; got 0"),
        ({"gate_activation": "relu"}, ValueError, "gate_activation: expected 'silu' or 'sigmoid'; got 'relu'"),
        ({"q": torch.zeros(5)}, ValueError, r"q: expected shape \[B, T, Hq, K\]; got \[5\]"),
        ({"q": None}, TypeError, r"q: expected a tensor \[B, T, Hq, K\]; got None"),
        ({"scale": "1"}, TypeError, "scale: expected a number; got str"),
    ],
)
def test_errors_of_intra_chunk_name_the_argument(changes, error, message):
    with pytest.raises(error, match=message):
        intra_chunk(**changes)


@pytest.mark.parametrize(("chunk_size", "chunks"), [(1, 5), (2, 3), (5, 1), (6, 1)])
def test_a_state_for_each_chunk_the_last_one_shorter(chunk_size, chunks):
    assert intra_chunk(states=torch.zeros(1, chunks, 2, 4, 3), chunk_size=chunk_size).shape == (1, 5, 2, 3)
    for wrong in (chunks - 1, chunks + 1):
        with pytest.raises(ValueError, match=rf"states: expected shape \[B=1, chunks={chunks}, .*; got \[1, {wrong}, "):
            intra_chunk(states=torch.zeros(1, wrong, 2, 4, 3), chunk_size=chunk_size)
