"""Propagation rules of products, powers, divisions, extremes and divisibility."""

from collections.abc import Sequence
from math import gcd, prod

from .divisors import divisors
from .domain import Domain, among, clip, common_divisor, congruent, keep, size
from .propagate import narrow, replace

# Sets of results are enumerated up to this many combinations of operands.
FEW = 64


def restrict(domains: list[Domain], node: int, values: Sequence[int], changed: list[int]) -> bool:
    """Keeps the values that are among the given ascending ones."""
    domain = domains[node]
    kept = among(domain, values)
    return len(kept) == size(domain) or replace(domains, node, kept, changed)


def multiples_only(domains: list[Domain], node: int, divisor: int, changed: list[int]) -> bool:
    """Keeps the multiples of a positive divisor."""
    domain = domains[node]
    if divisor < 2 or common_divisor(domain) % divisor == 0:
        return True
    return replace(domains, node, congruent(domain, 0, divisor), changed)


def divisors_only(domains: list[Domain], node: int, number: int, changed: list[int]) -> bool:
    """Keeps the divisors, of either sign, of a number other than 0."""
    domain, number = domains[node], abs(number)
    if isinstance(domain, tuple) or size(domain) <= FEW:
        kept = tuple([value for value in domain if value and number % value == 0])
        return len(kept) == size(domain) or replace(domains, node, kept, changed)
    if domain[0] < -number or domain[-1] > number:
        domain = clip(domain, -number, number)
        if not replace(domains, node, domain, changed):
            return False
    positive = divisors(number)
    if positive is None:
        return True
    both = positive if domain[0] >= 0 else (*(-value for value in reversed(positive)), *positive)
    return restrict(domains, node, both, changed)


