"""Of many plans the fastest, without making the candidates of all: none is lost by that, and most are not made."""

import pytest
import torch

from holdfast.ops.explain import named_problem
from holdfast.planner import Candidate, Device, Plan
from holdfast.planner.models import fastest, ranked
from holdfast.planner.models.matrix.scalar_decay import triton as single_pass
from holdfast.planner.movement import Prediction
from planner.test_models import MATRIX


def made_and_kept(bounds, seconds, keep):
    """Places of those that are made, in turn, and of those that are kept."""
    made = []

    def way(place):
        def make():
            made.append(place)
            return Candidate(Plan("some", (("place", place),)), Prediction(seconds[place], 0))

        return bounds[place], make

    found = fastest(map(way, range(len(seconds))), keep)
    return made, [each.plan["place"] for each in found]


def test_what_takes_too_long_is_not_made():
    # the third may be faster than the second best, and is not; the first and fourth cannot be
    assert made_and_kept([9.0, 1.0, 3.0, 6.0, 2.0], [10.0, 4.0, 8.0, 7.0, 2.0], keep=2) == ([1, 4, 2], [4, 1])
    assert made_and_kept([3.0, 1.0], [4.0, 2.0], keep=3) == ([1, 0], [1, 0])
    assert made_and_kept([], [], keep=2) == ([], [])


def test_of_equals_the_first_that_was_given_is_kept():
    assert made_and_kept([2.0, 1.0, 0.0], [2.0, 2.0, 2.0], keep=2) == ([2, 1, 0], [0, 1])


@pytest.mark.parametrize("name", ["h200", "rtx3090"])
@pytest.mark.parametrize("op", ["linear_attention", "ssd", "mlstm"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_single_pass_has_the_fastest_of_all_its_plans(op, name, direction):
    device = Device.named(name)
    for shape in MATRIX:
        _, problem = named_problem(op, shape, torch.bfloat16, True, False)
        ways = [(least, make()) for least, make in single_pass._ways(problem, device, direction)]
        assert all(0 < least < candidate.seconds for least, candidate in ways)
        every = [candidate for _, candidate in ways]
        assert len({candidate.plan for candidate in every}) == len(every)
        assert single_pass.candidates(problem, device, direction) == ranked(every)


@pytest.mark.parametrize("op", ["linear_attention", "simple_gla", "ssd", "mlstm"])
def test_most_plans_of_one_long_sequence_are_not_made(op):
    """A bound that rules out less costs milliseconds of every call's first plan."""
    _, problem = named_problem(op, MATRIX[2], torch.bfloat16, True, False)
    for direction in ("forward", "backward"):
        ways = [(least, make()) for least, make in single_pass._ways(problem, Device.named("h200"), direction)]
        last = ranked(candidate for _, candidate in ways)[-1].seconds
        assert len(ways) > 100
        assert sum(least <= last for least, _ in ways) < 30
