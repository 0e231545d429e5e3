"""The errors that doctor, the bench and these tests judge by."""

import math

import pytest
import torch

from holdfast.ops.parity import largest_error, relative_error

ZEROS = torch.zeros(4, dtype=torch.float64)
ONES = torch.ones(4, dtype=torch.float64)


@pytest.mark.parametrize("error", [relative_error, largest_error])
def test_no_difference_is_none(error):
    assert error(ZEROS, ZEROS) == 0
    assert error(ONES, ONES) == 0
    assert error(ZEROS[:0], ZEROS[:0]) == 0


def test_errors_are_relative_to_what_is_exact():
    exact = torch.tensor([3.0, 4.0, 0.0, 0.0], dtype=torch.float64)
    assert relative_error(exact + ONES, exact) == pytest.approx(2 / 5)
    # the root mean square of the exact is 2.5, and at two elements there is nothing else
    assert largest_error(exact + ONES, exact) == pytest.approx(1 / 2.5)
    assert largest_error(exact + torch.tensor([0, 3.0, 0, 0]), exact) == pytest.approx(3 / (4 + 2.5))


def test_errors_are_absolute_where_nothing_is_there():
    """A division by 0 would be infinite, or NaN."""
    assert relative_error(0.25 * ONES, ZEROS) == pytest.approx(0.5)
    assert largest_error(torch.tensor([0.25, -0.5]), torch.zeros(2)) == pytest.approx(0.5)


@pytest.mark.parametrize("error", [relative_error, largest_error])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_no_number(error, value):
    spoilt = torch.tensor([0.0, value])
    assert math.isnan(error(spoilt, spoilt))
