"""Of many plans the fastest, without making the candidates of all: none is lost by that, and most are not made."""

import pytest
import torch

from holdfast.ops.explain import named_problem
from holdfast.planner import Candidate, Device, Plan
from holdfast.planner.kernel_model import Kernel, KernelModel, planned
from holdfast.planner.models import ranked
from holdfast.planner.models.matrix.scalar_decay import triton as single_pass
from holdfast.planner.movement import Prediction
from planner.test_models import MATRIX

H200 = Device.named("h200")


def made_and_kept(bounds, seconds, keep):
    """Places of those that are made, in turn, and of those that are kept."""
    made = []

    def model(problem, device, direction):
        found = KernelModel(device)
        found.add(found.variable("place", range(len(seconds) or 1)) < len(seconds), "places")
        return found

    def candidate(problem, device, direction, values):
        made.append(values["place"])
        return Candidate(values.plan("some", "place"), Prediction(seconds[values["place"]], 0))

    kernel = Kernel(model, candidate, lambda problem, device, direction, values: bounds[values["place"]])
    found = planned(None, H200, "forward", kernel, keep=keep)
    return made, [each.plan["place"] for each in found]


def test_what_takes_too_long_is_not_made():
    # the third may be faster than the second best, and is not; the first and fourth cannot be
    assert made_and_kept([9.0, 1.0, 3.0, 6.0, 2.0], [10.0, 4.0, 8.0, 7.0, 2.0], keep=2) == ([1, 4, 2], [4, 1])
    assert made_and_kept([3.0, 1.0], [4.0, 2.0], keep=3) == ([1, 0], [1, 0])
    assert made_and_kept([], [], keep=2) == ([], [])


def test_of_equals_the_first_that_was_given_is_kept():
    assert made_and_kept([2.0, 1.0, 0.0], [2.0, 2.0, 2.0], keep=2) == ([2, 1, 0], [0, 1])


def ways(problem, device, direction):
    """Of each plan the least that it takes, and its candidate."""
    for values in single_pass.model(problem, device, direction).assignments():
        of = (problem, device, direction, values)
        yield single_pass._least(*of), single_pass.candidate(*of)


@pytest.mark.parametrize("name", ["h200", "rtx3090"])
@pytest.mark.parametrize("op", ["linear_attention", "ssd", "mlstm"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_single_pass_has_the_fastest_of_all_its_plans(op, name, direction):
    device = Device.named(name)
    for shape in MATRIX:
        _, problem = named_problem(op, shape, torch.bfloat16, True, False)
        found = list(ways(problem, device, direction))
        assert all(0 < least < candidate.seconds for least, candidate in found)
        every = [candidate for _, candidate in found]
        assert len({candidate.plan for candidate in every}) == len(every)
        assert single_pass.candidates(problem, device, direction) == ranked(every)


@pytest.mark.parametrize("op", ["linear_attention", "simple_gla", "ssd", "mlstm"])
def test_most_plans_of_one_long_sequence_are_not_made(op):
    """A bound that rules out less costs milliseconds of every call's first plan."""
    _, problem = named_problem(op, MATRIX[2], torch.bfloat16, True, False)
    for direction in ("forward", "backward"):
        found = list(ways(problem, H200, direction))
        last = ranked(candidate for _, candidate in found)[-1].seconds
        assert len(found) > 100
        assert sum(least <= last for least, _ in found) < 30


def test_only_one_assignment_becomes_a_candidate_where_one_is_enough():
    """The one whose size is least, the first of equals, whatever it is predicted to take."""

    def model(problem, device, direction):
        found = KernelModel(device)
        found.variable("place", range(5))
        return found

    def candidate(problem, device, direction, values):
        return Candidate(values.plan("some", "place"), Prediction(-values["place"], 0))

    sizes = [3, 1, 2, 1, 5]
    kernel = Kernel(model, candidate, only=lambda problem, device, direction, values: sizes[values["place"]])
    assert [each.plan for each in planned(None, H200, "forward", kernel)] == [Plan("some", (("place", 1),))]
