"""A problem of integers: variables, constraints, and the ways to solve it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from .backtrack import Backtrack, is_small
from .conflict import Infeasible
from .constraint import Constraint
from .differences import contradict
from .domain import Domain, of
from .expression import Expression, Integer, Named, Variable, as_expression, divides_by_variables
from .lower import Lowering
from .propagate import Network
from .search import Search, Values
from .solution import Solution

Order = Literal["smallest", "largest", "given"]


@dataclass(frozen=True, slots=True)
class Ready:
    """A model lowered to rules; objective: the node to make small, where there is one."""

    network: Network
    domains: list[Domain]
    objective: int | None
    is_impossible: bool


class Model:
    """Integer variables and constraints on them.

        model = Model()
        rows = model.variable("rows", range(16, 1025, 16), order="largest")
        cols = model.variable("cols", (32, 64, 128))
        smem = model.constant("smem", 232448)
        model.add(rows * cols * 2 <= smem, "tile fits shared memory")
        model.first()[rows]

    The search decides variables in the order of their declaration, auxiliary ones last, and of each the smallest or
    largest values first, or all in the order given. The same model gives the same solutions in the same order. limit:
    how many decisions one search may take before it raises SearchLimit; small problems may take any number.
    """

    def __init__(self, limit: int = 1_000_000) -> None:
        self.limit = limit
        self._variables: list[Variable] = []
        self._constraints: list[Constraint] = []
        self._labels: list[str | None] = []
        self._named: list[Named] = []
        self._ready: Ready | None = None

    @property
    def variables(self) -> tuple[Variable, ...]:
        return tuple(self._variables)

    @property
    def named(self) -> tuple[Named, ...]:
        return tuple(self._named)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return tuple(self._constraints)

    def variable(
        self,
        name: str,
        values: Iterable[int],
        order: Order = "smallest",
        auxiliary: bool = False,
        greedy: bool = False,
    ) -> Variable:
        """A new variable; values: a range of any length, or the integers that it may take.

        greedy: of its values, with the variables that are decided before it as they are, solutions have only the first
        that one has. `best` looks at all.
        """
        if any(variable.name == name for variable in self._variables):
            raise ValueError(f"variable: the model already has one named {name!r}")
        if order not in ("smallest", "largest", "given"):
            raise ValueError(f'variable {name}: expected the order "smallest", "largest" or "given"; got {order!r}')
        try:
            given = list(values) if order == "given" else values
            domain = of(given)
        except TypeError as error:
            raise TypeError(f"variable {name}: {error}") from None
        if not domain:
            raise ValueError(f"variable {name}: expected at least one value; got an empty domain")
        variable = Variable(self, len(self._variables), name, domain)
        variable.largest_first, variable.is_auxiliary, variable.is_greedy = order == "largest", auxiliary, greedy
        if order == "given":
            variable.ranks = {value: place for place, value in reversed([*enumerate(given)])}
        self._variables.append(variable)
        self._ready = None
        return variable

    def let(self, name: str, expression: Integer) -> Named:
        """The expression under a name, by which constraints show it."""
        named = Named(name, as_expression(expression))
        self._own(named.variables(), named)
        self._named.append(named)
        return named

    def constant(self, name: str, value: int) -> Variable:
        """A number that constraints show by its name."""
        return self.variable(name, (value,))

    def add(self, constraint: Constraint, label: str | None = None) -> Constraint:
        """Adds a constraint; label: what it is for, shown where it cannot be met."""
        if isinstance(constraint, bool):
            raise TypeError(f"model.add: got {constraint}, a comparison in which no variable occurs")
        if not isinstance(constraint, Constraint):
            raise TypeError(f"model.add: expected a constraint such as a <= b; got {constraint!r}")
        self._own(constraint.variables(), constraint)
        if any(map(divides_by_variables, constraint.operands())):
            # which raises where a divisor may be zero or less
            Lowering(self._variables).add(constraint)
        self._constraints.append(constraint)
        self._labels.append(label)
        self._ready = None
        return constraint

    def solutions(self) -> Iterator[Solution]:
        """All solutions, one after another; none, without an error, where there is no solution."""
        if is_small(self._variables):
            variables = self.variables
            for known in Backtrack(self._order(), self._constraints, self._named):
                yield Solution(variables, dict(known))
            return
        for values in self._search(self._lowered()):
            yield self._solution(values)

    def first(self) -> Solution:
        """The first solution; raises Infeasible where there is none."""
        for solution in self.solutions():
            return solution
        raise self._infeasible()

    def best(self, objective: Integer, minimize: bool = True, without: Constraint | None = None) -> Solution:
        """The solution with the least objective (or the largest), the first found where several are equally good.

        Branch and bound: after each solution, propagation works with an objective that has to be better. Raises
        Infeasible where there is no solution. without: a constraint that is left out, to see what it costs.
        """
        goal = as_expression(objective)
        self._own(goal.variables(), goal)
        if not minimize:
            goal = -goal
        best = None
        kept = [constraint for constraint in self._constraints if constraint is not without]
        for values in self._search(self._lower(kept, goal), goal, kept):
            best = values
        if best is None:
            raise self._infeasible()
        return self._solution(best)

    def reduced(self) -> dict[str, Domain] | None:
        """What propagation alone leaves of each variable's domain; None where it already finds that nothing fits."""
        ready = self._lowered()
        domains = list(ready.domains)
        if ready.is_impossible or not ready.network.reduce(domains):
            return None
        return {variable.name: domains[variable.index] for variable in self._variables}

    def _own(self, variables: Iterable[Variable], where: object) -> None:
        for variable in variables:
            if variable.model is not self:
                raise ValueError(f"{where}: the variable {variable} belongs to another model")

    def _lower(self, constraints: Sequence[Constraint], goal: Expression | None = None) -> Ready:
        lowering = Lowering(self._variables)
        for constraint in constraints:
            lowering.add(constraint)
        objective = None if goal is None or lowering.is_impossible else lowering.goal(goal)
        is_impossible = lowering.is_impossible or contradict(lowering.rules)
        return Ready(lowering.network(), lowering.domains, objective, is_impossible)

    def _lowered(self) -> Ready:
        if self._ready is None:
            self._ready = self._lower(self._constraints)
        return self._ready

    def _search(
        self, ready: Ready, goal: Expression | None = None, constraints: Sequence[Constraint] | None = None
    ) -> Iterator[Values]:
        if ready.is_impossible:
            return iter(())
        wanted = tuple(self._constraints if constraints is None else constraints)
        variables = tuple(self._variables)

        def check(values: Values) -> bool:
            named: dict[Expression, int] = dict(zip(variables, values, strict=True))
            return all(constraint.holds(named) for constraint in wanted)

        objective = None
        if goal is not None and ready.objective is not None:
            objective = (ready.objective, lambda values: goal.value(dict(zip(variables, values, strict=True))))
        return iter(Search(ready.network, ready.domains, self._order(), check, self.limit, objective))

    def _order(self) -> list[Variable]:
        """The variables as the search decides them."""
        return sorted(self._variables, key=lambda variable: variable.is_auxiliary)

    def _solution(self, values: Values) -> Solution:
        return Solution(self.variables, dict(zip(self._variables, values, strict=True)))

    def _infeasible(self) -> Infeasible:
        def is_feasible(constraints: Sequence[Constraint]) -> bool:
            return any(True for _ in self._search(self._lower(constraints), constraints=constraints))

        return Infeasible(self._constraints, self._labels, is_feasible)
