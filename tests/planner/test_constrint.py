"""ConstrINT as its users see it: writing models, the order of solutions, errors, and clashes in words."""

import itertools
import random

import pytest

from holdfast.planner.constrint import Infeasible, Model, SearchLimit, ceil_div, divides, maximum, minimum
from planner import random_models


def tile_model() -> Model:
    model = Model()
    rows = model.variable("rows", range(1, 2**40), order="largest")
    cols = model.variable("cols", (32, 64, 128))
    smem = model.constant("smem", 232448)
    model.add(rows * cols * 2 <= smem, "tile fits shared memory")
    model.add(divides(16, rows))
    return model


def test_first_solution_of_a_wide_range() -> None:
    assert dict(tile_model().first()) == {"rows": 3632, "cols": 32, "smem": 232448}


def test_best_is_the_optimum() -> None:
    model = tile_model()
    rows, cols, _ = model.variables
    model.add(rows * cols != 3632 * 32)
    best = model.best(rows * cols + cols, minimize=False)
    # 227 KiB hold 116224 elements of two bytes: 908 rows of 128, of which 896 is the largest multiple of 16.
    assert best[rows * cols + cols] == max(
        r * c + c for c in (32, 64, 128) for r in range(16, 4096, 16) if r * c * 2 <= 232448 and r * c != 3632 * 32
    )


@pytest.mark.parametrize("order", ["smallest", "largest"])
def test_solutions_come_in_declared_order(order: str) -> None:
    model = Model()
    helper = model.variable("helper", range(3), auxiliary=True)
    a = model.variable("a", range(50), order=order)
    b = model.variable("b", (1, 2))
    model.add(helper + b <= 3)
    found = [(solution[a], solution[b], solution[helper]) for solution in model.solutions()]
    expected = [(x, y, z) for x in range(50) for y in (1, 2) for z in range(3) if z + y <= 3]
    if order == "largest":
        expected.sort(key=lambda triple: (-triple[0], triple[1:]))
    assert found == expected
    assert found == [(solution[a], solution[b], solution[helper]) for solution in model.solutions()]


def test_ranges_beyond_machine_integers() -> None:
    model = Model()
    a = model.variable("a", range(2**70))
    b = model.variable("b", range(2**70))
    model.add(a * b == 2**20 * 3**5 * 7)
    model.add(a - b == 2**9 * 3**3 - 2**11 * 9 * 7)
    assert [dict(solution) for solution in model.solutions()] == [{"a": 13824, "b": 129024}]


