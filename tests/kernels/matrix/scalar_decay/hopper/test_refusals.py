"""What scalar decay's backend on Hopper refuses, and what it serves and plans."""

import sys
from types import SimpleNamespace

import pytest

from holdfast.kernels.matrix.scalar_decay.hopper.backend import Hopper
from holdfast.planner import Device
from holdfast.planner.models.matrix.scalar_decay import hopper as model
from kernels.matrix.scalar_decay.hopper.test_backend import H200, problem


@pytest.mark.parametrize(
    ("given", "device", "reason"),
    [
        (problem(), Device.named("a100"), "compute capability 9.0"),
        (problem(), Device.named("cpu"), "compute capability 9.0"),
        (problem(dtype="float32"), H200, "bfloat16 and float16"),
        (problem(traits={"delta": True}), H200, "the delta rule"),
        (problem(traits={"decay=vector": True}), H200, "a vector decay"),
        (problem(traits={"normalizer": True}), H200, "a normaliser"),
        (problem({"V": 20}), H200, "a V that 8 divides; got 20"),
        (problem({"K": 256}), H200, "got K = 256"),
        (problem({"V": 256}), H200, "got V = 256"),
    ],
)
def test_a_refusal_says_why(given, device, reason):
    assert reason in Hopper().reject(given, device)


def test_a_gluon_of_other_names_is_refused(monkeypatch):
    hopper = pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    from holdfast.kernels.lib import gluon
    from holdfast.kernels.lib.gluon import compat
    from holdfast.kernels.matrix.scalar_decay.hopper import backend as hopper_backend

    monkeypatch.delitem(sys.modules, compat.__name__)
    monkeypatch.delattr(gluon, "compat")
    monkeypatch.setattr(hopper, "tma", SimpleNamespace())
    # not what this process has found out already
    monkeypatch.setattr(hopper_backend, "without_gluon", hopper_backend.without_gluon.__wrapped__)
    assert "Triton's Gluon" in Hopper().reject(problem(), H200)


@pytest.mark.parametrize("sizes", [{}, {"K": 64, "V": 40}, {"Hq": 1, "V": 64}, {"T": 1}])
def test_it_serves_the_others(sizes):
    pytest.importorskip("triton.experimental.gluon")
    assert Hopper().reject(problem(sizes), H200) is None
    assert Hopper().reject(problem(sizes, {"varlen": True}), H200) is None
    assert Hopper().reject(problem({"V": 256}, {"needs_grad": False}), H200) is None


def test_memory_bounds_large_problems_and_few_heads_are_cut_into_segments():
    (large, *_), (small, *_) = (
        model.candidates(problem({"B": B, "H": H, "Hq": H}), H200, "forward") for B, H in ((4, 32), (1, 8))
    )
    assert large.prediction.bound == "memory"
    assert large.moved == pytest.approx(4 * 2 * 4 * 4096 * 32 * 128, rel=0.05)
    assert large.plan["segment_chunks"] == 4096 // model.CHUNK
    assert 8 * 4096 // model.CHUNK // small.plan["segment_chunks"] > 64
    # measured on an H200: 0.0368 and 0.140 ms
    assert small.seconds < large.seconds / 3


def test_packed_sequences_are_not_cut():
    packed = problem({"B": 1, "H": 8, "Hq": 8}, {"varlen": True})
    for direction in ("forward", "backward"):
        assert {found.plan["segment_chunks"] for found in model.candidates(packed, H200, direction)} == {
            4096 // model.CHUNK
        }
