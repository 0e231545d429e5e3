"""Tiles of two chained matrix products as real numbers: the bound that integer tiles approach.

S = A B and E = S D, with A [M, K], B [K, L], S [M, L], D [L, N], E [M, N]. With loops m, l outside and k, n inside, S
stays on chip. B and D are read again for each of the M / x tiles of m, A and E for each of the L / y tiles of l, where
E is written too and not read the first time:

    moved(x, y) = M L (K + N) / x + M L (K + 2 N) / y - M N    elements

With k and n in tiles of z, which cost nothing to make small, the tiles of A, B, D, E and S hold

    footprint(x, y) = x y + 2 z (x + y) <= capacity    elements

With a and b for the two numerators, Lagrange's condition is a / x^2 : b / y^2 = (y + 2 z) : (x + 2 z).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Continuous:
    """x, y: tiles along m and l. moved, footprint: elements."""

    x: float
    y: float
    moved: float
    footprint: float


def two_products(m: int, n: int, k: int, l: int, capacity: float, z: float = 16) -> Continuous:
    """The optimum for sizes m, n, k, l and a capacity in elements. It means nothing where a tile exceeds its size."""
    a, b = m * l * (k + n), m * l * (k + 2 * n)

    def other(x: float) -> float:
        """y that fills the capacity."""
        return (capacity - 2 * z * x) / (x + 2 * z)

    def imbalance(x: float) -> float:
        """Grows with x; zero where the derivatives are in proportion."""
        y = other(x)
        return b * x**2 * (y + 2 * z) - a * y**2 * (x + 2 * z)

    low, high = 0.0, capacity / (2 * z)
    for _ in range(200):
        middle = (low + high) / 2
        if imbalance(middle) < 0:
            low = middle
        else:
            high = middle
    x, y = low, other(low)
    return Continuous(x, y, a / x + b / y - m * n, x * y + 2 * z * (x + y))
