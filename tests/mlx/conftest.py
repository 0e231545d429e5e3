"""Where mlx is not installed only `test_installed.py` is collected, and says so."""

import shutil

import pytest

try:
    import mlx.core as mx
except ImportError:
    mx = None
    collect_ignore_glob = ["test_[!i]*.py"]


@pytest.fixture(autouse=True)
def fixed_mlx_seed():
    if mx:
        mx.random.seed(20260)


@pytest.fixture
def metal(monkeypatch):
    """Metal kernels run on the CPU; see mlx_support/cpu.py."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler, g++ or clang++, to run Metal kernels on the CPU")
    from holdfast.mlx import chassis, kernel
    from mlx_support.cpu import Metal

    stand_in = Metal(seed=1)
    monkeypatch.setattr(mx.fast, "metal_kernel", stand_in.metal_kernel)
    monkeypatch.setattr(chassis, "metal_missing", lambda: None)
    kernel._built.cache_clear()
    yield stand_in
    kernel._built.cache_clear()
