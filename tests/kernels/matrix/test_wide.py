"""Wide states without a GPU: how they are cut, and that slices are right in the interpreter."""

import pytest

pytest.importorskip("triton")
from interpreted import interpret


def test_interpreted():
    assert "no token" in interpret("kernels.matrix.wide_parity", "interpreted", seconds=300)
