"""Calls on this machine's CPU are recorded and replayed as a GPU's are."""

import pytest
import torch

from holdfast.kernels import select as planning
from holdfast.kernels.runtime.replay import replay


@pytest.fixture
def on_this_machine(monkeypatch):
    monkeypatch.setattr(replay, "_PLAIN", set())
    replay.allow(torch.device("cpu"))
    yield
    planning.forget()
