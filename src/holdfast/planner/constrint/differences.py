"""Contradictions such as a < b, b < c, c < a, which bounds alone would creep up on one by one.

Each constraint x - y <= d is an edge from y to x of length d; a cycle of negative length cannot be met (Bellman, 1958).
"""

from collections.abc import Iterable

from .propagate import AtMostZero, IsZero, Rule

# from, to, length
Edge = tuple[int, int, int]


def edges(rules: Iterable[Rule]) -> list[Edge]:
    """Of the rules that bound the difference of two numbers; a multiple of a difference is rounded down."""
    found = []
    for rule in rules:
        if not isinstance(rule, AtMostZero | IsZero) or len(rule.pairs) != 2:
            continue
        (one, scale), (other, opposite) = rule.pairs
        if scale != -opposite:
            continue
        if scale < 0:
            one, other, scale = other, one, -scale
        found.append((other, one, -rule.constant // scale))
        if isinstance(rule, IsZero):
            found.append((one, other, rule.constant // scale))
    return found


def contradict(rules: Iterable[Rule]) -> bool:
    """Whether the differences that the rules bound cannot all be met, whatever the numbers."""
    known = edges(rules)
    if len(known) < 2:
        return False
    distance = dict.fromkeys([node for start, end, _ in known for node in (start, end)], 0)
    for _ in distance:
        relaxed = False
        for start, end, length in known:
            if distance[start] + length < distance[end]:
                distance[end] = distance[start] + length
                relaxed = True
        if not relaxed:
            return False
    return True
