"""Truths, tables and greedy variables, and that small problems are solved alike with and without propagation."""

import itertools
import random
from unittest import mock

import pytest

from holdfast.planner.constrint import Infeasible, Model, lookup, maximum, one_of, truth
from holdfast.planner.constrint import model as models
from planner import random_models


def by_propagation(model: Model) -> list[dict[str, int]]:
    with mock.patch.object(models, "is_small", return_value=False):
        return [dict(solution) for solution in model.solutions()]


def small(source: random.Random, greedy: bool) -> Model:
    """A few variables, of which one has an order of its own, with constraints of every kind."""
    made = Model()
    variables = [
        made.variable(
            name, random_models.domain(source, 6), source.choice(("smallest", "largest", "given")),
            auxiliary=source.random() < 0.2, greedy=greedy and source.random() < 0.5,
        )
        for name in "abc"
    ]  # fmt: skip
    a, b, c = source.sample(variables, 3)
    table = {value: source.randint(-3, 9) for value in a.domain}
    first, second = random_models.constraint(source, variables), random_models.constraint(source, variables)
    while not hasattr(first, "sign"):
        first = random_models.constraint(source, variables)
    made.add(
        made.let("found", lookup(a, table) + 2 * truth(first)) >= random_models.expression(source, variables, 1), "one"
    )
    made.add(second)
    if source.random() < 0.6:
        rows = [tuple(source.choice(each.domain) for each in (b, c)) for _ in range(source.randint(1, 6))]
        made.add(one_of((b, c), rows))
    return made


def in_order(model: Model):
    """Of each variable as the search decides it: its values in turn."""
    order = sorted(model.variables, key=lambda variable: variable.is_auxiliary)
    for variable in order:
        values = list(variable.domain)
        if variable.ranks is not None:
            values.sort(key=variable.ranks.__getitem__)
        yield variable, values[::-1] if variable.largest_first else values


def by_definition(model: Model) -> list[dict[str, int]]:
    order = list(in_order(model))

    def below(depth, known):
        if depth == len(order):
            return [dict(known)] if all(each.holds(known) for each in model.constraints) else []
        variable, values = order[depth]
        found = []
        for value in values:
            found += below(depth + 1, known | {variable: value})
            if found and variable.is_greedy:
                break
        return found

    names = [variable.name for variable in model.variables]
    return [{name: known[name] for name in names} for known in map(named, below(0, {}))]


def named(known):
    return {variable.name: value for variable, value in known.items()}


@pytest.mark.parametrize("greedy", [False, True])
def test_solutions_are_those_of_the_definition_in_its_order(greedy):
    several = 0
    for seed in range(400):
        model = small(random.Random(seed), greedy)
        expected = by_definition(model)
        assert [dict(solution) for solution in model.solutions()] == expected, seed
        assert by_propagation(model) == expected, seed
        several += len(expected) > 1
    assert several > 40


def test_a_solution_works_out_names_alike():
    model = Model()
    rows, cols = model.variable("rows", range(1, 5)), model.variable("cols", (3, 1, 2), "given")
    cells = model.let("cells", rows * cols)
    model.add(cells <= 4)
    expected = [each[rows] * each[cols] for each in model.solutions()]
    assert [each[cells] for each in model.solutions()] == expected
    assert [dict(each)["cols"] for each in model.solutions()] == [3, 1, 2, 1, 2, 1, 1]
    assert str(cells <= 4) == "cells <= 4"


def test_the_best_looks_at_all_values_of_a_greedy_variable():
    model = Model()
    rows = model.variable("rows", range(1, 100), "largest", greedy=True)
    over = model.add(2 * rows <= 10, "room")
    assert [each[rows] for each in model.solutions()] == [5]
    assert model.best(rows)[rows] == 1
    assert model.best(-rows, without=over)[rows] == 99


def test_a_long_domain_is_searched_in_its_order():
    for order, place in (("smallest", 0), ("largest", -1)):
        model = Model()
        model.variable("rows", range(100), order)
        found = [each["rows"] for each in model.solutions()]
        assert sorted(found) == list(range(100))
        assert found[0] == range(100)[place]


def test_contradictions_of_tables_are_named():
    model = Model()
    warps = model.variable("warps", (4, 8))
    registers = lookup(warps, {4: 255, 8: 232})
    model.add(registers <= 100, "registers")
    model.add(one_of((warps, maximum(warps, 6)), [(4, 6), (8, 8)]), "shapes")
    with pytest.raises(Infeasible, match=r"registers: \{4: 255, 8: 232\}\[warps\] <= 100"):
        model.first()
    assert str(one_of((warps, 2 * warps), [(4, 8)])) == "(warps, 2 * warps) in {(4, 8)}"
    assert str(16 * truth(warps > 4)) == "16 * (warps > 4)"


def test_what_is_no_table():
    model = Model()
    warps = model.variable("warps", (4, 8))
    with pytest.raises(ValueError, match="what each value of warps stands for; got none for 8"):
        lookup(warps, {4: 1})
    with pytest.raises(ValueError, match=r"expected rows of 2 integers; got \(1,\)"):
        one_of((warps, warps), [(1,)])
    with pytest.raises(TypeError, match="truth: expected a comparison"):
        truth(one_of((warps,), [(4,)]))


def test_every_sign_of_a_truth():
    for left, right in itertools.product(range(-2, 3), repeat=2):
        model = Model()
        a, b = model.variable("a", range(-2, 3)), model.variable("b", range(-2, 3))
        model.add(a == left)
        model.add(b == right)
        total = 32 * truth(a < b) + 16 * truth(a <= b) + 8 * truth(a == b) + 4 * truth(a != b)
        found = model.variable("found", range(64))
        model.add(found == total + 2 * truth(a >= b) + truth(a > b))
        expected = 32 * (left < right) + 16 * (left <= right) + 8 * (left == right) + 4 * (left != right)
        assert by_propagation(model)[0]["found"] == expected + 2 * (left >= right) + (left > right)


@pytest.mark.parametrize(("counts", "expected"), [((2**15,), True), ((2**15 + 1,), False), ((2**8, 2**7 + 1), False)])
def test_how_many_assignments_are_few(counts, expected):
    model = Model()
    for place, count in enumerate(counts):
        model.variable(f"v{place}", range(count))
    assert models.is_small(model.variables) == expected
    # of a greedy variable mostly the first value is one
    model.variable("stages", range(100), greedy=True)
    assert models.is_small(model.variables) == expected
