"""What every test runs under: poisoned memory, fixed seeds, and no GPU tests where there is no GPU."""

import gc
import os
import random

import hypothesis
import numpy as np
import pytest
import torch

from holdfast.kernels import select as planning
from holdfast.planner import tables
from tiers import OneTriton, is_slow_by_name, line_of_what_is_left

# cuBLAS repeats bit for bit only with a fixed workspace, and reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Side by side with other processes of pytest-xdist a second thread costs more than it gives to tensors this small.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    # of the processes that tests start
    os.environ.setdefault("OMP_NUM_THREADS", "1")

SEED = 20260


def seed_torch(seed: int) -> None:
    """As torch.manual_seed, which where there is no GPU takes a millisecond to note down who asks."""
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@pytest.fixture
def one_thread():
    """Calls this small gain nothing from a second thread, and lose much to it where other processes run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TorchRandom:
    """Lets hypothesis reseed torch for each example, so that a failing one can be replayed."""

    seed = staticmethod(seed_torch)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()
hypothesis.register_random(TORCH_RANDOM)
hypothesis.settings.register_profile("holdfast", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("holdfast")


# how many slow tests were left out, if no others were
LEFT = pytest.StashKey[int]()
ONE_TRITON = pytest.StashKey[OneTriton]()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """The search for garbage leaves out what is there before the first test, and comes less often.

    Ten thousand tests are a million objects that stay until the end: a whole search of them takes half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    test = item.nodeid.partition("[")[0]
    if hasattr(item, "callspec"):
        sizes = item.get_closest_marker("sizes")
        of_one = item.config.stash.setdefault(ONE_TRITON, OneTriton())
        if of_one.has(test, item.callspec.params, sizes.args if sizes else ()):
            item.add_marker(pytest.mark.one_triton)
    path, _, name = test.partition("::")
    if is_slow_by_name(f"{path.removeprefix('tests/')}::{name}"):
        item.add_marker(pytest.mark.slow)


def pytest_deselected(items: list[pytest.Item]) -> None:
    config = items[0].config
    if config.getoption("markexpr") == "not slow" and all(item.get_closest_marker("slow") for item in items):
        config.stash[LEFT] = len(items)
        # of pytest-xdist: what its processes tell the one that prints
        if hasattr(config, "workeroutput"):
            config.workeroutput["left"] = len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    if left := getattr(node, "workeroutput", {}).get("left"):
        node.config.stash[LEFT] = left


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if left := config.stash.get(LEFT, None):
        terminalreporter.write_line(line_of_what_is_left(left))


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
    seed_torch(SEED)


@pytest.fixture
def no_table():
    """Plans from the models alone, whatever this checkout's tables have of the present device."""
    planning.forget()
    with tables.instead(None):
        yield
    planning.forget()
