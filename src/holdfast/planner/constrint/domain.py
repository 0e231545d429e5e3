"""The values that a number can still take: an arithmetic progression (a range) or an ascending tuple.

Both are indexed alike, so d[0] and d[-1] are the bounds. A range of 2^40 values costs as much as one of ten.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from math import gcd

Domain = range | tuple[int, ...]

EMPTY: Domain = ()


def of(values: Iterable[int]) -> Domain:
    """The domain of those values; raises TypeError where one is not an integer."""
    if isinstance(values, range):
        return values if values.step > 0 else values[::-1]
    found = list(values)
    for value in found:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"expected integers; got {value!r}")
    return tuple(sorted(set(found)))


def interval(low: int, high: int) -> Domain:
    return range(low, high + 1)


def size(domain: Domain) -> int:
    """How many values there are; len() would overflow on the largest ranges."""
    if isinstance(domain, tuple):
        return len(domain)
    return (domain[-1] - domain[0]) // domain.step + 1 if domain else 0


def stride(domain: Domain) -> int:
    """The largest m so that all values agree modulo m; 0 for a single value."""
    first = domain[0]
    if first == domain[-1]:
        return 0
    if isinstance(domain, range):
        return domain.step
    return gcd(*[value - first for value in domain])


def common_divisor(domain: Domain) -> int:
    """The greatest common divisor of all values."""
    if domain[0] == 1:
        return 1
    if isinstance(domain, tuple):
        return gcd(*domain)
    return abs(domain[0]) if domain[0] == domain[-1] else gcd(domain[0], domain.step)


def clip(domain: Domain, low: int, high: int) -> Domain:
    """The values from low to high, both included."""
    if isinstance(domain, tuple):
        return domain[bisect_left(domain, low) : bisect_right(domain, high)]
    start, step = domain[0], domain.step
    if low > start:
        start += -((start - low) // step) * step
    return range(start, min(high, domain[-1]) + 1, step)


def keep(domain: tuple[int, ...], wanted: Callable[[int], bool]) -> Domain:
    return tuple([value for value in domain if wanted(value)])


def congruent(domain: Domain, remainder: int, modulus: int) -> Domain:
    """The values that leave that remainder modulo modulus (positive)."""
    if modulus == 1:
        return domain
    if isinstance(domain, tuple):
        return tuple([value for value in domain if (value - remainder) % modulus == 0])
    start, step = domain[0], domain.step
    shared = gcd(step, modulus)
    gap = remainder - start
    if gap % shared:
        return EMPTY
    steps = gap // shared * pow(step // shared, -1, modulus // shared) % (modulus // shared)
    return range(start + steps * step, domain[-1] + 1, step // shared * modulus)


def among(domain: Domain, values: Iterable[int]) -> Domain:
    """The given ascending values that the domain holds."""
    if isinstance(domain, tuple):
        domain = frozenset(domain)
    return tuple([value for value in values if value in domain])


def without(domain: Domain, value: int) -> Domain:
    """The values but that one; a long range keeps a value inside it, which whoever excludes it has to check again."""
    if value not in domain:
        return domain
    if isinstance(domain, tuple):
        return tuple([other for other in domain if other != value])
    if value == domain[0]:
        return domain[1:]
    if value == domain[-1]:
        return domain[:-1]
    return tuple([other for other in domain if other != value]) if size(domain) <= 256 else domain


def describe(domain: Domain) -> str:
    """The domain in words, such as "16..1024 in steps of 16"."""
    if isinstance(domain, tuple):
        if len(domain) == 1:
            return str(domain[0])
        shown = ", ".join(map(str, domain if len(domain) <= 8 else domain[:7]))
        return f"{{{shown}}}" if len(domain) <= 8 else f"{{{shown}, ..., {domain[-1]}}}"
    if domain[0] == domain[-1]:
        return str(domain[0])
    return f"{domain[0]}..{domain[-1]}" + (f" in steps of {domain.step}" if domain.step > 1 else "")
