"""What mlx generates around the kernels: the signatures; and that it compiles for CUDA and keeps address spaces."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from holdfast.mlx import chassis, kernel
from holdfast.mlx.kernel import SOURCES
from mlx_support import kernels
from mlx_support.as_cuda import as_cuda
from mlx_support.cpu import Metal

SUPPORT = Path(kernels.__file__).parent


@pytest.fixture(scope="module")
def sources():
    """Needs no compiler: nothing runs."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in = Metal(runs=False)
        patch.setattr(mx.fast, "metal_kernel", stand_in.metal_kernel)
        patch.setattr(chassis, "metal_missing", lambda: None)
        kernel._built.cache_clear()
        found = kernels.sources(stand_in)
    kernel._built.cache_clear()
    return found


def test_every_kernel_is_among_them(sources):
    bodies = {path.stem for path in SOURCES.glob("*.metal") if "ward" in path.stem}
    shared = {"gla_history_backward"}
    assert {label.split("-")[0] for label in sources} == bodies | shared


def test_signatures_are_those_of_the_snapshot(sources):
    """The parameters, their order, types and address spaces, as mlx writes them."""
    assert kernels.snapshot(sources) == kernels.SNAPSHOT.read_text(), (
        f"mlx {importlib.metadata.version('mlx')} generates other signatures than mlx 0.32.4 did, with which "
        "tests/mlx_support/signatures.txt was made. If that is meant: cd tests && python -m mlx_support.kernels"
    )


def test_small_arrays_are_in_the_constant_address_space(sources):
    assert "const constant float* q" in sources["gla_backward-small"]
    assert "const device float* q" in sources["gla_backward"]


def test_sizes_are_not_compiled_in(sources):
    """Template arguments are dtypes, tiles and segments; B and L come with the arrays' shapes."""
    for text in sources.values():
        template = re.search(r"template <([^>]*)>\n\[\[kernel", text).group(1)
        assert set(re.findall(r"int (\w+)", template)) <= {"AHEAD", "R", "RPL", "CPL", "SG", "SEG", "SUB", "GK"}


@pytest.mark.slow
def test_the_same_sources_compile_for_cuda(sources, tmp_path):
    """And spill no registers. In a process of its own: NVRTC may crash on a faulty source."""
    pytest.importorskip("cuda.core", reason="needs NVRTC, which pip install 'holdfast[cuda]' brings, but no GPU")
    # CUDA has no constant address space to tell small arrays apart by
    sources = {label: text for label, text in sources.items() if not label.endswith("-small")}
    for label, text in sources.items():
        (tmp_path / f"{label}.cu").write_text(as_cuda(text))
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "nvrtc.py"), *map(str, sorted(tmp_path.glob("*.cu")))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(done.stdout.splitlines()) == {f"{label} spills 0" for label in sources}


@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++: g++ has no address spaces")
def test_address_spaces(sources, tmp_path):
    """clang, Metal's own front end, accepts every pointer in its address space, and refuses a planted mistake."""
    planted = sources["gla_forward"].replace("float S[RPL][CPL];", "thread const float* p = S0;", 1)
    command = ["clang++", "-std=c++14", "-fsyntax-only", f"-I{SUPPORT}"]
    for label, text in (sources | {"planted": planted}).items():
        plain = re.sub(r"\[\[.*?\]\]", "", text)
        (tmp_path / f"{label}.cpp").write_text(f'#include "address_spaces.h"\n{plain}')
    right = subprocess.run(
        [*command, *(tmp_path / f"{label}.cpp" for label in sources)], capture_output=True, text=True
    )
    assert right.returncode == 0, right.stderr
    wrong = subprocess.run([*command, tmp_path / "planted.cpp"], capture_output=True, text=True)
    assert wrong.returncode != 0
    assert "cannot initialize" in wrong.stderr
