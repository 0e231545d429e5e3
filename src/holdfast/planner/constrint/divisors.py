"""Divisors of the numbers that sizes and limits are made of."""

from functools import lru_cache

# Sizes of kernels are smooth; beyond this bound a number is left alone rather than factored at length.
LARGEST_TRIAL = 1 << 13


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...] | None:
    """The positive divisors of a positive number, ascending, or None where factoring it would take long."""
    found = [1]
    rest, candidate = number, 2
    while candidate * candidate <= rest:
        if candidate > LARGEST_TRIAL:
            return None
        power, powers = 1, [1]
        while rest % candidate == 0:
            rest //= candidate
            power *= candidate
            powers.append(power)
        if power > 1:
            found = [divisor * factor for divisor in found for factor in powers]
        candidate += 1 if candidate == 2 else 2
    if rest > 1:
        found += [divisor * rest for divisor in found]
    return tuple(sorted(found))
