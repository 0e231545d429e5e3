"""Propagation: each rule drops values that its relation rules out; all rules run until none drops any.

That fixed point is what the FlashRNN paper calls Global ARC-Reduce (appendix C). A rule works both ways, from operands
up to the result and from the result down to operands. It may keep values that no solution has, and never drops one
that some solution has. The rules of products and of other functions are in nonlinear.py.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from math import gcd
from typing import Protocol

from .domain import Domain, clip, congruent, size, stride, without

# Two-variable equalities are filtered value by value up to this many values.
LARGEST_SET = 256


class Rule(Protocol):
    """nodes: the numbers that the rule relates, as indices of the list of domains."""

    nodes: tuple[int, ...]

    def revise(self, domains: list[Domain], changed: list[int]) -> bool:
        """Narrows domains in place, appends the index of each that changed; False where one would be empty."""
        ...

    def renamed(self, old: int, new: int) -> "Rule":
        """The same rule of another number in the place of one."""
        ...


def replace(domains: list[Domain], node: int, domain: Domain, changed: list[int]) -> bool:
    """Puts a narrower domain in place."""
    if not domain:
        return False
    domains[node] = domain
    changed.append(node)
    return True


def narrow(domains: list[Domain], node: int, low: int, high: int, changed: list[int]) -> bool:
    """Keeps the values from low to high."""
    domain = domains[node]
    if low <= domain[0] and high >= domain[-1]:
        return True
    return replace(domains, node, clip(domain, low, high), changed)


class Linear:
    """sum(coefficient * node) + constant, compared with zero."""

    __slots__ = ("coefficients", "constant", "nodes", "pairs")

    def __init__(self, terms: Iterable[tuple[int, int]], constant: int) -> None:
        self.pairs = tuple(terms)
        self.nodes = tuple(node for node, _ in self.pairs)
        self.constant = constant

    def renamed(self, old: int, new: int) -> "Linear":
        terms: dict[int, int] = {}
        for node, coefficient in self.pairs:
            node = new if node == old else node
            terms[node] = terms.get(node, 0) + coefficient
        return type(self)([pair for pair in terms.items() if pair[1]], self.constant)


class AtMostZero(Linear):
    __slots__ = ()

    def revise(self, domains: list[Domain], changed: list[int]) -> bool:
        room = -self.constant
        for node, coefficient in self.pairs:
            room -= coefficient * domains[node][0 if coefficient > 0 else -1]
        if room < 0:
            return False
        for node, coefficient in self.pairs:
            domain = domains[node]
            low, high = domain[0], domain[-1]
            if coefficient > 0:
                if (high - low) * coefficient > room:
                    kept = clip(domain, low, low + room // coefficient)
                    if not replace(domains, node, kept, changed):
                        return False
            elif (low - high) * coefficient > room:
                kept = clip(domain, high - room // -coefficient, high)
                if not replace(domains, node, kept, changed):
                    return False
        return True


class IsZero(Linear):
    __slots__ = ()

    def revise(self, domains: list[Domain], changed: list[int]) -> bool:
        total = self.constant
        open_terms = []
        for node, coefficient in self.pairs:
            domain = domains[node]
            if domain[0] == domain[-1]:
                total += coefficient * domain[0]
            else:
                open_terms.append((node, coefficient))
        if len(open_terms) < 2:
            if not open_terms:
                return total == 0
            ((node, coefficient),) = open_terms
            value, remainder = divmod(-total, coefficient)
            return remainder == 0 and value in domains[node] and replace(domains, node, (value,), changed)
        if not self.bound(domains, open_terms, total, changed):
            return False
        if not self.match_remainders(domains, open_terms, total, changed):
            return False
        return len(open_terms) > 2 or self.match_values(domains, open_terms, total, changed)

    def bound(
        self, domains: list[Domain], open_terms: Sequence[tuple[int, int]], total: int, changed: list[int]
    ) -> bool:
        """Each term is at least what the others at their largest leave, and at most what they leave at their least."""
        spans = []
        below = above = -total
        for node, coefficient in open_terms:
            domain = domains[node]
            low, high = coefficient * domain[0], coefficient * domain[-1]
            if coefficient < 0:
                low, high = high, low
            below -= low
            above -= high
            spans.append((low, high))
        if below < 0 or above > 0:
            return False
        for (node, coefficient), (low, high) in zip(open_terms, spans, strict=True):
            least, most = high + above, low + below
            if least <= low and most >= high:
                continue
            if coefficient > 0:
                least, most = -(-least // coefficient), most // coefficient
            else:
                least, most = -(most // -coefficient), -least // -coefficient
            if not narrow(domains, node, least, most, changed):
                return False
        return True

    def match_remainders(
        self, domains: list[Domain], open_terms: Sequence[tuple[int, int]], total: int, changed: list[int]
    ) -> bool:
        """Each term is known modulo the common divisor of all other terms' strides."""
        strides = [abs(coefficient) * stride(domains[node]) for node, coefficient in open_terms]
        if strides.count(1) > 1:
            return True
        total += sum(coefficient * domains[node][0] for node, coefficient in open_terms)
        for place, (node, coefficient) in enumerate(open_terms):
            modulus = gcd(*strides[:place], *strides[place + 1 :])
            if modulus < 2:
                continue
            domain = domains[node]
            target = coefficient * domain[0] - total
            shared = gcd(coefficient, modulus)
            if target % shared:
                return False
            modulus //= shared
            if modulus == 1:
                continue
            remainder = target // shared * pow(coefficient // shared, -1, modulus) % modulus
            if strides[place] % (modulus * abs(coefficient)) == 0 and domain[0] % modulus == remainder:
                continue
            kept = congruent(domain, remainder, modulus)
            if (not kept or size(kept) < size(domain)) and not replace(domains, node, kept, changed):
                return False
            if kept[0] != domain[0]:
                total += coefficient * (kept[0] - domain[0])
        return True

    def match_values(
        self, domains: list[Domain], open_terms: Sequence[tuple[int, int]], total: int, changed: list[int]
    ) -> bool:
        """Of two open terms, where one has a short set of values, each keeps what the other can answer."""
        (one, scale_one), (other, scale_other) = open_terms
        first, second = domains[one], domains[other]
        if not isinstance(first, tuple) and not isinstance(second, tuple):
            return True
        if not isinstance(first, tuple) or (isinstance(second, tuple) and len(second) < len(first)):
            one, scale_one, first, other, scale_other, second = other, scale_other, second, one, scale_one, first
        if len(first) > LARGEST_SET:
            return True
        lookup = frozenset(second) if isinstance(second, tuple) else second
        kept, answers = [], []
        for value in first:
            answer, remainder = divmod(-(total + scale_one * value), scale_other)
            if remainder == 0 and answer in lookup:
                kept.append(value)
                answers.append(answer)
        if len(kept) < len(first) and not replace(domains, one, tuple(kept), changed):
            return False
        if len(answers) < size(second):
            return replace(domains, other, tuple(sorted(answers)), changed)
        return True