def test_every_operation_means_what_python_means() -> None:
    model = Model()
    a = model.variable("a", range(-7, 8))
    b = model.variable("b", range(1, 5))
    terms = {
        "sum": (a + b - 3, lambda x, y: x + y - 3),
        "reflected": (3 - a, lambda x, y: 3 - x),
        "product": (2 * a * b, lambda x, y: 2 * x * y),
        "negative": (-a, lambda x, y: -x),
        "power": (a**3, lambda x, y: x**3),
        "power 0": (a**0, lambda x, y: 1),
        "floor": (a // b, lambda x, y: x // y),
        "floor by a number": (a // 3, lambda x, y: x // 3),
        "number by": (7 // b, lambda x, y: 7 // y),
        "ceil": (ceil_div(a, b), lambda x, y: -(-x // y)),
        "minimum": (minimum(a, b, 2), lambda x, y: min(x, y, 2)),
        "maximum": (maximum(a, b), lambda x, y: max(x, y)),
    }
    results = {name: model.variable(name, range(-400, 401), auxiliary=True) for name in terms}
    for name, (term, _) in terms.items():
        model.add(results[name] == term)
    solutions = list(model.solutions())
    assert len(solutions) == 15 * 4
    for solution in solutions:
        for name, (term, function) in terms.items():
            assert solution[name] == solution[term] == function(solution[a], solution[b]), name


def test_expressions_read_as_written() -> None:
    model = Model()
    a, b, c = (model.variable(name, range(1, 9)) for name in "abc")
    text = {
        "a * b * 2 + c <= 64": a * b * 2 + c <= 64,
        "a - (b - c) == -a": a - (b - c) == -a,
        "(a + b) * c != a * (b + c)": (a + b) * c != a * (b + c),
        "a * (b // c) < a // b // c": a * (b // c) < a // b // c,
        "(a * b) ** 2 > ceil_div(a + b, c)": (a * b) ** 2 > ceil_div(a + b, c),
        "divides(16, a * b)": divides(16, a * b),
        "c >= minimum(a, 3)": minimum(a, 3) <= c,
    }
    for words, constraint in text.items():
        assert str(constraint) in (words, "minimum(a, 3) <= c")


def test_clash_in_words() -> None:
    model = tile_model()
    rows, cols, _ = model.variables
    model.add(cols >= 64)
    model.add(rows >= 2000, "enough rows")
    with pytest.raises(Infeasible) as caught:
        model.first()
    assert str(caught.value) == (
        "no solution; these clash:\n"
        "  tile fits shared memory: rows * cols * 2 <= smem\n"
        "  cols >= 64\n"
        "  enough rows: rows >= 2000\n"
        "where rows is 1..1099511627775, cols is {32, 64, 128}, smem is 232448"
    )
    with pytest.raises(Infeasible):
        model.best(rows)
    assert list(model.solutions()) == []


def test_a_clash_is_that_of_the_model_when_it_was_solved() -> None:
    model = Model()
    a = model.variable("a", range(10))
    model.add(a > 20)
    with pytest.raises(Infeasible) as caught:
        model.first()
    model.add(a > 30)
    assert caught.value.words() == ["a > 20"]


def feasible(model: Model, constraints) -> bool:
    domains = [variable.domain for variable in model.variables]
    return any(
        all(constraint.holds(dict(zip(model.variables, values, strict=True))) for constraint in constraints)
        for values in itertools.product(*domains)
    )


def clash_of(model: Model) -> Infeasible | None:
    try:
        model.first()
    except Infeasible as error:
        return error
    return None


def test_clashes_are_minimal() -> None:
    sizes = []
    for seed in range(250):
        source = random.Random(seed)
        model = random_models.model(source, reach=6, count=3)
        for _ in range(4):
            model.add(random_models.constraint(source, model.variables))
        clash = clash_of(model)
        if clash is None:
            continue
        found = clash.constraints
        sizes.append(len(found))
        assert clash.is_minimal
        assert not feasible(model, found)
        for place in range(len(found)):
            assert feasible(model, found[:place] + found[place + 1 :]), (seed, str(clash))
    assert len(sizes) > 100
    assert max(sizes) >= 3


@pytest.mark.parametrize("length", [2, 3, 6])
@pytest.mark.parametrize("scale", [1, 3])
def test_a_cycle_of_differences_over_huge_ranges_is_found_at_once(length: int, scale: int) -> None:
    model = Model(limit=10)
    ring = [model.variable(f"v{place}", range(2**60)) for place in range(length)]
    bystander = model.variable("bystander", range(2**60))
    model.add(ring[0] <= bystander)
    for one, next_ in zip(ring, [*ring[1:], ring[0]], strict=True):
        model.add(scale * one < scale * next_)
    with pytest.raises(Infeasible) as caught:
        model.first()
    assert caught.value.is_minimal
    assert len(caught.value.constraints) == length
    assert "bystander" not in str(caught.value)


def test_differences_that_can_be_met_are_left_alone() -> None:
    model = Model()
    a, b, c = (model.variable(name, range(2**60)) for name in "abc")
    model.add(a + 5 <= b)
    model.add(b == c - 7)
    model.add(c <= a + 12)
    assert dict(model.first()) == {"a": 0, "b": 5, "c": 12}
    model.add(c != a + 12)
    model.add(c <= a + 11)
    with pytest.raises(Infeasible):
        model.first()


def test_a_divisor_is_positive_even_where_nothing_fits() -> None:
    """v1 cannot be a square of v0, so its domain says nothing about the divisor."""
    model = Model()
    v0 = model.variable("v0", range(1, 9))
    v1 = model.variable("v1", (-6, -2))
    model.add(v1 == v0 * v0)
    model.add(v1 <= ceil_div(24, v0 * v0))
    for solve in (model.first, lambda: model.best(24 // (v0 * v0))):
        with pytest.raises(Infeasible, match=r"v1 == v0 \* v0"):
            solve()


def no_such_ratio(model: Model) -> None:
    """The square root of 2 is not rational, which propagation does not know."""
    a = model.variable("a", range(1, 2**40))
    b = model.variable("b", range(1, 2**40))
    model.add(a * a == 2 * b * b)


def test_a_search_that_reaches_its_limit_says_so() -> None:
    model = Model(limit=100)
    no_such_ratio(model)
    with pytest.raises(SearchLimit, match="100 steps"):
        model.first()


def test_a_clash_that_could_not_be_made_minimal_says_so() -> None:
    model = Model(limit=100)
    no_such_ratio(model)
    c = model.variable("c", range(2**40))
    model.add(c > 2**41)
    with pytest.raises(Infeasible) as caught:
        model.first()
    assert not caught.value.is_minimal
    assert "fewer may already" in str(caught.value)


def test_bad_models() -> None:
    model = Model()
    a = model.variable("a", range(-3, 10))
    b = model.variable("b", range(1, 10))
    stranger = Model().variable("stranger", range(3))
    with pytest.raises(TypeError, match=r"is two constraints: model.add\(a < b\)"):
        model.add(a < b < 5)
    with pytest.raises(ValueError, match="stranger belongs to another model"):
        model.add(a < stranger)
    with pytest.raises(ValueError, match="stranger belongs to another model"):
        model.best(a + stranger)
    with pytest.raises(ValueError, match="variable c: expected at least one value; got an empty domain"):
        model.variable("c", range(5, 5))
    with pytest.raises(ValueError, match="already has one named 'a'"):
        model.variable("a", range(5))
    with pytest.raises(TypeError, match=r"variable c: expected integers; got 1\.5"):
        model.variable("c", (1, 1.5))
    with pytest.raises(ValueError, match=r'expected the order "smallest", "largest" or "given"; got .up.'):
        model.variable("c", range(5), order="up")
    with pytest.raises(ValueError, match=r"exponent of 0 or more; got a \*\* -1"):
        a**-1
    with pytest.raises(TypeError, match="constant integer exponent; got b"):
        a**b
    with pytest.raises(ValueError, match="positive divisor; a can be -3: b // a"):
        model.add(b // a == 1)
    with pytest.raises(ValueError, match="positive divisor; got 0"):
        a // 0
    with pytest.raises(TypeError, match="write a // b, or ceil_div"):
        a / 2
    with pytest.raises(TypeError, match=r"write divides\(4, a\)"):
        a % 4
    with pytest.raises(TypeError, match=r"expected an integer or an expression; got 1\.5"):
        a + 1.5
    with pytest.raises(TypeError, match="got True, a comparison in which no variable occurs"):
        model.add(3 <= 4)
    with pytest.raises(TypeError, match="expected a constraint such as"):
        model.add(a + b)
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(a)
    with pytest.raises(KeyError, match="no variable 'z'"):
        model.first()["z"]
    assert model.constraints == ()
