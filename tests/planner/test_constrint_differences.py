"""Bounds on differences: a contradiction is found if and only if there is one."""

import random
from itertools import product

import pytest

from holdfast.planner.constrint.differences import contradict, edges
from holdfast.planner.constrint.propagate import AtMostZero, IsNotZero, IsZero

RANGE = range(-16, 17)


def holds(rule, values):
    total = rule.constant + sum(scale * values[node] for node, scale in rule.pairs)
    return total <= 0 if isinstance(rule, AtMostZero) else total == 0


def test_a_bound_by_hand():
    """3 b - 3 a + 7 <= 0: b is at most a - 7 / 3, of whole numbers a - 3, however it is written."""
    assert edges([AtMostZero([(1, 3), (0, -3)], 7)]) == [(0, 1, -3)]
    assert edges([AtMostZero([(0, -3), (1, 3)], 7)]) == [(0, 1, -3)]
    # 2 a - 2 b + 5 = 0 has no solution in whole numbers: both ways are rounded down
    assert sorted(edges([IsZero([(0, 2), (1, -2)], 5)])) == [(0, 1, 2), (1, 0, -3)]
    assert contradict([IsZero([(0, 2), (1, -2)], 5), AtMostZero([(0, 1), (1, -1)], -9)])


def test_other_rules_bound_no_difference():
    others = [
        AtMostZero([(0, 1)], 3), AtMostZero([(0, 1), (1, 1)], 3), AtMostZero([(0, 2), (1, -1)], 3),
        AtMostZero([(0, 1), (1, -1), (2, 1)], 3), IsNotZero([(0, 1), (1, -1)], 3),
    ]  # fmt: skip
    assert edges(others) == []
    assert not contradict(others)


@pytest.mark.parametrize("seed", range(150))
def test_a_contradiction_is_found_if_there_is_one(seed):
    draw = random.Random(seed)
    rules = []
    for _ in range(draw.randint(2, 6)):
        one, other = draw.sample(range(3), 2)
        scale = draw.choice((-2, -1, 1, 3))
        kind = AtMostZero if draw.random() < 0.8 else IsZero
        rules.append(kind([(one, scale), (other, -scale)], draw.randint(-4, 4)))
    # only differences count, so that the first is 0
    possible = any(all(holds(rule, (0, b, c)) for rule in rules) for b, c in product(RANGE, RANGE))
    assert contradict(rules) is not possible
