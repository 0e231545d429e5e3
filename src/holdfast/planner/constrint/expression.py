"""Integer expressions as they are written: `rows * cols * 2 + 64`, `ceil_div(tokens, chunk)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from .constraint import Comparison, Constraint, Divisibility, OneOf
from .domain import Domain

if TYPE_CHECKING:
    from .model import Model

SUM, PRODUCT, POWER, ATOM = range(4)
Integer: TypeAlias = "Expression | int"


class Expression:
    """An integer that depends on variables. Comparing two gives a constraint for Model.add."""

    __slots__ = ()
    binds = ATOM

    def value(self, values: Mapping[Expression, int]) -> int:
        """Its value where every variable has one; ZeroDivisionError cannot occur, divisors being positive."""
        raise NotImplementedError

    def parts(self) -> tuple[Expression, ...]:
        return ()

    def variables(self) -> Iterator[Variable]:
        for part in self.parts():
            yield from part.variables()

    def __add__(self, other: Integer) -> Expression:
        return Sum.of((1, self), (1, as_expression(other)))

    def __radd__(self, other: Integer) -> Expression:
        return Sum.of((1, as_expression(other)), (1, self))

    def __sub__(self, other: Integer) -> Expression:
        return Sum.of((1, self), (-1, as_expression(other)))

    def __rsub__(self, other: Integer) -> Expression:
        return Sum.of((1, as_expression(other)), (-1, self))

    def __neg__(self) -> Expression:
        return Sum(((-1, self),))

    def __mul__(self, other: Integer) -> Expression:
        return Product.of(self, as_expression(other))

    def __rmul__(self, other: Integer) -> Expression:
        return Product.of(as_expression(other), self)

    def __floordiv__(self, other: Integer) -> Expression:
        return Quotient(self, as_expression(other), rounds_up=False)

    def __rfloordiv__(self, other: Integer) -> Expression:
        return Quotient(as_expression(other), self, rounds_up=False)

    def __pow__(self, exponent: int) -> Expression:
        if isinstance(exponent, bool) or not isinstance(exponent, int):
            raise TypeError(f"power: expected a constant integer exponent; got {exponent}")
        if exponent < 0:
            raise ValueError(f"power: expected an exponent of 0 or more; got {self} ** {exponent}")
        return Power(self, exponent)

    def __truediv__(self, other: Integer) -> NoReturn:
        raise TypeError(f"{self} / {other} need not be an integer: write a // b, or ceil_div(a, b)")

    __rtruediv__ = __truediv__

    def __mod__(self, other: Integer) -> NoReturn:
        raise TypeError(f"{self} % {other}: write divides({other}, {self}), or a - a // b * b")

    __rmod__ = __mod__

    def __le__(self, other: Integer) -> Constraint:
        return Comparison(self, "<=", as_expression(other))

    def __lt__(self, other: Integer) -> Constraint:
        return Comparison(self, "<", as_expression(other))

    def __ge__(self, other: Integer) -> Constraint:
        return Comparison(self, ">=", as_expression(other))

    def __gt__(self, other: Integer) -> Constraint:
        return Comparison(self, ">", as_expression(other))

    def __eq__(self, other: object) -> Constraint:  # type: ignore[override]
        return Comparison(self, "==", as_expression(other))

    def __ne__(self, other: object) -> Constraint:  # type: ignore[override]
        return Comparison(self, "!=", as_expression(other))

    __hash__ = object.__hash__

    def __bool__(self) -> NoReturn:
        raise TypeError(f"{self} is not known before the model is solved, so it is neither true nor false")


def as_expression(value: object) -> Expression:
    """The value itself, or the constant that a Python integer is."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected an integer or an expression; got {value!r}")
    return Constant(value)


def divides_by_variables(expression: Expression) -> bool:
    """Whether it has a divisor that is not a number."""
    if isinstance(expression, Quotient) and not isinstance(expression.divisor, Constant):
        return True
    return any(map(divides_by_variables, expression.parts()))


def inside(part: Expression, binds: int) -> str:
    """The part as text, in parentheses where it binds less tightly than what surrounds it."""
    return str(part) if part.binds >= binds else f"({part})"


