"""How doctor judges results, and how large the numbers are that it draws for what has no example."""

import math
from functools import partial

import pytest
import torch

from holdfast.ops import checks
from holdfast.ops.checks import Attempt
from holdfast.recurrences import Draw

EXACT = torch.linspace(1, 2, 1000, dtype=torch.float64)


def judged(*factors, limit=0.01, off=()):
    """Results that are too large by a part, each a tensor of a thousand; off: (element, part) of the last one."""
    attempt = Attempt(lambda a: (a["x"],) * len(factors), {"x": EXACT}, {}, limit, grads=False)
    got = [(1 + part) * EXACT for part in factors]
    for element, part in off:
        got[-1][element] *= 1 + part
    return attempt.judge(got)


def test_errors_in_norm():
    assert judged(0.0, 0.0) == (0.0, "")
    error, wrong = judged(0.001, 0.009, 0.002)
    assert (round(error, 4), wrong) == (0.009, "")
    assert judged(0.001, 0.02)[1] == "relative error 2.0e-02 of output or gradient 1, limit 1e-02"
    assert judged(0.03, 0.02)[1] == "relative error 3.0e-02 of output or gradient 0, limit 1e-02"


def test_what_is_not_finite_is_wrong_wherever_it_is():
    for factors in ((math.nan, 0.0), (0.0, math.nan)):
        error, wrong = judged(*factors)
        assert math.isnan(error)
        assert wrong == f"relative error nan of output or gradient {factors.index(math.nan)}, limit 1e-02"


def test_one_element_may_be_off_by_a_few_limits():
    """Relative to itself and to what elements are, which here is about 1.5."""
    assert judged(0.0, 0.0, off=[(0, 0.15)])[1] == ""
    error, wrong = judged(0.0, 0.0, off=[(0, 0.25)])
    assert error < 0.01
    assert wrong == "relative error 9.9e-02 of one element of output or gradient 1, limit 8e-02"


@pytest.mark.parametrize(
    ("draw", "deviations"),
    [
        (partial(checks.draw_low_rank, K=64), {"W": 1 / 8, "Y": 1 / 8, "states": 1}),
        (checks.draw_chunks, {"q": 1, "k": 1 / 8, "v": 1, "states": 1 / 8, "gate": 1}),
        (checks.draw_conv, {"x": 1, "weight": 1 / 2}),
        (checks.draw_delta_layer, {"packed": 1, "conv_weight": 1 / 2}),
        (checks.draw_gla_layer, {"packed": 1, "decay_weight": 1 / 2}),
        (checks.draw_kda_layer, {"packed": 1, "conv_weight": 1 / 2, "decay_weight": 1 / 4}),
        (checks.draw_turned, {"q": 1, "k": 1 / 4, "v": 1}),
    ],
)
def test_products_of_what_is_drawn_are_about_one(draw, deviations):
    drawn = draw(Draw(0))
    assert {name: drawn[name].std().item() for name in deviations} == pytest.approx(deviations, rel=0.25)


def test_composed_from_chunk_primitives_it_is_the_recurrence():
    attempt = checks.of_example(checks.SIMPLE_GLA, 0, torch.device("cpu"), checks._COMPOSED)
    assert attempt.judge(attempt.results(partial(checks._compose, inter="chunked", intra="chunked")))[1] == ""
