"""Constraints as they are written: `rows * cols * 2 <= smem`, `divides(16, rows)`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from .expression import Expression, Variable

HOLDS: dict[str, Callable[[int, int], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
    "!=": operator.ne,
}


class Constraint:
    """A relation between two expressions, to be handed to Model.add."""

    __slots__ = ("left", "right")

    def __init__(self, left: Expression, right: Expression) -> None:
        self.left = left
        self.right = right

    def holds(self, values: Mapping[Expression, int]) -> bool:
        raise NotImplementedError

    def operands(self) -> tuple[Expression, ...]:
        return (self.left, self.right)

    def variables(self) -> list[Variable]:
        """Each variable once, in the order of writing."""
        return list(dict.fromkeys([variable for part in self.operands() for variable in part.variables()]))

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"the constraint {self} is neither true nor false before the model is solved; "
            "a chain such as a < b < c is two constraints: model.add(a < b) and model.add(b < c)"
        )


class Comparison(Constraint):
    __slots__ = ("sign",)

    def __init__(self, left: Expression, sign: str, right: Expression) -> None:
        super().__init__(left, right)
        self.sign = sign

    def holds(self, values: Mapping[Expression, int]) -> bool:
        return HOLDS[self.sign](self.left.value(values), self.right.value(values))

    def __str__(self) -> str:
        return f"{self.left} {self.sign} {self.right}"


class OneOf(Constraint):
    """Some expressions have, together, the values of one of some rows."""

    __slots__ = ("parts", "rows")

    def __init__(self, parts: tuple[Expression, ...], rows: tuple[tuple[int, ...], ...]) -> None:
        self.parts = parts
        self.rows = rows

    def holds(self, values: Mapping[Expression, int]) -> bool:
        return tuple([part.value(values) for part in self.parts]) in self.rows

    def of(self, known: AbstractSet[Variable]) -> OneOf:
        """What it says of the parts that depend on those variables alone."""
        places = [place for place, part in enumerate(self.parts) if all(each in known for each in part.variables())]
        rows = dict.fromkeys(tuple([row[place] for place in places]) for row in self.rows)
        return OneOf(tuple([self.parts[place] for place in places]), tuple(rows))

    def operands(self) -> tuple[Expression, ...]:
        return self.parts

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.parts))}) in {{{', '.join(map(str, self.rows))}}}"


class Divisibility(Constraint):
    """left divides right; 0 divides 0 alone."""

    __slots__ = ()

    def holds(self, values: Mapping[Expression, int]) -> bool:
        divisor, multiple = self.left.value(values), self.right.value(values)
        return multiple % divisor == 0 if divisor else multiple == 0

    def __str__(self) -> str:
        return f"divides({self.left}, {self.right})"
