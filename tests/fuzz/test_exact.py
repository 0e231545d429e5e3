"""The fuzzer's float64 loops agree with the library's oracles, which were written apart from them."""

from dataclasses import replace

import pytest
import torch

from holdfast.fuzz.case import Case
from holdfast.fuzz.modes import replaced
from holdfast.fuzz.scenario import Scenario
from holdfast.fuzz.subjects import SUBJECTS, options, own_cell
from holdfast.recurrences import RECURRENCES, oracle
from holdfast.recurrences.dense import recurrence

CU = (0, 0, 3, 4, 4, 12)
SIZES = {
    "matrix": {"H": 4, "Hq": 2, "K": 5, "V": 3},
    "dense": {"H": 2, "D": 6},
    "diagonal": {"D": 6},
    "selective": {"D": 6, "K": 5, "Hq": 2},
    "inter": {"H": 2, "K": 5, "V": 3, "rank": 4},
    "intra": {"H": 4, "Hq": 2, "K": 5, "V": 3, "chunk": 8},
    "norm": {"H": 2, "D": 6},
    "conv": {"D": 6},
}
OPTIONS = {
    "simple_gla": (("g",), ("g1", "scale"), ()),
    "lightning": (("layer",), ()),
    "ssd": (("D", "z", "dt_bias", "softplus"), ("AN", "DP")),
    "mlstm": ((), ("sigmoid",), ("sigmoid", "unnormalized")),
    "delta_rule": (("l2", "sig", "neg"), ()),
    "gated_delta_rule": (("l2", "A_log", "dt_bias"), ("g1", "sig"), ()),
    "elman": (("b", "relu"), ("b", "reset", "clip"), ("cut",)),
    "slstm": (("b", "reset"), ("b",)),
    "inter_chunk_scan": (("low",), ("vector",), ()),
    "intra_chunk": (("g", "states", "gate", "opened"), ()),
    "gated_rms_norm": (("gate", "w2"), ("gate", "w1", "activation"), ("center", "w1"), ()),
    "mamba1": (("D", "z", "dt_bias", "softplus"), ("flat",), ()),
    "causal_conv1d": (("b", "silu"), ("silu", "taps3"), ("taps1",)),
}
# what no recurrence defines is held against the op in plain PyTorch, in float64
WITHOUT_ORACLE = ("inter_chunk_scan", "intra_chunk", "gated_rms_norm", "causal_conv1d")


def by_oracle(case: Case, tensors: dict) -> dict:
    s, given = case.s, dict(tensors) | options(case.s)
    if s.op in WITHOUT_ORACLE:
        return replaced(case, tensors).run(SUBJECTS[s.op].pytorch)
    if s.op == "mlstm" and s.state:
        given["initial_state"] = tuple(given.pop(name) for name in "Cnm")
    definition = recurrence(own_cell) if s.op == "rnn" else RECURRENCES[s.op]
    o, final = oracle(definition, given, case.cu)
    parts = final if isinstance(final, tuple) else (final,)
    return dict(zip(SUBJECTS[s.op].results, (o, *parts), strict=True))


def scenarios():
    for op, subject in SUBJECTS.items():
        for chosen in OPTIONS.get(op, (("b", "reset", "clip"), ("b",)) if subject.family == "dense" else ((),)):
            walks = subject.family not in ("intra", "norm")
            for strength, cu in (("mild", ()), ("mixed", CU if walks else ())):
                yield Scenario(
                    op,
                    "cpu",
                    seed=7,
                    dtype="float64",
                    gates="float64",
                    B=1 if cu else 2,
                    T=12,
                    options=chosen,
                    strength=strength,
                    cu=cu,
                    state=walks,
                    final=walks,
                    **SIZES[subject.family],
                )


@pytest.mark.parametrize("s", [*scenarios()], ids=lambda s: f"{s.op}-{'+'.join(s.options)}-{s.strength}")
def test_the_loops_agree_with_the_oracles(s):
    case = Case(s)
    right = case.exact()
    tensors = {name: x.clone().requires_grad_(name in case.needing) for name, x in case.before.items()}
    results = by_oracle(case, tensors)
    found = {name: x.detach() for name, x in results.items()}
    names, grads = case.cotangents(results, 0)
    found |= case.pulled_back([results[name] for name in names], grads, tensors)
    assert found.keys() == right.keys()
    assert any(name[0] == "d" for name in right)
    for name, x in right.items():
        assert (found[name] - x).norm() <= 1e-10 * (x.norm() + 1), name


@pytest.mark.parametrize("op", SUBJECTS)
def test_no_steps_at_all(op):
    """T = 0: the state as it came."""
    family = SUBJECTS[op].family
    walks = family not in ("intra", "norm")
    s = Scenario(op, "cpu", seed=1, dtype="float64", gates="float64", B=2, state=walks, final=walks, **SIZES[family])
    if op == "intra_chunk":
        s = replace(s, options=("g", "states"))
    case = Case(s)
    right = case.exact()
    assert right["o"].numel() == 0
    if "final" in right:
        assert torch.equal(right["final"], case.before["initial_state"])
