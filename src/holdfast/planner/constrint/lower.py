"""Turns expressions and constraints, as written, into numbers and the rules between them.

Sums become one linear form per constraint; each product, power, division and extreme becomes one number of its own,
shared by all that mention it.
"""

from collections.abc import Iterable, Sequence
from math import gcd

from .constraint import Comparison, Constraint, Divisibility, OneOf
from .domain import Domain, clip, interval, of, stride
from .expression import (
    Constant,
    Expression,
    Extreme,
    Lookup,
    Named,
    Power,
    Product,
    Quotient,
    Sum,
    Truth,
    Variable,
    maximum,
    minimum,
)
from .nonlinear import Divide, Divides, Largest, Multiply, Raise, Rows
from .propagate import AtMostZero, IsNotZero, IsZero, Linear, Network, Rule

# sum(coefficient * node) + constant
Form = tuple[dict[int, int], int]


class Lowering:
    """domains: those of the variables first, then one a number that stands for an expression."""

    def __init__(self, variables: Sequence[Variable]) -> None:
        self.variables = len(variables)
        self.domains: list[Domain] = [variable.domain for variable in variables]
        self.rules: list[Rule] = []
        self.known: dict[tuple, int] = {}
        self.is_impossible = False

    def network(self) -> Network:
        return Network(self.exact(), len(self.domains))

    def exact(self) -> list[Rule]:
        """The rules, each division that leaves no remainder as a product instead."""
        wholes = {rule.nodes: rule for rule in self.rules if isinstance(rule, Divides)}
        found: list[Rule] = []
        replaced: list[Rule] = []
        for rule in self.rules:
            whole = wholes.get((rule.divisor, rule.dividend)) if isinstance(rule, Divide) else None
            if isinstance(rule, Divide) and whole is not None and len({*rule.nodes}) == 3:
                replaced.append(whole)
                found.append(Multiply(rule.dividend, (rule.result, rule.divisor)))
            else:
                found.append(rule)
        return [rule for rule in found if rule not in replaced]

    def add(self, constraint: Constraint) -> None:
        if self.is_impossible:
            # domains no longer mean anything, and whether a divisor is positive was seen when the model took it
            return
        if isinstance(constraint, Divisibility):
            divisor, multiple = self.node(constraint.left), self.node(constraint.right)
            self.rules.append(Divides(divisor, multiple))
        elif isinstance(constraint, OneOf):
            self.rules.append(Rows(tuple([self.node(part) for part in constraint.parts]), constraint.rows))
        elif isinstance(constraint, Comparison):
            self.compare(constraint)
        else:
            raise TypeError(f"model.add: expected a constraint; got {constraint!r}")

    def compare(self, constraint: Comparison) -> None:
        """left - right + constant is zero, not zero, or at most zero."""
        sign = constraint.sign
        left, right = self.form(constraint.left), self.form(constraint.right)
        if sign in (">=", ">"):
            left, right = right, left
        terms, constant = combine([(1, left), (-1, right)])
        if sign in ("<", ">"):
            constant += 1
        kind: type[Linear] = {"==": IsZero, "!=": IsNotZero}.get(sign, AtMostZero)
        if not terms:
            if not (constant == 0 if kind is IsZero else constant != 0 if kind is IsNotZero else constant <= 0):
                self.is_impossible = True
        elif len(terms) == 1 and kind is not IsNotZero:
            self.narrow(*terms.items(), constant, kind is IsZero)
        elif kind is IsZero and constant == 0 and sorted(terms.values()) == [-1, 1] and self.can_unite(*terms):
            self.unite(min(terms), max(terms))
        else:
            self.rules.append(kind(terms.items(), constant))

    def narrow(self, term: tuple[int, int], constant: int, is_equal: bool) -> None:
        """One number that is at most, at least or exactly something: a matter of its domain."""
        node, coefficient = term
        domain = self.domains[node]
        low, high = domain[0], domain[-1]
        if is_equal and constant % coefficient:
            self.is_impossible = True
            return
        if coefficient > 0 or is_equal:
            high = -constant // coefficient
        if coefficient < 0 or is_equal:
            low = -(constant // coefficient)
        self.restrict(node, clip(domain, low, high))

    def restrict(self, node: int, kept: Domain) -> None:
        if kept:
            self.domains[node] = kept
        else:
            self.is_impossible = True

    def can_unite(self, one: int, other: int) -> bool:
        """Whether not both are variables, and no rule relates them: rules take their numbers to be different ones."""
        return max(one, other) >= self.variables and not any(
            one in rule.nodes and other in rule.nodes for rule in self.rules
        )

    def unite(self, kept: int, gone: int) -> None:
        """Two numbers that are equal, the second not a variable, become the first."""
        self.restrict(kept, clip(self.domains[kept], self.domains[gone][0], self.domains[gone][-1]))
        self.rules = [rule.renamed(gone, kept) if gone in rule.nodes else rule for rule in self.rules]
        self.known = {key: kept if node == gone else node for key, node in self.known.items()}

    def node(self, expression: Expression) -> int:
        """The index of the number that the expression is."""
        return self.node_of(self.form(expression))

    def node_of(self, form: Form) -> int:
        terms, constant = form
        if constant == 0 and len(terms) == 1:
            ((node, coefficient),) = terms.items()
            if coefficient == 1:
                return node
        key = ("linear", constant, *sorted(terms.items()))
        if key not in self.known:
            made = self.number(key, *self.span(form))
            if terms:
                self.rules.append(IsZero([*terms.items(), (made, -1)], constant))
        return self.known[key]

    def span(self, form: Form) -> tuple[int, int]:
        """Bounds of a linear form."""
        terms, low = form
        high = low
        for node, coefficient in terms.items():
            ends = (coefficient * self.domains[node][0], coefficient * self.domains[node][-1])
            low, high = low + min(ends), high + max(ends)
        return low, high

    def goal(self, objective: Expression) -> int:
        """The index of a number that the objective is at most, and that takes the values which it can take."""
        form = self.form(objective)
        terms, constant = form
        if len(terms) < 2:
            return self.node_of(form)
        low, high = self.span(form)
        step = gcd(*[coefficient * stride(self.domains[node]) for node, coefficient in terms.items()])
        self.domains.append(range(low, high + 1, step or 1))
        made = len(self.domains) - 1
        self.rules.append(AtMostZero([*terms.items(), (made, -1)], constant))
        return made

    def number(self, key: tuple, low: int, high: int) -> int:
        self.domains.append(interval(low, high))
        self.known[key] = len(self.domains) - 1
        return self.known[key]

    def form(self, expression: Expression) -> Form:
        if isinstance(expression, Variable):
            domain = self.domains[expression.index]
            return ({}, domain[0]) if domain[0] == domain[-1] else ({expression.index: 1}, 0)
        if isinstance(expression, Constant):
            return {}, expression.number
        if isinstance(expression, Sum):
            return combine([(sign, self.form(term)) for sign, term in expression.terms])
        if isinstance(expression, Product):
            return self.product([self.form(factor) for factor in expression.factors])
        if isinstance(expression, Power):
            return self.product([self.form(expression.base)] * expression.exponent)
        if isinstance(expression, Quotient):
            return self.quotient(expression)
        if isinstance(expression, Extreme):
            return self.extreme(expression)
        if isinstance(expression, Named):
            return self.form(expression.expression)
        if isinstance(expression, Truth):
            return self.truth(expression.comparison)
        if isinstance(expression, Lookup):
            return self.lookup(expression)
        raise TypeError(f"expected an integer expression; got {expression!r}")

    def product(self, forms: Iterable[Form]) -> Form:
        scale = 1
        powers: dict[int, int] = {}
        for terms, constant in forms:
            if not terms:
                scale *= constant
                continue
            if len(terms) == 1 and constant == 0:
                ((node, coefficient),) = terms.items()
                scale *= coefficient
            else:
                node = self.node_of((terms, constant))
            powers[node] = powers.get(node, 0) + 1
        if scale == 0 or not powers:
            return {}, scale
        factors = [self.power(node, exponent) for node, exponent in sorted(powers.items())]
        while len(set(factors)) < len(factors):
            # a power that is equal to another factor became one number with it
            factors = [self.power(node, factors.count(node)) for node in sorted(set(factors))]
        return {self.multiply(tuple(sorted(factors))): scale}, 0

    def power(self, base: int, exponent: int) -> int:
        if exponent == 1:
            return base
        key = ("power", base, exponent)
        if key not in self.known:
            rule = Raise(len(self.domains), base, exponent)
            self.number(key, *rule.span(self.domains[base][0], self.domains[base][-1]))
            self.rules.append(rule)
        return self.known[key]

    def multiply(self, factors: tuple[int, ...]) -> int:
        if len(factors) == 1:
            return factors[0]
        key = ("product", *factors)
        if key not in self.known:
            low, high = 1, 1
            for node in factors:
                ends = [end * own for end in (low, high) for own in (self.domains[node][0], self.domains[node][-1])]
                low, high = min(ends), max(ends)
            self.rules.append(Multiply(self.number(key, low, high), factors))
        return self.known[key]

    def quotient(self, expression: Quotient) -> Form:
        shift = int(expression.rounds_up)
        (number, above), (by, below) = self.form(expression.dividend), self.form(expression.divisor)
        if not number and not by and below > 0:
            return {}, (above - shift) // below + shift
        divisor = self.node_of((by, below))
        small, large = self.domains[divisor][0], self.domains[divisor][-1]
        if small < 1:
            raise ValueError(
                f"division: expected a positive divisor; {expression.divisor} can be {small}: {expression}"
            )
        dividend = self.node_of((number, above))
        key = ("quotient", shift, dividend, divisor)
        if key not in self.known:
            numbers = [self.domains[dividend][0], self.domains[dividend][-1]]
            ends = [(number - shift) // by + shift for number in numbers for by in (small, large)]
            self.rules.append(Divide(self.number(key, min(ends), max(ends)), dividend, divisor, shift))
        return {self.known[key]: 1}, 0

    def extreme(self, expression: Extreme) -> Form:
        forms = [self.form(option) for option in expression.options]
        if not any(terms for terms, _ in forms):
            return {}, (max if expression.is_maximum else min)(constant for _, constant in forms)
        options = tuple(sorted({self.node_of(form) for form in forms}))
        key = ("extreme", expression.is_maximum, *options)
        if key not in self.known:
            pick = max if expression.is_maximum else min
            low = pick(self.domains[node][0] for node in options)
            high = pick(self.domains[node][-1] for node in options)
            self.rules.append(Largest(self.number(key, low, high), options, expression.is_maximum))
        return {self.known[key]: 1}, 0

    def truth(self, comparison: Comparison) -> Form:
        """A comparison of integers as the ends of a difference."""
        left, right, sign = comparison.left, comparison.right, comparison.sign
        if sign in (">=", ">"):
            left, right, sign = right, left, {">=": "<=", ">": "<"}[sign]
        if sign in ("<=", "<"):
            return self.form(minimum(1, maximum(0, right - left + int(sign == "<="))))
        same = minimum(1, maximum(0, right - left + 1)) * minimum(1, maximum(0, left - right + 1))
        return self.form(same if sign == "==" else 1 - same)

    def lookup(self, expression: Lookup) -> Form:
        own, table = self.domains[expression.key.index], expression.table
        if own[0] == own[-1]:
            return {}, table[own[0]]
        key = ("lookup", expression.key.index, *table.items())
        if key not in self.known:
            values = of([table[value] for value in own])
            made = self.number(key, values[0], values[-1])
            self.domains[made] = values
            self.rules.append(Rows((expression.key.index, made), tuple(table.items())))
        return {self.known[key]: 1}, 0


def combine(parts: Iterable[tuple[int, Form]]) -> Form:
    """The sum of forms, each times its factor."""
    total: dict[int, int] = {}
    constant = 0
    for factor, (terms, own) in parts:
        constant += factor * own
        for node, coefficient in terms.items():
            total[node] = total.get(node, 0) + factor * coefficient
    return {node: coefficient for node, coefficient in total.items() if coefficient}, constant
