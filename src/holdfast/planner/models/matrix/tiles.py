"""Tiles of the matrix family's kernels."""

from holdfast.planner.constrint import Expression, minimum
from holdfast.planner.kernel_model import covering

# tokens
CHUNK = 64
# tiles are this wide or half of it; a wider state would leave no registers
WIDEST = 128


def tile(width: int) -> int:
    """The tile that holds so many columns."""
    return WIDEST // 2 if width <= WIDEST // 2 else WIDEST


def chunk_places(length: int, sequences: int | None) -> int:
    """Chunks that there is room for in what is saved of each: packed sequences, if there are any, have spare ones."""
    return -(-length // CHUNK) if sequences is None else length // CHUNK + sequences


def padded(width: int) -> int:
    """The power of two, at least 16, that a tile of so many columns takes in Triton."""
    return covering(width, 16)


def registers_of(warps: int) -> int:
    """Of a thread, at most, where a block has an SM's 65536 to itself: they come in eights."""
    return min(240, 65536 // (32 * warps) // 8 * 8)


def registers_left(warps: Expression) -> Expression:
    """The same in a model."""
    return minimum(240, 65536 // (32 * warps) // 8 * 8)
