"""Scenarios: a line holds all of one, and a seed draws the same ones, among them everything that there is."""

import hashlib
from itertools import pairwise

import pytest

from holdfast.fuzz.draw import draw
from holdfast.fuzz.modes import MODES
from holdfast.fuzz.modules import MODULES
from holdfast.fuzz.scenario import Scenario, parse
from holdfast.fuzz.subjects import SUBJECTS

MANY = [draw(5, index, "cuda") for index in range(2000)]


def test_a_line_holds_all_of_a_scenario():
    assert all(parse(s.line()) == s for s in MANY)
    assert all(parse(s.line()) == s for s in (draw(5, index, "cpu") for index in range(300)))


def test_a_seed_draws_the_same_scenarios():
    assert [draw(5, index, "cuda") for index in range(50)] == MANY[:50]
    assert [draw(6, index, "cuda") for index in range(50)] != MANY[:50]


def digest(scenarios):
    return hashlib.sha256("\n".join(s.line() for s in scenarios).encode()).hexdigest()[:16]


def test_scenarios_are_those_of_another_day():
    """A report names a seed and a number, so a change of what is drawn has to be meant: then put the new ones here."""
    on_cpu = [draw(5, index, "cpu") for index in range(300)]
    assert (digest(MANY), digest(on_cpu)) == ("8fb4559823746619", "f2f557aa52788531")


def test_every_op_mode_and_layout_is_drawn():
    assert {s.op for s in MANY} == {*SUBJECTS, *MODULES}
    assert {s.mode for s in MANY} == set(MODES)
    assert {s.backend for s in MANY} >= {"default", "hopper", "triton", "fused", "alternating", "chunked", "decode"}
    assert {s.dtype for s in MANY} == {"bfloat16", "float16", "float32", "float64"}
    assert {s.grads for s in MANY} == {"both", "out", "state", "none"}
    assert any(s.cu and 0 in [b - a for a, b in zip(s.cu, s.cu[1:], strict=False)] for s in MANY)
    assert {0, 1, 1025} <= {s.T for s in MANY}


def test_a_step_loop_has_short_sequences():
    """Else it takes a minute, which is a hang to the fuzzer."""
    lengths = [
        length
        for s in MANY
        if s.backend == "reference"
        for length in ([b - a for a, b in pairwise(s.cu)] if s.cu else [s.T])
    ]
    assert max(lengths) == 129
    assert {0, 1, 64, 128} <= set(lengths)
    assert all(s.cu[-1] == s.T for s in MANY if s.cu)


# what adversarial calls once found, each as a scenario that may be drawn
@pytest.mark.parametrize(
    "found",
    [
        lambda s: s.dtype == "float32" and s.K >= 48 and s.T == 1 and s.state and s.op == "simple_gla",
        lambda s: s.op == "simple_gla" and s.backend == "hopper" and s.K == s.V == 64 and s.gate_dtype != s.wide,
        lambda s: s.op == "mlstm" and s.K == 128 and s.state and s.T in (127, 128, 129) and "sigmoid" not in s.options,
        lambda s: s.op == "mlstm" and s.mode == "autocast" and s.state and s.strength == "strong",
        lambda s: s.op == "gated_delta_rule" and s.keys == "model" and s.T > 1000,
        lambda s: s.op == "gated_delta_rule" and s.mode == "checkpoint" and "l2" in s.options,
        lambda s: s.op == "rotlru" and s.backend == "chunked" and s.layout in ("offset", "mixed"),
        lambda s: s.op == "ssd" and s.mode == "jvp",
        lambda s: s.op == "mlstm" and "unnormalized" in s.options and s.state,
        lambda s: s.op == "gla" and s.mode == "default_dtype",
        lambda s: s.op == "nn.GatedDeltaNet" and s.mode == "compile" and "inductor" in s.options,
    ],
)
def test_known_kinds_of_fault_are_within_reach(found):
    assert any(found(draw(5, index, "cuda")) for index in range(20000))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("op=gla device=cpu seed=1 width=3", "expected words such as op=gla or T=65; got 'width=3'"),
        ("op=gla device=cpu seed=1 T", "got 'T'"),
        ("op=gla device=cpu seed=1 T=many", "expected a value of T; got 'T=many'"),
        ("op=gla device=cpu seed=1 state=1", "expected a value of state"),
        ("op=gla T=3", "expected device and seed in the line"),
    ],
)
def test_a_line_that_is_none_is_refused(line, complaint):
    with pytest.raises(ValueError, match="replay: ") as error:
        parse(line)
    assert complaint in str(error.value)


def test_what_is_at_its_default_is_left_out():
    assert Scenario("gla", "cpu", 3, T=5).line() == "op=gla device=cpu seed=3 T=5"
