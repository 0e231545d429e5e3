"""explain says what would run and why not otherwise."""

import pytest

import holdfast
from holdfast.ops import matrix
from holdfast.recurrences import RECURRENCES


@pytest.mark.parametrize("op", RECURRENCES)
@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_every_op_can_be_explained(op, device):
    told = holdfast.explain(op, {"B": 4, "T": 4096, "H": 32, "K": 128, "V": 64, "D": 256}, "bfloat16", device)
    assert told.problem["T"] == 4096
    assert told.problem.dtype == "bfloat16"
    assert told.plan.backend not in told.passed_over
    assert "reference" in told.passed_over
    assert f"runs     {told.plan.backend}" in str(told)


def test_traits_are_those_of_the_call():
    told = holdfast.explain("mlstm", {"H": 4, "Hq": 2}, varlen=True, needs_grad=False)
    assert told.problem.traits == {"decay=scalar", "normalizer", "varlen"}
    assert told.problem["Hq"] == 2


def test_a_forced_backend_says_so():
    told = holdfast.explain("gla", backend="reference")
    assert told.plan.backend == "reference"
    assert told.passed_over["chunked"] == "reference is forced"


def test_a_rejection_is_passed_on(monkeypatch):
    class Hopper:
        name = "hopper"

        def reject(self, problem, device):
            return "needs compute capability 9.0"

    monkeypatch.setattr(matrix, "BACKENDS", (Hopper(), *matrix.BACKENDS))
    assert holdfast.explain("gla").passed_over["hopper"] == "needs compute capability 9.0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "glue"}, "op: expected one of .*gla.*; got 'glue'"),
        ({"op": "gla", "sizes": {"Z": 3}}, "sizes: expected axes among .*; got 'Z'"),
        ({"op": "gla", "sizes": {"B": -1}}, "sizes: expected B >= 0; got -1"),
        ({"op": "gla", "dtype": "int32"}, "dtype: expected a floating-point dtype .*; got 'int32'"),
        ({"op": "gla", "device": "abacus"}, "device: expected one of .*; got 'abacus'"),
        ({"op": "gla", "backend": "fast"}, "backend: expected one of .*; got 'fast'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        holdfast.explain(**arguments)
