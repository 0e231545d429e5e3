"""The sanitizer's calls reach every kernel, and what is read of its output."""

import pytest

from sanitize import sources
from sanitize.calls import CALLS
from sanitize.dry import launched


@pytest.mark.slow
def test_the_calls_launch_every_kernel():
    of = launched(CALLS)
    assert set().union(*of.values()) == sources.kernels()
