"""What is launched for some of the sanitizer's calls is what was launched on another day; nothing runs here."""

import pytest

pytest.importorskip("triton")
from sanitize import recorded_launches
from sanitize.calls import CALLS

# of each family a few; test_sanitize.py makes all
SOME = CALLS[::4]


def test_launches_are_those_on_record():
    kept = recorded_launches.LAUNCHES.read_text(encoding="utf-8").splitlines()
    names = tuple(f"{call.name}: " for call in SOME)
    assert recorded_launches.lines(SOME) == [line for line in kept if line.startswith(names)], recorded_launches.REMEDY