def times(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    corners = (one[0] * other[0], one[0] * other[1], one[1] * other[0], one[1] * other[1])
    return min(corners), max(corners)


class Multiply:
    """result = product of factors, each factor another node."""

    __slots__ = ("factors", "nodes", "result")

    def __init__(self, result: int, factors: tuple[int, ...]) -> None:
        self.result = result
        self.factors = factors
        self.nodes = (result, *factors)

    def renamed(self, old: int, new: int) -> "Multiply":
        result, *factors = (new if node == old else node for node in self.nodes)
        return Multiply(result, tuple(factors))

    def revise(self, domains: list[Domain], changed: list[int]) -> bool:
        scale = low = high = 1
        open_factors = []
        is_signed = False
        for node in self.factors:
            domain = domains[node]
            least, most = domain[0], domain[-1]
            if least == most:
                scale *= least
            else:
                open_factors.append(node)
                low *= least
                high *= most
                if least < 0:
                    is_signed = True
        if not open_factors or scale == 0:
            return narrow(domains, self.result, scale, scale, changed)
        if is_signed or scale < 0:
            if not self.bound_signed(domains, scale, open_factors, changed):
                return False
        else:
            number = domains[self.result][0]
            if number == domains[self.result][-1] and number > 0:
                number, rest = divmod(number, scale)
                return not rest and self.share_out(domains, number, open_factors, low, high, changed)
            if not self.bound_positive(domains, scale, open_factors, low * scale, high * scale, changed):
                return False
        if len(open_factors) == 1:
            (factor,) = open_factors
            return self.match_one(domains, scale, factor, changed)
        return self.match_divisors(domains, scale, open_factors, changed)

    def share_out(
        self, domains: list[Domain], number: int, open_factors: list[int], low: int, high: int, changed: list[int]
    ) -> bool:
        """A known product, above 0, of open factors that are not negative; low, high: the products of their bounds."""
        if len(open_factors) == 1:
            (factor,) = open_factors
            return narrow(domains, factor, number, number, changed)
        if len(open_factors) == 2:
            first, second = domains[open_factors[0]], domains[open_factors[1]]
            if isinstance(first, tuple) or isinstance(second, tuple):
                return self.match_pair(domains, number, *open_factors, changed)
        if low > number or high < number:
            return False
        shares = [common_divisor(domains[node]) for node in open_factors]
        share = prod(shares)
        if not share or number % share:
            return not share
        for node, own in zip(open_factors, shares, strict=True):
            domain = domains[node]
            least = -(-number // (high // domain[-1]))
            most = number // (low // domain[0]) if low else number
            whole = number // (share // own)
            if isinstance(domain, tuple):
                kept: Domain = tuple(
                    [value for value in domain if least <= value <= most and value and not whole % value]
                )
                if len(kept) < len(domain) and not replace(domains, node, kept, changed):
                    return False
                continue
            if not narrow(domains, node, max(1, least), most, changed):
                return False
            if not divisors_only(domains, node, whole, changed):
                return False
        return True

    def match_pair(self, domains: list[Domain], number: int, one: int, other: int, changed: list[int]) -> bool:
        """Of two open factors of a known number, one with a short set of values, each keeps the other's answers."""
        first, second = domains[one], domains[other]
        if not isinstance(first, tuple) or (isinstance(second, tuple) and len(second) < len(first)):
            one, first, other, second = other, second, one, first
        kept = tuple([value for value in first if value and number % value == 0 and number // value in second])
        if len(kept) == len(first) == size(second):
            return True
        if len(kept) < len(first) and not replace(domains, one, kept, changed):
            return False
        if len(kept) < size(second):
            return replace(domains, other, tuple(sorted([number // value for value in kept])), changed)
        return True

    def bound_positive(
        self, domains: list[Domain], scale: int, open_factors: list[int], low: int, high: int, changed: list[int]
    ) -> bool:
        """With a scale above 0 and no negative factor; low, high: the products of the factors' bounds."""
        result = domains[self.result]
        least, most = result[0], result[-1]
        if low > least or high < most:
            result = clip(result, low, high)
            if not replace(domains, self.result, result, changed):
                return False
            least, most = result[0], result[-1]
        raises, lowers = least > low, most < high
        if not raises and not lowers:
            return True
        for node in open_factors:
            domain = domains[node]
            own_low, own_high = domain[0], domain[-1]
            smallest, largest = own_low, own_high
            if raises:
                smallest = -(-least // (high // own_high))
            if lowers:
                if low:
                    largest = most // (low // own_low)
                elif others := scale * prod(domains[other][0] for other in open_factors if other != node):
                    largest = most // others
            if smallest > own_low or largest < own_high:
                kept = clip(domain, smallest, largest)
                if not replace(domains, node, kept, changed):
                    return False
                low = low // own_low * kept[0] if low else 0
                high = high // own_high * kept[-1]
                if high == 0:
                    return True
        return True

    def bound_signed(self, domains: list[Domain], scale: int, open_factors: list[int], changed: list[int]) -> bool:
        spans = [(domains[node][0], domains[node][-1]) for node in open_factors]
        whole = (scale, scale)
        for span in spans:
            whole = times(whole, span)
        if not narrow(domains, self.result, *whole, changed):
            return False
        least, most = domains[self.result][0], domains[self.result][-1]
        for place, node in enumerate(open_factors):
            others = (scale, scale)
            for other, span in enumerate(spans):
                if other != place:
                    others = times(others, span)
            if others[0] <= 0 <= others[1]:
                continue
            ends = [(end, by) for end in (least, most) for by in others]
            smallest = min(-(-end // by) for end, by in ends)
            largest = max(end // by for end, by in ends)
            if not narrow(domains, node, smallest, largest, changed):
                return False
            spans[place] = (domains[node][0], domains[node][-1])
        return True

    def match_divisors(self, domains: list[Domain], scale: int, open_factors: list[int], changed: list[int]) -> bool:
        """What divides what: the result is a multiple of each factor's common divisor, a factor divides the result."""
        shares = [common_divisor(domains[node]) for node in open_factors]
        share = abs(scale) * prod(shares)
        if share == 0:
            return True
        if not multiples_only(domains, self.result, share, changed):
            return False
        target = domains[self.result]
        number = target[0]
        if number == target[-1]:
            if number == 0:
                return True
            return all(
                divisors_only(domains, node, number // (share // own), changed)
                for node, own in zip(open_factors, shares, strict=True)
            )
        if isinstance(target, tuple) and len(target) <= FEW and 0 not in target:
            return self.match_sets(domains, open_factors, target, changed)
        return True

    def match_one(self, domains: list[Domain], scale: int, node: int, changed: list[int]) -> bool:
        """With one factor open, result = scale * factor."""
        target = domains[self.result]
        if isinstance(target, tuple):
            answers = [value // scale for value in target if value % scale == 0]
            if not restrict(domains, node, answers if scale > 0 else answers[::-1], changed):
                return False
        else:
            shared = common_divisor(target)
            if shared and not multiples_only(domains, node, shared // gcd(shared, scale), changed):
                return False
        domain = domains[node]
        if isinstance(domain, tuple):
            images = [value * scale for value in domain]
            return restrict(domains, self.result, images if scale > 0 else images[::-1], changed)
        return multiples_only(domains, self.result, abs(scale) * common_divisor(domain), changed)

    def match_sets(
        self, domains: list[Domain], open_factors: list[int], target: tuple[int, ...], changed: list[int]
    ) -> bool:
        for node in open_factors:
            domain = domains[node]
            if size(domain) > FEW:
                continue
            kept = tuple([value for value in domain if value and any(number % value == 0 for number in target)])
            if len(kept) < size(domain) and not replace(domains, node, kept, changed):
                return False
        if prod(size(domains[node]) for node in open_factors) > FEW:
            return True
        images = {1}
        for node in self.factors:
            images = {value * factor for value in images for factor in domains[node]}
        return restrict(domains, self.result, sorted(images), changed)


def root(number: int, exponent: int) -> int:
    """The largest r >= 0 with r ** exponent <= number, for number >= 0."""
    if number == 0:
        return 0
    guess = 1 << -(-number.bit_length() // exponent)
    while True:
        better = ((exponent - 1) * guess + number // guess ** (exponent - 1)) // exponent
        if better >= guess:
            return guess
        guess = better


class Raise:
    """result = base ** exponent, the exponent a constant of 2 or more."""

    __slots__ = ("base", "exponent", "nodes", "result")

    def __init__(self, result: int, base: int, exponent: int) -> None:
        self.result = result
        self.base = base
        self.exponent = exponent
        self.nodes = (result, base)

    def renamed(self, old: int, new: int) -> "Raise":
        return Raise(*(new if node == old else node for node in self.nodes), self.exponent)

    def span(self, low: int, high: int) -> tuple[int, int]:
        """Bounds of the power of a base between low and high."""
        ends = sorted((low**self.exponent, high**self.exponent))
        if self.exponent % 2 == 0 and low < 0 < high:
            ends[0] = 0
        return ends[0], ends[1]

    def signed_root(self, number: int) -> int:
        """Of an odd exponent: the largest r with r ** exponent <= number."""
        if number >= 0:
            return root(number, self.exponent)
        below = root(-number, self.exponent)
        return -below if below**self.exponent == -number else -below - 1

    def revise(self, domains: list[Domain], changed: list[int]) -> bool:
        base = domains[self.base]
        if not narrow(domains, self.result, *self.span(base[0], base[-1]), changed):
            return False
        least, most = domains[self.result][0], domains[self.result][-1]
        if self.exponent % 2:
            smallest = self.signed_root(least - 1) + 1
            largest = self.signed_root(most)
        else:
            if most < 0:
                return False
            largest = root(most, self.exponent)
            smallest = -largest
            if least > 0:
                inner = root(least - 1, self.exponent) + 1
                if base[0] > -inner:
                    smallest = inner
                elif base[-1] < inner:
                    largest = -inner
        if not narrow(domains, self.base, smallest, largest, changed):
            return False
        base, result = domains[self.base], domains[self.result]
        if isinstance(result, tuple) and size(base) <= FEW:
            if not restrict(domains, self.base, [value for value in base if value**self.exponent in result], changed):
                return False
            base = domains[self.base]
        if isinstance(base, tuple) and len(base) <= FEW:
            return restrict(domains, self.result, sorted({value**self.exponent for value in base}), changed)
        return True


class Divide:
    """result = dividend / divisor, rounded down or up, the divisor positive.

    With shift = 1 for up and 0 for down, the result is (dividend - shift) // divisor + shift.
    """

    __slots__ = ("dividend", "divisor", "nodes", "result", "shift")

    def __init__(self, result: int, dividend: int, divisor: int, shift: int) -> None:
        self.result = result
        self.dividend = dividend
        self.divisor = divisor
        self.shift = shift
        self.nodes = (result, dividend, divisor)

    def renamed(self, old: int, new: int) -> "Divide":
        return Divide(*(new if node == old else node for node in self.nodes), self.shift)

    def revise(self, domains: list[Domain], changed: list[int]) -> bool:
        shift = self.shift
        dividend, divisor = domains[self.dividend], domains[self.divisor]
        low, high = dividend[0] - shift, dividend[-1] - shift
        small, large = divisor[0], divisor[-1]
        lowest = low // (large if low >= 0 else small) + shift
        highest = high // (small if high >= 0 else large) + shift
        if not narrow(domains, self.result, lowest, highest, changed):
            return False
        least, above = domains[self.result][0] - shift, domains[self.result][-1] + 1 - shift
        smallest = least * (small if least >= 0 else large) + shift
        largest = above * (large if above >= 0 else small) - 1 + shift
        if not narrow(domains, self.dividend, smallest, largest, changed):
            return False
        low, high = domains[self.dividend][0] - shift, domains[self.dividend][-1] - shift
        if least > 0:
            large = min(large, high // least)
        if low >= 0:
            small = max(small, low // above + 1)
        if not narrow(domains, self.divisor, small, large, changed):
            return False
        return self.match_sets(domains, changed)

    def match_sets(self, domains: list[Domain], changed: list[int]) -> bool:
        dividend, divisor, result = domains[self.dividend], domains[self.divisor], domains[self.result]
        if size(dividend) * size(divisor) > FEW:
            return True
        shift = self.shift
        cases = [
            (value, by, answer)
            for value in dividend
            for by in divisor
            if (answer := (value - shift) // by + shift) in result
        ]
        return all(
            restrict(domains, node, sorted({case[place] for case in cases}), changed)
            for place, node in enumerate((self.dividend, self.divisor, self.result))
        )


class Largest:
    """result = the largest option, or the smallest."""

    __slots__ = ("is_maximum", "nodes", "options", "result")

    def __init__(self, result: int, options: tuple[int, ...], is_maximum: bool) -> None:
        self.result = result
        self.options = options
        self.is_maximum = is_maximum
        self.nodes = (result, *options)

    def renamed(self, old: int, new: int) -> "Largest":
        result, *options = (new if node == old else node for node in self.nodes)
        return Largest(result, tuple(options), self.is_maximum)

    def revise(self, domains: list[Domain], changed: list[int]) -> bool:
        pick = max if self.is_maximum else min
        low = pick(domains[node][0] for node in self.options)
        high = pick(domains[node][-1] for node in self.options)
        if not narrow(domains, self.result, low, high, changed):
            return False
        least, most = domains[self.result][0], domains[self.result][-1]
        for node in self.options:
            ends = (domains[node][0], most) if self.is_maximum else (least, domains[node][-1])
            if not narrow(domains, node, *ends, changed):
                return False
        able = [node for node in self.options if domains[node][-1] >= least and domains[node][0] <= most]
        if not able:
            return False
        if len(able) == 1:
            return narrow(domains, able[0], least, most, changed)
        return True


class Rows:
    """Some numbers have, together, the values of one of some rows."""

    __slots__ = ("nodes", "rows")

    def __init__(self, nodes: tuple[int, ...], rows: tuple[tuple[int, ...], ...]) -> None:
        self.nodes = nodes
        self.rows = rows

    def renamed(self, old: int, new: int) -> "Rows":
        return Rows(tuple([new if node == old else node for node in self.nodes]), self.rows)

    def revise(self, domains: list[Domain], changed: list[int]) -> bool:
        of_columns = [domains[node] for node in self.nodes]
        able = [row for row in self.rows if all(value in own for value, own in zip(row, of_columns, strict=True))]
        return bool(able) and all(
            restrict(domains, node, sorted(set(values)), changed)
            for node, values in zip(self.nodes, zip(*able, strict=True), strict=True)
        )


class Divides:
    """divisor divides multiple; 0 divides 0 alone."""

    __slots__ = ("divisor", "multiple", "nodes")

    def __init__(self, divisor: int, multiple: int) -> None:
        self.divisor = divisor
        self.multiple = multiple
        self.nodes = (divisor, multiple)

    def renamed(self, old: int, new: int) -> "Divides":
        return Divides(*(new if node == old else node for node in self.nodes))

    def revise(self, domains: list[Domain], changed: list[int]) -> bool:
        shared = common_divisor(domains[self.divisor])
        if shared == 0:
            return narrow(domains, self.multiple, 0, 0, changed)
        if not multiples_only(domains, self.multiple, shared, changed):
            return False
        multiple = domains[self.multiple]
        if multiple[0] == multiple[-1]:
            return multiple[0] == 0 or divisors_only(domains, self.divisor, multiple[0], changed)
        if 0 in multiple:
            return True
        reach = max(-multiple[0], multiple[-1])
        if not narrow(domains, self.divisor, -reach, reach, changed):
            return False
        divisor = domains[self.divisor]
        if size(divisor) > FEW:
            return True
        if isinstance(multiple, tuple):
            if len(multiple) > FEW:
                return True
            usable = [value for value in divisor if value and any(number % value == 0 for number in multiple)]
        else:
            low, high = multiple[0], multiple[-1]
            usable = [value for value in divisor if value and high // abs(value) * abs(value) >= low]
        if not restrict(domains, self.divisor, usable, changed):
            return False
        if isinstance(multiple, tuple):
            kept = keep(multiple, lambda number: any(number % value == 0 for value in usable))
            return len(kept) == len(multiple) or replace(domains, self.multiple, kept, changed)
        return True
