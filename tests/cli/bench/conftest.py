"""Short runs, and the roofs of a device that is not measured."""

import gc

import pytest
import torch

from holdfast.cli.bench import clock
from holdfast.cli.bench.roofs import Roofs

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def nothing_old_to_collect():
    """Each row collects garbage, which takes longest over what was there before: all the tests of a whole run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    monkeypatch.setattr(clock, "SECONDS", 0.01)
    monkeypatch.setattr(clock, "LEAST", 2)


@pytest.fixture
def roof() -> Roofs:
    return Roofs(copy_bandwidth=1e9, rates={"float32": 1e12}, copy_bytes=2**20, matrix_size=64)
