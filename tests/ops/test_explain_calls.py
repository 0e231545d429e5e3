"""The example calls that explain makes, here on a CPU, and what it tells of those that are not replayed."""

import pytest
import torch

from holdfast import ops
from holdfast.ops import explain as public
from holdfast.planner import Problem
from holdfast.recurrences import RECURRENCES, Draw, Sizes
from ops.test_problems import module

explain = module("explain")


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_calls_are_as_many_and_of_such_sizes(monkeypatch, grad, varlen):
    made, own = [], ops.simple_gla

    def noted(**given):
        made.append(given)
        return own(**given)

    monkeypatch.setattr(ops, "simple_gla", noted)
    explain._call(RECURRENCES["simple_gla"], Sizes(B=3, T=7), Draw(0), grad, varlen, "chunked", 2)
    assert len(made) == 2
    for given in made:
        assert given["q"].shape[:2] == ((1, 7) if varlen else (3, 7))
        assert given["backend"] == "chunked"
        assert (given["v"].grad is not None) == grad
        assert given["v"].requires_grad == grad
        if varlen:
            assert given["cu_seqlens"].tolist() == [0, 7]
            assert given["cu_seqlens"].dtype == torch.int32
        else:
            assert "cu_seqlens" not in given


def test_what_runs_in_full_is_told_of_the_op_and_its_family(monkeypatch):
    counted = {
        (name, "why"): n for n, name in enumerate(("gla", "gla_layer", "matrix_forward", "glad", "kda", "dense_x"))
    }
    monkeypatch.setattr(explain, "refusals", lambda: counted)
    told = explain._in_full(Problem("gla", "matrix", "float32", ()))
    assert told == {("gla", "why"): 0, ("gla_layer", "why"): 1, ("matrix_forward", "why"): 2}


@pytest.mark.parametrize(("op", "device"), [("gla", "cpu"), ("gla", "h200"), ("intra_chunk", "h200")])
def test_only_a_gpu_here_makes_calls(op, device):
    with pytest.raises(ValueError, match=f"calls: expected 0 for '{op}' on '{device}'; got 1"):
        public(op, device=device, calls=1)
    assert public(op, device=device).in_full == {}


@pytest.mark.parametrize(("name", "least"), [("B", 0), ("T", 0), ("H", 1), ("K", 1), ("r", 0), ("Kg", 1), ("G", 0)])
def test_sizes_have_a_least(name, least):
    op = "inter_chunk_scan" if name in ("r", "Kg", "G") else "gla"
    public(op, {name: least})
    with pytest.raises(ValueError, match=f"sizes: expected {name} >= {least}; got {least - 1}"):
        public(op, {name: least - 1})