class IsNotZero(Linear):
    __slots__ = ()

    def revise(self, domains: list[Domain], changed: list[int]) -> bool:
        total, open_node, open_coefficient = self.constant, None, 1
        for node, coefficient in self.pairs:
            domain = domains[node]
            if domain[0] == domain[-1]:
                total += coefficient * domain[0]
            elif open_node is None:
                open_node, open_coefficient = node, coefficient
            else:
                return True
        if open_node is None:
            return total != 0
        value, remainder = divmod(-total, open_coefficient)
        domain = domains[open_node]
        if remainder or value not in domain:
            return True
        kept = without(domain, value)
        return kept is domain or replace(domains, open_node, kept, changed)


class Network:
    """Rules, and for every number the rules that a change of it wakes."""

    __slots__ = ("budget", "rules", "watchers")

    def __init__(self, rules: Sequence[Rule], count: int) -> None:
        self.rules = tuple(rules)
        watchers: list[list[int]] = [[] for _ in range(count)]
        for place, rule in enumerate(self.rules):
            for node in dict.fromkeys(rule.nodes):
                watchers[node].append(place)
        self.watchers = tuple(map(tuple, watchers))
        # Bounds of `x < y, y < x` creep by one a round: stop early there (sound) and let the search halve domains.
        self.budget = 400 + 40 * len(self.rules)

    def reduce(self, domains: list[Domain], woken: Iterable[int] | None = None) -> bool:
        """Runs rules in place until none drops a value; False where a domain would be empty.

        woken: the nodes that changed since the last time. From there on, a rule does not run again for its own changes
        alone, which a search repeats too often to be worth it; without woken, all rules run and that one too.
        """
        rules, watchers = self.rules, self.watchers
        waiting = bytearray(len(rules))
        if woken is None:
            queue = deque(range(len(rules)))
        else:
            queue = deque(dict.fromkeys([place for node in woken for place in watchers[node]]))
        for place in queue:
            waiting[place] = 1
        budget = self.budget
        changed: list[int] = []
        while queue and budget:
            budget -= 1
            place = queue.popleft()
            if woken is None:
                waiting[place] = 0
            if not rules[place].revise(domains, changed):
                return False
            if changed:
                for node in changed:
                    for watcher in watchers[node]:
                        if not waiting[watcher]:
                            waiting[watcher] = 1
                            queue.append(watcher)
                changed.clear()
            waiting[place] = 0
        return True
