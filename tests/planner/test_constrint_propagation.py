"""What propagation alone finds: each rule is worth its place only if it narrows what these expect."""

import random

import pytest

from holdfast.planner.constrint import Model, ceil_div, divides
from holdfast.planner.constrint.divisors import divisors
from holdfast.planner.constrint.domain import clip, common_divisor, congruent, describe, size, stride, without
from holdfast.planner.constrint.nonlinear import root


def variables(model: Model, count: int, values=range(1, 2**40)):
    return [model.variable(name, values) for name in "abcdefgh"[:count]]


def test_factors_of_a_number_become_its_divisors() -> None:
    model = Model()
    a, b, c = variables(model, 3)
    model.add(a * b * c == 12)
    assert model.reduced() == dict.fromkeys("abc", (1, 2, 3, 4, 6, 12))


def test_a_bound_on_a_product_bounds_its_factors() -> None:
    model = Model()
    a, b, c = variables(model, 3)
    model.add(a * b * c <= 100)
    model.add(a >= 5)
    model.add(c == 3)
    reduced = model.reduced()
    assert reduced is not None
    assert (reduced["a"][0], reduced["a"][-1], reduced["b"][-1]) == (5, 33, 6)


def test_a_bound_on_a_sum_bounds_its_terms() -> None:
    model = Model()
    a, b, c = variables(model, 3)
    model.add(a + 2 * b - c == 10)
    model.add(c <= 3)
    reduced = model.reduced()
    assert reduced is not None
    assert (reduced["a"][-1], reduced["b"][-1]) == (11, 6)


def test_divisibility_keeps_ranges_as_progressions() -> None:
    model = Model()
    a, b = variables(model, 2)
    model.add(divides(16, a))
    model.add(b == 3 * a + 1)
    reduced = model.reduced()
    assert reduced is not None
    assert (reduced["a"][0], stride(reduced["a"])) == (16, 16)
    assert (reduced["b"][0], stride(reduced["b"])) == (49, 48)


def test_a_term_that_its_remainder_narrows_leaves_the_others_theirs() -> None:
    """Its least value is another one then, which the remainders of the others are counted from."""
    model = Model()
    a = model.variable("a", range(1, 3 * 2**20, 3))
    b = model.variable("b", range(2**40))
    model.add(a + 6 * b == 6 * 2**20 + 4)
    reduced = model.reduced()
    assert reduced is not None
    assert (reduced["a"][0], stride(reduced["a"])) == (4, 6)
    assert (reduced["b"][-1], stride(reduced["b"])) == (2**20, 1)


def test_remainders_alone_show_that_nothing_fits() -> None:
    model = Model()
    a, b = variables(model, 2)
    model.add(6 * a + 4 * b == 2**35 + 1)
    assert model.reduced() is None


def test_divisors_of_a_number() -> None:
    model = Model()
    a, b = variables(model, 2)
    model.add(divides(a * b, 20))
    model.add(b >= 4)
    reduced = model.reduced()
    assert reduced == {"a": (1, 2, 4, 5), "b": (4, 5, 10, 20)}


def test_powers_and_divisions_propagate_down() -> None:
    model = Model()
    a, b, c = variables(model, 3)
    model.add(a**2 <= 10**20)
    model.add(b // 7 == 5)
    model.add(c**3 >= 28)
    reduced = model.reduced()
    assert reduced is not None
    assert reduced["a"][-1] == 10**10
    assert (reduced["b"][0], reduced["b"][-1]) == (35, 41)
    assert reduced["c"][0] == 4


@pytest.mark.parametrize("divided", [lambda a, b: a // b, ceil_div], ids=["down", "up"])
def test_divisions_of_wide_ranges_keep_every_solution(divided) -> None:
    """Ranges too wide to be matched value by value, of numbers below zero too."""
    draw = random.Random(3)
    for _ in range(300):
        first, least = draw.randrange(-5000, 5000), draw.randrange(1, 40)
        values, divisors = range(first, first + 3000), range(least, least + draw.randrange(1, 60))
        value, divisor = draw.choice(values), draw.choice(divisors)
        result = value // divisor if divided is not ceil_div else -(-value // divisor)
        model = Model()
        a, b = model.variable("a", values), model.variable("b", divisors)
        quotient = model.variable("quotient", range(result - draw.randrange(50), result + 1 + draw.randrange(50)))
        model.add(divided(a, b) == quotient)
        reduced = model.reduced()
        assert reduced is not None
        assert value in reduced["a"]
        assert divisor in reduced["b"]
        assert result in reduced["quotient"]


def test_domains() -> None:
    wide = range(5, 2**80, 6)
    assert size(wide) == -((5 - 2**80) // 6)
    assert clip(wide, 12, 30) == range(17, 30, 6)
    assert list(congruent(range(5, 100, 6), 1, 4)) == [value for value in range(5, 100, 6) if value % 4 == 1]
    assert not congruent(range(0, 100, 6), 1, 4)
    assert common_divisor(range(4, 100, 6)) == 2
    assert without(range(10), 4) == (0, 1, 2, 3, 5, 6, 7, 8, 9)
    assert describe(range(16, 1025, 16)) == "16..1024 in steps of 16"
    assert [describe(few) for few in (range(1, 3), range(5, 6), (7,))] == ["1..2", "5", "7"]
    assert describe((1, 2, 4, 8, 16, 32, 64, 128)) == "{1, 2, 4, 8, 16, 32, 64, 128}"
    assert describe((1, 2, 4, 8, 16, 32, 64, 128, 256, 512)) == "{1, 2, 4, 8, 16, 32, 64, ..., 512}"


def test_divisors_and_roots() -> None:
    for number in range(1, 500):
        assert divisors(number) == tuple(d for d in range(1, number + 1) if number % d == 0)
    assert divisors((2**61 - 1) * 4) is None
    for exponent in (2, 3, 5):
        for number in [*range(200), 10**30, 10**30 - 1, 7**20]:
            found = root(number, exponent)
            assert found**exponent <= number < (found + 1) ** exponent


def test_strict_comparisons_leave_out_the_bound() -> None:
    model = Model()
    a, b, c = variables(model, 3, range(1, 100))
    model.add(a > 5)
    model.add(b < 5)
    model.add(c >= 5)
    model.add(c <= 9)
    model.add(c != 9)
    assert model.reduced() == {"a": range(6, 100), "b": range(1, 5), "c": range(5, 9)}
