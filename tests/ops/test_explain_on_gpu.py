"""explain on a GPU: which of an op's calls are replayed, and why others are not."""

import re

import pytest

import holdfast
from holdfast.kernels import select as planning

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def forget():
    planning.forget()
    yield
    planning.forget()


@pytest.mark.parametrize("grad", [False, True])
def test_calls_with_packed_sequences_are_told_to_run_in_full(grad):
    told = holdfast.explain("gla", {"T": 64}, "bfloat16", "cuda", grad, varlen=True, calls=3)
    assert {name for name, _ in told.in_full} >= {"matrix_forward"}
    assert {reason for _, reason in told.in_full} == {"it reads values on the host"}
    assert re.search(r"none of \d+ signatures? of matrix_forward: it reads values on the host", str(told))


@pytest.mark.parametrize("op", ["gla", "rglru", "lstm"])
def test_of_calls_that_are_replayed_nothing_is_told(op):
    told = holdfast.explain(op, {"T": 64}, "bfloat16", "cuda", calls=4)
    assert not told.in_full
    assert "replay" not in str(told)
