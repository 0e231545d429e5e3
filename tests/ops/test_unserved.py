"""Where a GPU has no kernel for a call's sizes a warning says so once, and which sizes have one."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from holdfast.ops import matrix, unserved
from holdfast.planner import Device, Problem
from holdfast.recurrences.definition import MatrixCall

pytest.importorskip("triton.experimental.gluon")


@pytest.fixture
def asked(monkeypatch):
    """What is said when a call of these sizes is planned on a GPU that is not here."""

    def plan(device="h200", op="gated_delta_rule", backend="", dtype=torch.bfloat16, B=1, K=64, V=64, packed=None):
        monkeypatch.setattr(matrix, "describe", lambda _: Device.named(device))
        matrix._SELECTED.clear()
        q, k, v = (torch.empty(B, 256, 2, width, dtype=dtype, device="meta") for width in (K, K, V))
        g, beta = (torch.empty(B, 256, 2, device="meta") for _ in range(2))
        call = MatrixCall(q, k, v, g, beta, delta="delta" in op)
        matrix._select(call, packed, op, True, "forward", backend)

    yield plan
    matrix._SELECTED.clear()


def said(plan, **of):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        plan(**of)
    return [str(each.message) for each in found]


def test_sizes_without_a_kernel_are_said(asked):
    (text,) = said(asked, K=320)
    assert "gated_delta_rule: no kernel serves K = 320 and V = 64 in bfloat16 on h200" in text
    assert "a K of 256 has one" in text
    (text,) = said(asked, K=321)
    assert "a K of 256 has one" in text
    (text,) = said(asked, op="ssd", dtype=torch.float32, device="a100", K=512)
    assert "K = 512 and V = 64 in float32 on a100" in text
    assert "a K of 256 has one" in text


def test_it_is_said_where_the_call_is_planned(asked):
    with pytest.warns(UserWarning, match="no kernel serves") as found:
        asked(K=320)
    assert found[0].filename == matrix.__file__


def test_it_is_said_once_a_size(asked):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for B in (1, 2):
            asked(K=312, B=B)
        asked(K=328)
    assert len(found) == 2


@pytest.mark.parametrize(
    "of",
    [
        {"K": 256, "V": 1000},
        {"op": "ssd", "K": 512, "V": 512},
        {"K": 192, "V": 384, "dtype": torch.float32},
        {"K": 320, "dtype": torch.float64},
        {"K": 320, "device": "cpu"},
        {"K": 320, "backend": "chunked"},
    ],
    ids=str,
)
def test_nothing_is_said_of_what_a_kernel_serves_or_was_asked_for(asked, of):
    assert said(asked, **of) == []


def test_a_gpu_without_kernels_is_told_why():
    """Sizes do not matter where none would do."""
    from holdfast.ops.unserved import warn_of_unserved
    from holdfast.planner import Problem

    given = Problem.of("gla", "matrix", "bfloat16", {"B": 1, "T": 8, "H": 1, "Hq": 1, "K": 8, "V": 8}, {})
    with pytest.warns(UserWarning, match="it needs compute capability 8.0"):
        warn_of_unserved(matrix._KERNELS, given, Device("cuda", "v100", (7, 0)))


@pytest.mark.parametrize(("served", "text"), [(1, "a K of 1 has one"), (5, "a K of 5 has one"), (0, "one: not 5")])
def test_the_nearest_size_is_any_from_the_asked_one_to_1(served, text):
    def reject(problem, device):
        return None if problem["K"] == served else f"not {problem['K']}"

    kernel = SimpleNamespace(name="one", reject=reject)
    problem = Problem("gla", "matrix", "float32", (("K", 5), ("V", 5)))
    said = unserved._served([kernel], problem, Device.named("h200"))
    assert text in said.split(", and ")
