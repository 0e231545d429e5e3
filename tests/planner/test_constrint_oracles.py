"""ConstrINT's answers against enumeration and against OR-Tools CP-SAT, on random problems."""

import itertools
import random
import time
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.planner.constrint import Infeasible, Model
from holdfast.planner.constrint import model as models
from planner import random_models

REASON = "OR-Tools, the solver's oracle, is a development dependency"


def enumerate_all(model: Model) -> set[tuple[int, ...]]:
    found = set()
    for values in itertools.product(*[variable.domain for variable in model.variables]):
        named = dict(zip(model.variables, values, strict=True))
        if all(constraint.holds(named) for constraint in model.constraints):
            found.add(values)
    return found


def searched(model: Model) -> list[tuple[int, ...]]:
    """All solutions by propagation, which small problems do without."""
    with mock.patch.object(models, "is_small", return_value=False):
        return [tuple(solution.values()) for solution in model.solutions()]


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_all_solutions_by_enumeration(source: random.Random) -> None:
    model = random_models.model(source, reach=7, count=3)
    found = [tuple(solution.values()) for solution in model.solutions()]
    assert len(found) == len(set(found))
    assert set(found) == enumerate_all(model)
    assert searched(model) == found


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False))
def test_optimum_by_enumeration(source: random.Random) -> None:
    model = random_models.model(source, reach=7, count=3)
    goal = random_models.objective(source, model)
    values = [goal.value(dict(zip(model.variables, found, strict=True))) for found in enumerate_all(model)]
    for minimize, pick in ((True, min), (False, max)):
        if values:
            assert model.best(goal, minimize=minimize)[goal] == pick(values)
        else:
            with pytest.raises(Infeasible):
                model.best(goal, minimize=minimize)


def test_entangled_equalities_by_enumeration() -> None:
    """Numbers that are equal become one, and exact divisions products: neither may lose or add a solution."""
    with_solutions = 0
    for seed in range(1500):
        source = random.Random(seed)
        model = random_models.entangled(source)
        expected = enumerate_all(model)
        found = searched(model)
        assert len(found) == len(set(found))
        assert set(found) == expected, seed
        with_solutions += bool(expected)
        if not expected:
            continue
        goal = random_models.objective(source, model)
        value = {values: goal.value(dict(zip(model.variables, values, strict=True))) for values in found}
        # the first of the best, in the order in which solutions come
        assert tuple(model.best(goal).values()) == min(found, key=value.__getitem__), seed
    assert with_solutions > 250


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False))
def test_propagation_keeps_every_solution(source: random.Random) -> None:
    model = random_models.model(source, reach=7, count=3)
    reduced = model.reduced()
    for solution in enumerate_all(model):
        assert reduced is not None
        for variable, value in zip(model.variables, solution, strict=True):
            assert value in reduced[variable.name]


def test_all_solutions_by_cp_sat() -> None:
    pytest.importorskip("ortools", reason=REASON)
    from planner import cpsat

    with_solutions = 0
    for seed in range(300):
        model = random_models.model(random.Random(seed), reach=10)
        found = [tuple(solution.values()) for solution in model.solutions()]
        assert len(found) == len(set(found))
        assert set(found) == cpsat.all_solutions(model), seed
        with_solutions += bool(found)
    assert 100 < with_solutions < 280


def test_optimum_by_cp_sat() -> None:
    pytest.importorskip("ortools", reason=REASON)
    from planner import cpsat

    with_solutions = 0
    for seed in range(300):
        source = random.Random(1000 + seed)
        model = random_models.model(source, reach=30)
        goal = random_models.objective(source, model)
        minimize = seed % 2 == 0
        try:
            found = model.best(goal, minimize=minimize)[goal]
        except Infeasible:
            found = None
        assert found == cpsat.optimum(model, goal, minimize), seed
        with_solutions += found is not None
    assert 100 < with_solutions < 280


def test_optimum_of_plans_by_cp_sat() -> None:
    pytest.importorskip("ortools", reason=REASON)
    from planner import cpsat

    without_solution = 0
    for seed in range(24):
        model, goal = random_models.plan(random.Random(seed))
        minimize = seed % 2 == 0
        try:
            found = model.best(goal, minimize=minimize)[goal]
        except Infeasible:
            found = None
            without_solution += 1
        assert found == cpsat.optimum(model, goal, minimize), seed
    assert without_solution < 12


def test_plans_are_solved_in_time() -> None:
    """Ten times the 20 ms that benchmarks/solver_times.py measures against, for machines that do other work too."""
    for seed in range(40):
        model, goal = random_models.plan(random.Random(seed))
        started = time.process_time()
        try:
            model.first()
            model.best(goal)
        except Infeasible as error:
            str(error)
        assert time.process_time() - started < 0.2, seed
