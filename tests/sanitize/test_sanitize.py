"""The sanitizer's calls reach every kernel, and what is read of its output."""

from sanitize import sources
from sanitize.calls import CALLS
from sanitize.dry import launched


def test_the_calls_launch_every_kernel(monkeypatch):
    of = launched(CALLS, monkeypatch)
    assert set().union(*of.values()) == sources.kernels()
