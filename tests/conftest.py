"""What every test runs under: poisoned memory, fixed seeds, and no GPU tests where there is no GPU."""

import os
import random

import hypothesis
import numpy as np
import pytest
import torch

from holdfast.kernels.common import planning
from holdfast.planner import tables

# cuBLAS repeats bit for bit only with a fixed workspace, and reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

SEED = 20260


class TorchRandom:
    """Lets hypothesis reseed torch for each example, so that a failing one can be replayed."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()
hypothesis.register_random(TORCH_RANDOM)
hypothesis.settings.register_profile("holdfast", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("holdfast")


def has_nvidia_gpu() -> bool:
    return torch.cuda.is_available() and torch.version.cuda is not None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not has_nvidia_gpu():
        pytest.skip("needs an NVIDIA GPU (none here)")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty returns NaN, so that an output that a kernel leaves unwritten cannot pass by luck.

    torch fills memory only in deterministic mode; a warning suffices there, since some operations have no such form.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fixed_seeds():
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture
def no_table():
    """Plans from the models alone, whatever this checkout's tables have of the present device."""
    planning.forget()
    with tables.instead(None):
        yield
    planning.forget()