class Constant(Expression):
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def binds(self) -> int:  # type: ignore[override]
        return ATOM if self.number >= 0 else SUM

    def value(self, values: Mapping[Expression, int]) -> int:
        return self.number

    def __str__(self) -> str:
        return str(self.number)


class Variable(Expression):
    """A number to be found; Model.variable and Model.constant make them."""

    __slots__ = ("domain", "index", "is_auxiliary", "is_greedy", "largest_first", "model", "name", "ranks")

    def __init__(self, model: Model, index: int, name: str, domain: Domain) -> None:
        self.model = model
        self.index = index
        self.name = name
        self.domain = domain
        # how the search decides it: ranks, the place of each value where they have an order of their own
        self.largest_first = self.is_auxiliary = self.is_greedy = False
        self.ranks: Mapping[int, int] | None = None

    def value(self, values: Mapping[Expression, int]) -> int:
        return values[self]

    def variables(self) -> Iterator[Variable]:
        yield self

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


class Sum(Expression):
    """Terms with their signs."""

    __slots__ = ("terms",)
    binds = SUM

    def __init__(self, terms: tuple[tuple[int, Expression], ...]) -> None:
        self.terms = terms

    @staticmethod
    def of(left: tuple[int, Expression], right: tuple[int, Expression]) -> Sum:
        """left + right; a sum on the left is continued, as Python reads a + b + c."""
        start = left[1].terms if isinstance(left[1], Sum) else (left,)
        return Sum((*start, right))

    def value(self, values: Mapping[Expression, int]) -> int:
        return sum(sign * term.value(values) for sign, term in self.terms)

    def parts(self) -> tuple[Expression, ...]:
        return tuple(term for _, term in self.terms)

    def __str__(self) -> str:
        text = ""
        for sign, term in self.terms:
            if text:
                text += f" {'+' if sign > 0 else '-'} {inside(term, PRODUCT)}"
            else:
                text = ("" if sign > 0 else "-") + inside(term, PRODUCT)
        return text


class Product(Expression):
    __slots__ = ("factors",)
    binds = PRODUCT

    def __init__(self, factors: tuple[Expression, ...]) -> None:
        self.factors = factors

    @staticmethod
    def of(left: Expression, right: Expression) -> Product:
        return Product((*left.factors, right) if isinstance(left, Product) else (left, right))

    def value(self, values: Mapping[Expression, int]) -> int:
        result = 1
        for factor in self.factors:
            result *= factor.value(values)
        return result

    def parts(self) -> tuple[Expression, ...]:
        return self.factors

    def __str__(self) -> str:
        first, *others = self.factors
        return " * ".join([inside(first, PRODUCT), *(inside(factor, POWER) for factor in others)])


class Power(Expression):
    __slots__ = ("base", "exponent")
    binds = POWER

    def __init__(self, base: Expression, exponent: int) -> None:
        self.base = base
        self.exponent = exponent

    def value(self, values: Mapping[Expression, int]) -> int:
        return self.base.value(values) ** self.exponent

    def parts(self) -> tuple[Expression, ...]:
        return (self.base,)

    def __str__(self) -> str:
        return f"{inside(self.base, ATOM)} ** {self.exponent}"


