"""Small problems, variable by variable: a constraint is checked as soon as its variables have values.

Where there are only some hundred assignments this takes less than to propagate each decision, and finds the same.
"""

from collections.abc import Iterator, Sequence
from math import prod

from .constraint import Constraint, OneOf
from .domain import size
from .expression import Expression, Named, Variable
from .search import branches

# Assignments, up to which a problem is small; of a greedy variable mostly the first value is one.
SMALL = 1 << 15


def is_small(variables: Sequence[Variable]) -> bool:
    return prod([size(variable.domain) for variable in variables if not variable.is_greedy]) <= SMALL


class Backtrack:
    """The assignments that the constraints admit, in the order of the search.

    order: the variables, in the order to decide them. named: expressions that are worked out once for each value of the
    last of their variables.
    """

    def __init__(self, order: Sequence[Variable], constraints: Sequence[Constraint], named: Sequence[Named]) -> None:
        self.order = tuple(order)
        place = {variable: depth for depth, variable in enumerate(self.order)}
        self.choices = [tuple(_values(variable)) for variable in self.order]
        self.named: list[list[Named]] = [[] for _ in range(len(order) + 1)]
        self.checks: list[list[Constraint]] = [[] for _ in range(len(order) + 1)]
        for each in named:
            self.named[max([place[variable] + 1 for variable in each.variables()], default=0)].append(each)
        for constraint in constraints:
            depths = sorted({place[variable] + 1 for variable in constraint.variables()}) or [0]
            if isinstance(constraint, OneOf):
                for depth in depths[:-1]:
                    self.checks[depth].append(constraint.of({each for each, at in place.items() if at < depth}))
            self.checks[depths[-1]].append(constraint)

    def __iter__(self) -> Iterator[dict[Expression, int]]:
        """All values known: of variables and of named expressions. The next one changes them."""
        values: dict[Expression, int] = {}
        if self.holds(0, values):
            yield from self.below(0, values)

    def below(self, depth: int, values: dict[Expression, int]) -> Iterator[dict[Expression, int]]:
        if depth == len(self.order):
            yield values
            return
        variable = self.order[depth]
        for value in self.choices[depth]:
            values[variable] = value
            if not self.holds(depth + 1, values):
                continue
            found = False
            for solution in self.below(depth + 1, values):
                found = True
                yield solution
            if found and variable.is_greedy:
                return

    def holds(self, depth: int, values: dict[Expression, int]) -> bool:
        """Whether the constraints of the first so many variables hold; works out what they name."""
        for each in self.named[depth]:
            values[each] = each.expression.value(values)
        return all(constraint.holds(values) for constraint in self.checks[depth])


def _values(variable: Variable) -> Iterator[int]:
    """Each value in the order of the search, which halves long domains."""
    pending = [variable.domain]
    while pending:
        domain = pending.pop()
        if size(domain) == 1:
            yield domain[0]
        else:
            pending += reversed(branches(domain, variable))
