"""Depth-first search over the variables, with propagation at each step and backtracking."""

from collections.abc import Callable, Iterator, Sequence

from .domain import Domain, clip, size
from .expression import Variable
from .propagate import Network

# Domains up to this size are tried value by value; of longer ones, the first value and then halves of the rest.
FEW = 32

Values = tuple[int, ...]


class SearchLimit(RuntimeError):
    """The search took more steps than Model.limit allows."""


def branches(domain: Domain, variable: Variable) -> list[Domain]:
    """Parts of a domain that together make it up, those to try first at the front."""
    largest_first, ranks = variable.largest_first, variable.ranks
    if ranks is not None:
        return [(value,) for value in sorted(domain, key=ranks.__getitem__)]
    if size(domain) <= FEW:
        return [(value,) for value in (reversed(domain) if largest_first else domain)]
    half = size(domain) // 2
    if largest_first:
        return [(domain[-1],), domain[half:-1], domain[:half]]
    return [(domain[0],), domain[1:half], domain[half:]]


class Search:
    """The assignments of the variables that the rules and a final check admit, in a fixed order.

    order: the variables, in the order to decide them.
    check: judges a full assignment by the constraints as written.
    objective: a node and a function that gives its value; after each solution only smaller values are looked for.
    """

    def __init__(
        self,
        network: Network,
        domains: Sequence[Domain],
        order: Sequence[Variable],
        check: Callable[[Values], bool],
        limit: int,
        objective: tuple[int, Callable[[Values], int]] | None = None,
    ) -> None:
        self.network = network
        self.domains = domains
        self.order = tuple(order)
        greedy = [place for place, variable in enumerate(order) if variable.is_greedy]
        self.greedy = frozenset(greedy if objective is None else ())
        self.check = check
        self.limit = limit
        self.objective = objective
        self.steps = 0

    def __iter__(self) -> Iterator[Values]:
        """The value of every variable, by its node."""
        domains: list[Domain] | None = list(self.domains)
        if not self.network.reduce(domains):
            return
        bound: int | None = None
        nodes, count = [variable.index for variable in self.order], len(self.order)
        # The domains before a decision, the node to decide, its part of the domain, the place in the order.
        pending: list[tuple[list[Domain], int, Domain, int]] = []
        place = 0
        while True:
            if domains is not None:
                while place < count and domains[nodes[place]][0] == domains[nodes[place]][-1]:
                    place += 1
                if place < count:
                    node = nodes[place]
                    for part in reversed(branches(domains[node], self.order[place])):
                        pending.append((domains, node, part, place))
                else:
                    values = tuple([domains[node][0] for node in range(count)])
                    if self.check(values):
                        yield values
                        if self.greedy:
                            # what is pending are other values of the variables on the way to this solution
                            pending = [other for other in pending if other[3] not in self.greedy]
                        if self.objective is not None:
                            bound = self.objective[1](values) - 1
            if not pending:
                return
            before, node, part, place = pending.pop()
            self.steps += 1
            if self.steps > self.limit:
                raise SearchLimit(f"no answer within {self.limit} steps; give the variables tighter domains")
            domains = self.decide(before, node, part, bound)

    def decide(self, before: list[Domain], node: int, part: Domain, bound: int | None) -> list[Domain] | None:
        """The reduced domains after a decision, or None where it leaves no solution better than the bound."""
        domains = before.copy()
        domains[node] = part
        woken = [node]
        if bound is not None and self.objective is not None:
            goal = self.objective[0]
            kept = clip(domains[goal], domains[goal][0], bound)
            if not kept:
                return None
            if kept[-1] < domains[goal][-1]:
                domains[goal] = kept
                woken.append(goal)
        return domains if self.network.reduce(domains, woken) else None
