"""The calls that doctor checks."""

from holdfast.ops import checks
from ops import recorded_checks


def test_checks_are_those_on_record():
    kept = recorded_checks.CHECKS.read_text(encoding="utf-8").splitlines()
    remedy = "if that is meant: PYTHONPATH=src:tests python -m ops.recorded_checks, and look at its differences"
    assert recorded_checks.lines() == kept, remedy


def test_limits():
    """Of float32, of bfloat16, and of a single element over them."""
    assert (checks.LIMIT, checks.HALF_LIMIT, checks.WORST) == (2e-5, 2**-6, 8)
