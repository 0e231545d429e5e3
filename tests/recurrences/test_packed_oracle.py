"""The oracle of packed sequences is that of each sequence alone, from its own state; an empty one keeps its state."""

import itertools
from dataclasses import replace

import pytest
import torch

from holdfast.recurrences import RECURRENCES, Draw, Sizes
from holdfast.recurrences.oracle import oracle
from parity import leaves

SIZES = Sizes(B=1, T=5, H=2, K=4, V=3, D=4)
BOUNDS = (0, 2, 2, 5)


def parts_of(state):
    return state if isinstance(state, tuple) else (state,)


@pytest.mark.parametrize("name", RECURRENCES)
def test_each_sequence_by_itself(name):
    recurrence = RECURRENCES[name]
    given = recurrence.example(Draw(0, torch.float64), SIZES)
    states = parts_of(recurrence.example(Draw(1, torch.float64), replace(SIZES, B=3))["initial_state"])
    # the sequences' axis of a dense recurrence's state is its second
    axis = 1 if recurrence.family == "dense" else 0
    whole = states if isinstance(given["initial_state"], tuple) else states[0]
    output, final = oracle(recurrence, given | {"initial_state": whole}, torch.tensor(BOUNDS))
    for n, (start, end) in enumerate(itertools.pairwise(BOUNDS)):
        own = tuple(x.narrow(axis, n, 1) for x in states)
        # what has no axis of time is a parameter
        alone = {k: x[:, start:end] if k != "initial_state" and x.shape[:2] == (1, 5) else x for k, x in given.items()}
        alone["initial_state"] = own if isinstance(given["initial_state"], tuple) else own[0]
        right, last = oracle(recurrence, alone)
        torch.testing.assert_close(output[:, start:end], right)
        for x, y in zip(leaves(final), leaves(last), strict=True):
            torch.testing.assert_close(x.narrow(axis, n, 1), y)
    assert output.shape[1] == 5
