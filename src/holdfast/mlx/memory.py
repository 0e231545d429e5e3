"""Bytes that a matrix scan keeps for its backward pass beyond arguments, outputs and gradients."""

from math import prod

from .chassis import DEFAULT_SEG
from .tile import Tile

FLOAT = 4


def kept_bytes(B: int, L: int, H: int, K: int, V: int, seg: int = DEFAULT_SEG) -> int:
    """Of the states of `gla_scan`, and of `ssd_scan` with K = N and V = P, while the backward kernel runs.

    Where one block holds a head and fills its simdgroups: 4 B H (L / seg + seg / 8 - 1 + 7) K V. With several blocks,
    of those at work at a time. A diagonal scan keeps none.
    """
    return FLOAT * prod(Tile.backward(K, V).kept_shape(B, L, H, seg))


def partial_bytes(B: int, L: int, H: int, K: int, V: int) -> int:
    """Of dq and dk (dC and dB) in float32, which are there beside the gradients where a head takes several blocks."""
    tile = Tile.backward(K, V)
    return 0 if tile.blocks == 1 else 2 * FLOAT * tile.parts(H, B) * B * L * H * K


def history_bytes(B: int, L: int, H: int, K: int, V: int) -> int:
    """Of a scan that keeps every state."""
    return FLOAT * B * H * L * K * V