class Quotient(Expression):
    """Division that rounds down, or up; the divisor is positive wherever its variables' domains let it be computed."""

    __slots__ = ("dividend", "divisor", "rounds_up")

    def __init__(self, dividend: Expression, divisor: Expression, rounds_up: bool) -> None:
        if isinstance(divisor, Constant) and divisor.number <= 0:
            raise ValueError(f"division: expected a positive divisor; got {divisor} in {dividend} // {divisor}")
        self.dividend = dividend
        self.divisor = divisor
        self.rounds_up = rounds_up

    @property
    def binds(self) -> int:  # type: ignore[override]
        return ATOM if self.rounds_up else PRODUCT

    def value(self, values: Mapping[Expression, int]) -> int:
        dividend, divisor = self.dividend.value(values), self.divisor.value(values)
        return -(-dividend // divisor) if self.rounds_up else dividend // divisor

    def parts(self) -> tuple[Expression, ...]:
        return (self.dividend, self.divisor)

    def __str__(self) -> str:
        if self.rounds_up:
            return f"ceil_div({self.dividend}, {self.divisor})"
        return f"{inside(self.dividend, PRODUCT)} // {inside(self.divisor, POWER)}"


class Extreme(Expression):
    """The smallest or largest of some expressions."""

    __slots__ = ("is_maximum", "options")

    def __init__(self, options: tuple[Expression, ...], is_maximum: bool) -> None:
        if not options:
            raise ValueError(f"{'maximum' if is_maximum else 'minimum'}: expected at least one expression; got none")
        self.options = options
        self.is_maximum = is_maximum

    def value(self, values: Mapping[Expression, int]) -> int:
        return (max if self.is_maximum else min)(option.value(values) for option in self.options)

    def parts(self) -> tuple[Expression, ...]:
        return self.options

    def __str__(self) -> str:
        return f"{'maximum' if self.is_maximum else 'minimum'}({', '.join(map(str, self.options))})"


class Named(Expression):
    """An expression that is shown by a name; whoever has worked it out may hand it over among the variables' values."""

    __slots__ = ("expression", "name")

    def __init__(self, name: str, expression: Expression) -> None:
        self.name = name
        self.expression = expression

    def value(self, values: Mapping[Expression, int]) -> int:
        known = values.get(self)
        return self.expression.value(values) if known is None else known

    def parts(self) -> tuple[Expression, ...]:
        return (self.expression,)

    def __str__(self) -> str:
        return self.name


class Truth(Expression):
    """1 where a comparison holds, else 0."""

    __slots__ = ("comparison",)

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def value(self, values: Mapping[Expression, int]) -> int:
        return int(self.comparison.holds(values))

    def parts(self) -> tuple[Expression, ...]:
        return (self.comparison.left, self.comparison.right)

    def __str__(self) -> str:
        return f"({self.comparison})"


class Lookup(Expression):
    """What a table has for each value of a variable."""

    __slots__ = ("key", "table")

    def __init__(self, key: Variable, table: Mapping[int, int]) -> None:
        self.key = key
        self.table = dict(table)

    def value(self, values: Mapping[Expression, int]) -> int:
        return self.table[self.key.value(values)]

    def parts(self) -> tuple[Expression, ...]:
        return (self.key,)

    def __str__(self) -> str:
        return f"{{{', '.join(f'{key}: {self.table[key]}' for key in self.key.domain)}}}[{self.key}]"


def ceil_div(dividend: Integer, divisor: Integer) -> Expression:
    """dividend / divisor, rounded up."""
    return Quotient(as_expression(dividend), as_expression(divisor), rounds_up=True)


def minimum(*options: Integer) -> Expression:
    return Extreme(tuple(map(as_expression, options)), is_maximum=False)


def maximum(*options: Integer) -> Expression:
    return Extreme(tuple(map(as_expression, options)), is_maximum=True)


def truth(comparison: Constraint) -> Expression:
    """1 where the comparison holds, else 0: `16 * truth(warps > 4)`."""
    if not isinstance(comparison, Comparison):
        raise TypeError(f"truth: expected a comparison such as a <= b; got {comparison!r}")
    return Truth(comparison)


def lookup(key: Variable, table: Mapping[int, int]) -> Expression:
    """table[key]; raises ValueError where the table lacks a value of the variable's domain."""
    if missing := [value for value in key.domain if value not in table]:
        raise ValueError(f"lookup: expected what each value of {key} stands for; got none for {missing[0]}")
    return Lookup(key, table)


def one_of(expressions: Sequence[Integer], rows: Sequence[Sequence[int]]) -> Constraint:
    """The constraint that the expressions, together, have the values of one of the rows."""
    for row in rows:
        if len(row) != len(expressions):
            raise ValueError(f"one_of: expected rows of {len(expressions)} integers; got {tuple(row)}")
    return OneOf(tuple(map(as_expression, expressions)), tuple(map(tuple, rows)))


def divides(divisor: Integer, multiple: Integer) -> Constraint:
    """The constraint that multiple is a whole number of times divisor; 0 divides 0 alone."""
    return Divisibility(as_expression(divisor), as_expression(multiple))
