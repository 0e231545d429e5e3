"""What mlx generates around the kernels: the signatures; and that it compiles for CUDA and keeps address spaces."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

import holdfast.mlx as hm
from holdfast.mlx import chassis, kernel
from holdfast.mlx.kernel import SOURCES
from mlx_support import kernels
from mlx_support.cases import SCANS
from mlx_support.cpu import Metal
from mlx_support.cuda_sources import Cuda

SUPPORT = Path(kernels.__file__).parent
ROOT = SUPPORT.parents[1]


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


@pytest.fixture(scope="module")
def cuda():
    """The stand-in for mlx's CUDA back end, and what it would compile. Arrays of few elements are as others there."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in = Cuda()
        patch.setattr(mx.fast, "cuda_kernel", stand_in.cuda_kernel)
        patch.setattr(chassis, "cuda_missing", lambda: None)
        patch.setattr(kernel, "has_cuda", lambda: True)
        kernel._built_for_cuda.cache_clear()
        found = kernels.sources(stand_in)
        for name in SCANS:
            case = SCANS[name]()
            replace(case, inputs=[case.inputs[0].astype(mx.bfloat16), *case.inputs[1:]]).run()
    kernel._built_for_cuda.cache_clear()
    return stand_in, {label: text for label, text in found.items() if not label.endswith("-small")}


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


def test_batch_and_length_are_not_compiled_in(sources):
    """Template arguments are dtypes, tiles, segments and sizes of a model; B, L and H come with the arrays' shapes."""
    for text in sources.values():
        template = re.search(r"template <([^>]*)>\n\[\[kernel", text).group(1)
        assert set(re.findall(r"int (\w+)", template)) <= {*"RKVNPD", "AHEAD", "RPL", "CPL", "SG", "SEG", "SUB", "GK"}


def test_cuda_kernels_are_told_apart_by_what_they_read(cuda):
    """mlx finds one again by its name and template, on disk too: no two sources share them."""
    stand_in, sources = cuda
    assert all(len(texts) == 1 for texts in stand_in.texts.values())
    assert set(sources.values()) <= set().union(*stand_in.texts.values())
    assert all(re.match(r"holdfast_\w+_[0-9a-f]{12} ", name) for name in stand_in.texts)


def test_a_grid_that_cuda_cannot_have_is_refused(cuda, monkeypatch):
    monkeypatch.setattr(chassis, "cuda_missing", lambda: None)
    monkeypatch.setattr(kernel, "has_cuda", lambda: True)
    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda[0].cuda_kernel)
    with pytest.raises(ValueError, match="rglru_forward: expected a batch and heads of at most 65535 on CUDA"):
        hm.rglru_scan(mx.zeros((65536, 1, 1)), mx.zeros((65536, 1, 1)))
    assert hm.rglru_scan(mx.zeros((65535, 1, 1)), mx.zeros((65535, 1, 1))).shape == (65535, 1, 1)


@pytest.mark.slow
def test_the_same_sources_compile_for_cuda(cuda, tmp_path):
    """And spill no registers. In a process of its own: NVRTC may crash on a faulty source."""
    _, sources = cuda
    pytest.importorskip("cuda.core", reason="needs NVRTC, which pip install 'holdfast[cuda]' brings, but no GPU")
    for label, text in sources.items():
        (tmp_path / f"{label}.cu").write_text(text)
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "nvrtc.py"), *map(str, sorted(tmp_path.glob("*.cu")))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(done.stdout.splitlines()) == {f"{label} spills 0" for label in sources}


# of mlx-recurrence 0.3.0's kernels by the same count: `python -m mlx_support.instructions FOLDER`
PEERS = {
    "rglru_forward": 12, "rglru_backward": 19, "rotlru_forward": 18, "rotlru_backward": 40,
    "gla_forward": 828, "gla_backward": 5526, "ssd_forward": 608, "ssd_backward": 2346,
}  # fmt: skip


@pytest.mark.slow
def test_no_more_instructions_a_token_than_the_peer():
    """In a process of its own, which replaces mlx's functions."""
    pytest.importorskip("cuda.core", reason="needs NVRTC, which pip install 'holdfast[cuda]' brings, but no GPU")
    pytest.importorskip("triton", reason="needs nvdisasm, which triton brings")
    done = subprocess.run(
        [sys.executable, "-m", "mlx_support.instructions"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "PATH": ""},
    )
    found = {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}
    assert found.keys() == PEERS.keys(), done.stderr
    assert all(found[name] <= PEERS[name] for name in PEERS), found


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
