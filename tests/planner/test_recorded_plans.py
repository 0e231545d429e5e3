"""The planner decides what is on record."""

import pytest

from planner import recorded_plans

REMEDY = (
    "the models decide otherwise than on record; if that is meant, write the record anew and look at its differences: "
    "PYTHONPATH=src:tests python -m planner.recorded_plans"
)


@pytest.fixture(scope="module")
def calls():
    """The same on every device."""
    return list(recorded_plans.calls())


@pytest.mark.parametrize("device", recorded_plans.DEVICES)
def test_plans_are_those_on_record(device, calls, no_table):
    kept = [line for line in recorded_plans.PLANS.read_text(encoding="utf-8").splitlines() if f" {device}; " in line]
    found = [recorded_plans.line(call, device) for call in calls]
    changed = [f"- {old}\n+ {new}" for old, new in zip(kept, found, strict=True) if old != new]
    assert not changed, "\n".join([f"{len(changed)} of {len(found)} calls: {REMEDY}", *changed[:5]])
