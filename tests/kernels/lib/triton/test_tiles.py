"""Tiles in Triton: what the interpreter says of them."""

import pytest

pytest.importorskip("triton")
from interpreted import interpret


def test_parts_add_up_to_the_number():
    assert "parts" in interpret("kernels.lib.triton.tiles_parity", "parts_of_a_number")
