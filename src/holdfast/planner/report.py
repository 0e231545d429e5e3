"""A solved kernel model as explain tells it: what was chosen, what each limit leaves over, and which one binds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .constrint import Constraint, Expression, Variable
from .constrint.constraint import Comparison
from .constrint.domain import describe
from .constrint.expression import Named


@dataclass(frozen=True, slots=True)
class Row:
    """A constraint of a kernel model. unit: of both of its sides."""

    label: str
    unit: str
    constraint: Constraint

    def sides(self, values: Mapping[Expression, int]) -> tuple[int, int] | None:
        """What is taken and what there is, of a limit; None of any other constraint."""
        constraint = self.constraint
        if not isinstance(constraint, Comparison) or constraint.sign in ("==", "!="):
            return None
        left, right = constraint.left.value(values), constraint.right.value(values)
        if constraint.sign in (">=", ">"):
            left, right = right, left
        return left, right - (constraint.sign in ("<", ">"))


@dataclass(frozen=True, slots=True)
class Limit:
    """A constraint at the optimum. taken, room: its sides, None where it is no limit but says what must hold.

    stops: the next values of variables that would break it, each with what it would take and of how much.
    """

    label: str
    unit: str
    text: str
    taken: int | None
    room: int | None
    stops: tuple[tuple[str, int, int, int], ...] = ()

    @property
    def slack(self) -> int | None:
        return None if self.taken is None or self.room is None else self.room - self.taken


@dataclass(frozen=True, slots=True)
class Report:
    """chosen: (variable, its value, the values it may take, in words). named: (name, value, what it stands for).

    fitting: how many assignments keep all constraints.
    """

    chosen: tuple[tuple[str, int, str], ...]
    named: tuple[tuple[str, int, str], ...]
    limits: tuple[Limit, ...]
    fitting: int

    @property
    def binding(self) -> tuple[Limit, ...]:
        """The limits that keep a variable from its next value."""
        return tuple(limit for limit in self.limits if limit.stops)


def report_of(
    variables: Sequence[Variable], named: Sequence[Named], rows: Sequence[Row], found: Mapping[str, int], fitting: int
) -> Report:
    """Of one assignment, by name."""
    values: dict[Expression, int] = {variable: found[variable.name] for variable in variables}
    chosen = [(each.name, found[each.name], _choice(each)) for each in variables]
    return Report(
        tuple(chosen),
        tuple([(each.name, found[each.name], str(each.expression)) for each in named]),
        tuple([_limit(row, values) for row in rows]),
        fitting,
    )


def _choice(variable: Variable) -> str:
    return f"{describe(variable.domain)}{', the first that fits' if variable.is_greedy else ''}"


def _limit(row: Row, values: dict[Expression, int]) -> Limit:
    stops = []
    for variable in row.constraint.variables():
        for value in _next_to(variable, values[variable]):
            other = values | {variable: value}
            if not row.constraint.holds(other):
                stops.append((variable.name, value, *(row.sides(other) or (0, 0))))
    taken, room = row.sides(values) or (None, None)
    return Limit(row.label, row.unit, str(row.constraint), taken, room, tuple(stops))


def _next_to(variable: Variable, value: int) -> Iterator[int]:
    """The values on either side of one, of those that the variable may take."""
    place = variable.domain.index(value)
    if place:
        yield variable.domain[place - 1]
    if value != variable.domain[-1]:
        yield variable.domain[place + 1]
