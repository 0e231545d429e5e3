"""Writes a ConstrINT model as one of OR-Tools CP-SAT, whose answers the tests take for the truth."""

from ortools.sat.python import cp_model

from holdfast.planner.constrint import Model
from holdfast.planner.constrint.constraint import Comparison, Divisibility
from holdfast.planner.constrint.expression import Constant, Extreme, Power, Product, Quotient, Sum, Variable


class Translation:
    """program: CP-SAT's model. variables: its variables by name. Every term gets a variable with computed bounds."""

    def __init__(self, model: Model) -> None:
        self.program = cp_model.CpModel()
        self.variables = {}
        self.bounds = {}
        for variable in model.variables:
            values = variable.domain
            is_interval = isinstance(values, range) and values.step == 1
            domain = cp_model.Domain(values[0], values[-1]) if is_interval else cp_model.Domain.from_values([*values])
            self.variables[variable.name] = self.program.new_int_var_from_domain(domain, variable.name)
        for constraint in model.constraints:
            self.add(constraint)

    def add(self, constraint) -> None:
        left, _, _ = self.term(constraint.left)
        right, right_low, right_high = self.term(constraint.right)
        if isinstance(constraint, Comparison):
            self.program.add(
                {
                    "<=": lambda: left <= right,
                    "<": lambda: left < right,
                    ">=": lambda: left >= right,
                    ">": lambda: left > right,
                    "==": lambda: left == right,
                    "!=": lambda: left != right,
                }[constraint.sign]()
            )
        else:
            assert isinstance(constraint, Divisibility)
            reach = max(abs(right_low), abs(right_high))
            times = self.program.new_int_var(-reach, reach, "")
            self.program.add_multiplication_equality(right, [left, times])

    def fresh(self, low: int, high: int):
        return self.program.new_int_var(low, high, "")

    def term(self, expression):
        """CP-SAT's form of an expression and bounds of its value."""
        if isinstance(expression, Variable):
            domain = expression.domain
            return self.variables[expression.name], domain[0], domain[-1]
        if isinstance(expression, Constant):
            return self.fresh(expression.number, expression.number), expression.number, expression.number
        if isinstance(expression, Sum):
            parts = [(sign, *self.term(term)) for sign, term in expression.terms]
            low = sum(sign * (least if sign > 0 else most) for sign, _, least, most in parts)
            high = sum(sign * (most if sign > 0 else least) for sign, _, least, most in parts)
            total = self.fresh(low, high)
            self.program.add(total == sum(sign * part for sign, part, _, _ in parts))
            return total, low, high
        if isinstance(expression, Power):
            return self.product([self.term(expression.base)] * expression.exponent)
        if isinstance(expression, Product):
            return self.product([self.term(factor) for factor in expression.factors])
        if isinstance(expression, Quotient):
            return self.quotient(expression)
        assert isinstance(expression, Extreme)
        parts = [self.term(option) for option in expression.options]
        pick = max if expression.is_maximum else min
        low, high = pick(least for _, least, _ in parts), pick(most for _, _, most in parts)
        result = self.fresh(low, high)
        add = self.program.add_max_equality if expression.is_maximum else self.program.add_min_equality
        add(result, [part for part, _, _ in parts])
        return result, low, high

    def product(self, parts):
        result, low, high = self.fresh(1, 1), 1, 1
        for part, least, most in parts:
            corners = [a * b for a in (low, high) for b in (least, most)]
            low, high = min(corners), max(corners)
            longer = self.fresh(low, high)
            self.program.add_multiplication_equality(longer, [result, part])
            result = longer
        return result, low, high

    def quotient(self, expression: Quotient):
        """q = a // b is b q <= a < b q + b, which holds for negative a too; ceil(a / b) = -(-a // b)."""
        dividend, low, high = self.term(expression.dividend)
        divisor, small, large = self.term(expression.divisor)
        # Bounds here are coarser than ConstrINT's, which has checked that the divisor is positive.
        small = max(small, 1)
        if expression.rounds_up:
            dividend, low, high = -dividend, -high, -low
        ends = [end // by for end in (low, high) for by in (small, large)]
        result = self.fresh(min(ends), max(ends))
        multiple, _, _ = self.product([(result, min(ends), max(ends)), (divisor, small, large)])
        self.program.add(multiple <= dividend)
        self.program.add(dividend < multiple + divisor)
        return (-result, -max(ends), -min(ends)) if expression.rounds_up else (result, min(ends), max(ends))


class Collector(cp_model.CpSolverSolutionCallback):
    def __init__(self, variables) -> None:
        super().__init__()
        self.chosen = variables
        self.found = set()

    def on_solution_callback(self) -> None:
        self.found.add(tuple(self.value(variable) for variable in self.chosen))


def all_solutions(model: Model) -> set[tuple[int, ...]]:
    """Every solution as a tuple, in the order of the model's variables."""
    translation = Translation(model)
    solver = solver_of_one_thread()
    solver.parameters.enumerate_all_solutions = True
    collector = Collector(list(translation.variables.values()))
    status = solver.solve(translation.program, collector)
    assert status in (cp_model.OPTIMAL, cp_model.INFEASIBLE), solver.status_name(status)
    return collector.found


def optimum(model: Model, objective, minimize: bool) -> int | None:
    """The best value of the objective, None where there is no solution."""
    translation = Translation(model)
    goal, _, _ = translation.term(objective)
    if minimize:
        translation.program.minimize(goal)
    else:
        translation.program.maximize(goal)
    solver = solver_of_one_thread()
    status = solver.solve(translation.program)
    assert status in (cp_model.OPTIMAL, cp_model.INFEASIBLE), solver.status_name(status)
    return round(solver.objective_value) if status == cp_model.OPTIMAL else None


def is_feasible(model: Model) -> bool:
    solver = solver_of_one_thread()
    status = solver.solve(Translation(model).program)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.INFEASIBLE), solver.status_name(status)
    return status != cp_model.INFEASIBLE


def solver_of_one_thread() -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 60
    return solver
